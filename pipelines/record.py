"""The record of a pipeline's run: how each step ended, in a file beside the run's configuration.

Clean-up and failure reports read it, because KFP's states differ between releases and do not name
the cause of a failure.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from d2plm.core.redaction import redacted
from d2plm.launch.job_log import job_log

RUN = "run.yaml"  # configuration of a run of a sweep, in a folder named after it
State = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True)
class Entry:
    """A change of a step's state; `message` says why it failed."""

    step: str
    state: State
    message: str = ""


def note(config: Path, step: str, state: State, message: str = "") -> None:
    """Append an entry to a run's record; errors are ignored, as the step itself reports them."""
    with suppress(OSError):
        config.parent.mkdir(parents=True, exist_ok=True)
        with _file(config).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(Entry(step, state, redacted(message)))) + "\n")


def entries(config: Path) -> dict[str, Entry]:
    """The last entry of each step; lines that a killed process left incomplete are skipped."""
    with suppress(OSError):
        found = {}
        for line in _file(config).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, TypeError):
                entry = Entry(**json.loads(line))
                found[entry.step] = entry
        return found
    return {}


def runs(config: Path) -> list[Path]:
    """Configurations of the runs of a sweep; each run has its own record."""
    return sorted(config.with_suffix("").glob(f"*/{RUN}"))


def cause(config: Path) -> Entry | None:
    """The step that failed or was ended by a signal; None if there is none."""
    unfinished = (one for one in entries(config).values() if one.state != "succeeded")
    return next(unfinished, None)


def as_markdown(config: Path) -> str:
    """Summarise the steps' states, the failure and the jobs' logs; of sweeps, unfinished runs."""
    known, failure = entries(config), cause(config)
    lines = [f"- `{entry.step}`: {entry.state}" for entry in known.values()]
    for run in runs(config):
        if (unfinished := cause(run)) is not None:
            lines.append(f"- `{run.parent.name}`, `{unfinished.step}`: {unfinished.state}")
            failure = failure or unfinished
    if failure is not None:
        message = failure.message or "its process was killed; its pod's log has no error"
        what = "did not end" if failure.state == "running" else failure.state
        lines.append(f"\n**`{failure.step}` {what}:**\n\n```\n{message}\n```")
    logs = [file for one in (config, *runs(config)) if (file := job_log(one)).is_file()]
    lines += [f"\nThe log of a training job: `{file}`" for file in logs]
    return "\n".join(lines or ["No step has written to the volume."]) + "\n"


def _file(config: Path) -> Path:
    return config.with_suffix(".jsonl")
