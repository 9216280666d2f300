"""Checking whether the cluster's nodes can pull the training image.

Only a node can tell, because its credentials and network differ from those of this machine. The
check either inspects pods that have used the image, which changes nothing, or starts a pod with it,
like a training pod but without devices and volumes, and deletes it again.
"""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from d2plm import __version__
from d2plm.doctor.verdicts import Verdict, failed, ok, skipped, warning
from d2plm.launch.client import POD, Cluster
from d2plm.launch.job_spec import Manifest, TrainingJob, pytorchjob
from d2plm.launch.pod_state import container_statuses, unscheduled, waiting

PULL_SECONDS = 300.0
POLL_SECONDS = 1.0
POD_LIMIT = 500
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
# `d2plm --version` prints ten lines, and the revision of a checkout.
PRINT_VERSION = "import d2plm.cli; print('d2plm', d2plm.__version__)"
FIX = (
    "push the image to the registry, correct launcher.image, or add imagePullSecrets to the pods' "
    "service account; on kind, make kind-up loads it"
)


def image_seen(cluster: Cluster, job: TrainingJob) -> Verdict:
    """Whether the newest pod with the job's image has pulled it."""
    image = job.image
    pods = cluster.request(cluster.path(POD), query={"limit": POD_LIMIT})["items"]
    for pod in sorted(pods, key=lambda p: p["metadata"]["creationTimestamp"], reverse=True):
        specs = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        names = {one["name"] for one in specs if one["image"] == image}
        for status in (one for one in container_statuses(pod) if one["name"] in names):
            reason, message = waiting(status)
            if reason in PULL_FAILURES:
                return failed(f"{image}: {pod['metadata']['name']}: {reason} {message}", FIX)
            if status.get("imageID"):
                return ok(f"{image}, which {pod['metadata']['name']} has pulled")
    return skipped(f"no pod in {cluster.namespace} has used {image}", "pull=true starts one")


def image_pulled(cluster: Cluster, job: TrainingJob) -> Verdict:
    """Start a pod with the image, wait until it prints d2plm's version, and delete it."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    pod = version_pod(job)
    path = cluster.path(POD, pod["metadata"]["name"])
    cluster.request(cluster.path(POD), "POST", body=pod)
    try:
        return _watch(cluster, path, job.image)
    finally:
        with suppress(ApiException, HTTPError):  # the pod's deadline ends it anyway
            cluster.request(path, "DELETE")


def _watch(cluster: Cluster, path: str, image: str) -> Verdict:
    """Wait until the pod at `path` ends, its image cannot be pulled, or the time limit is over."""
    began, waits_for = time.monotonic(), "its state is unknown"
    while (seconds := time.monotonic() - began) < PULL_SECONDS:
        pod = cluster.request(path)
        phase, statuses = pod["status"].get("phase"), container_statuses(pod)
        reason, message = waiting(statuses[0]) if statuses else unscheduled(pod)
        waits_for = f"{reason} {message}".strip() or phase
        if reason in PULL_FAILURES:
            return failed(f"{image}: {waits_for}", FIX)
        if phase in ("Succeeded", "Failed"):
            printed = str(cluster.request(f"{path}/log", query={"tailLines": 1})).strip()
            if phase == "Failed":
                return failed(
                    f"{image}: was pulled, but d2plm fails in it: {printed}",
                    "build it for the nodes' processor with make images, and push it",
                )
            if printed != f"d2plm {__version__}":
                return warning(
                    f"{image} contains {printed}, this machine has {__version__}",
                    "build and push the same version: make images",
                )
            return ok(f"{image}, pulled and run in {seconds:.0f} s: {printed}")
        time.sleep(POLL_SECONDS)
    return failed(
        f"{image}: the pod has not run within {PULL_SECONDS:g} s: {waits_for}",
        "check launcher.node_selector, launcher.tolerations, quotas and the registry's speed",
    )


def worker_pod(job: TrainingJob) -> Manifest:
    """One of a training job's pods, as a standalone pod."""
    template = pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job.name}-{uuid4().hex[:8]}", **template["metadata"]},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }


def version_pod(job: TrainingJob) -> Manifest:
    """A pod with a training pod's account, security and placement that prints d2plm's version."""
    small: dict[str, Any] = {"gpus": 0, "cpu": "100m", "memory": "512Mi", "shared_memory": "64Mi"}
    without: dict[str, Any] = dict.fromkeys(("preparation", "config_maps", "secrets"), ())
    pod = worker_pod(replace(job, name="d2plm-doctor", claims={}, **small, **without))
    pod["spec"] |= {
        "activeDeadlineSeconds": round(PULL_SECONDS),
        "terminationGracePeriodSeconds": 1,
    }
    pod["spec"]["containers"][0] |= {"command": ["python", "-c", PRINT_VERSION], "args": []}
    return pod
