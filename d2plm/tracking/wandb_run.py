"""Weights & Biases through its own client, with the account and mode of its own environment.

An offline run is written in blocks of 32 KiB, so a killed training run loses the last block. Each
process writes its own session, so steps after a checkpoint may occur in two sessions, equal except
for rates.
"""

import glob
import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2plm.core.errors import TrackingError, from_extra
from d2plm.core.files import write_text
from d2plm.tracking.tracker_run import Run, read_run_file

if TYPE_CHECKING:
    import wandb

WANDB_RUN_FILE = "wandb_run.json"


class WandBRun(Run):
    """A W&B run; tags and data sets are in its configuration, because W&B's tags have no values."""

    def __init__(self, run: "wandb.Run") -> None:
        self._run = run
        self.id, self.name = run.id, run.name or ""

    def __str__(self) -> str:
        return f"W&B run {self.id}"

    def log_params(self, params: dict[str, Any]) -> None:
        self._run.config.update(params, allow_val_change=True)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        if step is None:
            self._run.summary.update(values)
        else:
            self._run.log(values, step=step)

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        facts = {"digest": digest, "source": str(source), **profile}
        self.log_params({f"data/{context}/{name}": facts})

    def log_file(self, file: Path, folder: str | None = None) -> None:
        # By default, W&B links the file and sends later changes.
        files = Path(self._run.dir)
        copy = files / (folder or "") / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        self._run.save(glob.escape(str(copy)), base_path=str(files), policy="now")

    def set_tags(self, tags: dict[str, str]) -> None:
        self.log_params({f"tags/{key}": value for key, value in tags.items()})

    def describe(self, text: str) -> None:
        self._run.notes = text

    def end(self, status: str) -> None:
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


def begin_wandb_run(
    output_dir: Path, *, experiment: str, name: str | None = None, parent_run_id: str | None = None
) -> WandBRun:
    """Begin or resume the W&B run of `output_dir`, written to `output_dir/wandb`.

    Raises:
        TrackingError: if W&B is not installed, or the run's file is damaged.
        DataError: if `output_dir` cannot be written.
    """
    otherwise = ", or remove wandb from trackers"
    with from_extra("Weights & Biases", "wandb", TrackingError, otherwise):
        import wandb
    kept = read_run_file(output_dir / WANDB_RUN_FILE)
    if kept is None:
        kept = {"run_id": secrets.token_hex(4)} | ({} if name is None else {"name": name})
        write_text(output_dir / WANDB_RUN_FILE, json.dumps(kept))
    run = wandb.init(
        project=experiment,
        id=kept["run_id"],
        name=kept.get("name", name),
        group=parent_run_id,
        dir=str(output_dir),
        resume="allow",
        reinit="create_new",  # does not disturb a run of the caller
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # the remote's address and the command line may contain passwords
            x_disable_meta=True,
            save_code=False,
        ),
    )
    return WandBRun(run)
