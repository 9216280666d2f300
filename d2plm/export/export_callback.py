"""Callback that exports the averaged model as a self-describing folder after the last step.

A LoRA model is exported twice: merged into its base, and alone in the folder `adapter` beside it.
If nothing was trained, an existing complete export is kept together with its evaluation.
"""

from pathlib import Path
from typing import Any, Self

import numpy as np

from d2plm.export.exported_model import is_export_of, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model import lora
from d2plm.model.dit import dit_without_memory
from d2plm.model.esm import is_esm
from d2plm.settings.callbacks import CallbackSettings
from d2plm.training.callbacks.callback import Callback, RunContext
from d2plm.training.shards import full_weights
from d2plm.training.trainer import Trainer

ADAPTER = "adapter"  # folder beside the model folder


class Export(Callback):
    """Writes the EMA weights to `folder` when training ends.

    The export records `provenance` with the step and, unless given, the digest of the training
    proteins.

    Attributes:
        is_reused: whether an existing export was kept, as nothing was trained since.
    """

    called_last = True
    is_reused = False

    def __init__(self, folder: str | Path, provenance: dict[str, Any] | None = None) -> None:
        self.folder, self.provenance = Path(folder), provenance or {}

    @classmethod
    def create(cls, settings: CallbackSettings, context: RunContext) -> Self:
        return cls(context.model_dir, context.provenance)

    def on_train_end(self, trainer: Trainer) -> None:
        proteins = [collection.sequences for collection in trainer.collections]
        digests = {"train": "+".join(each.digest for each in proteins)}
        provenance = {
            "digests": digests,
            **self.provenance,
            "step": trainer.step,
            "run_id": trainer.run_id,
            "settings": trainer.identity,
        }
        process = trainer.process
        folders, base = [self.folder], provenance.get("init_from")
        if trainer.lora_rank and base is not None and not (Path(base).is_dir() and is_esm(base)):
            folders.append(self.folder.with_name(ADAPTER))

        def is_written() -> bool:
            return all(is_export_of(folder, provenance) for folder in folders)

        if trainer.first_step == trainer.step and process.on_main(is_written):
            self.is_reused = True
            return
        with trainer.ema.swapped_in():
            weights = full_weights(trainer.model, process)

        def write() -> None:
            lengths = LengthHistogram.of(
                np.concatenate([each.lengths for each in proteins]),
                trainer.model.config.max_position_embeddings - 2,
            )
            content = (trainer.paradigm, lengths, provenance)
            # The trained model may have the parameters of only one pipeline stage.
            whole = dit_without_memory(trainer.model.config).to(trainer.model.dtype)
            if trainer.lora_rank is None or weights is None:
                save_export(self.folder, whole, *content, weights)
                return
            for adapter in folders[1:]:
                save_export(adapter, whole, *content, weights)
            save_export(self.folder, whole, *content, lora.merged(weights))

        process.on_main(write)
