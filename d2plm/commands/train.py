"""d2plm train: train a model on prepared data; writes checkpoints, metrics and an export."""

import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from d2plm.assembly import dry_run
from d2plm.assembly.tracked_run import (
    describe,
    log_data,
    log_model,
    log_settings,
    system_metrics_logged,
    tracked_run,
)
from d2plm.assembly.training_run import (
    build_trainer,
    load_start,
    trainer_keys,
    training_stores,
    with_start_pinned,
)
from d2plm.config import save
from d2plm.core.errors import DataError
from d2plm.core.files import RUN_CONFIG
from d2plm.core.locks import locked
from d2plm.core.number_text import counted
from d2plm.core.precision import resolve_device
from d2plm.core.processes import train_locally
from d2plm.core.terminal import aligned, done, result
from d2plm.export.export_callback import Export
from d2plm.settings.commands import PipelineSettings, TrainSettings
from d2plm.settings.registry import module_words
from d2plm.tracking.runs import Runs
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics
from d2plm.training.trainer import Trainer
from d2plm.training.training_length import flops_per_step

log = logging.getLogger(__name__)


def run(config: TrainSettings) -> dict[str, Any] | None:
    """Train from the newest checkpoint, export the averaged model and return the results.

    Starts several processes with torchrun unless a launcher has already started this process.
    """
    if config.dry_run:
        forecast = dry_run.forecast(config)
        result(aligned(forecast))
        return forecast
    if config.trainer.fast_dev_run is not None:
        with TemporaryDirectory(prefix="d2plm-") as folder:
            steps = config.trainer.fast_dev_run
            run(dry_run.shortened(config, Path(folder)))
            log.info("fast_dev_run: %d steps, validation, save and export succeeded", steps)
        return None
    processes = config.distributed.processes
    if processes > 1 and "WORLD_SIZE" not in os.environ:
        dry_run.forecast(config)
        requested = Path(config.output_dir) / "config.requested.yaml"
        save(with_start_pinned(config), requested)  # all ranks load the same version
        train_locally(requested, processes, module_words())
        return None  # printed by rank 0
    return _train(config)


def _train(config: PipelineSettings) -> dict[str, Any] | None:
    """Train in this process; only rank 0 returns the results."""
    output_dir, stores = Path(config.output_dir), training_stores(config)
    config, start = load_start(config, stores["train"].vocabulary)
    metrics_file = output_dir / METRICS_FILE
    with _alone_in(output_dir, config), ExitStack() as stack:
        tracked = Runs()
        trainer = build_trainer(config, stores, tracked, start)
        # The run begins after all settings have been checked.
        tracked.runs = stack.enter_context(tracked_run(config, "train")).runs
        stack.enter_context(system_metrics_logged(config, tracked))
        trainer.run_id = tracked.id
        trainer.callbacks.insert(0, SaveConfig(config))
        parameters = trainer.num_parameters
        log.info(
            "training %s: %s parameters, %s, %d steps of %s tokens, %.3g FLOPs, on %s%s",
            config.paradigm.name,
            f"{parameters:,}",
            str(trainer.dtype).removeprefix("torch."),
            trainer.max_steps,
            f"{trainer.global_batch_tokens:,}",
            trainer.max_steps * flops_per_step(trainer.loader, trainer.model.config),
            trainer.process.describe(),
            ", compiled" if trainer.compiled else "",
        )
        if tracked.runs:
            log_settings(tracked, config, parameters=parameters)
            members = (config.data.mixture or {}).items()
            mixture = {name: Path(member["prepared_dir"]) for name, member in members}
            log_data(tracked, Path(config.data.prepared_dir), mixture)
            log_model(tracked, parameters, trainer.step, trainer.max_steps)
        with trainer_keys():
            trainer.train()
        if tracked.runs:
            log_model(tracked, parameters, trainer.step, trainer.max_steps)
            if metrics_file.is_file():
                tracked.log_file(metrics_file, "training")
            describe(tracked, config)
    if not trainer.process.is_main:
        return None
    for callback in trainer.callbacks:
        if isinstance(callback, Export):
            done(f"{'reusing' if callback.is_reused else 'exported'} {config.model_dir}")
    return {
        "output_dir": config.output_dir,
        "model_dir": config.model_dir,
        "run_id": tracked.id,
        "parameters": parameters,
        "step": trainer.step,
        # The newest value of each metric.
        "last": {name: value for row in read_metrics(metrics_file) for name, value in row.items()},
    }


def _alone_in(output_dir: Path, config: PipelineSettings) -> AbstractContextManager[None]:
    """Lock the output folder on rank 0; the other ranks wait for it, for a limited time."""
    if int(os.environ.get("RANK", 0)):
        return nullcontext()
    limit, ranks = config.trainer.max_wait_seconds, int(os.environ.get("WORLD_SIZE", 1))
    limit_key = "trainer.max_wait_seconds"
    if ranks > 1:
        patience = 0.9 * config.distributed.timeout_seconds
        if limit is None or patience < limit:
            limit, limit_key = patience, "0.9 × distributed.timeout_seconds"
    busy = f"another training run is writing to {output_dir}"
    if resolve_device(config.trainer.device) == "cuda":
        held = counted(ranks, "GPU")
        busy += f" (this one holds {held} meanwhile; {limit_key} limits the wait)"
    return locked(output_dir / ".lock", busy, max_wait_seconds=limit, limit_key=limit_key)


class SaveConfig(Callback):
    """Writes the configuration after the checkpoint's identity has been checked against it.

    Training ends with an error if the file disappears: the output folder has been deleted, and
    later files would be incomplete without the earlier ones.
    """

    def __init__(self, config: PipelineSettings) -> None:
        super().__init__()
        self.config = config

    def on_train_begin(self, trainer: Trainer) -> None:
        trainer.process.on_main(lambda: save(self.config, trainer.output_dir / RUN_CONFIG))

    def on_save(self, trainer: Trainer, *_: object) -> None:
        self.on_train_end(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        def check() -> None:
            if not (trainer.output_dir / RUN_CONFIG).is_file():
                raise DataError(
                    f"{trainer.output_dir}: was deleted during training ({RUN_CONFIG} is missing); "
                    "run the same command to train again from the start"
                )

        trainer.process.on_main(check)
