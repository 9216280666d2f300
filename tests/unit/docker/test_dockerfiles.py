"""What the images promise, held to the text of their Dockerfiles: building them takes minutes."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
IMAGES = ("trainer", "mmseqs2", "mlflow")
LOCKED = {
    name.lower().replace("_", "-")
    for name, equals, _ in (
        line.partition("==") for line in (ROOT / "requirements.lock").read_text().splitlines()
    )
    if equals
}


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str


def instructions(image: str) -> list[Instruction]:
    text = (ROOT / f"docker/{image}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        Instruction(word, " ".join(rest.split()))
        for word, _, rest in (line.partition(" ") for line in joined.splitlines())
        if word
    ]


def last_stage(image: str) -> list[Instruction]:
    parsed = instructions(image)
    start = max(number for number, one in enumerate(parsed) if one.word == "FROM")
    return parsed[start:]


def rests(parsed: list[Instruction], word: str) -> list[str]:
    return [one.rest for one in parsed if one.word == word]


@pytest.mark.parametrize("image", IMAGES)
def test_runs_as_a_numeric_user_other_than_root(image: str) -> None:
    assert rests(last_stage(image), "USER") == ["10001:10001"]


@pytest.mark.parametrize("image", IMAGES)
def test_is_tried_in_its_build_as_the_user_that_it_runs_as(image: str) -> None:
    stage = last_stage(image)
    after_user = stage[stage.index(Instruction("USER", "10001:10001")) :]
    (run,) = rests(after_user, "RUN")
    assert run.endswith(f"sh /smoke/{image}.sh")
    subprocess.run(["/bin/sh", "-n", ROOT / f"docker/smoke/{image}.sh"], check=True)


def test_every_stage_starts_from_one_pinned_base() -> None:
    bases = set()
    for image in IMAGES:
        parsed = instructions(image)
        bases.add(parsed[0])
        stages = {rest.split(" AS ")[-1] for rest in rests(parsed, "FROM") if " AS " in rest}
        for rest in rests(parsed, "FROM"):
            assert rest.split(" AS ")[0] in {"${PYTHON_IMAGE}", *stages}
    (base,) = bases
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.\d+-slim-[a-z]+", base.rest)


@pytest.mark.parametrize("image", IMAGES)
def test_the_last_stage_has_neither_compiler_nor_installer_unless_asked(image: str) -> None:
    stage = last_stage(image)
    for run in rests(stage, "RUN"):
        assert not re.search(r"\b(pip|gcc|g\+\+|clang|build-essential|curl|wget)\b", run)
        for packages in re.findall(r"apt-get install((?: \S+)+?) &&", run):
            assert packages.split() == ["-y", "--no-install-recommends", "${SYSTEM_PACKAGES}"]
    assert "SYSTEM_PACKAGES=" in rests(stage, "ARG") or image != "trainer"


@pytest.mark.parametrize("image", IMAGES)
def test_carries_the_labels_of_the_open_container_initiative(image: str) -> None:
    labels = dict(
        re.findall(
            r'org\.opencontainers\.image\.(\w+)="([^"]*)"', rests(last_stage(image), "LABEL")[0]
        )
    )
    description = labels.pop("description")
    assert description
    assert labels == {
        "title": f"d2plm-{image}",
        "licenses": "MIT",
        "version": "${VERSION}",
        "revision": "${REVISION}",
        "created": "${CREATED}",
    }


@pytest.mark.parametrize("image", IMAGES)
def test_needs_to_write_nowhere_but_in_tmp(image: str) -> None:
    (environment,) = rests(last_stage(image), "ENV")
    words = environment.split()
    for setting in ("HOME=/tmp", "TMPDIR=/tmp", "PYTHONDONTWRITEBYTECODE=1"):
        assert setting in words
    # torch and MLflow ask for the user's name, which an arbitrary uid has not.
    assert any(word.startswith("LOGNAME=") for word in words)


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_is_copied_exists_and_is_not_ignored(image: str) -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for copied in rests(instructions(image), "COPY"):
        if not copied.startswith("--from="):
            for source in copied.split()[:-1]:
                assert (ROOT / source).exists()
                assert any(Path(source).is_relative_to(kept_path) for kept_path in kept)


@pytest.mark.parametrize("image", IMAGES)
def test_versions_are_those_of_the_lock(image: str) -> None:
    assert any(
        "PIP_CONSTRAINT=/build/requirements.lock" in env
        for env in rests(instructions(image), "ENV")
    )
    for run in rests(instructions(image), "RUN"):
        if "install" in run and "apt-get" not in run:
            # Mirrors and passwords are read from a secret, which no layer keeps.
            assert "--mount=type=secret,id=pip,target=/etc/pip.conf" in run


def test_what_the_lock_lacks_of_the_server_is_pinned_beside_it() -> None:
    for line in (ROOT / "docker/mlflow.requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name = re.split(r"[\[=]", line)[0].lower()
            assert (name in LOCKED) != ("==" in line), line


def test_the_trainer_has_every_extra_that_is_used_at_run_time() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = next(
        rest.partition("=")[2].strip('"').split()
        for rest in rests(instructions("trainer"), "ARG")
        if rest.startswith("EXTRAS=")
    )
    # Lightning is what examples and benchmarks of a source checkout need.
    assert {*extras, "dev", "lightning"} == {*project["optional-dependencies"]}
    printed = subprocess.run(
        [sys.executable, ROOT / "docker/requirements.py", *extras],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {re.split(r"[\[<>=]", line)[0] for line in printed.splitlines()}
    assert {"torch", "kfp", "kubernetes", "mlflow", "tensorboard", "wandb"} <= names <= LOCKED
    assert not names & {"pytest", "mypy", "ruff", "hypothesis"}


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without what a make that runs these tests hands down.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["/usr/bin/env", "make", "--dry-run", *arguments],
        cwd=ROOT,
        env={**kept, "REGISTRY": "", "VARIANT": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_images_are_named_by_registry_and_tag() -> None:
    done = make("images", "CONTAINER_ENGINE=podman", "REGISTRY=registry.example/you", "TAG=1.2.3")
    assert re.findall(r"podman build .* --tag (\S+)", done.stdout) == [
        f"registry.example/you/d2plm-{image}:1.2.3" for image in IMAGES
    ]


def test_images_are_tagged_with_the_version_unless_told_otherwise() -> None:
    from d2plm import __version__

    assert f"--tag d2plm-trainer:{__version__} " in make("image-trainer").stdout


def test_a_variant_chooses_the_build_of_torch() -> None:
    indices = {
        variant: re.findall(
            r"TORCH_INDEX=(\S+)", make("image-trainer", f"VARIANT={variant}").stdout
        )
        for variant in ("cpu", "cuda")
    }
    assert indices == {
        "cpu": ["https://download.pytorch.org/whl/cpu"],
        "cuda": ["https://pypi.org/simple"],
    }
    refused = make("image-trainer", "VARIANT=gpu")
    assert refused.returncode != 0
    assert "VARIANT=gpu: give cpu or cuda" in refused.stderr
