"""The mmseqs2 image's list of packages suffices: the step runs where there are no others."""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.http_server import JSON, listening

ROOT = Path(__file__).parents[3]

NO_EXTRA = {"extra": ""}
STEP = """
import kfp
from kfp import dsl

def prepare(work_dir: str, input: str, overrides: str) -> str:
    from pipelines import steps

    return steps.prepare(steps.configure("1", "", work_dir, "none", overrides, input=input))
"""


def packages(list_name: str) -> set[str]:
    """A list of the Dockerfile's."""
    text = (ROOT / "docker/mmseqs2.Dockerfile").read_text()
    found = re.search(rf'\b{list_name}="([^"]*)"', text)
    assert found is not None
    return {*found[1].split()}


def with_dependencies(names: set[str]) -> set[str]:
    """`names` and all that they require on this machine."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found and (not requirement.marker or requirement.marker.evaluate(NO_EXTRA)):
            found.add(name)
            waiting += map(Requirement, distribution(name).requires or ())
    return found


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image's packages, as links to the files of this environment's, and no others."""
    folder = tmp_path_factory.mktemp("site-packages")
    installed = with_dependencies(packages("PACKAGES")) | packages("PACKAGES_ALONE")
    for name in installed - packages("PACKAGES_UNUSED"):
        for file in distribution(name).files or ():
            if ".." not in file.parts:
                link = folder / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.unlink(missing_ok=True)  # mlflow and mlflow-skinny share files
                link.symlink_to(file.locate())
    return folder


RUN = {
    "info": {
        **dict.fromkeys(("run_id", "run_uuid"), "0123456789abcdef0123456789abcdef"),
        "experiment_id": "1",
        "status": "RUNNING",
        "lifecycle_stage": "active",
        "artifact_uri": "mlflow-artifacts:/1/run/artifacts",
    },
    "data": {},
}
EXPERIMENT = {"experiment_id": "1", "name": "d2plm", "lifecycle_stage": "active"}
ANSWERS = {
    "/experiments/get-by-name": {"experiment": EXPERIMENT},
    "/runs/create": {"run": RUN},
    "/runs/get": {"run": RUN},
}


@pytest.fixture
def tracked() -> Iterator[tuple[str, list[str]]]:
    """The address of as much of MLflow's REST API as a run needs, and the calls that it had."""
    calls: list[str] = []

    def answer(request: BaseHTTPRequestHandler, _: bytes) -> tuple[int, str, bytes]:
        path = request.path.partition("?")[0].rpartition("/mlflow")[2]
        calls.append(f"{request.command} {path}")
        return 200, JSON, json.dumps(ANSWERS.get(path, {})).encode()

    with listening(answer) as port:
        yield f"http://127.0.0.1:{port}", calls


def test_packages_suffice(
    site_packages: Path, tracked: tuple[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "component.py").write_text(STEP)
    with gzip.open(ROOT / "examples/data/uniprot_500.fasta.gz", "rt") as proteins:
        (tmp_path / "few.fasta").write_text(">".join(proteins.read().split(">")[:60]))
    parameters = {
        "work_dir": f"{tmp_path}/work",
        "input": f"{tmp_path}/few.fasta",
        "overrides": "experiment=debug data.cluster.method=none",  # clustering takes longest
    }
    executor_input = {
        "inputs": {"parameterValues": parameters},
        "outputs": {
            "parameters": {"Output": {"outputFile": f"{tmp_path}/Output"}},
            "outputFile": f"{tmp_path}/output.json",
        },
    }
    # -S: without this environment's site-packages.
    program = (
        f"import runpy, sys; sys.path += [{str(site_packages)!r}, {str(ROOT)!r}]; "
        "runpy.run_module('kfp.dsl.executor_main', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c", program),
            *("--component_module_path", tmp_path / "component.py"),
            *("--function_to_execute", "prepare", "--executor_input", json.dumps(executor_input)),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "MLFLOW_TRACKING_URI": tracked[0],
            "_KFP_RUNTIME": "true",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    digest = json.loads((tmp_path / "output.json").read_text())["parameterValues"]["Output"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert {"POST /runs/log-inputs", "POST /runs/log-batch"} <= {*tracked[1]}
    assert any(call.endswith("/artifacts/data/manifest.json") for call in tracked[1])


def test_the_image_contains_neither_torch_nor_what_is_as_heavy(site_packages: Path) -> None:
    heavy = ("torch", "pandas", "pyarrow", "scipy", "sklearn", "matplotlib", "transformers")
    assert [name for name in heavy if (site_packages / name).exists()] == []
