"""Following a run on a Kubeflow Pipelines server, and reporting each step's changes.

Requests are retried for ten minutes if the server does not answer. The run continues when nobody
follows it.
"""

import time
from collections.abc import Iterable
from typing import Any

from d2plm.core.errors import ClusterError, LaunchError
from d2plm.core.terminal import done
from d2plm.launch.kfp_server import Server, reaching
from pipelines.steps import STEPS

TASKS = ("configure", *STEPS, "finish")
POLL_SECONDS = 5.0
PATIENCE_SECONDS = 600.0  # with a server that does not answer
SUCCEEDED = ("SUCCEEDED", "SKIPPED")
FAILED = ("FAILED", "CANCELED", "SYSTEM_ERROR")


def follow(server: Server, run_id: str) -> None:
    """Report each step's changes until the run has ended.

    Raises:
        LaunchError: if the run fails or is cancelled, with the step and its message.
        ClusterError: if the server rejects a request, or does not answer for ten minutes.
    """
    shown: dict[str, str] = {}
    answered, asks_again = time.monotonic(), False
    try:
        while True:
            try:
                with reaching(server.host):
                    run = server.client.get_run(run_id)
            except ClusterError as error:
                status = getattr(error.__cause__, "status", 0) or 0
                if 400 <= status < 500 or time.monotonic() > answered + PATIENCE_SECONDS:
                    raise ClusterError(
                        f"{error}; the run itself continues: {server.run_url(run_id)}"
                    ) from error
                if not asks_again:
                    done(f"{error}; retrying")
                asks_again = True
            else:
                answered, asks_again = time.monotonic(), False
                for task in _steps(run):
                    if task.state and shown.get(task.display_name) != task.state:
                        shown[task.display_name] = task.state
                        done(f"{task.display_name}: {task.state.lower()}")
                if run.state in (*SUCCEEDED, *FAILED):
                    break
            time.sleep(POLL_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        done(
            f"no longer following; the run continues: {server.run_url(run_id)}\n"
            f"to cancel it: d2plm pipeline cancel {run_id}"
        )
        raise
    if run.state not in SUCCEEDED:
        raise LaunchError(_failure(server, run))
    done(f"the run has succeeded: {server.run_url(run_id)}")


def _steps(run: Any) -> list[Any]:
    """The pipeline's steps in order, without the additional tasks that KFP starts for them."""
    tasks = (run.run_details and run.run_details.task_details) or ()
    steps = [task for task in tasks if task.display_name in TASKS]
    return sorted(steps, key=lambda task: TASKS.index(task.display_name))


def _failure(server: Server, run: Any) -> str:
    """Describe why a run failed: the failed steps, their messages, and where their logs are."""
    failures = [
        _step_failure(task, run.run_details.task_details, server)
        for task in _steps(run)
        if task.state in FAILED and task.display_name != "finish"
    ]
    message = run.error.message if run.error else None
    what = "; ".join(failures) or message or "KFP reports no reason"
    return f"the run ended as {run.state.lower()}: {what}; see {server.run_url(run.run_id)}"


def _step_failure(step: Any, tasks: Iterable[Any], server: Server) -> str:
    children = [step, *(task for task in tasks if task.parent_task_id == step.task_id)]
    messages = [task.error.message for task in children if task.error and task.error.message]
    pods = [
        *(task.pod_name for task in children),
        *(child.pod_name for task in children for child in task.child_tasks or ()),
    ]
    pod = next((name for name in pods if name and "driver" not in name), None)
    message = f" ({messages[0].splitlines()[0]})" if messages else ""
    where = f" -n {server.namespace}" if server.namespace else ""
    log = f", log: kubectl logs{where} {pod} -c main" if pod else ""
    return f"{step.display_name} {step.state.lower()}{message}{log}"
