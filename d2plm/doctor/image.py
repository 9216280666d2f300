"""Whether the training image can be pulled by the cluster's nodes.

Only a node can tell: it has other credentials and another network than this machine. So either the
pods that have used the image are looked at, which changes nothing, or a pod is started with it, as
training would start one but without devices and volumes, and deleted again.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from d2plm import __version__
from d2plm.doctor.report import Verdict, failed, ok, skipped, warning
from d2plm.launch.job_spec import TrainingJob, pytorchjob

PULL_SECONDS = 300.0
POLL_SECONDS = 1.0
POD_LIMIT = 500
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
MEND_PULL = (
    "push the image there, correct launcher.image, or give the pods' service account "
    "imagePullSecrets; kind: make kind-up loads it"
)


@dataclass(frozen=True)
class Image:
    """The training image in a cluster.

    Args:
        job: as the launcher would start it.
        timeout: of each request, as the client takes it.
        api: client of the Kubernetes API.
        namespace: that jobs run in.
    """

    job: TrainingJob
    timeout: tuple[float, float]
    api: Any
    namespace: str

    @property
    def name(self) -> str:
        """The image's."""
        return self.job.image

    def seen(self) -> Verdict:
        """What became of the newest pod that wanted the image."""
        pods = self._core().list_namespaced_pod(
            self.namespace, limit=POD_LIMIT, _request_timeout=self.timeout
        )
        newest_first = sorted(
            pods.items, key=lambda pod: pod.metadata.creation_timestamp, reverse=True
        )
        for pod in newest_first:
            for status in _statuses(pod, self.name):
                reason, message = _waiting(status)
                if reason in PULL_FAILURES:
                    return failed(
                        f"{self.name}: {pod.metadata.name}: {reason} {message}", MEND_PULL
                    )
                if status.image_id:
                    return ok(f"{self.name}, which {pod.metadata.name} runs or ran")
        return skipped(
            f"no pod in {self.namespace} has used {self.name}", "pull=true starts one to see"
        )

    def pulled(self) -> Verdict:
        """Start a pod with the image, wait until d2plm has told its version there, delete it."""
        pod = trial_pod(self.job)
        name = pod["metadata"]["name"]
        self._core().create_namespaced_pod(self.namespace, pod, _request_timeout=self.timeout)
        try:
            return self._watch(name)
        finally:
            self._delete(name)

    def _watch(self, name: str) -> Verdict:
        began, why = time.monotonic(), "nothing is known of it"
        while time.monotonic() - began < PULL_SECONDS:
            pod = self._core().read_namespaced_pod(
                name, self.namespace, _request_timeout=self.timeout
            )
            statuses = _statuses(pod, None)
            reason, message = _waiting(statuses[0]) if statuses else _unscheduled(pod)
            why = f"{reason} {message}".strip() or pod.status.phase
            if reason in PULL_FAILURES:
                return failed(f"{self.name}: {why}", MEND_PULL)
            if pod.status.phase in ("Succeeded", "Failed"):
                return self._ended(name, pod.status.phase, time.monotonic() - began)
            time.sleep(POLL_SECONDS)
        return failed(
            f"{self.name}: the pod has not run within {PULL_SECONDS:g} s: {why}",
            "see why it waits: launcher.node_selector, tolerations, quotas, or a slow registry",
        )

    def _ended(self, name: str, phase: str, seconds: float) -> Verdict:
        said = self._core().read_namespaced_pod_log(
            name, self.namespace, tail_lines=1, _request_timeout=self.timeout
        )
        if phase == "Failed":
            return failed(
                f"{self.name}: was pulled, but d2plm does not run in it: {said.strip()}",
                "build it for the nodes' processor with make images, and push it",
            )
        if said.strip() != f"d2plm {__version__}":
            return warning(
                f"{self.name} holds {said.strip()}, and this is {__version__}",
                "build and push both alike: make images",
            )
        return ok(f"{self.name}, pulled and run in {seconds:.0f} s: {said.strip()}")

    def _delete(self, name: str) -> None:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        with suppress(ApiException, HTTPError):  # its own deadline ends it
            self._core().delete_namespaced_pod(name, self.namespace, _request_timeout=self.timeout)

    def _core(self) -> Any:
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self.api)


def trial_pod(training: TrainingJob) -> dict[str, Any]:
    """A pod as a training job's, in account, security and placement, that tells d2plm's version."""
    job = replace(
        training,
        name=f"d2plm-doctor-{uuid4().hex[:8]}",
        gpus=0,
        cpu="100m",
        memory="512Mi",
        shared_memory="64Mi",
        claims=(),
        preparation=(),
        config_maps=(),
        secrets=(),
    )
    template = pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    container = template["spec"]["containers"][0]
    container |= {"command": ["python", "-m", "d2plm", "--version"], "args": []}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": job.name, **template["metadata"]},
        "spec": {
            **template["spec"],
            "restartPolicy": "Never",
            "activeDeadlineSeconds": round(PULL_SECONDS),
            "terminationGracePeriodSeconds": 1,
        },
    }


def _statuses(pod: Any, image: str | None) -> list[Any]:
    """Of the pod's containers that use `image`, or of the one that trains."""
    specs = [*(pod.spec.init_containers or ()), *pod.spec.containers]
    names = {one.name for one in specs if image in (one.image, None)}
    known = [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]
    return [status for status in known if status.name in names]


def _waiting(status: Any) -> tuple[str, str]:
    """(reason, message) of a container that waits."""
    waiting = status.state.waiting if status.state else None
    return ("", "") if waiting is None else (waiting.reason or "", waiting.message or "")


def _unscheduled(pod: Any) -> tuple[str, str]:
    """(reason, message) of a pod without a node."""
    conditions = pod.status.conditions or ()
    found = [c for c in conditions if c.type == "PodScheduled" and c.status != "True"]
    return (found[0].reason or "", found[0].message or "") if found else ("", "")
