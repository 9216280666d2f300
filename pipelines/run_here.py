"""Running the pipeline on this machine with KFP's local runner, without a cluster.

The steps write to the terminal. KFP's own messages appear only in `pipeline.log` in the work
folder, between the lines of the steps.
"""

import copy
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

import psutil
from rich.text import Text

from d2plm.config import Config
from d2plm.core.errors import LaunchError
from d2plm.core.lifetime import for_children
from d2plm.core.locks import locked
from d2plm.core.machine import user_name
from d2plm.core.signals import handled
from d2plm.core.terminal import JSON, output_in, output_modes, result
from d2plm.evaluation.findings import next_steps, read_evaluation
from d2plm.launch.elastic import GRACE_SECONDS
from pipelines.pipeline import pipeline
from pipelines.steps import OUTPUT_VARIABLE

LOG = "pipeline.log"
GENERATED = ("generated.fasta", "generated.jsonl")  # of sequences or of texts
LATEST = ("config.yaml", "manifest.json", "evaluation.json", "model", "report.html", *GENERATED)
END = "\0\n"  # marks the end of the steps' output
SHOWN = 2  # number of proteins or texts in the summary

logger = logging.getLogger(__name__)


def run_locally(config: Config, arguments: dict[str, Any]) -> dict[str, Any]:
    """Execute the pipeline with `arguments`, which compose to `config`.

    Returns the run's folders, its evaluation and its duration in seconds.

    Raises:
        LaunchError: if a step fails; its message has been printed.
    """
    work_dir, began = Path(config.work_dir), time.monotonic()
    busy = f"another pipeline is running in {work_dir}"
    try:
        with (
            locked(work_dir / ".pipeline.lock", busy, waiting=logger.warning),
            temporary_folder(work_dir) as scratch,
            (work_dir / LOG).open("w", buffering=1, encoding="utf-8") as log,
            output_in(output_modes() - {JSON}),  # the steps print text; only our result is JSON
            step_output(scratch / "output", log),
            steps_terminated_with_us(),
            redirect_stdout(log),
        ):
            execute(arguments, scratch)
            link_latest(config)
    except RuntimeError as error:
        raise LaunchError(
            f"the pipeline failed: {Text.from_ansi(str(error)).plain.splitlines()[0]} (the step's "
            f"message is above; everything is in {work_dir / LOG})"
        ) from error
    except OSError as error:
        raise LaunchError(
            f"{work_dir}: cannot be written ({error.strerror or error}); free space or choose "
            "another work_dir; the same command then continues"
        ) from error
    evaluation = read_evaluation(Path(config.output_dir))
    assert evaluation is not None, "the evaluate step writes it"
    seconds = time.monotonic() - began
    result(summary(config, evaluation, seconds))
    folders = {key: config[key] for key in ("work_dir", "output_dir", "model_dir")}
    return {**folders, "evaluation": evaluation, "seconds": round(seconds, 1)}


def execute(arguments: dict[str, Any], scratch: Path) -> None:
    """Execute the pipeline with KFP's runner, which prints its messages.

    There are no retries: they are for temporary failures in a cluster, whereas here a step fails
    because of a problem that the user has to fix.
    """
    from kfp import local

    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(scratch / "root"),
        workspace_root=str(scratch / "workspace"),  # KFP deletes it after the run
        raise_on_error=True,
    )
    here = copy.deepcopy(pipeline)
    for component in here.pipeline_spec.components.values():
        for task in component.dag.tasks.values():
            task.ClearField("retry_policy")
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.WARNING)  # hides the steps that KFP skips after a failure
    try:
        with warnings.catch_warnings(), arguments_kept():
            warnings.filterwarnings("ignore", module="kfp")  # about ignored settings of pods
            here(**arguments)
    finally:
        root.setLevel(level)


@contextmanager
def arguments_kept() -> Iterator[None]:
    """Prevent KFP from replacing `python3` in the steps' arguments, such as paths."""
    from kfp.local import subprocess_task_handler as handler

    replace = handler.replace_python_executable

    def in_commands(words: list[str], python: str) -> list[str]:
        pairs = zip(words, replace(words, python), strict=True)
        return [old if old.startswith("{") else new for old, new in pairs]  # arguments are JSON

    handler.replace_python_executable = in_commands
    try:
        yield
    finally:
        handler.replace_python_executable = replace


