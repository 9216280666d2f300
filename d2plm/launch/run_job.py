"""Training in a cluster: create the job, follow it, report how it ended, cancel it.

A job is named after the pipeline's run, so the step is safe to retry: a running job is adopted, a
failed job is replaced, and training resumes from its checkpoint.
"""

import logging
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, Literal

from d2plm.core.errors import ClusterError, LaunchError
from d2plm.core.processes import unwound_by_sigterm
from d2plm.core.terminal import done
from d2plm.data.cache import digest_of
from d2plm.launch.client import (
    JOB_KINDS,
    OBJECTS,
    PYTORCHJOB,
    TRAINING_RUNTIME,
    TRAINJOB,
    Cluster,
    JobKind,
    Resource,
    is_suspended,
)
from d2plm.launch.job_spec import (
    PERMANENT_EXIT_CODES,
    PREPARATION_CONTAINER,
    QUEUE_LABEL,
    Manifest,
    TrainingJob,
    pytorchjob,
    training_runtime,
    trainjob,
)
from d2plm.launch.logs import followed_log
from d2plm.launch.pod_state import OUT_OF_MEMORY, PodState, state_of, with_remedy

EVENTS_SECONDS = (1.0, 60.0)  # least time between two requests for events: before, after the start
SPECIFICATION = "d2plm/specification"  # annotation: the digest of what a job was made from
# Exit codes of a worker that ended because another failed or because another job pre-empted it.
CONSEQUENCES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
# Operators restart a worker that ran out of memory, although it will run out of memory again.
MOST_DEATHS_BY_MEMORY = 3
LOG_LINES = 20  # of a failed pod, in messages
MOST_WITHOUT_LOG = 2  # failed preparations without a log that are tolerated
GONE_SECONDS = 600  # until a deleted job and its pods are gone
# Trainer looks up a TrainJob's runtime in its own cache, which may lag behind.
RUNTIME_SECONDS = 60
_NO_RUNTIME_YET = re.compile(r"training ?runtime.*(must be created|not found)", re.IGNORECASE)

log = logging.getLogger(__name__)


def train_in_cluster(
    cluster: Cluster,
    kind: JobKind,
    job: TrainingJob,
    *,
    start_deadline_seconds: float = 1800,
    on_cancel: Literal["delete", "suspend"] = "delete",
    say: Callable[[str], None] = done,
) -> None:
    """Create or adopt `job` and wait for its end; SIGTERM or an interrupt cancels it.

    Args:
        start_deadline_seconds: how long to wait for the first pod to run.
        on_cancel: whether a cancellation deletes or suspends the job.
        say: called with each line of worker 0's log and each event of the job.

    Raises:
        ClusterError: if the cluster rejects a request or does not answer, or the job is deleted.
        LaunchError: if the job does not start in time, or fails; reports the exit of each pod and
            the end of the log.
    """
    running = RunningJob(cluster, kind, job.name, say)
    with unwound_by_sigterm():  # a pipeline step has no other handler
        try:
            running.create(job)
            running.follow(job, start_deadline_seconds)
        except (KeyboardInterrupt, SystemExit, HopelessError):
            running.cancel(on_cancel)
            raise


def delete_job(cluster: Cluster, name: str) -> None:
    """Delete the job of this name, of any kind, if it exists."""
    for kind in JOB_KINDS.values():
        if cluster.has(kind) and cluster.read(kind, name) is not None:
            _delete_objects(cluster, kind, name)
            done(f"{cluster.of(kind, name)} is deleted")


def _delete_objects(cluster: Cluster, kind: JobKind, name: str) -> None:
    for resource, _ in reversed(OBJECTS[kind]):
        cluster.delete(resource, name)


class HopelessError(LaunchError):
    """The job would continue without ever succeeding."""


