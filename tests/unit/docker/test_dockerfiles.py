"""The packages, names and variants of the images; make lint checks their Dockerfiles."""

import gzip
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from d2plm import __version__
from tests.http_server import JSON, listening

ROOT = Path(__file__).parents[3]
IMAGES = ("trainer", "mmseqs2", "mlflow")
LINES = (ROOT / "requirements.lock").read_text().lower().replace("_", "-").splitlines()
LOCKED = {line.partition("==")[0] for line in LINES if "==" in line}


def test_what_the_wheel_includes_is_in_the_images() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    context = (ROOT / ".dockerignore").read_text().splitlines()
    for folder in included:
        assert f"!{folder}" in context
        for name in ("trainer", "mmseqs2"):
            copied = (ROOT / f"docker/{name}.Dockerfile").read_text()
            assert re.search(rf"^COPY (.* )?{folder}\b", copied, re.MULTILINE), (name, folder)


def test_the_trainer_has_every_extra_that_is_used_at_run_time() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.search(r'ARG EXTRAS="(.*)"', (ROOT / "docker/trainer.Dockerfile").read_text())
    assert found is not None
    extras = found[1].split()
    # Lightning is what examples and benchmarks of a source checkout need; demo names two of these.
    assert {*extras, "demo", "dev", "lightning"} == {*project["optional-dependencies"]}
    printed = ran(sys.executable, "docker/requirements.py", *extras).stdout
    names = {re.split(r"[\[<>=]", line)[0] for line in printed.splitlines()}
    assert {"torch", "kfp", "kubernetes", "mlflow", "tensorboard", "wandb"} <= names <= LOCKED
    assert not names & {"pytest", "mypy", "ruff", "hypothesis"}


def ran(*words: str) -> "subprocess.CompletedProcess[str]":
    # Without what a make that runs these tests hands down.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    given = {**kept, "REGISTRY": "", "VARIANT": "cpu"}
    return subprocess.run(words, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


def make(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return ran("/usr/bin/env", "make", "--dry-run", *arguments)


def test_images_are_named_by_registry_tag_and_version() -> None:
    done = make("images", "CONTAINER_ENGINE=podman", "REGISTRY=registry.example/you", "TAG=1.2.3")
    assert re.findall(r"podman build .* --tag (\S+)", done.stdout) == [
        f"registry.example/you/d2plm-{image}:1.2.3" for image in IMAGES
    ]
    for variant, index in (("cpu", "download.pytorch.org/whl/cpu"), ("cuda", "pypi.org/simple")):
        said = make("image-trainer", f"VARIANT={variant}").stdout
        assert f"--tag d2plm-trainer:{__version__} " in said
        assert f"TORCH_INDEX=https://{index}" in said
    assert make("image-trainer", "VARIANT=gpu").returncode != 0


def test_what_the_lock_lacks_of_the_server_is_pinned_beside_it() -> None:
    for line in (ROOT / "docker/mlflow.requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[\[=]", line)[0].lower()
            assert (name in LOCKED) != ("==" in line), line


# The mmseqs2 image's list of packages suffices: the step runs where there are no others.
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
ANSWERS = {"/experiments/get-by-name": {"experiment": EXPERIMENT}}
ANSWERS |= {f"/runs/{call}": {"run": RUN} for call in ("create", "get")}


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


@pytest.mark.thorough  # of packages, not of code
def test_prepare_runs_and_is_tracked_with_the_listed_packages_alone(
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
    outputs = {"Output": {"outputFile": f"{tmp_path}/Output"}}
    executor_input = {
        "inputs": {"parameterValues": parameters},
        "outputs": {"parameters": outputs, "outputFile": f"{tmp_path}/output.json"},
    }
    pod = {"MLFLOW_TRACKING_URI": tracked[0], "_KFP_RUNTIME": "true"}
    # -S: without this environment's site-packages.
    program = (
        f"import runpy, sys; sys.path += [{str(site_packages)!r}, {str(ROOT)!r}]; "
        "runpy.run_module('kfp.dsl.executor_main', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    command += ["--component_module_path", f"{tmp_path}/component.py"]
    command += ["--function_to_execute", "prepare", "--executor_input", json.dumps(executor_input)]
    given = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **pod}
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    digest = json.loads((tmp_path / "output.json").read_text())["parameterValues"]["Output"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert {"POST /runs/log-inputs", "POST /runs/log-batch"} <= {*tracked[1]}
    assert any(call.endswith("/artifacts/data/manifest.json") for call in tracked[1])


def test_the_image_contains_neither_torch_nor_what_is_as_heavy(site_packages: Path) -> None:
    heavy = ("torch", "pandas", "pyarrow", "scipy", "sklearn", "matplotlib", "transformers")
    assert [name for name in heavy if (site_packages / name).exists()] == []
