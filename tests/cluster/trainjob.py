"""The double's Trainer v2: TrainJobs with their runtime, the JobSet and its Job folded into one.

Pods are named and labelled as a JobSet's. A pod that fails fails the whole job, which starts anew
unless its `podFailurePolicy` says that the exit code is permanent.
"""

from tests.cluster.pytorchjob import ALL, exit_codes, set_condition
from tests.cluster.store import RESOURCES, Object, Refusal, Store, delete_pod, made_pod, suffix

PORT = 29400
CONTAINER = "node"
CACHE_SECONDS = 0.05  # by which its view of runtimes lags behind
ATTEMPT = "cluster-double/restart-attempt"  # annotation; a JobSet has it in its status


def admit(store: Store, job: Object) -> None:
    """Trainer's validating webhook, of a new TrainJob and of every change but those of its status.

    Seen with Trainer 2.3 on Kubernetes 1.36: it looks for the runtime in a cache, and so refused
    one of three TrainJobs that were applied from one file with their runtime; and it refuses to
    let the finalizer of a foreground deletion be removed when the runtime is gone, for ever. No
    finalizer of Trainer's keeps a runtime that is in use: 2.3 has removed them.
    """
    plural, place, name = _runtime(job)
    seen = [one for one in store.list(plural, place) if store.age(one) > CACHE_SECONDS]
    if name not in [runtime["metadata"]["name"] for runtime in seen]:
        kind = RESOURCES[plural].kind
        text = (
            f'spec.runtimeRef: Invalid value: {kind}.trainer.kubeflow.org "{name}" not found: '
            f"specified {kind[0].lower()}{kind[1:]} must be created before the TrainJob is created"
        )
        webhook = f'admission webhook "validator.trainjob.{RESOURCES["trainjobs"].group}"'
        raise Refusal(403, "Forbidden", f"{webhook} denied the request: {text}")


def _runtime(job: Object) -> tuple[str, str, str]:
    reference = job["spec"]["runtimeRef"]
    if reference.get("kind") == "TrainingRuntime":
        return "trainingruntimes", job["metadata"]["namespace"], reference["name"]
    return "clustertrainingruntimes", "", reference["name"]


def reconcile(store: Store, job: Object, status: Object, pods: list[Object]) -> None:
    runtime, metadata = store.get(*_runtime(job)), job["metadata"]
    template = runtime["spec"]["template"]["spec"]
    attempt = int(metadata.get("annotations", {}).get(ATTEMPT, 0))
    of_attempt = [pod for pod in pods if _attempt(pod) == attempt]
    nodes = _nodes(job, runtime)
    if not of_attempt:
        if pods:
            return  # those of the last attempt are still going
        for index in range(nodes):
            store.create_pod(_node(job, runtime, index, attempt), _job(job), "FailedCreate")
        return
    done, failed = (
        [pod for pod in of_attempt if pod["status"].get("phase") == phase]
        for phase in ("Succeeded", "Failed")
    )
    policy = template["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    fatal = {code for rule in policy["rules"] for code in rule["onExitCodes"]["values"]}
    if failed and exit_codes(failed[0], *ALL) & fatal:
        text = "jobset failed due to FailJobSet failure policy action"
        set_condition(status, "Failed", "True", "FailJobSetFailurePolicyAction", text)
    elif len(done) == nodes:
        text = "jobset completed successfully"
        set_condition(status, "Complete", "True", "AllJobsCompleted", text)
    elif not failed and len(of_attempt) == nodes:
        return
    # Or a pod was taken away; with a backoffLimit of 0 its job has failed.
    elif attempt >= template.get("failurePolicy", {}).get("maxRestarts", 0):
        text = "jobset failed due to reaching max number of restarts"
        set_condition(status, "Failed", "True", "ReachedMaxRestarts", text)
    else:
        for pod in of_attempt:
            delete_pod(store, pod)
        store.warn(job, "JobSetRestarted", f"restarting jobset, attempt: {attempt + 1}")
        with store.edit("trainjobs", metadata["namespace"], metadata["name"]) as edited:
            edited["metadata"].setdefault("annotations", {})[ATTEMPT] = str(attempt + 1)


def _attempt(pod: Object) -> int:
    return int(pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"])


def _nodes(job: Object, runtime: Object) -> int:
    trainer = job["spec"].get("trainer", {})
    return int(trainer.get("numNodes", runtime["spec"].get("mlPolicy", {}).get("numNodes", 1)))


def _job(job: Object) -> Object:
    """The Job that the JobSet makes, as far as events regard it."""
    metadata = job["metadata"]
    own = {"name": f"{metadata['name']}-{CONTAINER}-0", "uid": f"{metadata['uid']}-job"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**metadata, **own}}


def _node(job: Object, runtime: Object, index: int, attempt: int) -> Object:
    name, number = job["metadata"]["name"], {"batch.kubernetes.io/job-completion-index": str(index)}
    replicated = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    labels = {
        "jobset.sigs.k8s.io/jobset-name": name,
        "jobset.sigs.k8s.io/replicatedjob-name": CONTAINER,
        "jobset.sigs.k8s.io/job-index": "0",
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        "batch.kubernetes.io/job-name": f"{name}-{CONTAINER}-0",
        **number,
    }
    template = replicated["template"]["spec"]["template"]
    trainer = job["spec"].get("trainer", {})
    variables = {one["name"]: one["value"] for one in trainer.get("env", ())} | {
        "PET_NNODES": str(_nodes(job, runtime)),
        "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", _automatic(trainer))),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-{CONTAINER}-0-0.{name}",
        "PET_MASTER_PORT": str(PORT),
    }
    pod_name = f"{name}-{CONTAINER}-0-{index}-{suffix()}"
    pod = made_pod(job, template, pod_name, labels, variables)
    pod["metadata"].setdefault("annotations", {}).update(number)
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER)
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    return pod


def _automatic(trainer: Object) -> str:
    """Processes of a node (torch.go of Trainer's source): a CPU each, or what torchrun finds."""
    limits = trainer.get("resourcesPerNode", {}).get("limits")
    if limits is None or any("gpu" in name for name in limits):
        return "auto"
    return str(max(int(limits.get("cpu", 1)), 1))
