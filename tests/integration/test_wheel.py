"""The wheel, installed without a clone: the pipeline, and the use of its model."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `d2plm` of an environment that has the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = folder / "source"
    kept = ("d2plm", "pipelines", "configs", "examples")
    for name in kept:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *build], check=True)
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = folder.glob("*.whl")
    into = ["--python", str(folder / "venv" / "bin" / "python"), "install", "--no-deps"]
    subprocess.run([*pip, *into, "--no-index", str(wheel)], check=True)
    return folder / "venv" / "bin" / "d2plm"


@pytest.mark.thorough
def test_it_runs_the_pipeline_and_uses_its_model(installed: Path, tmp_path: Path) -> None:
    own = tmp_path / "configs" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndefaults: [debug]\nname: mine\nwork_dir: runs/mine\n")
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        ended = subprocess.run(
            [installed, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout

    few = "examples/data/uniprot_500.fasta.gz"
    run("demo", "experiment=mine", f"data.input={few}")
    model = "runs/mine/model"
    run("generate", model, "number=2", "length=20", "steps=5", "output=new.fasta")
    assert run("score", "new.fasta").startswith("name,residues,nats")  # by the shipped model
    run("embed", "new.fasta", f"model_dir={model}")
    assert (tmp_path / "embeddings" / "part-00000.parquet").is_file()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
