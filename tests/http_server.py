"""An HTTP server for tests to which a client that hangs up is no error."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # of a handler
            super().handle_error(request, client_address)
