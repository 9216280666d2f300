"""The tutorial, followed literally in a copy of the tree."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from d2plm.settings import registry
from tests.conftest import MonkeyPatch, shared_folder
from tests.docs.markdown import ROOT, blocks
from tests.http_server import free_port

TUTORIAL = ROOT / "docs" / "tutorial.md"
OWN = "my_parts.py"  # module that docs/python.md has its reader write
SECONDS = 900


@dataclass(frozen=True)
class Followed:
    """The tutorial after its last block: the user's folder, and how many processes were left."""

    folder: Path
    output: str
    exit_code: int
    left: int


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch: MonkeyPatch) -> None:
    """What a document registers is forgotten after its test."""
    entries = {group: dict(known) for group, known in registry._ENTRIES.items()}
    monkeypatch.setattr(registry, "_ENTRIES", entries)
    monkeypatch.setattr(registry, "_loaded", [])
    sys.modules.pop(Path(OWN).stem, None)


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The tutorial's blocks, in one shell, in a copy of the files that git knows or would take."""

    def fill(folder: Path) -> None:
        copy = copy_of_the_tree(folder / "d2plm")
        script = "".join(b.text for b in blocks(TUTORIAL) if runs(b.language, b.needs))
        (folder / "followed.json").write_text(json.dumps(follow(script, copy)))

    folder = shared_folder(tmp_path_factory, "tutorial", fill)
    return Followed(folder / "d2plm" / "mine", **json.loads((folder / "followed.json").read_text()))


def runs(language: str, needs: str | None) -> bool:
    """Whether a block of the tutorial is run."""
    return language == "bash" and needs is None


def copy_of_the_tree(folder: Path) -> Path:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def follow(script: str, folder: Path, program: str = "-m d2plm") -> dict[str, Any]:
    """Run a script as in a terminal that ends at the first failure, on a port of its own.

    `program`: words of Python that run `d2plm`.
    """
    programs = folder.parent / "bin"
    programs.mkdir()
    (programs / "d2plm").write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n')
    (programs / "d2plm").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    output = folder.parent / "output.txt"
    with output.open("w") as stream:
        # -m: as in a terminal, a job in the background is a process group that kill %1 ends.
        command = ["bash", "-m", "-e", "-u", "-x", "-o", "pipefail"]
        # The copy's d2plm, not the installed one's.
        own = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": stream, "stderr": stream}
        shell = subprocess.Popen(
            command, cwd=folder, env=own, text=True, start_new_session=True, **streams
        )
        session = os.getsid(shell.pid)
        try:
            shell.communicate(script.replace("8080", str(free_port())), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            shell.kill()
            shell.wait()
        finally:
            left = end_session(session)
    return {"output": output.read_text(), "exit_code": shell.returncode, "left": left}


def end_session(session: int, seconds: float = 60) -> int:
    """Wait for the session's processes to end and kill what is left; gives how many those were."""
    deadline = time.monotonic() + seconds
    while (members := in_session(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in members:
        os.kill(process, signal.SIGKILL)
    return len(members)


def in_session(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            members += [int(entry.name)] * (int(its) == session and state != "Z")
    return members
