"""Interpretation of a pod's status."""

from typing import Any

import pytest

from d2plm.launch.client import PYTORCHJOB
from d2plm.launch.pod_state import PodState, state_of


def pod(phase: str, containers: list[Any] | None = None, **status: Any) -> Any:
    """A pod with this status, as the API server sends it."""
    return {
        "metadata": {"name": "mine-worker-0", "uid": "1"},
        "spec": {"containers": []},
        "status": {"phase": phase, "containerStatuses": containers or [], **status},
    }


def container(name: str = "pytorch", **state: Any) -> dict[str, Any]:
    fixed = {"image": "i", "imageID": "", "ready": False, "restartCount": 0}
    return {"name": name, "state": state, **fixed}


def read(phase: str, containers: list[Any] | None = None, **status: Any) -> PodState:
    return state_of(pod(phase, containers, **status), PYTORCHJOB)


def unschedulable(message: str) -> PodState:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return read("Pending", conditions=[{**condition, "message": message}])


@pytest.mark.parametrize(
    ("message", "advice", "other"),
    [
        ("3 Insufficient nvidia.com/gpu.", "gpus", "taints"),
        ('persistentvolumeclaim "d2plm-workspace" not found.', "claims", "lower cpu"),
        ("pod has unbound immediate PersistentVolumeClaims.", "kubectl describe pvc", "lower cpu"),
        ("1 node(s) were unschedulable.", "uncordon", "lower cpu"),
        ("1 node(s) had untolerated taint {nvidia.com/gpu: present}.", "taints", "lower cpu"),
        (
            "1 node(s) had untolerated taint {node.kubernetes.io/unschedulable: }.",
            *("uncordon", "taints"),
        ),
        ("1 node(s) were unschedulable, 2 Insufficient cpu.", "lower cpu", "taints"),
        ("something new.", "lower cpu", "uncordon"),
    ],
)
def test_advice_follows_the_schedulers_message(message: str, advice: str, other: str) -> None:
    state = unschedulable(message)
    assert state.waits_for is not None and not state.has_started
    said = state.waits_for.partition(f"Unschedulable: {message}")[2]
    assert advice in said and other not in said


BACKING_OFF = {"reason": "ImagePullBackOff", "message": "no such tag"}
REMOVED = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
REMOVED |= {"message": "PodGC: node no longer exists"}
INITIALISING = container(waiting={"reason": "PodInitializing"})
UNPREPARED = [container("prepare", terminated={"exitCode": 1})]
OUT_OF_MEMORY = [container(terminated={"exitCode": 137, "reason": "OOMKilled"})]


@pytest.mark.parametrize(
    ("state", "waits_for", "has_started"),
    [
        (read("Running", [container(running={})]), None, True),
        (read("Pending", [container(waiting={"reason": "ContainerCreating"})]), None, False),
        (read("Pending", initContainerStatuses=[container("prepare", running={})]), *(None, True)),
        (read("Pending", initContainerStatuses=[container("istio", running={})]), None, False),
        *(
            (read("Pending", **{key: [container(waiting=BACKING_OFF)]}), "no such tag", False)
            for key in ("initContainerStatuses", "containerStatuses")
        ),
    ],
)
def test_what_a_pod_waits_for(state: PodState, waits_for: str | None, has_started: bool) -> None:
    assert (state.has_started, state.ended) == (has_started, None)
    assert (state.waits_for is None) == (waits_for is None)
    assert (waits_for or "") in (state.waits_for or "")


@pytest.mark.parametrize(
    ("state", "ended", "exit_code"),
    [
        (read("Succeeded", [container(terminated={"exitCode": 0})]), None, None),
        (read("Failed", OUT_OF_MEMORY), "exit code 137 (OOMKilled); raise the job's memory", 137),
        (read("Failed", [INITIALISING], initContainerStatuses=UNPREPARED), "exit code 1", 1),
        (read("Failed", reason="Evicted", message="low on memory."), "Evicted: low on me", None),
        (read("Failed", conditions=[REMOVED]), "DeletionByPodGC: PodGC: node no longer ", None),
        (read("Failed"), "failed for an unknown reason", None),
    ],
)
def test_how_a_pod_has_ended(state: PodState, ended: str | None, exit_code: int | None) -> None:
    assert state.exit_code == exit_code
    assert (state.ended is None) == (ended is None)
    assert (state.ended or "").startswith(ended or "")
    assert state.container == "prepare" or ended != "exit code 1"
