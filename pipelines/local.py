"""Running the pipeline on this machine: its steps in order, each in its own process.

Their output is shown on the terminal and kept in `pipeline.log` in the work folder.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any, TextIO

from d2plm.core.errors import LaunchError, OutputError
from d2plm.core.locks import locked
from d2plm.core.machine import user_name
from d2plm.core.processes import GRACE_SECONDS, child, described, exit_code
from d2plm.core.terminal import JSON, output_in, output_modes, result
from d2plm.core.waiting import waiting
from d2plm.evaluation.findings import next_steps, plain_sentence
from d2plm.evaluation.new_members import headline, read_members
from d2plm.evaluation.result import Evaluation, read_evaluation
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.registry import loaded_modules
from pipelines import steps

LOG = "pipeline.log"
GENERATED = ("generated.fasta", "generated.jsonl")  # sequences, or texts
LATEST = ("config.yaml", "manifest.json", "evaluation.json", "model", "report.html", *GENERATED)


def run_locally(config: PipelineSettings) -> dict[str, Any]:
    """Run every step; returns the run's folders, its evaluation and its duration in seconds.

    Steps are not retried: here they fail because of problems that the user has to fix.

    Raises:
        LaunchError: if a step fails; its message has been printed.
    """
    work_dir, began = Path(config.work_dir), time.monotonic()
    busy = f"another pipeline is running in {work_dir}"
    run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    try:
        with (
            locked(work_dir / ".pipeline.lock", busy),
            (work_dir / LOG).open("w", buffering=1, encoding="utf-8") as log,
            output_in(output_modes() - {JSON}),  # the steps print text; only our result is JSON
            _temporary_folder(work_dir) as temporary,
        ):
            file = steps.save_configuration(config, run_id)
            for name in steps.STEPS:
                _run_step(name, file, log, run_id, work_dir, temporary)
            link_latest(config)
    except OSError as error:
        raise LaunchError(
            f"{work_dir}: cannot be written ({error.strerror or error}); free space or choose "
            "another work_dir; the same command then continues"
        ) from error
    evaluation = read_evaluation(Path(config.output_dir))
    assert evaluation is not None, "the evaluate step writes it"
    seconds = time.monotonic() - began
    result(summary(config, evaluation, seconds))
    folders = {key: getattr(config, key) for key in ("work_dir", "output_dir", "model_dir")}
    return {**folders, "evaluation": evaluation, "seconds": round(seconds, 1)}


def step_command(name: str, file: Path) -> list[str]:
    """Command line of one step; see `steps.main`."""
    return [sys.executable, "-m", "pipelines.steps", name, str(file), *loaded_modules()]


@contextmanager
def _temporary_folder(work_dir: Path) -> Iterator[dict[str, str]]:
    """Yield variables that put the steps' temporary files into one folder; delete leftover ones.

    torch's cache of compiled code keeps its default place, so that later runs reuse it.
    """
    root = Path(tempfile.gettempdir())
    digest = hashlib.sha256(os.fsencode(work_dir.resolve())).hexdigest()[:12]
    prefix = f"d2plm-{os.getuid()}-{digest}-"
    for left in root.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)  # does not follow links
    folder = tempfile.mkdtemp(prefix=prefix)
    user = user_name() or f"uid_{os.getuid()}"
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(root / f"torchinductor_{user}")
    try:
        yield {"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_step(
    name: str, file: Path, log: TextIO, run_id: str, work_dir: Path, environment: dict[str, str]
) -> None:
    with (
        _shown(log) as output,
        child(
            step_command(name, file), environment, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        code = exit_code(process.wait())
    if code:
        reason = f"the step {name} ended with {described(code)}"
        steps.finish(run_id, str(work_dir), "FAILED", reason)
        raise LaunchError(
            f"the pipeline failed: {reason} (its message is above; everything is in "
            f"{work_dir / LOG})"
        )


@contextmanager
def _shown(log: TextIO) -> Iterator[int]:
    """Yield a file descriptor whose lines are shown and logged until its last writer ends."""
    reading, writing = os.pipe()
    relay = Thread(target=_show, args=[reading, log], daemon=True)
    relay.start()
    try:
        yield writing
    finally:
        os.close(writing)
        with waiting("the last processes of the step that write to its output"):
            relay.join(GRACE_SECONDS)


def _show(reading: int, log: TextIO) -> None:
    """Write lines to the log and the terminal; a full disk or lost terminal stops no step."""
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            for stream in (log, sys.stdout):
                with suppress(OSError, ValueError, OutputError):
                    stream.write(line)
                    stream.flush()


def link_latest(config: PipelineSettings) -> None:
    """Link this run's outputs into the work folder; each paradigm has its own output folder."""
    work_dir, output_dir = Path(config.work_dir), Path(config.output_dir)
    targets = {name: output_dir / name for name in LATEST}
    targets["manifest.json"] = Path(config.data.prepared_dir) / "manifest.json"
    for name, target in targets.items():
        link = work_dir / name
        if link.is_symlink():
            link.unlink()
        if target.exists() and not link.exists():
            link.symlink_to(os.path.relpath(target, work_dir))


def summary(config: PipelineSettings, evaluation: Evaluation, seconds: float) -> str:
    """Summarise the run: its files, the verdict on the model, and the next commands."""
    output_dir, work_dir = Path(config.output_dir), Path(config.work_dir)
    generated = next(file for name in GENERATED if (file := output_dir / name).is_file())
    members = read_members(generated)
    made = f"{generated}" if members is None else f"{generated}: {headline(members)}"
    ui = f"{Path(sys.executable).parent / 'mlflow'} ui --backend-store-uri"
    following = "\n           ".join(
        f"{what}: {how}" for what, how in next_steps(evaluation, f"{work_dir}/model").items()
    )
    return f"""
── done in {seconds / 60:.1f} minutes ──
model      {work_dir}/model; the best so far: models:/{config.tracking.registered_model}@champion
           {plain_sentence(evaluation)}
generated  {made}
report     {output_dir / "report.html"}: open it in a browser; all output: {work_dir / LOG}
runs       {ui} '{config.tracking.uri}'
next       {following}
cluster    KFP_HOST=https://your-kubeflow make submit-pipeline PARADIGM={config.paradigm.name}"""
