"""TensorBoard and Weights & Biases, through accelerate's trackers.

Those are used by themselves, without an `Accelerator` or a process state, as they also serve
commands that train nothing. Both packages are extras, imported only where they are used.
"""

import glob
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from d2plm.core.errors import TrackingError
from d2plm.core.redaction import redacted_line, redacted_value
from d2plm.tracking.names import with_size
from d2plm.tracking.run_file import keeping, name_on_file, run_on_file

if TYPE_CHECKING:
    from accelerate.tracking import TensorBoardTracker, WandBTracker

TENSORBOARD_FOLDER = "tensorboard"
WANDB_RUN_FILE = "wandb_run.json"

log = logging.getLogger(__name__)


class TensorBoardRun:
    """Event files in a folder; files are not kept, as TensorBoard has no place for them.

    A resumed run writes an event file more, which hides the points of the earlier ones from its
    first step on: TensorBoard shows every step once.

    Args:
        folder: of the event files.
    """

    id: str | None = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tracker: TensorBoardTracker | None = None
        self._has_steps = False

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters, without passwords, for TensorBoard's HParams."""
        from torch.utils.tensorboard.summary import hparams

        values = {key: redacted_value(key, value) for key, value in params.items()}
        with _telling(f"write to {self.folder}"):
            # The writer's own method would make a folder of another name at every resumption.
            for summary in hparams(values, {}):
                self._open().writer.file_writer.add_summary(summary)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Metrics of a step, or of the whole run, which are drawn at step 0."""
        with _telling(f"write to {self.folder}"):
            if step is not None and not self._has_steps:
                self._hide_from(max(step, 1))  # what was written without a step stays
                self._has_steps = True
            values = {name: float(value) for name, value in metrics.items()}
            self._open().log(values, step=step or 0)

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """A data set that the run reads, as text."""
        facts = {"digest": digest, "source": str(source), **profile}
        self._log_text(f"data/{context}/{name}", json.dumps(facts))

    def log_file(self, file: Path, folder: str | None = None) -> None: ...

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags, as text."""
        for key, value in tags.items():
            self._log_text(f"tags/{key}", value)

    def describe(self, text: str) -> None:
        """A text, Markdown."""
        self._log_text("description", text)

    def show_size(self, title: str, size: str) -> None:
        """Nothing: TensorBoard calls a run by its folder."""

    def flush(self) -> None:
        """Write what is pending."""
        if self._tracker is not None:
            with _telling(f"write to {self.folder}"):
                self._tracker.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._tracker is not None:
            self._tracker.finish()
        self._tracker = None

    def _log_text(self, tag: str, text: str) -> None:
        with _telling(f"write to {self.folder}"):
            self._open().log({tag: text}, step=0)

    def _hide_from(self, step: int) -> None:
        """What the writer's `purge_step` does, which must be known before anything is written."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        started = Event(session_log=SessionLog(status=SessionLog.START))
        self._open().writer.file_writer.add_event(started, step)

    def _open(self) -> "TensorBoardTracker":
        if self._tracker is None:
            tracker = _trackers().TensorBoardTracker(run_name="", logging_dir=str(self.folder))
            tracker.main_process_only = False  # see `_trackers`
            tracker.start()
            self._tracker = tracker
        return self._tracker


class WandBRun:
    """A Weights & Biases run; steps that the server has already are not sent again.

    W&B's own process writes an offline run in blocks of 32 KiB: a training that is killed, not
    ended, loses there what was not yet written. An offline run keeps each process's session, so
    that steps after a checkpoint may be in two of them, equal up to rates.

    Args:
        tracker: started.
        file: that keeps the run's id and name.
    """

    def __init__(self, tracker: "WandBTracker", file: Path) -> None:
        self._tracker, self._run, self._file = tracker, tracker.run, file
        self.id: str | None = tracker.run.id

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters, without passwords."""
        self._set({key: redacted_value(key, value) for key, value in params.items()})

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Metrics of a step, or of the whole run, which go into its summary."""
        values = {name: float(value) for name, value in metrics.items()}
        with _telling(f"write to W&B run {self.id}"):
            if step is None:
                self._run.summary.update(values)
            elif step >= self._run.starting_step:
                self._tracker.log(values, step=step)

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """A data set that the run reads, in its configuration."""
        facts = {"digest": digest, "source": str(source), **profile}
        self._set({f"data/{context}/{name}": facts})

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """A file, as it is now."""
        with _telling(f"write to W&B run {self.id}"):
            files = Path(self._run.dir)
            copy = files / (folder or "") / file.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            self._run.save(glob.escape(str(copy)), base_path=str(files), policy="now")

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags, in its configuration: W&B's own are words without values."""
        self._set({f"tags/{key}": value for key, value in tags.items()})

    def describe(self, text: str) -> None:
        """The run's notes, Markdown."""
        with _telling(f"write to W&B run {self.id}"):
            self._run.notes = text

    def show_size(self, title: str, size: str) -> None:
        """Put the size into the name of a run that nobody has named; see `names.with_size`."""
        name = with_size(self._run.name or "", title, size)
        if name is not None:
            with _telling(f"write to W&B run {self.id}"):
                self._run.name = name
            if run_on_file(self._file) == self.id:
                _keep(self._file, str(self.id), name)

    def flush(self) -> None:
        """Nothing: W&B's own process writes when it chooses to."""

    def _set(self, values: dict[str, Any]) -> None:
        with _telling(f"write to W&B run {self.id}"):
            self._run.config.update(values, allow_val_change=True)


