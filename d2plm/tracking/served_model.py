"""The model as MLflow serves it (models from code): score proteins, one row each.

Input: a table with a column `sequence`. Output: the bound in nats, the canonical residues and the
perplexity of each. Parameters: `masks_per_sequence`, `seed`. Bad input raises MLflow's own
exception, which its server answers as a bad request with the reason; any other would hide it.
"""

from typing import Any

import mlflow
import numpy
import pandas
from numpy.typing import NDArray


class ScoringModel(mlflow.pyfunc.PythonModel):
    """Scores proteins under an exported model."""

    def load_context(self, context: Any) -> None:
        """Load the export that was logged with the model."""
        from d2plm.export import load_export

        exported = load_export(context.artifacts["export"])
        self.denoiser = exported.denoiser()
        self.paradigm, self.max_length = exported.paradigm, exported.max_length

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        """The bound of each sequence; see the module.

        Raises:
            MlflowException: if the table is empty, or a sequence or parameter is none that will do.
        """
        from d2plm.errors import D2PLMError
        from d2plm.evaluation.likelihood import score_sequences

        settings = params or {}
        try:
            scores = score_sequences(
                self.denoiser,
                self.paradigm,
                _tokens(model_input["sequence"].tolist()),
                masks_per_sequence=settings.get("masks_per_sequence", 16),
                seed=settings.get("seed", 0),
                max_length=self.max_length,
            )
        except D2PLMError as error:
            raise mlflow.MlflowException.invalid_parameter_value(str(error)) from error
        return pandas.DataFrame(
            {
                "nats": scores.nats,
                "residues": scores.residues,
                "perplexity": numpy.exp(scores.nats / scores.residues),
            }
        )


def _tokens(sequences: list[Any]) -> list[NDArray[numpy.uint8]]:
    """Each row's residue tokens [L]."""
    from d2plm.data.records import encode_residues
    from d2plm.errors import DataError

    if not sequences:
        raise DataError("the table has no rows; give at least one sequence")
    for row, sequence in enumerate(sequences):
        if not isinstance(sequence, str):
            raise DataError(f"row {row}: {sequence!r} is no text; give residue letters")
    return [encode_residues(sequence, f"row {row}") for row, sequence in enumerate(sequences)]


mlflow.models.set_model(ScoringModel())
