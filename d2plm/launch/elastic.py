"""torchrun with the workers' exit codes: `python -m d2plm.launch.elastic <torchrun arguments>`.

torchrun itself always exits with 1 if a worker fails, so a pre-emption looks like a bug, and every
worker prints the same error. This entry point runs torchrun in-process, exits with the code of the
worker that failed first, or 128 + the signal, and prints the error of that worker once.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from d2plm.core.collective_messages import CONNECTION_LOST
from d2plm.core.errors import first_line
from d2plm.core.number_text import duration
from d2plm.core.processes import GRACE_SECONDS, LOST, end_with_parent, for_children

REPORT_SECONDS = 60.0  # between reports of the wait for the other nodes
# Makes workers leave their error in a file, for this process to print.
QUIET_WORKERS = "D2PLM_QUIET_WORKERS"


def main() -> int:
    """Run torchrun with this process's arguments and return the workers' exit code."""
    import torch
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # torchrun would report the same error again
    end_with_parent()
    os.environ |= {QUIET_WORKERS: "1", **for_children()}
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    # torchrun forwards SIGTERM to its workers, but SIGUSR1 kills it.
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    # "auto" in a TrainJob without resources would count the machine's cores, not the pod's.
    if os.environ.get("PET_NPROC_PER_NODE") == "auto" and not torch.cuda.is_available():
        os.environ["PET_NPROC_PER_NODE"] = "1"
    if _has_several_nodes():
        threading.Thread(target=_report_rendezvous, daemon=True).start()
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        code, message = first_failure(error.failures)
        if message:
            print(message, file=sys.stderr)
        return code
    except SignalException as error:
        return 128 + signal.Signals(error.sigval).value
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        print(
            f"d2plm: error: the other nodes cannot be reached ({first_line(error)}); node 0 may "
            "be lost; run the same command to resume from the last checkpoint",
            file=sys.stderr,
        )
        return LOST
    return 0


def _has_several_nodes() -> bool:
    return os.environ.get("PET_NNODES", "1") not in ("1", "1:1")


def _report_rendezvous() -> None:
    """Report that torchrun waits for the other nodes, until it has started its workers."""
    began, workers = time.monotonic(), Path(f"/proc/self/task/{os.getpid()}/children")
    with suppress(OSError):  # not Linux
        while not workers.read_text():
            time.sleep(REPORT_SECONDS)
            if not workers.read_text():
                waited = duration(time.monotonic() - began)
                print(f"waiting for the other nodes for {waited}", file=sys.stderr, flush=True)


def first_failure(failures: dict[int, Any]) -> tuple[int, str]:
    """Find the cause among torchrun's `ProcessFailure`s by rank; other ranks fail as a result.

    A killed worker leaves no error, and the errors of the other ranks do not name the cause.
    Returns the exit code, as in a shell, and the message, which is empty if the worker has printed
    it.
    """
    several = _has_several_nodes()
    for rank, failed in sorted(failures.items()):
        if several and failed.exitcode == -signal.SIGABRT:  # gloo, NCCL: lost connection
            return LOST, (
                "d2plm: error: another node's worker has ended, or this one's native code failed "
                f"(rank {rank} aborted); the same command resumes from the last checkpoint"
            )
        if failed.exitcode < 0 and failed.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failed.exitcode).name
            return 128 - failed.exitcode, (
                f"d2plm: error: rank {rank} was killed by {name} (SIGKILL usually means that "
                "memory ran out); the same command resumes from the last checkpoint"
            )
    errors = [
        (data["time_ns"], data["text"], data["exit_code"], data["is_bug"])
        for failed in failures.values()
        if (data := failed.error_file_data.get("d2plm"))
    ]
    if errors:
        _, text, code, is_bug = min(errors)
        # With several nodes, a lost connection is not a bug on this node.
        lost = [line.strip() for line in text.splitlines() if CONNECTION_LOST.search(line)]
        if not (several and lost):
            return code, text
        if is_bug:
            text = (
                f"d2plm: error: another node's worker has ended ({lost[-1]}); the same command "
                "resumes from the last checkpoint"
            )
        return LOST, text
    code = min(failures.items())[1].exitcode
    return code if code > 0 else 128 - code, ""


def leave_error(text: str, exit_code: int, is_bug: bool = False) -> bool:
    """Leave a worker's error for `main` to print; False if `main` did not start this worker.

    The file has torchrun's format plus the time, which identifies the first of several errors. With
    `is_bug`, the text is a traceback.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or QUIET_WORKERS not in os.environ:
        return False
    now = time.time_ns()
    error = {"time_ns": now, "text": text, "exit_code": exit_code, "is_bug": is_bug}
    content = {"message": text, "timestamp": str(now // 10**9), "d2plm": error}
    try:
        Path(file).write_text(json.dumps(content))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    exit_code = main()
    with suppress(OSError):
        print(end="", flush=True)  # unlike flush(), works with a closed standard output
    os._exit(exit_code)  # after a signal torchrun's heartbeat would abort a normal exit