@contextmanager
def tensorboard_run(output_dir: Path) -> Iterator[TensorBoardRun]:
    """Event files in `output_dir/tensorboard`; one is made when there is something to write.

    Raises:
        TrackingError: if TensorBoard is not installed, or the folder cannot be written.
    """
    with _installed("TensorBoard", "tensorboard"):
        import tensorboard  # noqa: F401
    run = TensorBoardRun(output_dir / TENSORBOARD_FOLDER)
    with _telling(f"write to {run.folder}"):
        run.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield run
    except BaseException:
        _end_broken(run.close, "the TensorBoard events are not closed")
        raise
    with _telling(f"write to {run.folder}"):
        run.close()


@contextmanager
def wandb_run(
    output_dir: Path, *, project: str, name: str | None = None, group: str | None = None
) -> Iterator[WandBRun]:
    """The W&B run that belongs to `output_dir`, written to `output_dir/wandb`.

    Without `WANDB_API_KEY` and `WANDB_MODE` it is offline: nothing leaves the machine, nothing is
    asked, and `wandb sync` sends it later. `WANDB_RUN_ID` wins over the run on file. An exception
    marks the run failed.

    Raises:
        TrackingError: if W&B is not installed, cannot be reached or refuses, or `output_dir` cannot
            be written.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # sent even where a run is offline
    with _installed("Weights & Biases", "wandb"):
        import wandb
    file = output_dir / WANDB_RUN_FILE
    run_id, name = _wandb_run(file, name)
    offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
    tracker = _trackers().WandBTracker(
        project,
        id=run_id,
        name=name,
        group=group,
        dir=str(output_dir),
        mode="offline" if offline else None,
        resume="allow",
        reinit="create_new",  # a run of the caller's own goes on undisturbed
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,  # the remote's address and the command line may hold passwords
            x_disable_meta=True,
            save_code=False,
        ),
    )
    with _telling(f"begin W&B run {run_id} of project {project}"):
        tracker.start()
    if not tracker.run.offline:
        log.info("W&B run %s", tracker.run.url)
    run = WandBRun(tracker, file)
    try:
        yield run
    except BaseException:
        _end_broken(partial(tracker.run.finish, exit_code=1), "the W&B run is not marked failed")
        raise
    with _telling(f"finish W&B run {run_id}"):
        tracker.finish()


def _wandb_run(file: Path, name: str | None) -> tuple[str, str | None]:
    """(id, name) of the run to write to; the name is the one that it began with, or got since."""
    given = os.environ.get("WANDB_RUN_ID")
    if given:
        return given, name
    run_id = run_on_file(file)
    if run_id is None:
        run_id = secrets.token_hex(4)
        _keep(file, run_id, name)
        return run_id, name
    return run_id, name_on_file(file) or name


def _keep(file: Path, run_id: str, name: str | None) -> None:
    with keeping(file) as run:
        run["run_id"] = run_id
        if name is not None:
            run["name"] = name


def _trackers() -> ModuleType:
    """accelerate's trackers, usable before there is a process state.

    Their logger asks for one, and making one here would choose the device and wait for the other
    ranks, which is the trainer's to do; that only rank 0 comes here is seen to by `tracking_run`.
    """
    from accelerate import tracking

    tracking.logger = logging.getLogger(tracking.__name__)
    return tracking


def _end_broken(end: Callable[[], object], otherwise: str) -> None:
    """End a run that an exception broke off, without taking that exception's place."""
    try:
        end()
    except Exception as error:  # the one that broke the run off is on its way, and says why
        log.warning("%s: %s", otherwise, redacted_line(error))


@contextmanager
def _installed(tracker: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise TrackingError(
            f"{tracker} is not installed ({error}); install d2plm[{extra}], or leave {extra} out "
            "of tracking.trackers"
        ) from error


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Turn a failure into one line; hold nothing but calls of the tracker inside.

    Args:
        what: what is being done, completing "cannot …".
    """
    try:
        yield
    except Exception as error:  # both raise what their own libraries raise
        raise TrackingError(
            f"cannot {what}: {redacted_line(error)}; mend that, then run this again"
        ) from error
