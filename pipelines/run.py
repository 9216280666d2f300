"""Running the pipeline on this machine, through KFP's own local runner, with no cluster.

KFP's log goes to `pipeline.log` in the work folder; the terminal shows what the steps themselves
say.
"""

import copy
import io
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import psutil

from d2plm.config import Config
from d2plm.core.errors import LaunchError
from d2plm.core.terminal import JSON, QUIET, output_in, output_modes, result
from d2plm.evaluation.findings import read_evaluation
from d2plm.launch.elastic import GRACE_SECONDS
from pipelines.pipeline import pipeline

LOG = "pipeline.log"
LATEST = (
    *("config.yaml", "manifest.json", "evaluation.json", "generated.fasta", "model"),
    "report.html",
)


def run_locally(config: Config, arguments: dict[str, Any]) -> dict[str, Any]:
    """Execute the pipeline with `arguments`; `config` is what they compose to.

    Gives the run's folders, its evaluation, and the seconds that it took.

    Raises:
        LaunchError: if a step fails; what it said has been printed.
    """
    from kfp import local

    work_dir = Path(config["work_dir"])
    began = time.monotonic()
    work_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="d2plm-pipeline-"))
    try:
        with (
            (work_dir / LOG).open("w") as log,
            steps_speak_to_us(),
            redirect_stdout(StepOutput(sys.stdout, log, QUIET in output_modes())),
            steps_end_with_us(),
            quiet(),
        ):
            local.init(
                runner=local.SubprocessRunner(use_venv=False),
                pipeline_root=str(scratch / "root"),
                workspace_root=str(scratch / "workspace"),  # KFP deletes it after the run
                raise_on_error=True,
            )
            locally(pipeline)(**arguments)
    except RuntimeError as error:
        raise LaunchError(
            f"the pipeline failed: {strip_colours(str(error)).splitlines()[0]} (what the step said "
            f"stands above; everything is in {work_dir / LOG})"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    link_latest(config)
    seconds = time.monotonic() - began
    result(summary(config, seconds))
    return {
        "work_dir": config["work_dir"],
        "output_dir": config["output_dir"],
        "model_dir": config["model_dir"],
        "evaluation": read_evaluation(Path(config["output_dir"])),
        "seconds": round(seconds, 1),
    }


def locally(definition: Any) -> Any:
    """The pipeline without retries: they are for what comes and goes in a cluster.

    Here a step fails for a reason that its user has to mend, and has just read.
    """
    ours = copy.deepcopy(definition)
    for component in ours.pipeline_spec.components.values():
        for task in component.dag.tasks.values():
            task.ClearField("retry_policy")
    return ours


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing of what KFP ignores here, and of what it skips after a failure."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="kfp")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def steps_speak_to_us() -> Iterator[None]:
    """Have the steps' results be text, which goes to the log and is shown: ours is the document."""
    with output_in(output_modes() - {JSON}):
        yield


@contextmanager
def steps_end_with_us() -> Iterator[None]:
    """On SIGTERM, end the running step too: KFP would wait for it instead."""

    def end(_signal: int, _frame: object) -> None:
        children = psutil.Process().children(recursive=True)
        for child in children:
            child.terminate()
        psutil.wait_procs(children, GRACE_SECONDS)  # training finishes its step and saves
        raise SystemExit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class StepOutput(io.TextIOBase):
    """Standard output during a run: all to the log, only the steps' own lines to `console`.

    Args:
        only_errors: whether what ends a step is all that is shown of it.
    """

    def __init__(self, console: TextIO, log: TextIO, only_errors: bool = False) -> None:
        self.console, self.log, self.only_errors = console, log, only_errors
        self.line = self.heading = ""
        self.in_executor_input = self.in_traceback = False

    def write(self, text: str) -> int:
        self.log.write(text)
        self.line += text
        while "\n" in self.line:
            line, self.line = self.line.split("\n", 1)
            self._show(strip_colours(line))
        return len(text)

    def flush(self) -> None:
        self.log.flush()
        self.console.flush()

    def _show(self, line: str) -> None:
        started = re.search(r"INFO - Executing task '([\w-]+)'", line)
        if started:
            self.heading = f"\n── {started[1]} ──\n"
        elif re.search(r"ERROR - ", line):
            self._tell(line, error=True)
        elif line.startswith("    "):
            self._show_step(line[4:])

    def _show_step(self, line: str) -> None:
        if "[KFP Executor" in line:
            self.in_executor_input = "Got executor_input" in line
        elif self.in_executor_input:
            self.in_executor_input = line != "}"
        elif line.startswith("Traceback (most recent call last)"):
            self.in_traceback = True
        elif self.in_traceback:  # KFP's own frames, mostly; the log has them
            self.in_traceback = line.startswith(" ") or not line
            if not self.in_traceback:
                said = re.sub(r"^d2plm\.errors\.\w+: ", "d2plm: error: ", line)
                self._tell(said, error=True)
        elif line.strip() and not line.startswith("Output: "):  # which the next step is given
            self._tell(line, error=line.startswith("d2plm: error"))

    def _tell(self, line: str, error: bool = False) -> None:
        if error or not self.only_errors:
            self.console.write(f"{self.heading}{line}\n")  # KFP's print would indent it
            self.console.flush()
            self.heading = ""


def strip_colours(text: str) -> str:
    """`text` without terminal escapes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def link_latest(config: Config) -> None:
    """Point the work folder's entries at this run's outputs (each paradigm has its own folder)."""
    work_dir, output_dir = Path(config["work_dir"]), Path(config["output_dir"])
    targets = {name: output_dir / name for name in LATEST}
    targets["manifest.json"] = Path(config["data"]["prepared_dir"]) / "manifest.json"
    for name, target in targets.items():
        link = work_dir / name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(os.path.relpath(target, work_dir))


def summary(config: Config, seconds: float) -> str:
    """What a user wants to know at the end, and where to look further."""
    from d2plm.evaluation.summary import table

    output_dir, work_dir = Path(config["output_dir"]), Path(config["work_dir"])
    evaluation = read_evaluation(output_dir)
    assert evaluation is not None, "the evaluate step has written it"
    bounds, *_ = table(evaluation).split("\n\n")  # the rest stands above
    proteins = (output_dir / "generated.fasta").read_text().rstrip()
    paradigm = config["paradigm"]["name"]
    ui = f"{Path(sys.executable).parent / 'mlflow'} ui"
    return f"""
── result: {paradigm.replace("_", " ")} ──
{bounds}

{proteins}

finished in {seconds / 60:.1f} minutes
report     {output_dir / "report.html"}: open it in a browser
files      {output_dir}: config.yaml evaluation.json evaluation.png metrics.jsonl
           generated.fasta designs.json model/ (the export) checkpoints/; linked from {work_dir}
MLflow UI  {ui} --backend-store-uri '{config["tracking"]["uri"]}'
registry   models:/{config["tracking"]["registered_model"]}@champion
cluster    KFP_HOST=https://your-kubeflow make submit-pipeline PARADIGM={paradigm}"""
