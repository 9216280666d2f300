"""A job in a cluster: create it, follow it, report how it ended, cancel it.

A job is named after the pipeline's run, so the step is safe to retry: a running job is adopted, a
failed job is replaced, and training resumes from its checkpoint; of shards, the missing ones run.
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
from d2plm.core.number_text import duration
from d2plm.core.processes import unwound_by_sigterm
from d2plm.core.shards import format_indices, parse_indices
from d2plm.core.terminal import done
from d2plm.data.cache import digest_of
from d2plm.launch.client import (
    DELETED,
    INDEXED_JOB,
    JOB_KINDS,
    LISTED,
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
    SHARDS,
    Manifest,
    ShardedJob,
    TrainingJob,
    training_runtime,
    trainjob,
)
from d2plm.launch.logs import followed_log
from d2plm.launch.pod_state import PodState, state_of
from d2plm.launch.remedies import MISSING_QUEUE, OUT_OF_MEMORY, with_remedy

EVENTS_SECONDS = (1.0, 60.0)  # minimum between requests for events: before, after the start
REPORT_SECONDS = 60.0  # between reports of the same wait
SPECIFICATION = "d2plm/specification"  # annotation: digest of the job's specification
# Exit codes of a worker that ended because another failed or because another job pre-empted it.
CONSEQUENCES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
# Operators restart a worker that ran out of memory, although it will run out of memory again.
MOST_DEATHS_BY_MEMORY = 3
BRIEF_SECONDS = 10  # timeout of optional requests, such as for events, to keep deadlines
LOG_LINES = 20  # shown of a failed pod's log
LOG_SECONDS = 20  # maximum wait for the logs of failed pods
MOST_WITHOUT_LOG = 2  # failed preparations without a log that are tolerated
GONE_SECONDS = 600  # until a deleted job and its pods are gone
# Until a pod is stuck: on a node that does not answer, or deleted and beyond its grace period.
STUCK_SECONDS = 120
# Trainer looks up a TrainJob's runtime in its own cache, which may lag behind.
RUNTIME_SECONDS = 60
_NO_RUNTIME_YET = re.compile(r"training ?runtime.*(must be created|not found)", re.IGNORECASE)

log = logging.getLogger(__name__)


def train_in_cluster(
    cluster: Cluster,
    kind: JobKind,
    job: TrainingJob,
    *,
    on_cancel: Literal["delete", "suspend"] = "delete",
    is_cancelled: Callable[[], bool] = lambda: True,
    say: Callable[[str], None] = done,
) -> None:
    """Create or adopt `job` and wait for its end; SIGTERM or an interrupt cancels it.

    Args:
        is_cancelled: called upon a signal; False leaves the job for the next process to adopt.
        say: called with each line of worker 0's log and each event of the job.

    Raises:
        ClusterError: if the cluster rejects a request or does not answer, or the job is deleted.
        LaunchError: if the job waits beyond one of its deadlines, or fails; reports the exit of
            each pod and the end of the log.
    """
    running = RunningJob(cluster, kind, job.name, say)
    with unwound_by_sigterm():  # a pipeline step has no other handler
        try:
            running.create(job)
            running.follow(job)
        except (KeyboardInterrupt, SystemExit, HopelessError) as reason:
            if isinstance(reason, HopelessError) or is_cancelled():
                running.cancel(on_cancel)
            else:
                running.leave()
            raise


def delete_job(cluster: Cluster, name: str) -> None:
    """Delete the job of this name, of any kind, if it exists."""
    for kind in JOB_KINDS.values():
        if cluster.has(kind) and cluster.read(kind, name) is not None:
            _delete_objects(cluster, kind, name)
            done(f"{cluster.of(kind, name)} is deleted")
            RunningJob(cluster, kind, name, done).report_stuck_pods()


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
        # For optional requests, which must not delay deadlines and are repeated later.
        self._brief = replace(cluster, timeout_seconds=BRIEF_SECONDS, patience_seconds=0)
        self._said: dict[str, str] = {}  # last message about each condition, pod and event
        self._events_due = 0.0
        self._warnings: dict[str, str] = {}  # last warning by name of the object
        self._pods: dict[str, PodState] = {}  # latest state by pod name
        self._has_started = False  # whether any pod has started
        self._hindered_since: dict[str, float] = {}  # time by uid of pods that may be stuck
        self._waiting = ("", 0.0)  # key of the deadline, start of the wait
        self._reported_at: dict[str, float] = {}  # time of the last report of each wait
        self._ends: dict[str, PodState] = {}  # failed pods by uid
        self._log_ends: dict[str, list[str]] = {}  # last log lines of failed pods by uid
        self._log_readers: list[threading.Thread] = []
        self._is_over = threading.Event()
        self._watch_error: Exception | None = None  # why the pods cannot be watched

    def __str__(self) -> str:
        return self.cluster.of(self.kind, self.name)

    def create(self, job: TrainingJob) -> None:
        """Create, adopt or, if it has failed, replace the job.

        Raises `ClusterError` if the cluster rejects it or has a job of this name with other
        settings.
        """
        digest = _digest(self.kind, job)
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
            if isinstance(job, ShardedJob):
                job = replace(job, shards=missing_shards(there))
            self.say(f"{self} of an earlier attempt has failed: replacing it")
            _delete_objects(self.cluster, self.kind, self.name)

    def follow(self, job: TrainingJob) -> None:
        """Report events until the job has ended.

        Raises:
            ClusterError: if the API server does not answer, or the job is deleted.
            LaunchError: if the job fails.
            HopelessError: if the job waits beyond a deadline, or can no longer succeed.
        """
        threading.Thread(target=self._watch_pods, name="pods", daemon=True).start()
        began = time.monotonic()
        with ExitStack() as stack:
            stack.callback(self._is_over.set)  # ends the thread that watches the pods
            log = followed_log(self.cluster, self.kind, self.name, self.say)
            last_lines = stack.enter_context(log)
            for state in self.cluster.states(self.kind, self.name):
                if self.kind is INDEXED_JOB:
                    self._say_once("shards", f"{self}: {_shards_done(state)}")
                for condition in _conditions(state):
                    text = f"{self}: {condition['type']}: {_message(condition)}"
                    self._say_once(condition["type"], text)
                ended = _condition(state, self.kind.succeeded, self.kind.failed)
                if ended is not None:
                    break
                if self._watch_error is not None:
                    raise self._watch_error
                now = time.monotonic()
                if now >= self._events_due:  # not more often: they are listed for the namespace
                    self._events_due = now + EVENTS_SECONDS[self._has_started]
                    self._report_events(state)
                self._wait(job, state, now)
                if hopeless := self._why_hopeless(job, now - began):
                    raise HopelessError(*self._failure_report(*hopeless, last_lines))
            else:
                self.report_stuck_pods()
                raise ClusterError(
                    f"{self} was deleted while it was running; run the same command again to "
                    "continue"
                )
        if ended["type"] == self.kind.failed:
            what = f"failed: {_message(ended)}"
            if isinstance(job, ShardedJob):
                missing = format_indices(missing_shards(state))
                what += (
                    f"; shards {missing} of {job.count} are missing: correct the cause, and the "
                    "same command runs only these"
                )
            raise LaunchError(*self._failure_report(what, None, last_lines))

    def cancel(self, how: Literal["delete", "suspend"]) -> None:
        """Delete or suspend the job; its pods save a checkpoint and end."""
        remains = self._how_it_remains()
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
        self.report_stuck_pods()

    def leave(self) -> None:
        """Report that the job continues without this process."""
        self.say(f"the same step adopts the job: {self._how_it_remains()}")

    def report_stuck_pods(self) -> None:
        """Report pods of a deleted or suspended job that cannot end."""
        with suppress(ClusterError):  # the account may be allowed only to delete jobs
            pods = self._brief.pods(self.kind, self.name)
            for pod in self._stuck([state_of(pod, self.kind) for pod in pods], at_once=True):
                self.say(self._how_to_end(pod))

    def _how_it_remains(self) -> str:
        return f"{self} continues to run; to delete it, run {self._how_to_delete()}"

    def _how_to_delete(self) -> str:
        plurals = ",".join(resource.plural for resource, _ in reversed(OBJECTS[self.kind]))
        return f"kubectl delete {plurals} {self.name} --namespace {self.cluster.namespace}"

    def _how_to_end(self, pod: PodState) -> str:
        what = "does not answer" if pod.is_cut_off else "does not end it"
        return (
            f"pod {pod.name}: its node {pod.node} {what}; if the node is gone, run kubectl delete "
            f"pod {pod.name} --namespace {self.cluster.namespace} --force --grace-period=0"
        )

    def _created(self, job: TrainingJob) -> bool:
        if self.kind is not TRAINJOB:
            ((_, make),) = OBJECTS[self.kind]
            return self.cluster.create(self.kind, make(job)) is not None
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
                self._say_once("runtime", f"waiting until Trainer has seen the runtime of {self}")
                time.sleep(1)

    def _create_runtime(self, runtime: Manifest) -> Manifest:
        """Create the job's runtime, replacing that of another job, and return it."""
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
        began = time.monotonic()
        while True:
            there = self.cluster.read(kind, self.name)
            pods = [state_of(p, self.kind) for p in self.cluster.pods(self.kind, self.name)]
            if there is None and not pods:
                return
            waited = time.monotonic() - began
            stuck = self._stuck(pods, at_once=True)
            left = [self._how_to_end(pod) if pod in stuck else f"pod {pod.name}" for pod in pods]
            if not left:
                object_ = self.cluster.of(kind, self.name)
                left = [f"{object_}; check that {self.kind.controller} is running"]
            what, why = f"the former {self} is", "; ".join(left)
            if waited > GONE_SECONDS:
                raise ClusterError(
                    f"{what} not deleted after {duration(waited)}: {why}; or give the job another "
                    "name"
                )
            limit = f"{duration(waited)} of {duration(GONE_SECONDS)}"
            self._report_wait("gone", f"waiting until {what} deleted, for {limit}: {why}")
            time.sleep(1)

    def _stuck(self, pods: Sequence[PodState], *, at_once: bool = False) -> list[PodState]:
        """Stuck pods of a job; `at_once`: without waiting `STUCK_SECONDS`."""
        now, since = time.monotonic(), dict[str, float]()
        for pod in pods:
            if pod.is_cut_off or pod.grace_seconds is not None:
                due = now + (0 if pod.is_cut_off else pod.grace_seconds or 0)
                since[pod.uid] = min(due, self._hindered_since.get(pod.uid, due))
        self._hindered_since = since
        latest = now - (0 if at_once else STUCK_SECONDS)
        return [pod for pod in pods if pod.uid in since and since[pod.uid] <= latest]

    def _watch_pods(self) -> None:
        """Watch the pods in a thread, because operators delete a pod at once to restart it."""
        try:
            for change, pods in self.cluster.watched_pods(self.kind, self.name):
                if self._is_over.is_set():
                    return
                names = {pod["metadata"]["name"] for pod in pods}
                if change == LISTED:
                    self._pods = {name: pod for name, pod in self._pods.items() if name in names}
                for pod in pods:
                    self._update_pod(pod)
                if change == DELETED:
                    self._pods = {n: pod for n, pod in self._pods.items() if n not in names}
        except Exception as error:  # raised again in the thread that follows the job
            self._watch_error = error

    def _update_pod(self, pod: Any) -> None:
        state = state_of(pod, self.kind)
        self._pods[state.name] = state
        self._has_started |= state.has_started
        if state.ended is not None:
            is_new = state.uid not in self._ends
            self._ends[state.uid] = state
            self._say_once(state.uid, f"pod {state.name}: {state.ended}")
            if is_new:  # at once, as operators delete the pod; in a thread, as its node may be lost
                reader = threading.Thread(target=self._read_log_end, args=[state], daemon=True)
                reader.start()
                self._log_readers.append(reader)  # once it can be joined
        elif state.waits_for is not None:
            self._say_once(state.uid, f"pod {state.name} waits: {state.waits_for}")

    def _read_log_end(self, pod: PodState) -> None:
        from urllib3.exceptions import HTTPError

        with suppress(ClusterError, HTTPError, OSError):
            container = pod.container or self.kind.container
            self._log_ends[pod.uid] = list(
                self.cluster.log(pod.name, container, tailLines=LOG_LINES)
            )

    def _report_events(self, job: Manifest) -> None:
        """Report each new warning about the job and the objects created for it."""
        try:
            events = self._brief.warnings(self.kind, job)
        except ClusterError as error:
            if "events" not in self._said:  # once, even if later errors differ
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

    def _report_wait(self, about: str, text: str) -> None:
        """Report a wait that continues, once in `REPORT_SECONDS`."""
        now = time.monotonic()
        if now - self._reported_at.get(about, -REPORT_SECONDS) >= REPORT_SECONDS:
            self._reported_at[about] = now
            self.say(text)

    @staticmethod
    def _has_enough(job: TrainingJob, pods: list[PodState]) -> bool:
        """Whether enough pods are at work; completed pods of shards do not count beside others."""
        working = [pod for pod in pods if pod.is_at_work]
        if isinstance(job, ShardedJob) and len(working) < len(pods):
            working = [pod for pod in working if not pod.has_completed]
        return len(working) >= job.smallest

    def _wait(self, job: TrainingJob, state: Manifest, now: float) -> None:
        """Report the job's wait; `HopelessError` at its deadline, or at once if it cannot end."""
        pods = list(self._pods.values())
        stuck = self._stuck(pods)
        for pod in stuck:
            self._say_once(f"stuck {pod.uid}", self._how_to_end(pod))
        if is_suspended(self.kind, state):
            what, key, why = "left its queue", "queue_deadline_seconds", self._why_suspended(state)
        elif self._has_enough(job, pods):
            self._waiting = "", now
            return
        else:
            has_started = self._has_started
            what = "continued on all its nodes" if has_started else "started"
            key = "stall_deadline_seconds" if has_started else "start_deadline_seconds"
            why = self._why_waiting(pods, stuck)
        if self._waiting[0] != key:
            self._waiting = key, now
            self._reported_at[key] = now  # the reasons have been reported one by one
        seconds, limit = now - self._waiting[1], getattr(job, key)
        if seconds > limit:
            raise HopelessError(f"{self} has not {what} within {key}={limit:g}: {why}")
        waited = f"for {duration(seconds)} of {duration(limit)} ({key})"
        self._report_wait(key, f"{self} has not {what} {waited}: {why}")

    def _why_waiting(self, pods: Sequence[PodState], stuck: Sequence[PodState]) -> str:
        reasons = [
            self._how_to_end(pod)
            if pod in stuck
            else f"{pod.name}: {pod.hindrance or self._warnings.get(pod.name) or 'not ready'}"
            for pod in pods
            if not pod.is_at_work
        ]
        reasons = reasons or [f"{name}: {warning}" for name, warning in self._warnings.items()]
        return "; ".join(reasons or ["it lacks pods; check that its operator is running"])

    def _why_suspended(self, job: Manifest) -> str:
        """Why the job is suspended; `HopelessError` if its queue does not exist."""
        queue = job["metadata"]["labels"].get(QUEUE_LABEL)
        if queue is None:
            return "it is suspended, by no queue"
        why = f"Kueue holds it in queue {queue}"
        try:
            workload = self._brief.workload(self.kind, job) or {}
        except ClusterError as error:
            return f"{why} ({error})"
        for one in workload.get("status", {}).get("conditions") or ():
            if (one["type"], one["status"]) == ("QuotaReserved", "False"):
                why += f": {one['reason']}: {one['message']}"
                if MISSING_QUEUE.search(one["message"]):
                    raise HopelessError(f"{self}: {why}; correct the queue's name, or create it")
        self._say_once("queue", f"{self}: {why}")
        return why

    def _why_hopeless(self, job: TrainingJob, seconds: float) -> tuple[str, PodState | None] | None:
        """Why the job cannot succeed although its operator continues, and the pod at fault.

        The training operator restarts pods without limit, and checks the deadline only when
        something changes.
        """
        if self.kind is INDEXED_JOB:
            return None  # Kubernetes fails shards one by one, and keeps the deadline
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
        """Report the end of each pod and the log of the one at fault; return the exit code, too.

        `cause` defaults to the first existing pod that did not fail because of another.
        """
        pods = self.cluster.pods(self.kind, self.name)
        for pod in pods:
            self._update_pod(pod)  # the watch may lag behind
        end = time.monotonic() + LOG_SECONDS
        for reader in self._log_readers:
            reader.join(max(end - time.monotonic(), 0))
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


def missing_shards(job: Manifest) -> list[int]:
    shards = parse_indices(job["metadata"]["annotations"][SHARDS].partition("/")[0])
    completed = {*parse_indices(job.get("status", {}).get("completedIndexes", ""))}
    return [shard for index, shard in enumerate(shards) if index not in completed]


def _shards_done(job: Manifest) -> str:
    succeeded = job.get("status", {}).get("succeeded", 0)
    return f"{succeeded} of {job['spec']['completions']} shards are done"


def _digest(kind: JobKind, job: TrainingJob) -> str:
    """Digest of a job's specification without its owners."""
    alone = replace(job, owners=())
    return digest_of([make(alone) for _, make in OBJECTS[kind]])[:16]
