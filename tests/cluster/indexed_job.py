"""The double's Job controller: Indexed Jobs with a limit of failures for each index.

As Kubernetes' documentation has it (1.33, in which `backoffLimitPerIndex` is stable): a pod's
failure is met by the first rule of `podFailurePolicy` that fits; else it counts against its index,
whose next pod comes after a backoff. The Job goes on while any index can, and then has failed if
one has.
"""

from collections import Counter
from datetime import UTC, datetime

from d2plm.core.shards import format_indices
from tests.cluster.kubelet import worker_of
from tests.cluster.pytorchjob import ALL, exit_codes, is_true, set_condition
from tests.cluster.store import Object, Store, made_pod, now, suffix

BACKOFF_SECONDS = 0.1  # doubled with each failure of an index; 10 s in a cluster


def reconcile(store: Store, job: Object, status: Object, pods: list[Object]) -> None:
    spec, failures = job["spec"], Counter[int]()
    done, failed, active = set[int](), set[int](), set[int]()
    last_failure: dict[int, Object] = {}
    for pod in pods:
        index, phase = worker_of(pod), pod.get("status", {}).get("phase")
        if phase == "Succeeded":
            done.add(index)
        elif phase == "Failed":
            last_failure[index] = pod
            action = _action(spec.get("podFailurePolicy", {}), pod)
            if action == "FailIndex":
                failed.add(index)
            elif action == "Count":
                failures[index] += 1
                if failures[index] > spec["backoffLimitPerIndex"]:
                    failed.add(index)
        else:
            active.add(index)
    failed -= done
    for index in range(spec["completions"]):
        waits = index in last_failure and _seconds_since_end(last_failure[index]) < (
            BACKOFF_SECONDS * 2 ** failures[index]
        )
        is_free = index not in done | failed | active and not waits
        if is_free and len(active) < spec["parallelism"]:
            store.create_pod(_pod(job, index), job, "FailedCreate")
            active.add(index)
    status["active"] = len(active - done - failed)
    status["succeeded"], status["failed"] = len(done), len(last_failure)
    status["completedIndexes"] = format_indices(sorted(done))
    status |= {"failedIndexes": format_indices(sorted(failed))} if failed else {}
    status.setdefault("startTime", now())
    seconds = (datetime.now(UTC) - datetime.fromisoformat(status["startTime"])).total_seconds()
    if seconds > spec.get("activeDeadlineSeconds", seconds):
        text = "Job was active longer than specified deadline"
        set_condition(status, "Failed", "True", "DeadlineExceeded", text)
    elif len(done | failed) == spec["completions"]:
        if failed:
            set_condition(status, "Failed", "True", "FailedIndexes", "Job has failed indexes")
        else:
            set_condition(status, "Complete", "True", "CompletionsReached", "Reached the number")


def _action(policy: Object, pod: Object) -> str:
    """Of the first rule that fits a failed pod; without one, its failure counts."""
    status, codes = pod["status"], exit_codes(pod, *ALL)
    for rule in policy.get("rules", ()):
        of_codes = {*rule.get("onExitCodes", {}).get("values", ())}
        of_conditions = rule.get("onPodConditions", ())
        if codes & of_codes or any(is_true(status, one["type"]) for one in of_conditions):
            return str(rule["action"])
    return "Count"


def _seconds_since_end(pod: Object) -> float:
    """Since a failed pod's container ended, to the second; long ago if it has never run."""
    for known in pod["status"].get("containerStatuses", ()):
        if at := known["state"].get("terminated", {}).get("finishedAt"):
            return (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()
    return float("inf")


def _pod(job: Object, index: int) -> Object:
    name = job["metadata"]["name"]
    labels = {
        "batch.kubernetes.io/job-name": name,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    return made_pod(job, job["spec"]["template"], f"{name}-{index}-{suffix()}", labels, variables)
