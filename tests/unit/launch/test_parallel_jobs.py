"""Several runs at a time: all are done, a failure is named, and nothing is left running."""

import os
import sys
import time
from pathlib import Path

import pytest

from d2plm.core.errors import LaunchError
from d2plm.launch.parallel_jobs import Job, run_jobs


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_job_runs_its_commands_in_order_and_is_given_when_done(tmp_path: Path) -> None:
    jobs = [
        Job(
            f"job {i}",
            [python(f"print('first {i}')"), python("print('second')")],
            tmp_path / f"{i}",
        )
        for i in range(3)
    ]
    done = {job.name for job in run_jobs(jobs, parallel=2)}
    assert done == {"job 0", "job 1", "job 2"}
    assert (tmp_path / "1").read_text() == "first 1\nsecond\n"


def test_no_more_than_asked_run_at_once_each_with_its_share_of_the_cores(tmp_path: Path) -> None:
    code = (
        "import os, time, pathlib; print(os.environ['OMP_NUM_THREADS']); "
        f"folder = pathlib.Path({str(tmp_path)!r}); mine = folder / f'running-{{os.getpid()}}'; "
        "mine.touch(); time.sleep(0.5); "
        "print(len(list(folder.glob('running-*')))); mine.unlink()"
    )
    jobs = [Job(str(i), [python(code)], tmp_path / f"{i}.log") for i in range(4)]
    assert len(list(run_jobs(jobs, parallel=2))) == 4
    for i in range(4):
        threads, running = (tmp_path / f"{i}.log").read_text().split()
        assert int(threads) == max((os.cpu_count() or 1) // 2, 1)
        assert int(running) <= 2


def test_a_failure_names_the_job_its_last_line_and_its_log(tmp_path: Path) -> None:
    marker = tmp_path / "alive"
    endless = python(
        f"import time, pathlib\nwhile True: pathlib.Path({str(marker)!r}).touch(); time.sleep(0.05)"
    )
    jobs = [
        Job("endless", [endless], tmp_path / "endless.log"),
        Job("broken", [python("import time; time.sleep(1); raise SystemExit('no luck')")],
            tmp_path / "broken.log"),
    ]  # fmt: skip
    with pytest.raises(LaunchError, match=r"broken: .*exit code 1 \(no luck\).*broken\.log"):
        list(run_jobs(jobs, parallel=2))
    last = marker.stat().st_mtime_ns
    time.sleep(0.5)
    assert marker.stat().st_mtime_ns == last, "the other job was ended"
