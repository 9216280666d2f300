"""The mmseqs2 image's list of packages suffices: the step runs where there are no others."""

import gzip
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, ClassVar

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]

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


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(names: set[str]) -> set[str]:
    """`names` and all that they require on this machine."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        if canonical(requirement.name) in found:
            continue
        found.add(canonical(requirement.name))
        required = map(Requirement, distribution(requirement.name).requires or ())
        waiting += [
            further
            for further in required
            if further.marker is None or further.marker.evaluate({"extra": ""})
        ]
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


class TrackingServer(BaseHTTPRequestHandler):
    """As much of MLflow's REST API as a run needs."""

    seen: ClassVar[list[str]] = []
    run: ClassVar[dict[str, Any]] = {
        "info": {
            "run_id": "0123456789abcdef0123456789abcdef",
            "run_uuid": "0123456789abcdef0123456789abcdef",
            "experiment_id": "1",
            "status": "RUNNING",
            "lifecycle_stage": "active",
            "artifact_uri": "mlflow-artifacts:/1/run/artifacts",
        },
        "data": {},
    }

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].rpartition("/mlflow")[2]
        self.seen.append(f"{self.command} {path}")
        experiment = {"experiment_id": "1", "name": "d2plm", "lifecycle_stage": "active"}
        content = {
            "/experiments/get-by-name": {"experiment": experiment},
            "/runs/create": {"run": self.run},
            "/runs/get": {"run": self.run},
        }.get(path, {})
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = answer  # noqa: N815  # the names that http.server calls

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def tracking_server() -> Iterator[str]:
    TrackingServer.seen.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), TrackingServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_prepare_runs_and_is_tracked_with_the_listed_packages_alone(
    site_packages: Path, tracking_server: str, tmp_path: Path
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
            "MLFLOW_TRACKING_URI": tracking_server,
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
    assert {"POST /runs/log-inputs", "POST /runs/log-batch"} <= {*TrackingServer.seen}
    assert any(call.endswith("/artifacts/data/manifest.json") for call in TrackingServer.seen)


def test_the_image_contains_neither_torch_nor_what_is_as_heavy(site_packages: Path) -> None:
    heavy = ("torch", "pandas", "pyarrow", "scipy", "sklearn", "matplotlib", "transformers")
    assert [name for name in heavy if (site_packages / name).exists()] == []
