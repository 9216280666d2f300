"""The model that MLflow serves (models from code): an adapter from its server to `serving`.

MLflow copies this file beside every registered model, so it handles only what concerns the server:
the order of requests, their time limit, and the status of errors.
"""

import json
import logging
import os
import sys
import threading
import time
from typing import Any

import mlflow
import pandas
from mlflow.protos.databricks_pb2 import DEADLINE_EXCEEDED, INTERNAL_ERROR, INVALID_PARAMETER_VALUE

LIMIT = "D2PLM_SERVING_MAX_RESIDUES"
TIMEOUT = "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT"  # seconds; `mlflow models serve` sets it
# After the full timeout, MLflow answers without a reason and the work continues.
SHARE_OF_TIMEOUT = 0.95

log = logging.getLogger(__name__)


class Refusal(mlflow.MlflowException):
    """An error response. Its text is only the reason, without the table of the request."""

    def __init__(self, reason: str, error_code: int) -> None:
        super().__init__(reason, error_code=error_code)
        self.reason = reason

    def serialize_as_json(self) -> str:
        return json.dumps({"error_code": self.error_code, "message": self.reason})


class ServedModel(mlflow.pyfunc.PythonModel):
    """Scores, generates and fills in proteins with an exported model, one request at a time."""

    def load_context(self, context: Any) -> None:
        """Load the export logged with the model, and install the strict reader in the server."""
        from d2plm.core.errors import ConfigError
        from d2plm.tracking.locations import open_model
        from d2plm.tracking.request_guard import guard
        from d2plm.tracking.serving import MAX_RESIDUES, Service

        limit = os.environ.get(LIMIT, str(MAX_RESIDUES))
        if not limit.isdecimal():
            raise ConfigError(f"{LIMIT}={limit!r}: must be an integer ≥ 1")
        exported = open_model(context.artifacts["export"], key="export")
        self.service = Service(exported, int(limit))
        self.turn = threading.Lock()  # the server has many threads; memory suffices for one request
        server = sys.modules.get("mlflow.pyfunc.scoring_server")
        if server is not None:
            guard(server, int(limit))

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        """Answer a request by `serving.Service.answer`, within the server's time limit.

        Raises:
            MlflowException: with the status of the response.
        """
        from d2plm.core.errors import ConfigError, DataError, ModelError

        seconds = float(os.environ.get(TIMEOUT, "inf")) * SHARE_OF_TIMEOUT
        deadline = time.monotonic() + seconds
        late = Refusal(
            f"not finished within {seconds:g} seconds, including the wait for other requests; "
            "request fewer residues or steps at a time",
            DEADLINE_EXCEEDED,
        )

        def require_time_left() -> None:
            if time.monotonic() > deadline:
                raise late

        if not self.turn.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            raise late
        try:
            return self.service.answer(model_input, params or {}, require_time_left)
        except mlflow.MlflowException:
            raise
        except (ConfigError, DataError) as error:
            raise Refusal(str(error), INVALID_PARAMETER_VALUE) from error
        except ModelError as error:
            raise Refusal(str(error), INTERNAL_ERROR) from error
        except Exception as error:  # MLflow would report a bad request, with the traceback
            log.exception("a request failed")
            raise Refusal(
                "this is a bug in D2PLM; the server's log has the details", INTERNAL_ERROR
            ) from error
        finally:
            self.turn.release()


mlflow.models.set_model(ServedModel())
