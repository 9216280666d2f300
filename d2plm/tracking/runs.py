"""Runs: what a command says to its trackers, from preparation to registry.

Any of MLflow, TensorBoard and Weights & Biases, or none. Each keeps which run is whose beside the
outputs, so that every step of a pipeline, and a resumed training, writes into the same run. Only
rank 0 writes.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from d2plm.core.errors import TrackingError, require, require_choice
from d2plm.core.redaction import redacted
from d2plm.tracking.groups import grouped
from d2plm.tracking.mlflow_run import MLflowRun, mlflow_run

TRACKERS = ("mlflow", "tensorboard", "wandb")

log = logging.getLogger(__name__)


class Run(Protocol):
    """What a command may say to its tracking run.

    Metrics without a step are figures of the whole run. A tracker that has no place for something
    leaves it out.
    """

    @property
    def id(self) -> str | None: ...

    def log_params(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...
    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None: ...
    def log_file(self, file: Path, folder: str | None = None) -> None: ...
    def set_tags(self, tags: dict[str, str]) -> None: ...
    def describe(self, text: str) -> None: ...
    def show_size(self, title: str, size: str) -> None: ...
    def flush(self) -> None: ...


class Runs:
    """Several runs told the same; what one of them refuses does not keep it from the others.

    Args:
        runs: one of each tracker.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    @property
    def id(self) -> str | None:
        """The id of the first run that has one, MLflow's before others'."""
        return next((run.id for run in self.runs if run.id is not None), None)

    @property
    def mlflow(self) -> MLflowRun | None:
        """The MLflow run among them, which the registry needs."""
        return next((run for run in self.runs if isinstance(run, MLflowRun)), None)

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters, without passwords."""
        self._tell(lambda run: run.log_params(params))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Metrics of a step, or of the whole run."""
        named = metrics if step is None else grouped(metrics)
        self._tell(lambda run: run.log_metrics(named, step))

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """A data set that the run reads.

        Args:
            name: shown without passwords.
            digest: of its content.
            context: what the run uses it for: train, validation or test.
            source: where it is.
            profile: how large it is.
        """
        self._tell(lambda run: run.log_dataset(redacted(name), digest, context, source, profile))

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """A file, as it is now."""
        self._tell(lambda run: run.log_file(file, folder))

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags, without passwords; these may change during a run."""
        shown = {key: redacted(value) for key, value in tags.items()}
        self._tell(lambda run: run.set_tags(shown))

    def describe(self, text: str) -> None:
        """What is shown at the head of the run, Markdown without passwords; the last one counts."""
        self._tell(lambda run: run.describe(redacted(text)))

    def show_size(self, title: str, size: str) -> None:
        """Put the model's size into the name of a run that was called `title` and the time."""
        self._tell(lambda run: run.show_size(title, size))

    def flush(self) -> None:
        """Send what is pending."""
        self._tell(lambda run: run.flush())

    def _tell(self, call: Callable[[Run], None]) -> None:
        errors = []
        for run in self.runs:
            try:
                call(run)
            except TrackingError as error:
                errors.append(error)
        for other in errors[1:]:
            log.warning("%s", other)
        if errors:
            raise errors[0]


class NoRun(Runs):
    """Tracking switched off."""

    def __init__(self) -> None:
        super().__init__([])


def require_trackers(trackers: Sequence[str]) -> None:
    """Raise `ConfigError` unless `trackers` is a list of trackers, each once."""
    key, wanted = "tracking.trackers", f"a list of any of {', '.join(TRACKERS)}"
    require(isinstance(trackers, list | tuple), key, trackers, wanted)
    for tracker in trackers:
        require_choice(key, tracker, TRACKERS)
    require(len({*trackers}) == len(trackers), key, trackers, f"{wanted}, each once")


@contextmanager
def tracking_run(
    output_dir: Path,
    *,
    trackers: Sequence[str] = ("mlflow",),
    uri: str | None = None,
    experiment: str = "d2plm",
    run_name: str | None = None,
    parent_run_id: str | None = None,
) -> Iterator[Runs]:
    """The run that belongs to `output_dir`, begun with each of `trackers` where it has none.

    Args:
        output_dir: where a run's outputs are.
        trackers: any of `TRACKERS`; none of them, or a rank (`RANK`) other than 0, gives a `NoRun`.
        uri: of the MLflow store; `MLFLOW_TRACKING_URI` wins.
        experiment: MLflow's experiment, W&B's project.
        run_name: what the run is called.
        parent_run_id: the MLflow run that this one is shown under; W&B's group.

    Raises:
        ConfigError: on an unknown tracker.
        TrackingError: if a tracker is not installed, cannot be reached or refuses, or `output_dir`
            cannot be written.
    """
    require_trackers(trackers)
    if not trackers or os.environ.get("RANK", "0") != "0":
        yield NoRun()
        return
    with ExitStack() as stack:
        runs: list[Run] = []
        if "mlflow" in trackers:
            mlflow = mlflow_run(
                output_dir,
                uri=uri,
                experiment=experiment,
                run_name=run_name,
                parent_run_id=parent_run_id,
            )
            runs.append(stack.enter_context(mlflow))
        if "tensorboard" in trackers:
            from d2plm.tracking.accelerate_runs import tensorboard_run

            runs.append(stack.enter_context(tensorboard_run(output_dir)))
        if "wandb" in trackers:
            from d2plm.tracking.accelerate_runs import wandb_run

            wandb = wandb_run(output_dir, project=experiment, name=run_name, group=parent_run_id)
            runs.append(stack.enter_context(wandb))
        yield Runs(runs)
