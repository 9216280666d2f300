"""Start-up: user and system CPU time of help, of a rejected command, and of importing the model.

Each runs in a separate process. `load_model` is compared with the import of transformers'
`PreTrainedModel`, which every transformers model needs, in alternating pairs.

    python -m benchmarks.latency
"""

import os
import subprocess
import sys
from statistics import quantiles

from benchmarks.measure import BenchError, Row, measuring_parser, publish, ratio_row, say

COMMANDS = {  # (words, exit code, goal in CPU seconds)
    "d2plm --help": (("--help",), 0, 0.2),
    "a path that is not there": (("score", "none.fasta", "model_dir=none"), None, 1.0),
    "a value of another type": (("train", "trainer.max_steps=many"), None, 1.0),
    "a value out of its range": (("train", "data.search.min_seq_id=2"), None, 1.0),
    "an unknown key": (("train", "trainer.max_stepz=3"), None, 1.0),
}
LOAD_MODEL = "from d2plm import load_model"
PRETRAINED = "from transformers import PreTrainedModel"


def cpu_seconds(*words: str, code: int | None = 0) -> float:
    """User and system time of one Python process; `code=None` expects any exit code but 0.

    Raises:
        BenchError: if it ends with another exit code.
    """
    quiet = subprocess.DEVNULL
    process = subprocess.Popen([sys.executable, *words], stdout=quiet, stderr=quiet)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code if code is not None else process.returncode == 0:
        raise BenchError(f"python {' '.join(words)} ended with exit code {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure and print every row."""
    made = measuring_parser("latency", __doc__)
    made.add_argument("--turns", type=int, default=10, help="turns of each")
    options = made.parse_args()
    rows = []
    for what, (words, code, goal) in COMMANDS.items():
        say(what)
        cpu_seconds("-m", "d2plm", *words, code=code)  # once before, so that files are cached
        seconds = [cpu_seconds("-m", "d2plm", *words, code=code) for _ in range(options.turns)]
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        rows.append(Row(what, middle, "CPU s", goal, at_most=True, spread=(low, high)))
    say("load_model and PreTrainedModel, in turns")
    both: dict[str, list[float]] = {LOAD_MODEL: [], PRETRAINED: []}
    for turn in range(options.turns + 1):
        for program in [*both] if turn % 2 else reversed([*both]):
            both[program].append(cpu_seconds("-c", program))
    ours, theirs = (seconds[1:] for seconds in both.values())  # the first reads the files
    what = "importing load_model ÷ importing transformers' PreTrainedModel"
    rows.append(ratio_row(what, ours, theirs, 1.1, at_most=True))
    publish(options, rows)


if __name__ == "__main__":
    main()
