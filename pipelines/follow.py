"""Following a run on a Kubeflow Pipelines server: each step's changes as they happen.

The server may be away for a while. Whoever stops following does not stop the run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from d2plm.core.errors import ClusterError, LaunchError
from pipelines.pipeline import STEPS
from pipelines.server import Server, reaching

POLL_SECONDS = 5.0
PATIENCE_SECONDS = 600.0  # with a server that does not answer
WELL = ("SUCCEEDED", "SKIPPED")
ENDED = (*WELL, "FAILED", "CANCELED")
BROKEN = ("FAILED", "CANCELED", "SYSTEM_ERROR")


def follow(server: Server, run_id: str, say: Callable[[str], None] = print) -> None:
    """Say what each step does until the run has ended.

    Args:
        server: where the run is.
        run_id: which.
        say: is given one line for each change.

    Raises:
        LaunchError: if the run ends otherwise than well, with the step and what it said.
        ClusterError: if the server refuses, or does not answer for long.
    """
    told: dict[str, str] = {}
    try:
        while True:
            run = _patiently(server, run_id, say)
            for task in _steps(run):
                if task.state and told.get(task.display_name) != task.state:
                    told[task.display_name] = task.state
                    say(f"{task.display_name}: {task.state.lower()}")
            if run.state in ENDED:
                break
            time.sleep(POLL_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        say(
            f"no longer following; the run goes on: {server.run_url(run_id)}\n"
            f"to end it: d2plm pipeline cancel {run_id}"
        )
        raise
    if run.state not in WELL:
        raise LaunchError(_account(server, run))
    say(f"the run has succeeded: {server.run_url(run_id)}")


def _patiently(server: Server, run_id: str, say: Callable[[str], None]) -> Any:
    """The run as it stands, from a server that may be away for a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    away = False
    while True:
        try:
            with reaching(server.host):
                return server.client.get_run(run_id)
        except ClusterError as error:
            status = getattr(error.__cause__, "status", 0) or 0
            if 400 <= status < 500 or time.monotonic() > deadline:
                raise ClusterError(
                    f"{error}; the run itself goes on: {server.run_url(run_id)}"
                ) from error
            if not away:
                say(f"{error}; asking again")
                away = True
            time.sleep(POLL_SECONDS)


def _tasks(run: Any) -> list[Any]:
    """All that a run consists of: steps, and what KFP itself starts for them."""
    return list(run.run_details.task_details or ()) if run.run_details else []


def _steps(run: Any) -> list[Any]:
    """The pipeline's own steps among a run's tasks, in their order in time."""
    steps = [task for task in _tasks(run) if task.display_name in STEPS]
    return sorted(steps, key=lambda task: STEPS.index(task.display_name))


def _account(server: Server, run: Any) -> str:
    """How a run ended: the steps that failed, what they said and where their logs are."""
    accounts = [
        _account_of(task, _tasks(run), server)
        for task in _steps(run)
        if task.state in BROKEN and task.display_name != "finish"
    ]
    message = run.error.message if run.error else None
    what = "; ".join(accounts) or message or "KFP does not say why"
    return f"the run ended as {run.state.lower()}: {what}; see {server.run_url(run.run_id)}"


def _account_of(step: Any, tasks: Iterable[Any], server: Server) -> str:
    children = [step, *(task for task in tasks if task.parent_task_id == step.task_id)]
    messages = [task.error.message for task in children if task.error and task.error.message]
    pods = [
        *(task.pod_name for task in children if task.pod_name),
        *(child.pod_name for task in children for child in task.child_tasks or ()),
    ]
    pod = next((name for name in pods if name and "driver" not in name), None)
    said = f" ({messages[0].splitlines()[0]})" if messages else ""
    where = f" -n {server.namespace}" if server.namespace else ""
    log = f", log: kubectl logs{where} {pod} -c main" if pod else ""
    return f"{step.display_name} {step.state.lower()}{said}{log}"
