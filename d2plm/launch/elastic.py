"""torchrun with true exit codes: `python -m d2plm.launch.elastic <torchrun arguments>`.

torchrun itself exits with 1 whatever its worker died of, so a pre-emption looks like a defect, and
every worker tells the same story. This entry point runs it in-process, exits with the code of the
worker that failed first, or 128 + the signal, and prints that worker's error, once.
"""

import json
import logging
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import first_line

# What tells a worker that its error is to be left for this process to print.
QUIET_WORKERS = "D2PLM_QUIET_WORKERS"
GRACE_SECONDS = 120  # for a last step and its save, before workers are killed
# The training operator starts a pod again whose exit code is above 127; this one means just that.
LOST = 128 + signal.SIGUSR1
# What gloo and NCCL say when the other end of a connection has gone.
_OTHERS_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Connection refused|remote process exited"
)


def main() -> int:
    """Run torchrun with this process's arguments and return the workers' exit code."""
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)  # torchrun's report would be the second of the same error
    os.environ[QUIET_WORKERS] = "1"
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    # torchrun passes SIGTERM on to its workers, and dies of SIGUSR1.
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        failure = first_failure(error.failures)
        if failure.message:
            print(failure.message, file=sys.stderr)
        return failure.exit_code
    except SignalException as error:
        return 128 + signal.Signals(error.sigval).value
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        print(
            f"d2plm: error: the other nodes cannot be reached ({first_line(error)}); node 0 may "
            "have been lost; the same command goes on from the last checkpoint",
            file=sys.stderr,
        )
        return LOST
    return 0


@dataclass(frozen=True)
class Failure:
    """What brought a group of workers down.

    Attributes:
        exit_code: as a shell has it.
        message: what is left to say of it; empty where the worker has said it itself.
    """

    exit_code: int
    message: str = ""


def first_failure(failures: dict[int, Any]) -> Failure:
    """The cause among torchrun's `ProcessFailure`s by rank; the others fail for its sake.

    A worker that was killed leaves no error of its own, but its neighbours' do not tell why.
    """
    for rank, failed in sorted(failures.items()):
        if failed.exitcode < 0 and failed.exitcode != -signal.SIGTERM:
            name = signal.Signals(-failed.exitcode).name
            return Failure(
                128 - failed.exitcode,
                f"d2plm: error: rank {rank} was killed by {name} (SIGKILL usually means that "
                "memory ran out); the same command goes on from the last checkpoint",
            )
    told = [
        (data["time_ns"], data["text"], data["exit_code"])
        for failed in failures.values()
        if (data := failed.error_file_data.get("d2plm"))
    ]
    if told:
        _, text, code = min(told)
        return Failure(LOST if _OTHERS_LOST.search(text) and _is_one_of_several() else code, text)
    code = min(failures.items())[1].exitcode
    return Failure(code if code > 0 else 128 - code)


def _is_one_of_several() -> bool:
    """Whether torchrun has been told of other nodes, whose loss is no defect of this one."""
    return os.environ.get("PET_NNODES", "1") not in ("1", "1:1")


def leave_error(text: str, exit_code: int) -> bool:
    """Leave a worker's error for `main` to print; False where nobody will.

    The file's form is torchrun's own, with what it needs to find the first of several.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or QUIET_WORKERS not in os.environ:
        return False
    now = time.time_ns()
    told = {"time_ns": now, "text": text, "exit_code": exit_code}
    content = {"message": text, "timestamp": str(now // 10**9), "d2plm": told}
    try:
        Path(file).write_text(json.dumps(content))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
