"""d2plm export: export the averaged weights of a checkpoint as a model folder."""

from typing import Any

from d2plm.assembly.training_run import build_trainer, on_one_process, training_stores
from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.core.terminal import done
from d2plm.export.export_callback import Export
from d2plm.settings.commands import PipelineSettings
from d2plm.training import checkpoint


def run(config: PipelineSettings) -> dict[str, Any]:
    """Export the checkpoint that `trainer.resume` names, or the newest complete one."""
    config = on_one_process(config)
    trainer = build_trainer(config, training_stores(config))
    export = next((c for c in trainer.callbacks if isinstance(c, Export)), None)
    if export is None:
        raise ConfigError("callbacks.export=null: exporting needs this callback; configure it")
    root, location = trainer.saver.root, config.trainer.resume
    if location in ("auto", "none"):
        name = checkpoint.newest_whole(root)
        if name is None:
            raise CheckpointError(
                f"{root.location}: contains no complete checkpoint; train first, or set output_dir"
            )
        location = root.of(name)
    trainer.load(location)
    trainer.first_step = 0  # an existing export in the folder may be of another checkpoint
    export.on_train_end(trainer)
    done(f"exported {location} to {config.model_dir}")
    return {"checkpoint": location, "model_dir": config.model_dir, "step": trainer.step}
