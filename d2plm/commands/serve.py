"""d2plm serve: answer requests to a model over HTTP, until SIGTERM or SIGINT."""

import logging
import math
import socket

import uvicorn

from d2plm.core.errors import ConfigError
from d2plm.core.terminal import done
from d2plm.serving.app import application
from d2plm.serving.schedule import SHARE
from d2plm.serving.service import Service
from d2plm.settings.commands import ServeSettings
from d2plm.tracking.locations import open_model

# Seconds that an idle connection is kept. Proxies reuse one for up to 60 seconds, and a request on
# a connection that the server is closing fails.
KEEP_ALIVE = 75

log = logging.getLogger(__name__)


def run(config: ServeSettings) -> None:
    """Load the model and serve it; requests that have begun are finished before the end."""
    host, port, timeout = config.host, config.port, config.timeout
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot be used ({error.strerror}); choose others", {"host": host, "port": port}
        ) from error
    with listener:  # before the model is loaded, which may take minutes
        exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
        service = Service(exported, config.max_residues)
        for what, rate in service.measure().items():
            residues = min(rate * timeout * (1 - SHARE), config.max_residues)
            log.info("a request of up to %s residues can be %s", f"{residues:,.0f}", what)
        app = application(service, timeout)
        done(f"serving {config.model_dir} on http://{host}:{listener.getsockname()[1]}")
        # Few requests take longer than the timeout, but a client may be slow to read its answer.
        grace = math.ceil(timeout) + 5
        settings = uvicorn.Config(
            app, lifespan="off", timeout_graceful_shutdown=grace, timeout_keep_alive=KEEP_ALIVE
        )
        uvicorn.Server(settings).run(sockets=[listener])