class RunningJob:
    """A job in the cluster; `say` is called with each line to report."""

    def __init__(
        self, cluster: Cluster, kind: JobKind, name: str, say: Callable[[str], None]
    ) -> None:
        self.cluster, self.kind, self.name, self.say = cluster, kind, name, say
        self._said: dict[str, str] = {}  # last message about each condition, pod and event
        self._events_due = 0.0
        self._warnings: dict[str, str] = {}  # last warning by name of the object
        self._pods: dict[str, PodState] = {}  # latest state by pod name
        self._ends: dict[str, PodState] = {}  # failed pods by uid
        self._log_ends: dict[str, list[str]] = {}  # last log lines of failed pods by uid
        self._is_over = threading.Event()
        self._lost: Exception | None = None  # why the pods cannot be watched

    def __str__(self) -> str:
        return self.cluster.of(self.kind, self.name)

    def create(self, job: TrainingJob) -> None:
        """Create the job; adopt an existing one, or replace it if it has failed.

        Raises:
            ClusterError: if the cluster rejects the job or has another job of this name.
        """
        digest = _digest(job)
        job = replace(job, annotations={**job.annotations, SPECIFICATION: digest})
        while True:
            there = self.cluster.read(self.kind, self.name)
            if there is None or "deletionTimestamp" in there["metadata"]:
                self._wait_until_gone(self.kind)
                if self._created(job):
                    self.say(f"created {self}")
                    return
                continue
            if there["metadata"].get("annotations", {}).get(SPECIFICATION) != digest:
                raise ClusterError(
                    f"{self} already exists with other settings; give the job another name, or "
                    f"run {self._how_to_delete()}"
                )
            if _condition(there, self.kind.failed) is None:
                self.say(f"{self} already exists: following it")
                is_queued = QUEUE_LABEL in there["metadata"]["labels"]
                if is_suspended(self.kind, there) and not is_queued:
                    self.cluster.suspend(self.kind, self.name, False)
                return
            self.say(f"{self} of an earlier attempt has failed: replacing it")
            _delete_objects(self.cluster, self.kind, self.name)

    def follow(self, job: TrainingJob, start_deadline_seconds: float) -> None:
        """Report events until the job has ended.

        Raises:
            ClusterError: if the API server does not answer, or the job is deleted.
            LaunchError: if the job fails.
            HopelessError: if the job does not start in time, or can no longer succeed.
        """
        threading.Thread(target=self._watch_pods, name="pods", daemon=True).start()
        began = waiting_since = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._is_over.set)  # ends the thread that watches the pods
            log = followed_log(self.cluster, self.kind, self.name, self.say)
            last_lines = stack.enter_context(log)
            for state in self.cluster.states(self.kind, self.name):
                for condition in _conditions(state):
                    text = f"{self}: {condition['type']}: {_message(condition)}"
                    self._say_once(condition["type"], text)
                ended = _condition(state, self.kind.succeeded, self.kind.failed)
                if ended is not None:
                    break
                if self._lost is not None:
                    raise self._lost
                now = time.monotonic()
                if now >= self._events_due:  # not more often: they are listed for the namespace
                    has_started = any(pod.has_started for pod in list(self._pods.values()))
                    self._events_due = now + EVENTS_SECONDS[has_started]
                    self._report_events(state)
                if is_suspended(self.kind, state):  # by a queue without free capacity
                    waiting_since = now
                elif now - waiting_since > start_deadline_seconds and not any(
                    pod.has_started for pod in list(self._pods.values())
                ):
                    raise HopelessError(self._why_not_started(start_deadline_seconds))
                if hopeless := self._why_hopeless(job, now - began):
                    raise HopelessError(*self._failure_report(*hopeless, last_lines))
            else:
                raise ClusterError(
                    f"{self} was deleted while it was running; run the same command again to "
                    "resume training from its checkpoint"
                )
        if ended["type"] == self.kind.failed:
            raise LaunchError(*self._failure_report(f"failed: {_message(ended)}", None, last_lines))

    def cancel(self, how: Literal["delete", "suspend"]) -> None:
        """Delete or suspend the job; its pods save a checkpoint and end."""
        remains = f"{self} continues to run; to delete it, run {self._how_to_delete()}"
        try:
            if how == "suspend":
                self.cluster.suspend(self.kind, self.name, True)
                self.say(f"cancelled: {self} is suspended")
            else:
                _delete_objects(self.cluster, self.kind, self.name)
                self.say(f"cancelled: {self} is deleted")
        except ClusterError as error:
            log.error("not cancelled: %s; %s", error, remains)
        except (KeyboardInterrupt, SystemExit):  # another signal
            log.error("interrupted before the job was cancelled: %s", remains)
            raise

    def _how_to_delete(self) -> str:
        plurals = ",".join(resource.plural for resource, _ in reversed(OBJECTS[self.kind]))
        return f"kubectl delete {plurals} {self.name} --namespace {self.cluster.namespace}"

    def _created(self, job: TrainingJob) -> bool:
        """Create the job; False if it already exists."""
        if self.kind is PYTORCHJOB:
            return self.cluster.create(PYTORCHJOB, pytorchjob(job)) is not None
        runtime = self._create_runtime(training_runtime(job))
        known = {**runtime, **runtime["metadata"]}
        owner = {key: known[key] for key in ("apiVersion", "kind", "name", "uid")}
        owned = trainjob(replace(job, owners=[{**owner, "blockOwnerDeletion": True}]))
        end = time.monotonic() + RUNTIME_SECONDS
        while True:
            try:
                return self.cluster.create(TRAINJOB, owned) is not None
            except ClusterError as error:
                if not _NO_RUNTIME_YET.search(str(error)) or time.monotonic() > end:
                    raise
                time.sleep(1)

    def _create_runtime(self, runtime: Manifest) -> Manifest:
        """Create the job's runtime and return it; replaces the runtime of another job."""
        keys = ("annotations", "ownerReferences", "deletionTimestamp")
        wanted = [runtime["metadata"].get(key) for key in keys]
        while (created := self.cluster.create(TRAINING_RUNTIME, runtime)) is None:
            there = self.cluster.read(TRAINING_RUNTIME, self.name)
            if there is not None and [there["metadata"].get(key) for key in keys] == wanted:
                return there
            self.cluster.delete(TRAINING_RUNTIME, self.name)
            self._wait_until_gone(TRAINING_RUNTIME)
        return created

    def _wait_until_gone(self, kind: Resource) -> None:
        """Wait until the object of `kind` and the pods of a former job are gone."""
        end = time.monotonic() + GONE_SECONDS
        while left := self._left(kind):
            self._say_once("gone", f"waiting until the former {self} is deleted")
            if time.monotonic() > end:
                raise ClusterError(
                    f"the former {self} is not deleted after {GONE_SECONDS / 60:.0f} minutes: "
                    f"{', '.join(left)}; check that {self.kind.controller} is running, or give "
                    "the job another name"
                )
            time.sleep(1)

    def _left(self, kind: Resource) -> list[str]:
        there = self.cluster.read(kind, self.name)
        left = [] if there is None else [self.cluster.of(kind, self.name)]
        pods = self.cluster.pods(self.kind, self.name)
        return left + [f"pod {pod['metadata']['name']}" for pod in pods]

    def _watch_pods(self) -> None:
        """Watch the pods in a thread, because operators delete a pod at once to restart it."""
        try:
            for pod in self.cluster.watched_pods(self.kind, self.name):
                if self._is_over.is_set():
                    return
                if pod is not None:
                    self._update_pod(pod)
        except Exception as error:  # raised again in the thread that follows the job
            self._lost = error

    def _update_pod(self, pod: Any) -> None:
        state = state_of(pod, self.kind)
        self._pods[state.name] = state
        if state.ended is not None:
            if state.uid not in self._ends:
                container = state.container or self.kind.container
                with suppress(ClusterError):  # the thread that follows the log reports it
                    log_end = self.cluster.log(state.name, container, tailLines=LOG_LINES)
                    self._log_ends[state.uid] = list(log_end)
            self._ends[state.uid] = state
            self._say_once(state.uid, f"pod {state.name}: {state.ended}")
        elif state.waits_for is not None:
            self._say_once(state.uid, f"pod {state.name} waits: {state.waits_for}")

    def _report_events(self, job: Manifest) -> None:
        """Report each new warning about the job and the objects created for it."""
        try:
            events = self.cluster.warnings(self.kind, job)
        except ClusterError as error:
            self._say_once("events", f"warnings cannot be reported: {error}")
            return
        for event in events:
            about, reason = event["involvedObject"], event.get("reason", "")
            message = event.get("message", "")
            warning = with_remedy(None, reason, message)
            self._warnings[about["name"]] = warning
            # Once per reason, because messages name changing pods; not if already said for a pod.
            key = f"{about['kind']} {about['name']} {reason}"
            said = list(self._said.values())
            if key not in self._said and not any(message in text for text in said):
                self._say_once(key, f"{about['kind']} {about['name']}: {warning}")

    def _say_once(self, about: str, text: str) -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self.say(text)

    def _why_not_started(self, seconds: float) -> str:
        waiting = [
            f"{pod.name}: {pod.waits_for or self._warnings.get(pod.name) or 'not ready'}"
            for pod in list(self._pods.values())
        ]
        if not waiting:
            said = [f"{name}: {warning}" for name, warning in self._warnings.items()]
            waiting = said or ["it has no pods; check that its operator is running"]
        return (
            f"{self} has not started within start_deadline_seconds={seconds:g}: "
            f"{'; '.join(waiting)}"
        )

    def _why_hopeless(self, job: TrainingJob, seconds: float) -> tuple[str, PodState | None] | None:
        """Why the job cannot succeed although its operator continues, and the pod at fault.

        The training operator restarts pods without limit, and checks the deadline only when
        something changes.
        """
        ends = list(self._ends.values())
        starved = [end for end in ends if end.reason == OUT_OF_MEMORY]
        if (times := _most_of_one(starved)) >= MOST_DEATHS_BY_MEMORY:
            return f"ran out of memory {times} times in the same place", starved[-1]
        if self.kind is PYTORCHJOB and _most_of_one(ends) > job.restarts:
            return f"needed more than restarts={job.restarts} restarts of a pod", ends[-1]
        permanent = [end for end in ends if end.exit_code in PERMANENT_EXIT_CODES]
        unprepared = [end for end in permanent if end.container == PREPARATION_CONTAINER]
        # A pod may be gone before its log was read, but its operator will start another.
        logged = [end for end in unprepared if self._log_ends.get(end.uid)]
        if logged or len(unprepared) > MOST_WITHOUT_LOG:
            return "cannot prepare its data", (logged or unprepared)[-1]
        if job.deadline_seconds is not None and seconds > job.deadline_seconds:
            return f"has not ended within deadline_seconds={job.deadline_seconds}", None
        return None

    def _failure_report(
        self, what: str, cause: PodState | None, last_lines: Sequence[str]
    ) -> tuple[str, int]:
        """Report with the end of each pod and the log of the one at fault; and its exit code.

        `cause` defaults to the first existing pod that did not fail because of another.
        """
        pods = self.cluster.pods(self.kind, self.name)
        for pod in pods:
            self._update_pod(pod)  # the watch may lag behind
        there = {pod["metadata"]["uid"] for pod in pods}
        seen = list(self._ends.values())
        present = [end for end in seen if end.uid in there]
        ends = present or seen[-1:]  # the operator may have deleted all pods
        ends.sort(key=lambda end: end.ended_at or "unknown")  # "unknown" sorts last
        if cause is None:
            by_itself = [end for end in ends if end.exit_code not in (None, *CONSEQUENCES)]
            cause = next(iter([*by_itself, *ends]), None)
        elif cause not in ends:
            ends.append(cause)
        lines = [f"{self} {what}", *(f"  {end.name}: {end.ended}" for end in ends)]
        whose = "worker 0"
        if cause is not None and cause.exit_code is not None:
            same = attrgetter("number", "container", "exit_code")
            alike = [end for end in seen if same(end) == same(cause)]
            logged = [end for end in (cause, *alike) if self._log_ends.get(end.uid)]
            if logged:
                whose, last_lines = logged[0].name, self._log_ends[logged[0].uid]
        if last_lines:
            lines += [f"the last lines of {whose}:", *(f"  {line}" for line in last_lines)]
        return "\n".join(lines), (cause and cause.exit_code) or 1


def _most_of_one(ends: Sequence[PodState]) -> int:
    """Largest number of failures of one pod index, as one incident may end all pods of a job."""
    return max(Counter(end.number for end in ends).values(), default=0)


def _conditions(job: Manifest) -> list[Manifest]:
    conditions = job.get("status", {}).get("conditions") or []
    return [condition for condition in conditions if condition["status"] == "True"]


def _condition(job: Manifest, *types: str) -> Manifest | None:
    return next((condition for condition in _conditions(job) if condition["type"] in types), None)


def _message(condition: Manifest) -> str:
    return str(condition.get("message") or condition.get("reason", ""))


def _digest(job: TrainingJob) -> str:
    """Digest of a job's specification without its owners."""
    alone = replace(job, owners=())
    manifests = [pytorchjob(alone), training_runtime(alone)]
    return digest_of(manifests)[:16]
