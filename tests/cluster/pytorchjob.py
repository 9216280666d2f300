"""The double's training operator: elastic PyTorchJobs of Workers alone, as v1.9 treats them.

Restarts under `restartPolicy: ExitCode` are not counted, so `backoffLimit` ends no job; nor does
a deadline, at which the operator looks only when something changes.
"""

from collections import Counter

from tests.cluster.kubelet import worker_of
from tests.cluster.store import Object, Store, delete_pod, made_pod, now

PORT = 23456
ALL = ("initContainerStatuses", "containerStatuses")
NO_EXIT_CODE = 0xBEEF  # the operator's value for an unknown exit code


def reconcile(store: Store, job: Object, status: Object, pods: list[Object]) -> None:
    if not status:
        text = f"PyTorchJob {job['metadata']['name']} is created."
        set_condition(status, "Created", "True", "PyTorchJobCreated", text)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    by_index = {worker_of(pod): pod for pod in pods}
    for index in range(worker["replicas"]):
        if index not in by_index:
            store.create_pod(_worker(job, index), job, "FailedCreatePod")
            continue
        _judge(store, job, status, by_index[index])
    _summarise(job, status, pods)


def _judge(store: Store, job: Object, status: Object, pod: Object) -> None:
    name = job["metadata"]["name"]
    if pod.get("status", {}).get("phase") != "Failed":
        return
    if max(exit_codes(pod, "containerStatuses"), default=NO_EXIT_CODE) >= 128:
        delete_pod(store, pod)
        text = f"job {name} is restarting because Worker replica(s) failed."
        store.warn(job, "PyTorchJobRestarting", text)
        set_condition(status, "Restarting", "True", "PyTorchJobRestarting", text)
    else:
        text = f'job "{name}" is failing because "Worker" replica(s) failed.'
        store.warn(job, "PyTorchJobFailed", text)
        set_condition(status, "Failed", "True", "PyTorchJobFailed", text)


def _summarise(job: Object, status: Object, pods: list[Object]) -> None:
    name, worker = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    phases = Counter(
        "Failed" if phase == "Running" and "deletionTimestamp" in pod["metadata"] else phase
        for pod in pods
        if (phase := pod.get("status", {}).get("phase"))
    )
    active, succeeded, failed = (phases[one] for one in ("Running", "Succeeded", "Failed"))
    if succeeded == worker["replicas"]:
        text = f"PyTorchJob {job['metadata']['namespace']}/{name} successfully completed."
        set_condition(status, "Succeeded", "True", "PyTorchJobSucceeded", text)
    elif active > 0:
        text = f"PyTorchJob {job['metadata']['namespace']}/{name} is running."
        set_condition(status, "Running", "True", "PyTorchJobRunning", text)
    if failed and worker["replicas"] > succeeded + active:
        text = f"PyTorchJob {name} is restarting because {failed} Worker replica(s) failed."
        set_condition(status, "Restarting", "True", "PyTorchJobRestarting", text)


def _worker(job: Object, index: int) -> Object:
    name = job["metadata"]["name"]
    labels = {
        "training.kubeflow.org/operator-name": "pytorchjob-controller",
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/replica-type": "worker",
        "training.kubeflow.org/replica-index": str(index),
    }
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    policy = job["spec"]["elasticPolicy"]
    variables = {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:{PORT}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_RDZV_CONF": ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"]),
    }
    return made_pod(job, template, f"{name}-worker-{index}", labels, variables)


def exit_codes(pod: Object, *kinds: str) -> set[int]:
    """Of the containers that have ended, under these keys of the pod's status."""
    known = [one for kind in kinds for one in pod.get("status", {}).get(kind, ())]
    return {ended["exitCode"] for one in known if (ended := one["state"].get("terminated"))}


def is_true(status: Object, kind: str) -> bool:
    conditions = status.get("conditions", ())
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def set_condition(status: Object, kind: str, value: str, reason: str, message: str) -> None:
    """The operator's way: Running and Restarting replace each other, and Failed is the last."""
    conditions = status.setdefault("conditions", [])
    known: Object = next((c for c in conditions if c["type"] == kind), {})
    if is_true(status, "Failed") or (known.get("status"), known.get("reason")) == (value, reason):
        return
    instead = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
    conditions[:] = [c for c in conditions if c["type"] not in (kind, instead)]
    for condition in conditions:
        if kind in ("Failed", "Succeeded") and condition["type"] == "Running":
            condition["status"] = "False"
    condition = {"type": kind, "status": value, "reason": reason, "message": message}
    conditions.append({**condition, "lastUpdateTime": now(), "lastTransitionTime": now()})
