"""The double's Kueue (0.17): it suspends a job with a queue, and says in its Workload why."""

from tests.cluster.store import Object, Store, owner

QUEUE = "kueue.x-k8s.io/queue-name"


def set_suspended(job: Object, value: bool) -> None:
    spec = job["spec"]
    (spec["runPolicy"] if job["kind"] == "PyTorchJob" else spec)["suspend"] = value


def reconcile(store: Store, plural: str, job: Object) -> None:
    """Admit a job whose queue exists and has room; the texts were seen on a cluster."""
    metadata, queue = job["metadata"], job["metadata"].get("labels", {}).get(QUEUE)
    if store.queues is None or queue is None:
        return
    message = store.queues.get(queue, f"LocalQueue {queue} doesn't exist")
    reason = "Pending" if queue in store.queues else "Inadmissible"
    condition = {"type": "QuotaReserved", "status": "False", "reason": reason, "message": message}
    if not message:
        condition |= {"status": "True", "reason": "QuotaReserved"}
    name, place = f"{job['kind'].lower()}-{metadata['name']}-cea58", metadata["namespace"]
    if not store.list("workloads"):
        made = {"name": name, "namespace": place, "ownerReferences": [owner(job)]}
        made["labels"] = {"kueue.x-k8s.io/job-uid": metadata["uid"]}
        store.create("workloads", {"metadata": made})
    with store.edit("workloads", place, name) as edited:
        edited["status"] = {"conditions": [condition]}
    with store.edit(plural, place, metadata["name"]) as edited:
        set_suspended(edited, bool(message))
