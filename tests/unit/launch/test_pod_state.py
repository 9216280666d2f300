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


def test_a_pod_that_trains_has_started_and_waits_for_nothing() -> None:
    state = read("Running", [container(running={})])
    assert (state.has_started, state.waits_for, state.ended) == (True, None, None)


def test_a_pod_without_a_node_says_what_the_scheduler_says() -> None:
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    state = read("Pending", conditions=[{**condition, "message": message}])
    assert not state.has_started
    assert state.waits_for is not None
    assert f"Unschedulable: {message}" in state.waits_for
    assert "gpus" in state.waits_for or "gpus" in state.waits_for


@pytest.mark.parametrize(
    ("message", "advice", "other"),
    [
        ('persistentvolumeclaim "d2plm-workspace" not found.', "claims", "lower cpu"),
        ("pod has unbound immediate PersistentVolumeClaims.", "kubectl describe pvc", "lower cpu"),
        ("1 node(s) were unschedulable.", "uncordon", "lower cpu"),
        (
            "1 node(s) had untolerated taint {node.kubernetes.io/unschedulable: }.",
            "uncordon",
            "taints",
        ),
        ("1 node(s) had untolerated taint {nvidia.com/gpu: present}.", "taints", "lower cpu"),
        ("1 node(s) were unschedulable, 2 Insufficient cpu.", "lower cpu", "taints"),
        ("something new.", "lower cpu", "uncordon"),
    ],
)
def test_a_pod_without_a_node_is_given_the_advice_that_its_message_asks_for(
    message: str, advice: str, other: str
) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    message = f"0/3 nodes are available: {message}"
    waits_for = read("Pending", conditions=[{**condition, "message": message}]).waits_for
    assert waits_for is not None
    assert advice in waits_for.partition(message)[2]
    assert other not in waits_for.partition(message)[2]


def test_a_pod_without_container_statuses_ends_with_its_reason_from_wherever_it_is() -> None:
    assert read("Failed", reason="NodeShutdown", message="rejected").ended == (
        "NodeShutdown: rejected"
    )
    removed = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    removed |= {"message": "PodGC: node no longer exists"}
    state = read("Failed", [container(running={})], conditions=[removed])
    assert state.ended == "DeletionByPodGC: PodGC: node no longer exists"
    assert read("Failed").ended == "failed for an unknown reason"


@pytest.mark.parametrize("initial", [True, False])
def test_an_image_that_cannot_be_pulled_is_said_and_starting_is_not(initial: bool) -> None:
    where = "initContainerStatuses" if initial else "containerStatuses"
    backing_off = {"reason": "ImagePullBackOff", "message": "no such tag"}
    state = read("Pending", **{where: [container(waiting=backing_off)]})
    assert state.waits_for is not None
    assert "ImagePullBackOff: no such tag" in state.waits_for
    assert "image" in state.waits_for
    assert not state.has_started
    creating = container(waiting={"reason": "ContainerCreating"})
    assert read("Pending", [creating]).waits_for is None


def test_a_pod_that_ran_out_of_memory_is_reported_with_its_fix() -> None:
    state = read("Failed", [container(terminated={"exitCode": 137, "reason": "OOMKilled"})])
    assert (state.exit_code, state.reason, state.has_started) == (137, "OOMKilled", True)
    assert state.ended == (
        "exit code 137 (OOMKilled); raise the job's memory, or lower the token budget"
    )


def test_an_evicted_pod_has_ended_though_no_container_says_so() -> None:
    state = read("Failed", reason="Evicted", message="The node was low on resource: memory.")
    assert state.exit_code is None
    assert state.ended is not None
    assert state.ended.startswith("Evicted: The node was low on resource: memory.")


def test_a_preparation_that_failed_is_the_container_to_look_at() -> None:
    failed = container("prepare", terminated={"exitCode": 1, "reason": "Error"})
    waiting = container(waiting={"reason": "PodInitializing"})
    state = read("Failed", [waiting], initContainerStatuses=[failed])
    assert (state.container, state.exit_code, state.ended) == ("prepare", 1, "exit code 1")


def test_a_pod_that_prepares_has_started() -> None:
    waiting = container(waiting={"reason": "PodInitializing"})
    assert read(
        "Pending", [waiting], initContainerStatuses=[container("prepare", running={})]
    ).has_started
    assert not read(
        "Pending", [waiting], initContainerStatuses=[container("istio", running={})]
    ).has_started


def test_a_pod_that_ended_well_has_not_failed() -> None:
    state = read("Succeeded", [container(terminated={"exitCode": 0, "reason": "Completed"})])
    assert (state.ended, state.exit_code, state.has_started) == (None, None, True)
