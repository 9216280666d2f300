"""d2plm replay: repeat a training step with the same batch, masks and weights, and inspect it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

from d2plm.assembly.training_run import build_trainer, on_one_process, training_stores
from d2plm.config import read
from d2plm.core.errors import ConfigError
from d2plm.core.files import nearest_path, write_text
from d2plm.core.terminal import result
from d2plm.settings.commands import PipelineSettings, ReplaySettings
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics
from d2plm.training.replay import Replayed, replay


def run(config: ReplaySettings) -> Replayed:
    """Repeat the step and print its sequences and gradients; the run itself is not changed."""
    folder = Path(config.run)
    if not (folder / "config.yaml").is_file():
        near = nearest_path(folder)
        raise ConfigError(
            f"run={folder}: contains no config.yaml{near}; give the output_dir of a training run"
        )
    settings: PipelineSettings = on_one_process(read("train", folder / "config.yaml"))
    # No callbacks, because they would write files.
    settings = replace(settings, output_dir=str(folder), callbacks={})
    if config.device is not None:
        settings = replace(settings, trainer=replace(settings.trainer, device=config.device))
    if config.prepared_dir is not None:
        data = replace(settings.data, prepared_dir=config.prepared_dir, tokenizer=None)
        settings = replace(settings, data=data)
    trainer = build_trainer(settings, training_stores(settings))
    replayed = replay(trainer, config.step, config.checkpoint)
    rows = read_metrics(folder / METRICS_FILE)
    logged = (row for row in rows if row["step"] == config.step and "loss" in row)
    result(table(replayed, next(logged, None), config.show))
    if config.output is not None:
        write_text(Path(config.output), json.dumps(asdict(replayed), indent=2))
    return replayed


def table(replayed: Replayed, logged: dict[str, float] | None, show: int) -> str:
    """Format the step, and the sequences and parameters that contribute most, as text."""
    lines = [
        f"step {replayed.step}: loss {replayed.loss:.6f}, gradient norm {replayed.grad_norm:.6f}, "
        f"learning rate {replayed.learning_rate:.3g}",
    ]
    if logged is not None:
        lines.append(
            f"in the log:     loss {logged['loss']:.6f} (mean of the steps since the row before), "
            f"gradient norm {logged['grad_norm']:.6f}"
        )
    lines += ["", "sequence      tokens   time  predicted   nats   nats/predicted"]
    for one in replayed.sequences[:show]:
        lines.append(
            f"{one.sequence_id:<12}  {one.residues:6}  {one.time:5.3f}  {one.predicted:9}  "
            f"{one.nats:6.1f}  {one.nats / max(one.predicted, 1):8.4f}"
        )
    lines += ["", "gradient norm  parameter"]
    largest = sorted(replayed.gradients.items(), key=lambda item: -item[1])[:show]
    lines += [f"{norm:13.6f}  {name}" for name, norm in largest]
    return "\n".join(lines)
