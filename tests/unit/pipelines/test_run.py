"""What a local run shows: the steps' own lines, and none of KFP's."""

import io

from pipelines.run import StepOutput

RAW = """\
01:11:49.440 - INFO - Executing task \x1b[96m'train'\x1b[0m
01:11:49.440 - INFO - Streamed logs:

    [KFP Executor 2026-11-21 01:11:49,569 INFO]: Got executor_input:
    {
        "inputs": {
            "settings": "experiment=debug"
        }
    }
    training 3/10  loss 2.9
    [KFP Executor 2026-11-21 01:11:55,215 INFO]: Wrote executor output file to /tmp/x.

01:11:56.575 - INFO - Task 'train' finished with status SUCCESS
01:11:56.575 - ERROR - something broke
"""


FAILED = """\
    d2plm: error: trainer.max_steps=-1: must be > 0
    Traceback (most recent call last):
      File "/site-packages/kfp/dsl/executor_main.py", line 109, in <module>
        executor_main()
    d2plm.core.errors.LaunchError: training ended with exit code 2
    more
"""


def test_a_step_that_fails_says_why_without_a_traceback() -> None:
    console, log = io.StringIO(), io.StringIO()
    StepOutput(console, log, only_errors=True).write(FAILED)
    assert console.getvalue() == (
        "d2plm: error: trainer.max_steps=-1: must be > 0\n"
        "d2plm: error: training ended with exit code 2\n"
    )
    assert log.getvalue() == FAILED


def test_only_the_steps_lines_and_errors_are_shown_and_all_is_logged() -> None:
    console, log = io.StringIO(), io.StringIO()
    output = StepOutput(console, log)
    for piece in (RAW[:100], RAW[100:333], RAW[333:]):  # lines arrive in pieces
        output.write(piece)
    assert console.getvalue() == (
        "\n── train ──\ntraining 3/10  loss 2.9\n01:11:56.575 - ERROR - something broke\n"
    )
    assert log.getvalue() == RAW
