"""Interpreting a training pod's status: whether it has started, what it waits for, how it ended."""

from dataclasses import dataclass

from d2plm.launch.client import JobKind
from d2plm.launch.job_spec import PREPARATION_CONTAINER, Manifest
from d2plm.launch.remedies import with_remedy

STARTING = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True)
class PodState:
    """The state of a pod.

    Attributes:
        uid: unique ID; a replacement may have the same name.
        number: index among the pods that train together.
        node: name of its node; empty if it has none.
        has_started: whether preparation or training has started.
        is_cut_off: whether its node does not answer.
        grace_seconds: grace period of a deleted pod; None if it is not deleted.
        waits_for: why it has not started, if known.
        ended: how it failed; None if it has not failed.
        reason: Kubernetes' reason of the failure.
        container, exit_code: the container that failed, and its exit code.
        ended_at: time of the failure, ISO 8601.
    """

    name: str
    uid: str
    number: str
    node: str
    has_started: bool
    is_cut_off: bool = False
    grace_seconds: int | None = None
    waits_for: str | None = None
    ended: str | None = None
    reason: str | None = None
    exit_code: int | None = None
    container: str | None = None
    ended_at: str | None = None
    has_completed: bool = False

    @property
    def is_at_work(self) -> bool:
        hindered = self.is_cut_off or self.grace_seconds is not None or self.ended is not None
        return self.has_started and not hindered

    @property
    def hindrance(self) -> str | None:
        """Why it is not at work, if known."""
        if self.is_cut_off:
            return f"its node {self.node} does not answer"
        is_ending = "is being deleted" if self.grace_seconds is not None else None
        return self.ended or self.waits_for or is_ending


def container_statuses(pod: Manifest) -> list[Manifest]:
    status = pod.get("status", {})
    keys = ("initContainerStatuses", "containerStatuses")
    return [known for key in keys for known in status.get(key) or ()]


def state_of(pod: Manifest, kind: JobKind) -> PodState:
    metadata, status = pod["metadata"], pod.get("status", {})
    statuses, conditions = container_statuses(pod), _conditions(pod)
    failed = next((s for s in statuses if s["state"].get("terminated", {}).get("exitCode")), None)
    terminated = failed["state"]["terminated"] if failed is not None else {}
    exit_code, reason = terminated.get("exitCode"), terminated.get("reason")
    ended = with_remedy(f"exit code {exit_code}", reason, None) if terminated else None
    if status.get("phase") == "Failed" and (status.get("reason") or ended is None):
        # Evicted, NodeShutdown …; if the node was removed, only a condition has the reason.
        known = status if status.get("reason") else conditions.get("DisruptionTarget", {})
        reason = known.get("reason", "failed for an unknown reason")
        ended = with_remedy(ended, reason, known.get("message"))
    ours = (PREPARATION_CONTAINER, kind.container)
    return PodState(
        name=metadata["name"],
        uid=metadata["uid"],
        number=metadata.get("labels", {}).get(kind.index_label, ""),
        node=pod.get("spec", {}).get("nodeName", ""),
        has_started=any(s["name"] in ours and "waiting" not in s["state"] for s in statuses),
        has_completed=status.get("phase") == "Succeeded",
        # Without heartbeats, the node controller changes only the first of these conditions.
        is_cut_off=[conditions.get(one, {}).get("status") for one in ("Ready", "ContainersReady")]
        == ["False", "True"],
        grace_seconds=metadata.get("deletionGracePeriodSeconds", 0)
        if "deletionTimestamp" in metadata
        else None,
        waits_for=_waits_for(pod) if status.get("phase") == "Pending" else None,
        ended=ended,
        reason=reason,
        exit_code=exit_code,
        container=failed["name"] if failed is not None else None,
        ended_at=terminated.get("finishedAt"),
    )


def _conditions(pod: Manifest) -> dict[str, Manifest]:
    return {one["type"]: one for one in pod.get("status", {}).get("conditions") or ()}


def unscheduled(pod: Manifest) -> tuple[str, str]:
    """(reason, message) of a pod that has no node; empty for other pods."""
    condition = _conditions(pod).get("PodScheduled", {"status": "True"})
    has_node = condition["status"] != "False"
    return ("", "") if has_node else (condition.get("reason", ""), condition.get("message", ""))


def waiting(status: Manifest) -> tuple[str, str]:
    """(reason, message) of a waiting container; empty for other containers."""
    known = status.get("state", {}).get("waiting") or {}
    return known.get("reason", ""), known.get("message", "")


def _waits_for(pod: Manifest) -> str | None:
    reasons = [unscheduled(pod), *map(waiting, container_statuses(pod))]
    said = (one for one in reasons if any(one) and one[0] not in STARTING)
    return next((with_remedy(None, *one) for one in said), None)
