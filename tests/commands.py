"""Running `d2plm` commands, each in a fork of a server that has imported everything.

A command is a process of its own, with its own environment, folder, output and exit code, but does
not pay the seconds that importing torch and transformers takes. What a new interpreter does is for
`python_m` to test.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.ranks import context

ROOT = Path(__file__).parents[1]
THREADS = {"OMP_NUM_THREADS": "1"}
CLOSED_PIPE = "a closed pipe"


def d2plm(
    *words: str, folder: Path = ROOT, seconds: float = 600, stdout: str = "", **changes: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user would.

    Args:
        words: of the command line.
        folder: to run it in.
        seconds: after which it is killed.
        stdout: a device or `CLOSED_PIPE` in place of a file.
        changes: of the environment.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    with tempfile.TemporaryDirectory() as name:
        output = [Path(name, "stdout"), Path(name, "stderr")]
        environment = {**os.environ, **THREADS, **changes}
        process = context().Process(target=_run, args=(words, folder, environment, output, stdout))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        process.kill()
        process.join()
        if late:
            raise subprocess.TimeoutExpired(words, seconds)
        code = process.exitcode
        assert code is not None
        return subprocess.CompletedProcess(words, code, *(file.read_text() for file in output))


def python_m(
    *words: str, folder: Path = ROOT, seconds: float = 600, **changes: str
) -> "subprocess.CompletedProcess[str]":
    """The same as `python -m d2plm`, in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-m", "d2plm", *words],
        cwd=folder,
        env={**os.environ, **THREADS, **changes},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def _run(
    words: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str],
    output: list[Path],
    stdout: str,
) -> None:
    from d2plm.cli import main

    for descriptor, file in enumerate(output, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if stdout == CLOSED_PIPE:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    elif stdout:
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(1)  # the environment's number was read with torch
    tempfile.tempdir = None  # to be looked up in this environment
    sys.argv[:] = ["d2plm", *words]
    try:
        sys.exit(main())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends
        atexit._run_exitfuncs()
