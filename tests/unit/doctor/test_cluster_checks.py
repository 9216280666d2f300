"""The checks of a cluster, over real HTTP with the real client, against a double of the API."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2plm.doctor.cluster_checks import ClusterChecks
from d2plm.doctor.verdicts import Verdicts, examine
from d2plm.launch.job_spec import TrainingJob
from tests.cluster.double import write_kube_config
from tests.conftest import MonkeyPatch
from tests.unit.doctor.api import (
    CLAIM,
    CREATE_PYTORCHJOB,
    CREATE_RUNTIME,
    CREATE_TRAINJOB,
    IMAGE,
    NAMESPACE,
    NODES,
    PODS,
    PYTORCHJOBS,
    REVIEWS,
    Api,
    claim,
    node,
    pod,
    serving,
)

CLAIM_CHECK = "claim d2plm-workspace"


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture(autouse=True)
def address(api: Api, tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[str]:
    with serving(api) as address:
        monkeypatch.setenv("KUBECONFIG", str(write_kube_config(tmp_path / "config", address)))
        yield address


def cluster_for(kind: str = "auto", timeout_seconds: float = 5, **changes: Any) -> ClusterChecks:
    """The checks for a launcher's job, which is as shipped but for `changes`."""
    whole = {"claims": {"d2plm-workspace": "/workspace"}, **changes}
    job = TrainingJob("doctor", IMAGE, (), **whole)
    return ClusterChecks(kind, job, timeout_seconds)


def verdicts(**changes: Any) -> Verdicts:
    one = cluster_for(**changes)
    assert one.reach().status == "ok"
    return examine(one.checks(), limit_seconds=20)


def test_a_healthy_cluster_is_ok_and_not_changed(api: Api, address: str) -> None:
    api.answers[PODS] = {"items": [pod("train-0", {"running": {}}, "2026-01-01T00:00:00Z", "sha")]}
    found = verdicts(gpus=8, nodes=2, queue="team")
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(found, "ok")
    assert found["GPUs"].found == "16 nvidia.com/gpu; 2 nodes × 8 requested"
    assert cluster_for().reach().found == f"v1.33.1 at {address}"
    changing = {path for method, path, _ in api.asked if method not in ("GET", "DRY-RUN")}
    assert changing == {REVIEWS}


def dry_runs(api: Api) -> dict[str, Any]:
    return {path: body for method, path, body in api.asked if method == "DRY-RUN"}


def test_the_job_that_training_would_create_is_tried(api: Api) -> None:
    verdicts(gpus=8, nodes=2, queue="team")
    tried = dry_runs(api)
    assert {*tried} == {CREATE_PYTORCHJOB, PODS}
    job = tried[CREATE_PYTORCHJOB]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    container = tried[PODS]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    ("changes", "lacking", "created"),
    [
        ({"kind": "trainjob"}, [], {CREATE_RUNTIME, CREATE_TRAINJOB}),
        ({}, ["kubeflow.org"], {CREATE_RUNTIME, CREATE_TRAINJOB}),
        ({"namespace": "other"}, [], {CREATE_PYTORCHJOB.replace("d2plm", "other")}),
    ],
)
def test_it_is_of_the_kind_and_in_the_namespace_of_the_launchers(
    api: Api, changes: dict[str, Any], lacking: list[str], created: set[str]
) -> None:
    api.lacks(*lacking)
    verdicts(**changes)
    assert {path for path in dry_runs(api) if not path.endswith("/pods")} == created


NO_RUNTIME = {CREATE_TRAINJOB: (403, "denied: trainingruntime d2plm/doctor not found")}
ONLY_KATIB: Any = {PYTORCHJOBS: {"groupVersion": "kubeflow.org/v1", "resources": []}}
TWO_MODES = claim(mode="ReadWriteOnce")
TWO_MODES["status"]["accessModes"] = ["ReadWriteOnce", "ReadWriteMany"]
TWO_NODES: Any = {NODES: {"items": [node("gpu-a", gpus=8), node("gpu-b", gpus=8)]}}
ONE_NODE: Any = {NODES: {"items": [node("gpu-a", gpus=8), node("small")]}}
NO_GPUS: Any = {NODES: {"items": [node("small")]}}
OF_JOBS = {("create", "pytorchjobs"), ("delete", "pytorchjobs"), ("get", "pods/log")}
OF_TRAINJOBS = {("create", "trainjobs"), ("create", "trainingruntimes")}
CANNOT_PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
PULLED = pod("new", {"running": {}}, "2026-02-01T00:00:00Z", "sha")
WAITS: Any = {PODS: {"items": [PULLED, pod("old", CANNOT_PULL, "2026-01-01T00:00:00Z")]}}


