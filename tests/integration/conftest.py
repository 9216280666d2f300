"""Prepared data, and one debug-size pipeline run through KFP's local runner, for many tests."""

import gzip
import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.commands import d2plm, python_c
from tests.conftest import shared_folder

REPOSITORY = Path(__file__).parents[2]
FASTA = REPOSITORY / "examples" / "data" / "uniprot_20k.fasta.gz"
RECORDS = 60

# `d2plm` whose pipeline's steps are forks of this process, which has imported all.
FORKED_STEPS = """
import os, sys
from contextlib import contextmanager
from types import SimpleNamespace
from d2plm.cli import main
from pipelines import local, steps

@contextmanager
def forked(command, environment, stdout, **_):
    *python, step, file = command
    assert python == [sys.executable, "-m", "pipelines.steps"]
    child = os.fork()
    if not child:
        os.dup2(stdout, 1), os.dup2(stdout, 2)
        os.environ |= environment
        steps.train_locally = lambda file, *_: main(["train", f"--config-file={file}"])
        os._exit(steps.main([step, file]))
    yield SimpleNamespace(wait=lambda: os.waitpid(child, 0)[1])

local.child = forked
raise SystemExit(main())
"""


@dataclass(frozen=True)
class Prepared:
    """A work folder with prepared data."""

    work_dir: Path
    input: Path

    def arguments(self) -> list[str]:
        return [
            *("experiment=debug", f"data.input={self.input}", f"work_dir='{self.work_dir}'"),
            *("data.cluster.method=none", "evaluation.nearest_identity=false"),
        ]


@dataclass(frozen=True)
class Finished(Prepared):
    """A finished pipeline run."""

    output: str

    @property
    def output_dir(self) -> Path:
        return self.work_dir / "diffusion"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.work_dir / 'mlflow.db'}"


def few_proteins(path: Path, records: int = RECORDS) -> Path:
    """The first records of the example file, as plain FASTA."""
    seen = 0
    with gzip.open(FASTA, "rt") as source, path.open("w") as target:
        for line in source:
            seen += line.startswith(">")
            if seen > records:
                break
            target.write(line)
    return path


def start(words: list[str], log: Path, **environment: str) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own; its output is added to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            words,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def steps(output: Path) -> int:
    """The steps in the metrics of a run that logs each of them."""
    file = output / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The first proteins of the example, prepared; much faster than a whole run."""

    def run(folder: Path) -> None:
        work = Prepared(folder / "a run", few_proteins(folder / "few.fasta"))
        result = d2plm("prepare", *work.arguments(), "tracking=none")
        assert result.returncode == 0, result.stdout + result.stderr

    folder = shared_folder(tmp_path_factory, "prepared", run)
    return Prepared(folder / "a run", folder / "few.fasta")


@pytest.fixture(scope="session")
def finished(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of `d2plm pipeline run experiment=debug` on the prepared data."""

    def run(folder: Path) -> None:
        # A space in the name, as users have them.
        started = Finished(folder / "a run", prepared.input, "")
        shutil.copytree(prepared.work_dir, started.work_dir)
        result = python_c(FORKED_STEPS, "pipeline", "run", *started.arguments())
        assert result.returncode == 0, result.stdout + result.stderr
        (folder / "output.txt").write_text(result.stdout)

    folder = shared_folder(tmp_path_factory, "pipeline", run)
    return Finished(folder / "a run", prepared.input, (folder / "output.txt").read_text())


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Finished:
    """A copy of the finished run, for a test that runs commands on it."""
    work_dir = tmp_path / "a run"
    shutil.copytree(finished.work_dir, work_dir, symlinks=True)
    (known,) = (work_dir / "pipeline_runs").glob("*.yaml")
    known.write_text(known.read_text().replace(str(finished.work_dir), str(work_dir)))
    with closing(sqlite3.connect(work_dir / "mlflow.db")) as store, store:
        # Or the steps write beside the original; the last part is left, its blank is an escape.
        for table, column in (("runs", "artifact_uri"), ("experiments", "artifact_location")):
            moved = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"  # noqa: S608  # ours
            store.execute(moved, (str(finished.work_dir.parent), str(tmp_path)))
    return replace(finished, work_dir=work_dir)
