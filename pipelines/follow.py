"""Following a run on a Kubeflow Pipelines server, and reporting each step's changes.

Requests are retried for ten minutes while the server does not answer. The server reports no
reasons: that of a failure is read from the step's log, that of a wait from its pod.
"""

import re
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from d2plm.core.errors import ClusterError, LaunchError
from d2plm.core.number_text import duration
from d2plm.core.terminal import done
from d2plm.launch import client
from d2plm.launch.kfp_server import Server, reaching
from d2plm.launch.pod_state import state_of, unscheduled
from pipelines.steps import ERROR, STEPS

TASKS = ("configure", "prepare", "plan", *[*STEPS][1:], "reduce", "finish")  # also of sweeps
POLL_SECONDS = 5.0
PODS_SECONDS = 5.0  # timeout for listing the pods
PATIENCE_SECONDS = 600.0  # during which unanswered requests are repeated
REPORT_SECONDS = 60.0  # between two lines about the same wait
SUCCEEDED = ("SUCCEEDED", "SKIPPED")
FAILED = ("FAILED", "CANCELED", "SYSTEM_ERROR")
ENDED = (*SUCCEEDED, *FAILED)
CANCELLED = ("CANCELING", "CANCELED")  # a cancelled run may end as FAILED
LOG_LINES = 10  # shown of the log of a step that was killed
_KFP_LINE = re.compile(r"[IWEF]\d{4} |time=|Error: exit status")  # KFP's launcher and Argo
_RUN_LABEL = "pipeline/runid"
_GATED = "SchedulingGated"  # held by a queue
_START, _QUEUE = "start_deadline_seconds", "queue_deadline_seconds"
_DENIED = (401, 403)


def follow(
    server: Server, run_id: str, start_deadline_seconds: float, queue_deadline_seconds: float
) -> None:
    """Report each step's changes, and why a step waits, until the run has ended.

    Args:
        start_deadline_seconds: how long the first step, or a pod outside a queue, may wait.
        queue_deadline_seconds: how long a pod may wait in a queue.

    Raises:
        LaunchError: if the run fails or is cancelled, with the step and its error, or if a step
            does not start in time.
        ClusterError: if the server rejects a request, or does not answer for ten minutes.
    """
    shown: dict[str, str] = {}
    pods, is_cancelled = _Pods(server, run_id), False
    wait = _Wait({_START: start_deadline_seconds, _QUEUE: queue_deadline_seconds})
    try:
        while True:
            run = _ask(server, run_id)
            is_cancelled |= run.state in CANCELLED
            for name, task in _steps(run).items():
                if task.state and shown.get(name) != task.state:
                    shown[name] = task.state
                    done(f"{name}: {task.state.lower()}")
            if run.state in ENDED:
                break
            if failure := wait.report(run, *pods.waiting()):
                raise LaunchError(f"{failure}; the run itself continues: {server.run_url(run_id)}")
            time.sleep(POLL_SECONDS)
    except (KeyboardInterrupt, SystemExit):
        done(
            f"no longer following; the run continues: {server.run_url(run_id)}\n"
            f"to cancel it: d2plm pipeline cancel {run_id}"
        )
        raise
    url = server.run_url(run_id)
    if is_cancelled:
        raise LaunchError(f"the run was cancelled; see {url}")
    if run.state not in SUCCEEDED:
        raise LaunchError(f"the run has failed, see {url}: {_failure(server, run)}")
    done(f"the run has succeeded: {url}")


def _ask(server: Server, run_id: str) -> Any:
    """Request the run's state, repeatedly while the server does not answer."""
    began, said_at = time.monotonic(), float("-inf")
    while True:
        try:
            with reaching(server.host):
                return server.client.get_run(run_id)
        except ClusterError as error:
            status = getattr(error.__cause__, "status", 0) or 0
            if 400 <= status < 500 or time.monotonic() > began + PATIENCE_SECONDS:
                raise ClusterError(
                    f"{error}; the run itself continues: {server.run_url(run_id)}"
                ) from error
            if time.monotonic() - said_at >= REPORT_SECONDS:
                said_at = time.monotonic()
                left = duration(began + PATIENCE_SECONDS - said_at)
                done(f"{error}; retrying for up to {left}")
        time.sleep(POLL_SECONDS)


