"""Start-up: user and system CPU time of help, of a rejected command, and of importing the model.

Each runs in a separate process. `load_model` is compared with the import of transformers'
`PreTrainedModel`, which every transformers model needs, in alternating pairs.

    python -m benchmarks.latency
"""

import os
import subprocess
import sys

from benchmarks.measure import BenchError, median_row, parser, publish, ratio_row

COMMANDS = {  # (words, whether it is rejected, goal in CPU seconds)
    "d2plm --help": (("--help",), False, 0.2),
    "a path that is not there": (("score", "none.fasta", "model_dir=none"), True, 1.0),
    "a value of another type": (("train", "trainer.max_steps=many"), True, 1.0),
    "a value out of its range": (("train", "data.search.min_seq_id=2"), True, 1.0),
    "an unknown key": (("train", "trainer.max_stepz=3"), True, 1.0),
}
LOAD_MODEL = ("-c", "from d2plm import load_model")
PRETRAINED = ("-c", "from transformers import PreTrainedModel")


def cpu_seconds(*words: str, rejected: bool = False) -> float:
    """User and system time of one Python process.

    Raises:
        BenchError: if it fails although it should not be rejected, or the other way round.
    """
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if (process.returncode != 0) != rejected:
        raise BenchError(f"python {' '.join(words)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print every row."""
    made = parser("latency", __doc__)
    made.add_argument("--turns", type=int, default=10, help="turns of each")
    given = made.parse_args()
    rows = []
    for what, (words, rejected, goal) in COMMANDS.items():
        runs = range(given.turns + 1)
        seconds = [cpu_seconds("-m", "d2plm", *words, rejected=rejected) for _ in runs]
        rows.append(median_row(what, seconds[1:], "CPU s", goal, at_most=True))
    both = [(cpu_seconds(*LOAD_MODEL), cpu_seconds(*PRETRAINED)) for _ in range(given.turns + 1)]
    ours, theirs = zip(*both[1:], strict=True)  # the first of each reads the files
    what = "importing load_model ÷ importing transformers' PreTrainedModel"
    publish(given, [*rows, ratio_row(what, ours, theirs, 1.1, at_most=True)])


if __name__ == "__main__":
    main()
