"""A pipeline that is killed repeatedly equals an uninterrupted one, and leaves nothing behind."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from safetensors.numpy import load_file

from tests.integration.conftest import Finished, start
from tests.runs import wait_for

pytestmark = pytest.mark.thorough

KILLS = 3
MODEL = "d2plm-diffusion"


def begin(finished: Finished, work_dir: Path, temporary: Path) -> "subprocess.Popen[bytes]":
    words = replace(finished, work_dir=work_dir).arguments()
    program = [sys.executable, "-m", "d2plm", "pipeline", "run", *words]
    return start(program, work_dir.with_suffix(".log"), TMPDIR=str(temporary))


def processes_of(work_dir: Path) -> list[psutil.Process]:
    """Every process that names the folder: the pipeline, its steps, workers and MMseqs2."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.cwd()]
        except psutil.Error:
            continue
        if any(str(work_dir) in word for word in words) and process.pid != os.getpid():
            found.append(process)
    return found


def about(text: str) -> Any:
    return pytest.approx(float(text), rel=1e-6)


def state(work_dir: Path, number: Callable[[str], Any] = float) -> dict[str, Any]:
    """All that a run is judged by, without times, ids and places."""
    output = work_dir / "diffusion"
    rows: dict[int, dict[str, float]] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line, parse_float=number)
        timeless = {k: v for k, v in row.items() if k in ("loss", "grad_norm", "validation_nelbo")}
        rows.setdefault(row["step"], {}).update(timeless)
    evaluation = json.loads((output / "evaluation.json").read_text(), parse_float=number)
    client = MlflowClient(f"sqlite:///{work_dir / 'mlflow.db'}")
    run = client.get_run(json.loads((output / "tracking_run.json").read_text())["run_id"])
    versions = client.search_model_versions(f"name = '{MODEL}'")
    weights = load_file(output / "model" / "model.safetensors")
    return {
        "digests": json.loads((work_dir / "data" / "manifest.json").read_text())["digests"],
        "weights": {name: value.tolist() for name, value in weights.items()},
        "metrics": rows,
        "evaluation": {key: evaluation[key] for key in ("model", "baselines", "digests")},
        "proteins": (output / "generated.fasta").read_text(),
        "run": (run.info.status, number(str(run.data.metrics["evaluation/nelbo"]))),
        "aliases": sorted(client.get_registered_model(MODEL).aliases),
        "versions": [sorted(version.tags) for version in versions],
        "checkpoints": sorted(file.name for file in (output / "checkpoints").iterdir()),
    }


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short name: sockets' addresses have 108 characters."""
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        yield Path(folder)


def test_kills_change_no_result(finished: Finished, tmp_path: Path, temporary: Path) -> None:
    draw, work_dir = random.Random(0), tmp_path / "a run"
    seconds = 30.0  # about what a run takes
    for kill in range(KILLS):
        process = begin(finished, work_dir, temporary)
        try:
            process.wait((kill + draw.random()) / KILLS * seconds)  # early and late ones
        except subprocess.TimeoutExpired:
            if kill % 2:
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        wait_for(lambda: not processes_of(work_dir), 60)
    log = work_dir.with_suffix(".log")
    assert begin(finished, work_dir, temporary).wait(600) == 0, log.read_text()[-3000:]
    assert "Traceback" not in log.read_text()
    assert state(work_dir) == state(finished.work_dir, about)  # whose steps were forks
    client = MlflowClient(f"sqlite:///{work_dir / 'mlflow.db'}")
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == 1
    assert len(client.search_model_versions()) == 1
    names = {file.name for file in work_dir.rglob("*")}
    assert not {name for name in names if name.startswith("partial.") or name.endswith(".lock")}
    # Compiled blocks and Triton's cache stay for later runs.
    assert not {file.name for file in temporary.iterdir() if "torchinductor" not in file.name}
