"""TensorBoard: event files in a folder, through PyTorch's `SummaryWriter`.

TensorBoard does not store files and names a run by its folder. A resumed run writes another event
file, which hides the points of earlier files from its first step on, so every step is shown once.
"""

import json
from pathlib import Path
from typing import Any

from d2plm.core.errors import TrackingError, from_extra
from d2plm.tracking.tracker_run import Run

FOLDER = "tensorboard"


class TensorBoardRun(Run):
    """Event files in a folder; tags, data sets and descriptions are texts at step 0.

    Raises:
        TrackingError: if TensorBoard is not installed.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        otherwise = ", or remove tensorboard from trackers"
        with from_extra("TensorBoard", "tensorboard", TrackingError, otherwise):
            from torch.utils.tensorboard.writer import SummaryWriter
        self._folder, self._open = folder, SummaryWriter
        self._writer = SummaryWriter(str(folder))
        self._has_steps = False

    def __str__(self) -> str:
        return f"TensorBoard's {self._folder}"

    def log_params(self, params: dict[str, Any]) -> None:
        self._writer.add_hparams(params, {}, run_name=".")  # the default is one folder per call

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if step is not None and not self._has_steps:
            self._writer.close()
            # Step 0 has the figures of the whole run, which are kept.
            self._writer = self._open(str(self._folder), purge_step=max(step, 1))
            self._has_steps = True
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step or 0)

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        facts = {"digest": digest, "source": str(source), **profile}
        self._writer.add_text(f"data/{context}/{name}", json.dumps(facts), 0)

    def set_tags(self, tags: dict[str, str]) -> None:
        for key, value in tags.items():
            self._writer.add_text(f"tags/{key}", value, 0)

    def describe(self, text: str) -> None:
        self._writer.add_text("description", text, 0)

    def flush(self) -> None:
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.close()
