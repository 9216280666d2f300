"""Training in a cluster: create the job, follow it, say how it ended, cancel it.

A job's name is made from the pipeline's run, which makes the step safe to retry: a job that is
there already is adopted, one that has failed is replaced, and training goes on from its checkpoint.
"""

import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from d2plm.errors import ClusterError, LaunchError
from d2plm.launch.cluster import PYTORCHJOB, TRAINING_RUNTIME, TRAINJOB, Cluster, Kind, is_suspended
from d2plm.launch.jobs import Manifest, TrainingJob, pytorchjob, training_runtime, trainjob
from d2plm.launch.logs import FollowedLog
from d2plm.launch.pods import PodState, state_of
from d2plm.signals import unwound_by_sigterm

KINDS = {"pytorchjob": PYTORCHJOB, "trainjob": TRAINJOB}
SPECIFICATION = "d2plm/specification"  # annotation: the digest of what a job was made from
# What a worker exits with for another's sake, or for the sake of whoever pre-empted it.
CONSEQUENCES = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
OUT_OF_MEMORY = "OOMKilled"
# Operators start such a worker again, to run out of memory at the same place.
MOST_DEATHS_BY_MEMORY = 3

log = logging.getLogger(__name__)


def _print(line: str) -> None:
    print(line, flush=True)


def train_in_cluster(
    cluster: Cluster,
    kind: Kind,
    job: TrainingJob,
    *,
    start_deadline_seconds: float = 1800,
    on_cancel: Literal["delete", "suspend"] = "delete",
    say: Callable[[str], None] = _print,
) -> None:
    """Create `job`, or adopt it, and end as it ends; SIGTERM or an interrupt cancels it.

    Args:
        cluster: where.
        kind: as what.
        job: what.
        start_deadline_seconds: how long it may go on before a pod runs.
        on_cancel: what becomes of a job that is cancelled.
        say: is given each line of worker 0's log, and what happens to the job.

    Raises:
        ClusterError: if the cluster refuses, does not answer, or the job is taken away.
        LaunchError: if it fails, with each pod's end and the log's; or does not start in time.
    """
    running = RunningJob(cluster, kind, job.name, say)
    with unwound_by_sigterm():  # in a pipeline's step nobody else handles it
        try:
            running.create(job)
            running.follow(job, start_deadline_seconds)
        except (KeyboardInterrupt, SystemExit, HopelessError):
            running.cancel(on_cancel)
            raise


class HopelessError(LaunchError):
    """A job that would go on, but to no end."""


