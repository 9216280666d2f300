"""Running commands and programs, each in a fork of a server that has imported everything.

It is a process of its own, with its own environment, folder, output and exit code, but does not pay
the seconds that importing torch and transformers takes.
"""

import atexit
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from tests.ranks import context

ROOT = Path(__file__).parents[1]
THREADS = {"OMP_NUM_THREADS": "1"}
CLOSED_PIPE = "a closed pipe"


def d2plm(
    *words: str, seconds: float = 1200, stdout: str = "", **changes: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user would, with `changes` of the environment.

    Its standard output may be a device or `CLOSED_PIPE` in place of a file.
    """
    environment = {**os.environ, **THREADS, **changes}
    return _forked(_command, ("d2plm", *words), environment, seconds, stdout)


def python_c(
    program: str, *words: str, environment: Mapping[str, str] | None = None, seconds: float = 1200
) -> "subprocess.CompletedProcess[str]":
    """Run a program as `python -c` does, in this environment or another one."""
    given = {**(os.environ if environment is None else environment), **THREADS}
    return _forked(_program, (program, *words), given, seconds)


def _forked(
    function: Callable[..., object],
    words: tuple[str, ...],
    environment: Mapping[str, str],
    seconds: float,
    stdout: str = "",
) -> "subprocess.CompletedProcess[str]":
    with tempfile.TemporaryDirectory() as name:
        output = [Path(name, "stdout"), Path(name, "stderr")]
        arguments = (function, words, environment, output, stdout)
        process = context().Process(target=_run, args=arguments)
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


def _command(*_: str) -> None:
    from d2plm.cli import main

    sys.exit(main())


def _program(program: str, *_: str) -> None:
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102


def _run(
    function: Callable[..., object],
    words: tuple[str, ...],
    environment: Mapping[str, str],
    output: list[Path],
    stdout: str,
) -> None:
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
    os.chdir(ROOT)
    torch.set_num_threads(1)  # the environment's number was read with torch
    tempfile.tempdir = None  # to be looked up in this environment
    sys.argv[:] = words
    try:
        function(*words)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends
        atexit._run_exitfuncs()