@pytest.mark.parametrize(
    ("check", "changes", "cluster", "status", "said"),
    [
        # What the server rejects.
        ("job", {}, {"rejected": {CREATE_PYTORCHJOB: (404, "namespaces")}}, "failed", "create nam"),
        ("job", {}, {"rejected": {CREATE_PYTORCHJOB: (403, "forbidden")}}, "failed", "access.yaml"),
        ("job", {}, {"rejected": {CREATE_PYTORCHJOB: (422, "spec.np")}}, "failed", "spec.np"),
        ("job", {"kind": "trainjob"}, {"rejected": NO_RUNTIME}, "ok", "TrainJob"),  # of a dry run
        ("job", {"kind": "trainjob"}, {"rejected": {CREATE_TRAINJOB: (403, "x")}}, "failed", "x"),
        ("job", {"kind": "pytorchjob"}, {"lacks": ["kubeflow.org"]}, "failed", "no pytorchjobs"),
        ("job", {}, {"lacks": ["kubeflow.org", "trainer.kubeflow.org"]}, "failed", "neither"),
        ("job", {}, {"answers": ONLY_KATIB}, "ok", "TrainJob"),
        ("pod", {}, {"rejected": {PODS: (403, "exceeded quota: x")}}, "failed", "raise the names"),
        ("pod", {}, {"rejected": {PODS: (403, "violates PodSecurity")}}, "failed", "access.yaml"),
        ("pod", {}, {"forbidden": {("create", "pods")}}, "skipped", ""),
        # Permissions.
        ("permissions", {"kind": "pytorchjob"}, {"forbidden": OF_JOBS}, "failed", "get pods/log"),
        ("permissions", {"kind": "trainjob"}, {"forbidden": OF_TRAINJOBS}, "failed", "trainjobs"),
        ("permissions", {"kind": "pytorchjob"}, {"forbidden": OF_TRAINJOBS}, "ok", ""),
        ("permissions", {}, {"forbidden": {("create", "pods")}}, "ok", ""),
        ("permissions", {}, {"answers": {NAMESPACE: 404}}, "failed", "no namespace d2plm"),
        # What may not be seen, and what is broken.
        ("permissions", {}, {"answers": {REVIEWS: 403}}, "skipped", "(403)"),
        ("GPUs", {}, {"answers": {NODES: 403}}, "skipped", "(403)"),
        ("GPUs", {}, {"answers": {NODES: 500}}, "failed", "500"),
        ("job", {}, {"answers": {NODES: 500}}, "ok", ""),
        # Claims.
        (CLAIM_CHECK, {}, {"answers": {CLAIM: 404}}, "failed", "no PersistentVolumeClaim"),
        (CLAIM_CHECK, {}, {"answers": {CLAIM: claim("Pending")}}, "warning", "Pending"),
        (CLAIM_CHECK, {}, {"answers": {CLAIM: claim(mode="ReadWriteOnce")}}, "warning", "Bound"),
        (CLAIM_CHECK, {}, {"answers": {CLAIM: TWO_MODES}}, "ok", "ReadWriteMany"),
        ("claim extra", {"claims": {"d2plm-workspace": "/w", "extra": "/e"}}, {}, "failed", ""),
        # GPUs, queues and images.
        ("GPUs", {"gpus": 8, "nodes": 2}, {"answers": ONE_NODE}, "warning", "8 nvidia.com/gpu; 2 "),
        ("GPUs", {"gpus": 4, "nodes": 2, "same_node": True}, {"answers": TWO_NODES}, "ok", ""),
        ("GPUs", {"gpus": 8, "nodes": 2, "same_node": True}, {"answers": TWO_NODES}, "warning", ""),
        ("GPUs", {"gpus": 1}, {"answers": NO_GPUS}, "warning", ""),
        ("GPUs", {}, {"answers": NO_GPUS}, "ok", ""),
        ("Kueue", {"queue": "absent"}, {}, "failed", "no LocalQueue absent"),
        ("Kueue", {}, {"lacks": ["kueue.x-k8s.io"]}, "skipped", ""),
        ("Kueue", {"queue": "team"}, {"lacks": ["kueue.x-k8s.io"]}, "failed", ""),
        ("image", {}, {"answers": {PODS: {"items": [PULLED]}}}, "ok", ""),
        ("image", {}, {"answers": WAITS}, "failed", "in old: ImagePullBackOff: not found"),
        ("image", {}, {}, "skipped", f"--image={IMAGE}"),
    ],
)
def test_what_is_amiss_is_found(
    api: Api, check: str, changes: dict[str, Any], cluster: Any, status: str, said: str
) -> None:
    api.answers |= cluster.get("answers", {})
    api.rejected |= cluster.get("rejected", {})
    api.forbidden |= cluster.get("forbidden", set())
    api.lacks(*cluster.get("lacks", ()))
    found = verdicts(**changes)[check]
    assert found.status == status and said in f"{found.found} {found.fix}", found


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("rejects", "(401)"),
        ("gone", "no answer ("),
        ("silent", "timed out"),
        ("unconfigured", "KUBECONFIG"),
    ],
)
def test_a_server_that_cannot_be_reached_fails_in_one_line(
    api: Api, tmp_path: Path, monkeypatch: MonkeyPatch, server: str, said: str
) -> None:
    api.answers["/apis"] = 401
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if server == "gone":
            listening.close()
            address = "http://127.0.0.1:9"
        else:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = write_kube_config(tmp_path / "other", address)
        if server == "unconfigured":
            config.write_text("clusters: 7\n")
        if server != "rejects":
            monkeypatch.setenv("KUBECONFIG", str(config))
        reach = cluster_for(timeout_seconds=0.3).reach
        found = examine({"API server": reach}, 10)["API server"]
    assert found.status == "failed" and said in found.found and "\n" not in found.found
    assert time.monotonic() - began < 5