@contextmanager
def temporary_folder(work_dir: Path) -> Iterator[Path]:
    """Create a folder for temporary files; after a kill, the next run removes it.

    torch's cache of compiled code stays at its default place, so that later runs reuse it.
    """
    root = Path(tempfile.gettempdir())
    digest = hashlib.sha256(os.fsencode(work_dir.resolve())).hexdigest()[:12]
    folder = root / f"d2plm-{os.getuid()}-{digest}"
    for _ in range(10):  # a step of a killed run may not have ended yet
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.5)
    folder.mkdir(mode=0o700)
    (folder / "tmp").mkdir()
    user = user_name() or f"uid_{os.getuid()}"
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(root / f"torchinductor_{user}")
    try:
        with variables({"TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": str(folder / "tmp")}):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def step_output(pipe: Path, log: TextIO) -> Iterator[None]:
    """Write the steps' output to the terminal and to `log` while they run.

    Args:
        pipe: path of the named pipe, created here, to which the steps write.
        log: file that also contains KFP's messages.
    """
    console = sys.stdout
    os.mkfifo(pipe)
    reading = os.fdopen(os.open(pipe, os.O_RDWR), errors="replace")  # O_RDWR: no end of file

    def relay() -> None:
        for line in reading:
            ended = line.endswith(END)  # may follow an unfinished line of a killed step
            line = line.removesuffix(END)
            # A full disk, or a terminal that is gone or lacks a character, must not stop steps.
            with suppress(OSError, ValueError):
                log.write(line)
            with suppress(OSError, ValueError):
                console.write(line)
                console.flush()
            if ended:
                return

    thread = threading.Thread(target=relay, name="step output", daemon=True)
    thread.start()
    try:
        with variables({OUTPUT_VARIABLE: str(pipe)}):
            yield
    finally:
        pipe.write_text(END)
        thread.join()
        reading.close()


@contextmanager
def steps_terminated_with_us() -> Iterator[None]:
    """End the running step together with this process; on SIGTERM, KFP would wait for it."""

    def end(_signal: int, _frame: object) -> None:
        children = psutil.Process().children(recursive=True)
        # The step ends its own children in order, so that training saves a checkpoint.
        for child in [child for child in children if _is_step(child)] or children:
            with suppress(psutil.NoSuchProcess):
                child.terminate()
        _, alive = psutil.wait_procs(children, GRACE_SECONDS)
        for child in alive:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        raise SystemExit(128 + signal.SIGTERM)

    with handled(end, signal.SIGTERM), variables(for_children()):
        yield


def _is_step(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "kfp.dsl.executor_main" in process.cmdline()
    return False


def link_latest(config: Config) -> None:
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


def summary(config: Config, evaluation: dict[str, Any], seconds: float) -> str:
    """Summary of the run's results, and where to find more."""
    from d2plm.evaluation.summary import table
    from d2plm.export.designs import DESIGNS

    output_dir, work_dir = Path(config.output_dir), Path(config.work_dir)
    bounds, *_ = table(evaluation).split("\n\n")  # the evaluation step has printed the rest
    generated = next(file for name in GENERATED if (file := output_dir / name).is_file())
    described = " ".join(
        name for name in (generated.name, DESIGNS) if (output_dir / name).is_file()
    )
    paradigm = config.paradigm.name
    ui = f"{Path(sys.executable).parent / 'mlflow'} ui"
    steps = next_steps(evaluation, f"{work_dir}/model").items()
    following = "\n           ".join(f"{what}: {how}" for what, how in steps)
    return f"""
── result: {paradigm.replace("_", " ")} ──
{bounds}

{first_records(generated)}

finished in {seconds / 60:.1f} minutes
report     {output_dir / "report.html"}: open it in a browser
files      {output_dir}: config.yaml evaluation.json evaluation.png metrics.jsonl
           {described} model/ (the export) checkpoints/; linked from {work_dir}
MLflow UI  {ui} --backend-store-uri '{config.tracking.uri}'
registry   models:/{config.tracking.registered_model}@champion
next       {following}
cluster    KFP_HOST=https://your-kubeflow make submit-pipeline PARADIGM={paradigm}"""


def first_records(file: Path) -> str:
    """The first records of a FASTA file or of JSON lines, and the number of the others."""
    between = "\n>" if file.suffix == ".fasta" else "\n"
    first, *others = file.read_text(encoding="utf-8").rstrip().split(between)
    text = between.join([first, *others[: SHOWN - 1]])
    more = len(others) + 1 - SHOWN
    return f"{text}\n… and {more:,} more in {file}" if more > 0 else text
