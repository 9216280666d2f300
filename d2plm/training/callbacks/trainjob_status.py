"""TrainJobStatus: training progress in the status of its TrainJob.

Kubeflow Trainer 2.3, with its feature TrainJobStatus, gives the pods an address, a certificate and
a token. A thread of rank 0 sends the latest state, so a slow server does not delay training.
"""

import json
import logging
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from d2plm.core.errors import first_line
from d2plm.training.callbacks.callback import Callback
from d2plm.training.trainer import Trainer

VARIABLES = [f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN")]
SECONDS = 10.0  # minimum time between two requests
TIMEOUT_SECONDS = 5.0  # for a request, and for the last one at the end of training
# Limits of the custom resource.
MOST_SECONDS, MOST_METRICS, MOST_CHARACTERS = 2**31 - 1, 256, 64

log = logging.getLogger(__name__)


class TrainJobStatus(Callback):
    """Send progress, remaining time and latest metrics to Kubeflow Trainer.

    Args:
        url: address that receives the status.
        ca_cert: file with the server's certificate authority.
        token: file with the pod's token, which Kubernetes renews.
    """

    def __init__(self, url: str, ca_cert: str, token: str) -> None:
        self.url, self.ca_cert, self.token = urlsplit(url), ca_cert, Path(token)
        self.metrics: dict[str, float] = {}
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._is_warned = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Create it from Trainer's environment variables; None without them."""
        values = [environment.get(name) for name in VARIABLES]
        return cls(*map(str, values)) if all(values) else None

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.process.is_main:
            self._is_over.clear()
            self._thread = threading.Thread(target=self._report, args=[trainer], daemon=True)
            self._thread.start()

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.metrics = {**self.metrics, **metrics}  # a copy, as the thread reads the old one

    on_evaluate = on_log

    def on_stop(self, trainer: Trainer) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_SECONDS)

    def _report(self, trainer: Trainer) -> None:
        began, first = time.monotonic(), trainer.step
        while True:
            is_last = self._is_over.is_set()
            try:
                self._send(_status(trainer, self.metrics, time.monotonic() - began, first))
            except Exception as error:  # no error may end training
                if not self._is_warned:
                    log.warning("the TrainJob's status has no progress: %s", first_line(error))
                self._is_warned = True
            if is_last:
                return
            self._is_over.wait(SECONDS)

    def _send(self, status: dict[str, Any]) -> None:
        context = ssl.create_default_context(cafile=self.ca_cert)
        connection = HTTPSConnection(self.url.netloc, timeout=TIMEOUT_SECONDS, context=context)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            headers["Authorization"] = f"Bearer {self.token.read_text().strip()}"
            body = json.dumps({"trainerStatus": status})
            connection.request("POST", self.url.path, body, headers)
            answer = connection.getresponse()
            if answer.status >= 300:
                raise OSError(f"{answer.status} {answer.reason}")


def _status(
    trainer: Trainer, metrics: Mapping[str, float], seconds: float, first: int
) -> dict[str, Any]:
    step, last = trainer.step, trainer.max_steps
    status: dict[str, Any] = {
        "progressPercentage": min(100 * step // last, 100),
        "metrics": [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in [*metrics.items()][:MOST_METRICS]
            if len(name) <= MOST_CHARACTERS
        ],
        "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if step > first:
        left = seconds / (step - first) * (last - step)
        status["estimatedRemainingSeconds"] = min(int(left), MOST_SECONDS)
    return status