class RunningJob:
    """A job in the cluster.

    Args:
        cluster: where it is.
        kind: what it is.
        name: its name.
        say: is given what happens.
    """

    def __init__(self, cluster: Cluster, kind: Kind, name: str, say: Callable[[str], None]) -> None:
        self.cluster, self.kind, self.name, self.say = cluster, kind, name, say
        self._said: dict[str, str] = {}  # last, of each condition and pod
        self._pods: dict[str, PodState] = {}  # by name, as seen last
        self._ends: dict[str, PodState] = {}  # of those that failed, by uid
        self._lost: Exception | None = None  # why the pods cannot be watched

    def __str__(self) -> str:
        return self.cluster.of(self.kind, self.name)

    def create(self, job: TrainingJob) -> None:
        """Create it; where it is there already, adopt it, or replace it if it has failed.

        Raises:
            ClusterError: if the cluster refuses, or has another job of this name.
        """
        digest = _digest(job)
        job = replace(job, annotations={**job.annotations, SPECIFICATION: digest})
        while not self._created(job):
            there = self.cluster.read(self.kind, self.name)
            if there is None or "deletionTimestamp" in there["metadata"]:
                time.sleep(1)
                continue
            self._require_same(there, digest)
            if _condition(there, self.kind.failed) is None:
                self.say(f"{self} is there already: going on with it")
                if is_suspended(self.kind, there) and job.queue is None:
                    self.cluster.suspend(self.kind, self.name, False)
                return
            self.say(f"{self} of an earlier attempt has failed: replacing it")
            self._delete()
        self.say(f"created {self}")

    def follow(self, job: TrainingJob, start_deadline_seconds: float) -> None:
        """Say what happens until it has ended.

        Raises:
            ClusterError: if the API server stays away, or the job is taken away.
            LaunchError: if it fails.
            HopelessError: if it does not start in time, or goes on to no end.
        """
        threading.Thread(target=self._watch_pods, name="pods", daemon=True).start()
        began = waiting_since = time.monotonic()
        ended = None
        with FollowedLog(self.cluster, self.kind, self.name, self.say) as followed:
            for state in self.cluster.states(self.kind, self.name):
                self._say_conditions(state)
                ended = _condition(state, self.kind.succeeded, self.kind.failed)
                if ended is not None:
                    break
                if self._lost is not None:
                    raise self._lost
                if is_suspended(self.kind, state):  # by a queue that has no room yet
                    waiting_since = time.monotonic()
                elif time.monotonic() - waiting_since > start_deadline_seconds:
                    self._require_started(start_deadline_seconds)
                self._require_hope(job, time.monotonic() - began)
        if ended is None:
            raise ClusterError(
                f"{self} was deleted while it ran; the same command starts it again, and training "
                "goes on from its checkpoint"
            )
        if ended["type"] == self.kind.failed:
            for pod in self.cluster.pods(self.kind, self.name):
                self._look_at(pod)  # what was watched may lag behind
            raise self._failure(ended, list(followed.last))

    def cancel(self, how: Literal["delete", "suspend"]) -> None:
        """Delete it, or suspend it: its pods save and end."""
        try:
            if how == "suspend":
                self.cluster.suspend(self.kind, self.name, True)
                self.say(f"cancelled: {self} is suspended")
            else:
                self.cluster.delete(self.kind, self.name)
                self.say(f"cancelled: {self} is deleted")
        except ClusterError as error:
            log.error("%s goes on, as it could not be cancelled: %s", self, error)

    def _created(self, job: TrainingJob) -> bool:
        """Whether it could be created, or else is there."""
        if self.kind is PYTORCHJOB:
            return self.cluster.create(PYTORCHJOB, pytorchjob(job)) is not None
        self.cluster.create(TRAINING_RUNTIME, training_runtime(job))
        created = self.cluster.create(TRAINJOB, trainjob(job))
        if created is None:
            return False
        owner = {key: created[key] for key in ("apiVersion", "kind")} | {
            key: created["metadata"][key] for key in ("name", "uid")
        }
        change = {"metadata": {"ownerReferences": [owner]}}  # the runtime goes with its job
        self.cluster.patch(TRAINING_RUNTIME, self.name, change)
        return True

    def _delete(self) -> None:
        """Delete it and wait until it is gone."""
        kinds = [self.kind, *([TRAINING_RUNTIME] if self.kind is TRAINJOB else [])]
        for kind in kinds:
            self.cluster.delete(kind, self.name)
        while any(self.cluster.read(kind, self.name) is not None for kind in kinds):
            time.sleep(1)

    def _require_same(self, there: Manifest, digest: str) -> None:
        if there["metadata"].get("annotations", {}).get(SPECIFICATION) != digest:
            raise ClusterError(
                f"there is another {self}, made from other settings; set launcher.name to another "
                f"name, or: kubectl delete {self.kind.plural} {self.name} "
                f"--namespace {self.cluster.namespace}"
            )

    def _say_conditions(self, job: Manifest) -> None:
        for condition in _conditions(job):
            message = condition.get("message") or condition.get("reason", "")
            self._say_once(condition["type"], f"{self}: {condition['type']}: {message}")

    def _watch_pods(self) -> None:
        """In a thread: an operator deletes a pod that is to be started again at once."""
        try:
            for pod in self.cluster.watched_pods(self.kind, self.name):
                self._look_at(pod)
        except Exception as error:  # of whatever kind: it ends the thread that follows the job
            self._lost = error

    def _look_at(self, pod: Any) -> None:
        state = state_of(pod, self.kind.container)
        self._pods[state.name] = state
        if state.ended is not None:
            self._ends[state.uid] = state
            self._say_once(state.uid, f"pod {state.name}: {state.ended}")
        elif state.waits_for is not None:
            self._say_once(state.uid, f"pod {state.name} waits: {state.waits_for}")

    def _say_once(self, about: str, text: str) -> None:
        if self._said.get(about) != text:
            self._said[about] = text
            self.say(text)

    def _require_hope(self, job: TrainingJob, seconds: float) -> None:
        """Give up what runs out of memory or of restarts or of time.

        The training operator starts workers again without end, and looks at the time only when
        something changes.
        """
        ends = list(self._ends.values())
        starved = [end for end in ends if end.reason == OUT_OF_MEMORY]
        if len(starved) >= MOST_DEATHS_BY_MEMORY:
            what, ends = f"ran out of memory {len(starved)} times", starved
        elif self.kind is PYTORCHJOB and len(ends) > job.restarts:
            what = f"needed more than launcher.restarts={job.restarts} restarts of its pods"
        elif job.deadline_seconds is not None and seconds > job.deadline_seconds:
            what = f"has not ended within launcher.deadline_seconds={job.deadline_seconds}"
        else:
            return
        last = f"; last {ends[-1].name}: {ends[-1].ended}" if ends else ""
        exit_code = ends[-1].exit_code if ends else None
        raise HopelessError(f"{self} {what}{last}", exit_code or 1)

    def _require_started(self, deadline_seconds: float) -> None:
        """Give up what has no pod that runs."""
        pods = list(self._pods.values())
        if any(pod.has_started for pod in pods):
            return
        waiting = [f"{pod.name}: {pod.waits_for}" for pod in pods if pod.waits_for]
        if not pods:
            warning = self.cluster.last_warning(self.name)
            waiting.append(warning or "it has no pods; is its operator running?")
        raise HopelessError(
            f"{self} has not started within launcher.start_deadline_seconds="
            f"{deadline_seconds:g}: {'; '.join(waiting) or 'its pods do not say why'}"
        )

    def _failure(self, condition: Manifest, last_lines: list[str]) -> LaunchError:
        """The condition, how each pod ended, and the log of the one that failed by itself."""
        ends = list({end.name: end for end in self._ends.values()}.values())  # the last of each
        by_itself = [end for end in ends if end.exit_code not in (None, *CONSEQUENCES)]
        lines = [f"{self} failed: {condition.get('message') or condition.get('reason')}"]
        lines += [f"  {end.name}: {end.ended}" for end in ends]
        cause = next(iter([*by_itself, *ends]), None)
        whose = "worker 0"
        if cause is not None and cause.exit_code is not None:
            container = cause.container or self.kind.container
            if its_own := self.cluster.last_lines(cause.name, container):
                whose, last_lines = cause.name, its_own
        if last_lines:
            lines += [f"the last lines of {whose}:", *(f"  {line}" for line in last_lines)]
        return LaunchError("\n".join(lines), (cause and cause.exit_code) or 1)


def _conditions(job: Manifest) -> list[Manifest]:
    """The conditions that hold."""
    conditions = job.get("status", {}).get("conditions") or []
    return [condition for condition in conditions if condition["status"] == "True"]


def _condition(job: Manifest, *types: str) -> Manifest | None:
    return next((condition for condition in _conditions(job) if condition["type"] in types), None)


def _digest(job: TrainingJob) -> str:
    """Of everything that a job is made from, but for who owns it."""
    alone = replace(job, owners=())
    manifests = [pytorchjob(alone), training_runtime(alone)]
    return hashlib.sha256(json.dumps(manifests, sort_keys=True).encode()).hexdigest()[:16]