class _Wait:
    """Reports what the run waits for; `limits`: launcher setting → maximum seconds of a wait."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        self._key, self._why = "", ""
        self._since = self._said_at = time.monotonic()

    def report(self, run: Any, is_known: bool, key: str, why: str) -> str | None:
        """Report a wait at once, then every minute; return an error message once it is too long.

        Args:
            is_known: whether the pods can be read; otherwise waits of pods have no limit.
            key: setting that limits the pod's wait; empty: no pod waits.
            why: reason of the wait.
        """
        is_of_pod, now = bool(key), time.monotonic()
        if not key:
            states = {name: task.state for name, task in _steps(run).items() if task.state}
            has_begun = any(state != "PENDING" for state in states.values())
            ongoing = [f"{name} is {s.lower()}" for name, s in states.items() if s not in ENDED]
            why = ", ".join(ongoing) or f"the run is {(run.state or 'pending').lower()}"
            key = "" if has_begun else _START
        is_other, is_new = key != self._key, why != self._why
        self._key, self._why = key, why
        if is_other or (is_new and not key):
            self._since = now
        if is_new and is_of_pod:
            self._said_at = now
            done(f"waiting: {why}")
        waited, limit = now - self._since, self._limits.get(key)
        if limit is not None and waited > limit and (is_known or not is_of_pod):
            what = "left its queue" if key == _QUEUE else "started"
            return f"no pod has {what} within {key}={limit:g}: {why}"
        if now - self._said_at >= REPORT_SECONDS:
            self._said_at = now
            of = "" if limit is None else f" of {duration(limit)} (launcher.{key})"
            unread = "" if is_known else "; its pods cannot be read"
            done(f"waiting: {why}, for {duration(waited)}{of}{unread}")
        return None


class _Pods:
    """The run's pods, if this account may read them."""

    def __init__(self, server: Server, run_id: str) -> None:
        self._query = {"labelSelector": f"{_RUN_LABEL}={run_id}"}
        self._cluster: client.Cluster | None = None
        self._last = ("", "")
        if client.is_configured():
            try:
                self._cluster = client.connect(server.step_namespace, timeout_seconds=PODS_SECONDS)
            except ClusterError:
                return

    def waiting(self) -> tuple[bool, str, str]:
        """Return whether the pods can be read, and the limiting setting and reason of a pod's wait.

        Both are empty if no pod waits, and unchanged while the cluster does not answer.
        """
        if self._cluster is None:
            return False, "", ""
        try:
            path, what = self._cluster.path(client.POD), "list the run's pods"
            pods = self._cluster.call("GET", path, what, query=self._query)["items"]
        except ClusterError as error:
            if getattr(error.__cause__, "status", None) in _DENIED:  # or of another cluster
                self._cluster, self._last = None, ("", "")
            return False, *self._last
        held = [(unscheduled(pod)[0], state_of(pod, client.PYTORCHJOB).waits_for) for pod in pods]
        kinds = [(_QUEUE if reason == _GATED else _START, why) for reason, why in held if why]
        # Pods outside a queue come first, because their limit is shorter.
        self._last = max(kinds, key=lambda kind: kind[0] == _START, default=("", ""))
        return True, *self._last


def _steps(run: Any) -> dict[str, Any]:
    """The steps in order, without KFP's own tasks; repeated steps of a sweep are numbered."""
    steps = [task for task in _tasks(run) if task.display_name in TASKS]
    steps.sort(key=lambda task: (TASKS.index(task.display_name), str(task.create_time)))
    found: dict[str, Any] = {}
    for name, tasks in groupby(steps, key=lambda task: task.display_name):
        found |= {f"{name} {n}" if n > 1 else name: task for n, task in enumerate(tasks, 1)}
    return found


def _tasks(run: Any) -> list[Any]:
    return (run.run_details and run.run_details.task_details) or []


def _failure(server: Server, run: Any) -> str:
    """Describe the failed steps, each with the last lines of its log."""
    failures = []
    for name, step in _steps(run).items():
        if step.state in FAILED and name != "finish":
            said = step.error.message if step.error else None
            lines = _last_lines(server, run, step) or said or "its log is not available"
            failures.append(f"{name}: {lines}")
    message = run.error.message if run.error else None
    return "\n".join(failures) or message or "KFP reports no reason"


def _last_lines(server: Server, run: Any, step: Any) -> str:
    """A step's own error, or the end of its log; empty if the server has no log."""
    end = ""
    for node in _nodes(run, step):
        try:
            log = server.log(run.run_id, node)
        except ClusterError:
            continue
        own = [line for line in log.splitlines() if line.strip() and not _KFP_LINE.match(line)]
        errors = [number for number, line in enumerate(own) if line.startswith(ERROR)]
        if errors:
            return "\n".join(own[errors[-1] :]).removeprefix(ERROR)
        end = "\n".join(own[-LOG_LINES:]) or end
    return end


def _nodes(run: Any, step: Any) -> Iterator[str]:
    """Possible node ids of a step's log: its own and those that KFP started, latest first."""
    below = [task for task in _tasks(run) if task.parent_task_id == step.task_id]
    known = [
        *(child.pod_name for task in (step, *below) for child in task.child_tasks or ()),
        *(name for task in below for name in (task.pod_name, task.task_id)),
        *(step.pod_name, step.task_id),
    ]
    yield from dict.fromkeys(name for name in known if name and "driver" not in name)
