"""torchrun with true exit codes: `python -m d2plm.launch.elastic <torchrun arguments>`.

torchrun itself exits with 1 whatever its worker died of, so a pre-emption looks like a defect. This
entry point runs it in-process and exits with the failed worker's own code, or 128 + the signal.
"""

import logging
import signal
import sys


def main() -> int:
    """Run torchrun with this process's arguments and return the workers' exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    # The worker has said what is wrong; torchrun's report of it would be the second.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + signal.Signals(error.sigval).value
    return 0


if __name__ == "__main__":
    sys.exit(main())
