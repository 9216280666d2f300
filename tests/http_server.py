"""HTTP servers for tests: to them, a client that hangs up is no error."""

import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = "application/json"
# The request, with its method, path and headers, and its body → status, content type and content.
Answer = Callable[[BaseHTTPRequestHandler, bytes], tuple[int, str, bytes] | None]


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # of a handler
            super().handle_error(request, client_address)


def free_port() -> int:
    """A port to which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as freed:
        return int(freed.getsockname()[1])


@contextmanager
def listening(answer: Answer, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of a server; with a context, over TLS. No answer is given in place of None."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            if "Transfer-Encoding" in self.headers:
                self.rfile.read(len(b"0\r\n\r\n"))  # an empty file
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if said := answer(self, body):
                status, kind, content = said
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815  # names of http.server

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
