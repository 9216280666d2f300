"""The packages, names and variants of the images; make lint checks their Dockerfiles."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from d2plm import __version__

ROOT = Path(__file__).parents[3]
IMAGES = ("trainer", "mmseqs2", "mlflow")
LOCKED = {
    name.lower().replace("_", "-")
    for name, equals, _ in (
        line.partition("==") for line in (ROOT / "requirements.lock").read_text().splitlines()
    )
    if equals
}


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
