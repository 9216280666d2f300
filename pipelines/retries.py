"""Retrying temporary failures of a step in its own pod: an unreachable server or volume.

Kubeflow Pipelines 2.17 retries only lost pods; earlier releases retry every exit code, including
that of misspelt settings. Here the kind of failure decides.
"""

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from d2plm.core.errors import ClusterError, first_line
from d2plm.launch.client import TRANSIENT
from d2plm.launch.kfp_server import POD_VARIABLE

PAUSES = (5, 20, 60, 180)  # seconds before each further attempt
AWAY = (errno.EIO, errno.ESTALE, errno.ENETUNREACH, errno.EHOSTUNREACH)  # volumes, networks
Result = TypeVar("Result")

log = logging.getLogger(__name__)


def patiently(act: Callable[[], Result]) -> Result:
    """Call `act`; in a pipeline's pod, repeat it after temporary failures, which are logged."""
    for pause in PAUSES if POD_VARIABLE in os.environ else ():
        try:
            return act()
        except Exception as error:
            if not is_temporary(error):
                raise
            log.warning("%s; trying again in %d seconds", first_line(error), pause)
        time.sleep(pause)
    return act()


def is_temporary(error: BaseException | None) -> bool:
    """Whether a retry may help; not after a `ClusterError`: its client has retried for minutes."""
    while error is not None and not isinstance(error, ClusterError):
        if _is_away(error):
            return True
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    return False


def _is_away(error: Any) -> bool:
    from requests.exceptions import RetryError  # such as after five times 503

    status = getattr(error, "status", None)  # 0: TLS has failed
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_AGAIN
    is_network = isinstance(error, ConnectionError | TimeoutError | RetryError)
    return is_network or status in TRANSIENT or getattr(error, "errno", None) in AWAY
