"""The model that `mlflow.pyfunc.load_model` returns (models from code), for tables in Python.

MLflow copies this file beside every registered model, so it contains only what concerns MLflow.
"""

import os
from typing import Any

import mlflow
import pandas

# MLflow documents this variable as the time limit of its scoring server, and sets it for each
# server that it starts. Nothing else in its public interface tells a model that it is served.
SERVER_TIMEOUT = "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT"


class PyfuncModel(mlflow.pyfunc.PythonModel):
    """Scores, generates and fills in proteins with an exported model, without limits on size."""

    def load_context(self, context: Any) -> None:
        """Load the export that was logged with the model.

        Raises:
            ConfigError: in MLflow's scoring server, which converts null to the text "None".
        """
        from d2plm.core.errors import ConfigError
        from d2plm.serving.service import Service
        from d2plm.tracking.locations import open_model

        if SERVER_TIMEOUT in os.environ:
            raise ConfigError(
                "MLflow's server is not supported, because it converts null, NaN and true to "
                "letters of residues; run d2plm serve model_dir=models:/NAME@ALIAS, or unset "
                f"{SERVER_TIMEOUT} if this is not a server"
            )
        self.service = Service(open_model(context.artifacts["export"], key="export"))

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        """Answer with `serving.service.Service`, and return its rows as a table.

        Args:
            params: settings of the service. MLflow adds the defaults of all tasks; they are dropped
                because a task rejects the settings of the others.

        Raises:
            D2PLMError: as `parse_request` and `Service.answer`.
        """
        from pydantic_core import to_json

        from d2plm.serving.service import DEFAULTS, parse_request

        settings = {k: v for k, v in (params or {}).items() if v != DEFAULTS.get(k)}
        request = {"inputs": model_input.to_dict("list"), "params": settings}
        # Missing values of pandas are null, and so are objects that are no values of JSON.
        body = to_json(request, inf_nan_mode="null", fallback=lambda value: None)
        return pandas.DataFrame(self.service.answer(parse_request(body)))


mlflow.models.set_model(PyfuncModel())
