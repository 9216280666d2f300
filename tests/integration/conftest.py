"""One debug-size pipeline run, through KFP's local runner, shared by the tests that look at it."""

import gzip
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FASTA = REPOSITORY / "examples" / "data" / "uniprot_20k.fasta.gz"
RECORDS = 400


@dataclass(frozen=True)
class Finished:
    """A finished pipeline run."""

    work_dir: Path
    input: Path
    output: str

    @property
    def output_dir(self) -> Path:
        return self.work_dir / "diffusion"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.work_dir / 'mlflow.db'}"

    def arguments(self) -> list[str]:
        return ["experiment=debug", f"data.input={self.input}", f"work_dir='{self.work_dir}'"]


def d2plm(*words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run(
        [sys.executable, "-m", "d2plm", *words],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


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


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of `d2plm pipeline run experiment=debug` on the first proteins of the example."""
    folder = tmp_path_factory.mktemp("pipeline")
    fasta = few_proteins(folder / "few.fasta")
    run = Finished(folder / "a run", fasta, "")  # a space, as users have them
    result = d2plm("pipeline", "run", *run.arguments())
    assert result.returncode == 0, result.stdout + result.stderr
    return Finished(run.work_dir, fasta, result.stdout)
