"""Running a function on several ranks: each a fork of a server that has imported everything.

So that a test with four ranks costs their work and not four times the imports.
"""

import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from typing import Any

import torch
from torch.distributed import TCPStore

SERVER = "D2PLM_TESTS_FORK_SERVER"  # address of the server that pytest's workers share


def context() -> Any:
    """What starts processes: each a fork of one server, which has imported `tests.preload`."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(["tests.preload", "tests.ranks"])
    return made


def share_server() -> None:
    """Start the server for this process and its children, or use the one that its parent started.

    Its imports take as long as many a test. multiprocessing has no public way to join a server.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if SERVER in os.environ:
        server._forkserver_address = os.environ[SERVER]
        server._forkserver_alive_fd = os.pipe()[1]  # it ends with the process that started it
        server.ensure_running = resource_tracker.ensure_running
    else:
        context()
        server.ensure_running()
        os.environ[SERVER] = server._forkserver_address


class Ranks:
    """Processes that were started together; one alone is outside any group."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, world_size: int = 1) -> None:
        # Listening before they start, as torchrun does: a port that was only looked up may be
        # taken by another process before the first rank binds it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        start = context().Process
        self.processes = [
            start(target=_run, args=(function, arguments, rank, world_size, self._store.port))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Exit codes, as shells give them; None for those that had to be killed."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.01))
        late = [process.is_alive() for process in self.processes]
        self.kill()
        return [None if slow else _code(p) for p, slow in zip(self.processes, late, strict=True)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def run(
    function: Callable[..., Any], *arguments: Any, world_size: int = 1, seconds: float = 240
) -> None:
    """Run to the end; every rank must succeed."""
    codes = Ranks(function, *arguments, world_size=world_size).wait(seconds)
    assert codes == [0] * world_size, codes


def _code(process: Any) -> int:
    code = process.exitcode
    return code if code >= 0 else 128 - code


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, world_size: int, port: int
) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    try:
        function(*arguments)
    except Exception:  # reported, and converted to the exit code that `run` asserts
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if world_size > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
