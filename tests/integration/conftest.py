"""One debug-size pipeline run, through KFP's local runner, shared by the tests that look at it."""

import gzip
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import python_m
from tests.conftest import shared_folder

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

    def run(folder: Path) -> None:
        started = Finished(folder / "a run", few_proteins(folder / "few.fasta"), "")
        result = python_m("pipeline", "run", *started.arguments())
        assert result.returncode == 0, result.stdout + result.stderr
        (folder / "output.txt").write_text(result.stdout)

    folder = shared_folder(tmp_path_factory, "pipeline", run)
    # A space in the name, as users have them.
    return Finished(folder / "a run", folder / "few.fasta", (folder / "output.txt").read_text())
