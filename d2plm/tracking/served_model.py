"""The model as MLflow serves it (models from code): score proteins, one row each.

Input: a table with a column `sequence`. Output: the bound in nats, the canonical residues and the
perplexity of each. Parameters: `masks_per_sequence`, `seed`.
"""

from typing import Any

import mlflow
import numpy
import pandas


class ScoringModel(mlflow.pyfunc.PythonModel):
    """Scores proteins under an exported model."""

    def load_context(self, context: Any) -> None:
        """Load the export that was logged with the model."""
        from d2plm.export import load_export

        self.exported = load_export(context.artifacts["export"])

    def predict(
        self, context: Any, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        """The bound of each sequence; see the module."""
        from d2plm.data.fasta import encode_residues
        from d2plm.evaluation.likelihood import score_sequences

        settings = params or {}
        tokens = [
            encode_residues(sequence, f"row {row}")
            for row, sequence in enumerate(model_input["sequence"])
        ]
        scores = score_sequences(
            self.exported.denoiser(),
            self.exported.paradigm,
            tokens,
            masks_per_sequence=settings.get("masks_per_sequence", 16),
            seed=settings.get("seed", 0),
            max_length=self.exported.max_length,
        )
        return pandas.DataFrame(
            {
                "nats": scores.nats,
                "residues": scores.residues,
                "perplexity": numpy.exp(scores.nats / scores.residues),
            }
        )


mlflow.models.set_model(ScoringModel())
