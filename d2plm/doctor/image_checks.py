"""Whether the cluster's nodes can pull the training image.

Only a node can tell: its credentials and network are not those of this machine. Either the pods
that have used the image are looked at, which changes nothing, or a pod is started with it, as
training would start one but without devices and volumes, and deleted again.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from d2plm import __version__
from d2plm.doctor.verdicts import Verdict, failed, ok, skipped, warning
from d2plm.launch.job_spec import TrainingJob, pytorchjob

PULL_SECONDS = 300.0
POLL_SECONDS = 1.0
POD_LIMIT = 500
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
FIX = (
    "push the image there, correct launcher.image, or give the pods' service account "
    "imagePullSecrets; kind: make kind-up loads it"
)


@dataclass(frozen=True)
class ImageChecks:
    """The training image in a cluster.

    Args:
        job: as the launcher would create it.
        timeout: of each request, as the client takes it.
        api: client of the Kubernetes API.
        namespace: that jobs run in.
    """

    job: TrainingJob
    timeout: tuple[float, float]
    api: Any
    namespace: str

    def seen(self) -> Verdict:
        """Whether the newest pod with the image could pull it."""
        image = self.job.image
        pods = self._core().list_namespaced_pod(
            self.namespace, limit=POD_LIMIT, _request_timeout=self.timeout
        )
        for pod in sorted(pods.items, key=lambda p: p.metadata.creation_timestamp, reverse=True):
            specs = [*(pod.spec.init_containers or ()), *pod.spec.containers]
            names = {one.name for one in specs if one.image == image}
            for status in (one for one in _statuses(pod) if one.name in names):
                reason, message = _waiting(status)
                if reason in PULL_FAILURES:
                    return failed(f"{image}: {pod.metadata.name}: {reason} {message}", FIX)
                if status.image_id:
                    return ok(f"{image}, which {pod.metadata.name} has pulled")
        return skipped(f"no pod in {self.namespace} has used {image}", "pull=true starts one")

    def pulled(self) -> Verdict:
        """Start a pod with the image, wait until it has printed d2plm's version, delete it."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        pod = version_pod(self.job)
        name = pod["metadata"]["name"]
        self._core().create_namespaced_pod(self.namespace, pod, _request_timeout=self.timeout)
        try:
            return self._watch(name)
        finally:
            with suppress(ApiException, HTTPError):  # its own deadline ends it
                self._core().delete_namespaced_pod(
                    name, self.namespace, _request_timeout=self.timeout
                )

    def _watch(self, name: str) -> Verdict:
        image, began, waits_for = self.job.image, time.monotonic(), "nothing is known of it"
        while time.monotonic() - began < PULL_SECONDS:
            pod = self._core().read_namespaced_pod(
                name, self.namespace, _request_timeout=self.timeout
            )
            statuses = _statuses(pod)
            reason, message = _waiting(statuses[0]) if statuses else _unscheduled(pod)
            waits_for = f"{reason} {message}".strip() or pod.status.phase
            if reason in PULL_FAILURES:
                return failed(f"{image}: {waits_for}", FIX)
            if pod.status.phase in ("Succeeded", "Failed"):
                return self._ended(name, pod.status.phase, time.monotonic() - began)
            time.sleep(POLL_SECONDS)
        return failed(
            f"{image}: the pod has not run within {PULL_SECONDS:g} s: {waits_for}",
            "check launcher.node_selector, launcher.tolerations, quotas and the registry's speed",
        )

    def _ended(self, name: str, phase: str, seconds: float) -> Verdict:
        image = self.job.image
        log = self._core().read_namespaced_pod_log(
            name, self.namespace, tail_lines=1, _request_timeout=self.timeout
        )
        printed = log.strip()
        if phase == "Failed":
            return failed(
                f"{image}: was pulled, but d2plm does not run in it: {printed}",
                "build it for the nodes' processor with make images, and push it",
            )
        if printed != f"d2plm {__version__}":
            return warning(
                f"{image} holds {printed}, this machine has {__version__}",
                "build and push the same version: make images",
            )
        return ok(f"{image}, pulled and run in {seconds:.0f} s: {printed}")

    def _core(self) -> Any:
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self.api)


def worker_pod(job: TrainingJob) -> dict[str, Any]:
    """One of a training job's pods, as a pod by itself."""
    template = pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job.name}-{uuid4().hex[:8]}", **template["metadata"]},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }


def version_pod(job: TrainingJob) -> dict[str, Any]:
    """A pod with a training pod's account, security and placement that prints d2plm's version."""
    pod = worker_pod(
        replace(
            job,
            name="d2plm-doctor",
            gpus=0,
            cpu="100m",
            memory="512Mi",
            shared_memory="64Mi",
            claims=(),
            preparation=(),
            config_maps=(),
            secrets=(),
        )
    )
    pod["spec"] |= {
        "activeDeadlineSeconds": round(PULL_SECONDS),
        "terminationGracePeriodSeconds": 1,
    }
    pod["spec"]["containers"][0] |= {"command": ["python", "-m", "d2plm", "--version"], "args": []}
    return pod


def _statuses(pod: Any) -> list[Any]:
    """Of a pod's containers."""
    return [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]


def _waiting(status: Any) -> tuple[str, str]:
    """(reason, message) of a container that waits."""
    waiting = status.state.waiting if status.state else None
    return ("", "") if waiting is None else (waiting.reason or "", waiting.message or "")


def _unscheduled(pod: Any) -> tuple[str, str]:
    """(reason, message) of a pod without a node."""
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status != "True":
            return condition.reason or "", condition.message or ""
    return "", ""
