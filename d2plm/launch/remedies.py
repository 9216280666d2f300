"""Remedies for what Kubernetes reports.

The scheduler and quotas report reasons only as text; this is the one place that parses it.
"""

import re

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
# Kueue's message about a queue that does not exist, for which waiting is useless.
MISSING_QUEUE = re.compile(r"Queue \S+ doesn't exist")


def remedy_for(message: str) -> str:
    """What fixes the conditions that Kubernetes' `message` names; empty if none is known."""
    return ", or ".join(
        advice for pattern, advice in REMEDIES_BY_MESSAGE.items() if re.search(pattern, message)
    )


def with_remedy(what: str | None, reason: str | None, message: str | None) -> str:
    """Describe an event in one line: Kubernetes' `reason` and `message`, and the known remedy."""
    detail = ": ".join(part for part in (reason, message) if part and part != "Error")
    line = f"{what} ({detail})" if what and detail else what or detail
    remedy = remedy_for(message or "") or REMEDIES.get(reason or "")
    return f"{line}; {remedy}" if remedy else line
