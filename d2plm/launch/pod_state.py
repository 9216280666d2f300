"""Interpreting a training pod's status: has it started, what does it wait for, how did it end."""

import re
from dataclasses import dataclass

from d2plm.launch.client import JobKind
from d2plm.launch.job_spec import PREPARATION_CONTAINER, Manifest

STARTING = ("ContainerCreating", "PodInitializing")
OUT_OF_MEMORY = "OOMKilled"
REMEDIES = {
    OUT_OF_MEMORY: "raise the job's memory, or lower the token budget",
    "Evicted": "its node ran out of resources; request the cpu and memory that the pod needs",
    "Unschedulable": "lower cpu, memory or gpus, tolerate the nodes' taints, or add nodes",
    "ImagePullBackOff": "check the job's image and the namespace's credentials for its registry",
    "ErrImagePull": "check the job's image and the namespace's credentials for its registry",
    "ErrImageNeverPull": "load the image into the nodes",
    "InvalidImageName": "correct the job's image",
    "CreateContainerConfigError": "create the object that the pod refers to, or correct its name",
}
# Message of the scheduler or a quota → remedy, which overrides that of the reason.
REMEDIES_BY_MESSAGE = {
    r'persistentvolumeclaim "[^"]*" not found': "create the claim, or correct its name in claims",
    r"unbound immediate PersistentVolumeClaims": "kubectl describe pvc says why it has no volume",
    r"were unschedulable|\{node\.kubernetes\.io/unschedulable": "make its cordoned nodes available "
    "(kubectl uncordon), or wait until they are",
    r"exceeded quota": "lower cpu, memory or gpus, or raise the namespace's quota",
    r"\d Insufficient ": "lower cpu, memory or gpus, or add nodes",
    r"taint(?!\S* \{node\.kubernetes\.io/unschedulable)": "tolerate the nodes' taints",
}


@dataclass(frozen=True)
class PodState:
    """The state of a pod.

    Attributes:
        uid: unique ID; a replacement may have the same name.
        number: index among the pods that train together.
        has_started: whether it has started to prepare or to train.
        waits_for: why it has not started, if known.
        ended: how it failed; None if it has not failed.
        reason: Kubernetes' reason of the failure.
        container, exit_code: the container that failed, and its exit code.
        ended_at: time of the failure, ISO 8601.
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
    ended_at: str | None = None


def container_statuses(pod: Manifest) -> list[Manifest]:
    status = pod.get("status", {})
    keys = ("initContainerStatuses", "containerStatuses")
    return [known for key in keys for known in status.get(key) or ()]


def state_of(pod: Manifest, kind: JobKind) -> PodState:
    metadata, status = pod["metadata"], pod.get("status", {})
    statuses = container_statuses(pod)
    failed = next((s for s in statuses if s["state"].get("terminated", {}).get("exitCode")), None)
    terminated = failed["state"]["terminated"] if failed is not None else {}
    exit_code, reason = terminated.get("exitCode"), terminated.get("reason")
    ended = with_remedy(f"exit code {exit_code}", reason, None) if terminated else None
    if status.get("phase") == "Failed" and status.get("reason"):  # Evicted, NodeLost …
        reason = status["reason"]
        ended = with_remedy(ended, reason, status.get("message"))
    ours = (PREPARATION_CONTAINER, kind.container)
    return PodState(
        name=metadata["name"],
        uid=metadata["uid"],
        number=metadata.get("labels", {}).get(kind.index_label, ""),
        has_started=any(s["name"] in ours and "waiting" not in s["state"] for s in statuses),
        waits_for=_waits_for(pod) if status.get("phase") == "Pending" else None,
        ended=ended,
        reason=reason,
        exit_code=exit_code,
        container=failed["name"] if failed is not None else None,
        ended_at=terminated.get("finishedAt"),
    )


def unscheduled(pod: Manifest) -> tuple[str, str]:
    """(reason, message) of a pod that has no node; empty for other pods."""
    for condition in pod.get("status", {}).get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", ""), condition.get("message", "")
    return "", ""


def waiting(status: Manifest) -> tuple[str, str]:
    """(reason, message) of a waiting container; empty for other containers."""
    known = status.get("state", {}).get("waiting") or {}
    return known.get("reason", ""), known.get("message", "")


def _waits_for(pod: Manifest) -> str | None:
    reasons = [unscheduled(pod), *map(waiting, container_statuses(pod))]
    said = (one for one in reasons if any(one) and one[0] not in STARTING)
    return next((with_remedy(None, *one) for one in said), None)


def with_remedy(what: str | None, reason: str | None, message: str | None) -> str:
    """One line with the event, Kubernetes' `reason` and `message`, and the remedy if known."""
    detail = ": ".join(part for part in (reason, message) if part and part != "Error")
    line = f"{what} ({detail})" if what and detail else what or detail
    fitting = [
        advice
        for pattern, advice in REMEDIES_BY_MESSAGE.items()
        if re.search(pattern, message or "")
    ]
    remedy = ", or ".join(fitting) or REMEDIES.get(reason or "")
    return f"{line}; {remedy}" if remedy else line
