"""The run to which a command writes, in every configured tracker: the entry point of this package.

Only rank 0 writes, and before the process group exists; accelerate's trackers join the group when
they start, and would wait for the other ranks. If one tracker fails, the others still receive the
data.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2plm.core.errors import D2PLMError, require, require_choice
from d2plm.core.redaction import redacted, redacted_value
from d2plm.tracking.mlflow_run import MLflowRun, begin_mlflow_run
from d2plm.tracking.tracker_run import Run, reaching

TRACKERS = ("mlflow", "tensorboard", "wandb")
# Trackers group metrics by the part of the name before the slash. docs/tracking.md lists the names;
# `metrics.jsonl` and callbacks use the names of training, without a section.
TIMES = ("tokens_per_second", "model_tflops_per_second", "mfu", "data_wait_share")
MEMORY = ("peak_memory_gib", "peak_memory_allocated_gib", "peak_memory_reserved_gib")
SECTIONS = {**dict.fromkeys(TIMES, "time"), **dict.fromkeys(MEMORY, "system")}

log = logging.getLogger(__name__)


class Runs(Run):
    """The same run in several trackers: hides passwords and groups metrics into sections.

    Every method calls all trackers, and then raises `TrackingError` if one has failed. Without
    `runs`, tracking is disabled.
    """

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self.runs = list(runs)

    @property
    def id(self) -> str | None:  # type: ignore[override]  # known once there are runs
        """The id of the first run that has one; MLflow's comes first."""
        return next((run.id for run in self.runs if run.id is not None), None)

    @property
    def mlflow(self) -> MLflowRun | None:
        return next((run for run in self.runs if isinstance(run, MLflowRun)), None)

    def log_params(self, params: dict[str, Any]) -> None:
        shown = {key: redacted_value(key, value) for key, value in params.items()}
        self._each("log parameters to", lambda run: run.log_params(shown))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        named = metrics if step is None else in_sections(metrics)
        self._each("log metrics to", lambda run: run.log_metrics(named, step))

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        arguments = (redacted(name), digest, context, source, profile)
        self._each(f"log data set {name} to", lambda run: run.log_dataset(*arguments))

    def log_file(self, file: Path, folder: str | None = None) -> None:
        self._each(f"log {file} to", lambda run: run.log_file(file, folder))

    def set_tags(self, tags: dict[str, str]) -> None:
        shown = {key: str(redacted_value(key, value)) for key, value in tags.items()}
        self._each("set tags of", lambda run: run.set_tags(shown))

    def describe(self, text: str) -> None:
        self._each("describe", lambda run: run.describe(redacted(text)))

    def flush(self) -> None:
        self._each("log metrics to", lambda run: run.flush())

    def end(self, status: str) -> None:
        self._each(f"set the status {status} of", lambda run: run.end(status))

    def _each(self, what: str, call: Callable[[Run], None]) -> None:
        errors = []
        for run in self.runs:
            try:
                with reaching(f"{what} {redacted(str(run))}"):
                    call(run)
            except D2PLMError as error:
                errors.append(error)
        for other in errors[1:]:
            log.warning("%s", other)
        if errors:
            raise errors[0]


def require_trackers(trackers: Sequence[str]) -> None:
    """Raise `ConfigError` unless `trackers` is a list of different trackers."""
    wanted = f"a list of any of {', '.join(TRACKERS)}"
    require(isinstance(trackers, list | tuple), "trackers", trackers, wanted)
    for tracker in trackers:
        require_choice("trackers", tracker, TRACKERS)
    require(len({*trackers}) == len(trackers), "trackers", trackers, f"{wanted}, each once")


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
    """Begin or resume the run of `output_dir` in each of `trackers`.

    An exception marks the run FAILED, an interrupt or SIGTERM KILLED; otherwise it is FINISHED at
    the end, and RUNNING again when a later command resumes it.

    Args:
        trackers: any of `TRACKERS`; if empty, or on a rank (`RANK`) other than 0, nothing is
            written.
        uri: URI of the MLflow store; `MLFLOW_TRACKING_URI` takes precedence.
        experiment: MLflow's experiment, W&B's project.
        parent_run_id: parent run in MLflow; group in W&B.

    Raises:
        ConfigError: if a tracker is unknown.
        DataError: if `output_dir` cannot be written.
        TrackingError: if a tracker is not installed, cannot be reached or rejects a request.
    """
    require_trackers(trackers)
    runs, status = Runs(), "FAILED"
    named = {"name": run_name, "parent_run_id": parent_run_id}
    chosen = trackers if os.environ.get("RANK", "0") == "0" else ()
    try:
        if "mlflow" in chosen:
            runs.runs.append(begin_mlflow_run(output_dir, uri=uri, experiment=experiment, **named))
        if "tensorboard" in chosen:
            from d2plm.tracking.tensorboard_run import FOLDER, TensorBoardRun

            with reaching(f"write to {output_dir / FOLDER}"):
                runs.runs.append(TensorBoardRun(output_dir / FOLDER))
        if "wandb" in chosen:
            from d2plm.tracking.wandb_run import begin_wandb_run

            with reaching(f"begin a W&B run in {output_dir}"):
                runs.runs.append(begin_wandb_run(output_dir, experiment=experiment, **named))
        yield runs
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit):
        status = "KILLED"
        raise
    finally:
        try:
            runs.end(status)
        except D2PLMError as error:
            if status == "FINISHED":
                raise
            log.warning("%s", error)  # the exception that ended the run is raised


def in_sections(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics of training for trackers; names with a slash are unchanged.

    `validation_x` becomes `validation/x`, and a user's own `x` becomes `train/x`.
    """

    def shown(name: str) -> str:
        if "/" in name:
            return name
        if name.startswith("validation_"):
            return name.replace("_", "/", 1)
        return f"{SECTIONS.get(name, 'train')}/{name}"

    return {shown(name): value for name, value in metrics.items()}
