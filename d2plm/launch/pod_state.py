"""What a training pod's status means: whether it has started, what it waits for, how it ended."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from d2plm.launch.client import JobKind
from d2plm.launch.job_spec import PREPARATION_CONTAINER

STARTING = ("ContainerCreating", "PodInitializing")
MENDS = {
    "OOMKilled": "raise the job's memory, or lower the token budget",
    "Evicted": "its node ran out of resources: request the cpu and memory that it needs",
    "Unschedulable": "lower cpu, memory or gpus, tolerate the nodes' taints, or add nodes",
    "ImagePullBackOff": "check the job's image and the namespace's credentials for its registry",
    "ErrImagePull": "check the job's image and the namespace's credentials for its registry",
    "ErrImageNeverPull": "load the image into the nodes",
    "InvalidImageName": "correct the job's image",
    "CreateContainerConfigError": "create what the pod refers to, or correct its name",
}


@dataclass(frozen=True)
class PodState:
    """A pod, for those who wait for it.

    Attributes:
        name: its name.
        uid: of this very pod; one that replaces it may have the same name.
        number: its place among those that train together.
        has_started: whether it prepares or trains, or has.
        waits_for: what keeps it from starting, as far as it says so.
        ended: how it failed; None if it has not.
        reason: Kubernetes' word for that.
        exit_code: of the container that failed.
        container: which that was.
        ended_at: when that was.
    """

    name: str
    uid: str
    number: str
    has_started: bool
    waits_for: str | None = None
    ended: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    container: str | None = None
    ended_at: datetime | None = None


def state_of(pod: Any, kind: JobKind) -> PodState:
    """The state of a job's pod.

    Args:
        pod: the client's `V1Pod`.
        kind: of the job.
    """
    status = pod.status
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]
    failed = next((s for s in statuses if _exit_code(s)), None)
    exit_code = reason = ended = None
    if failed is not None:
        exit_code, reason = _exit_code(failed), failed.state.terminated.reason
        ended = _with_mend(f"exit code {exit_code}", reason, None)
    if status.phase == "Failed" and status.reason:  # Evicted, DeadlineExceeded, NodeLost …
        reason = status.reason
        ended = _with_mend(ended, reason, status.message)
    ours = (PREPARATION_CONTAINER, kind.container)
    return PodState(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        number=(pod.metadata.labels or {}).get(kind.index_label, ""),
        has_started=any(s.name in ours and s.state.waiting is None for s in statuses),
        waits_for=_waits_for(status, statuses) if status.phase == "Pending" else None,
        ended=ended,
        reason=reason,
        exit_code=exit_code,
        container=failed.name if failed is not None else None,
        ended_at=failed.state.terminated.finished_at if failed is not None else None,
    )


def _exit_code(container: Any) -> int | None:
    """Of a container that has failed."""
    terminated = container.state.terminated
    return terminated.exit_code or None if terminated is not None else None


def _waits_for(status: Any, statuses: list[Any]) -> str | None:
    for condition in status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return _with_mend(None, condition.reason, condition.message)
    for waiting in (s.state.waiting for s in statuses):
        if waiting is not None and waiting.reason not in STARTING:
            return _with_mend(None, waiting.reason, waiting.message)
    return None


def _with_mend(what: str | None, reason: str | None, message: str | None) -> str:
    """One line of what is known; `reason` is Kubernetes' own word."""
    said = ": ".join(part for part in (reason, message) if part and part != "Error")
    line = f"{what} ({said})" if what and said else what or said
    mend = MENDS.get(reason or "")
    return f"{line}; {mend}" if mend else line
