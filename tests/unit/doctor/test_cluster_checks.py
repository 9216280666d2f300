"""The checks of a cluster, over real HTTP with the real client, against the cluster's double."""

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from d2plm.doctor.cluster_checks import ClusterChecks
from d2plm.doctor.verdicts import Verdicts, examine
from d2plm.launch.job_spec import TrainingJob
from tests.cluster import NAMESPACE, Cluster, Script
from tests.cluster.api import REVIEWS
from tests.cluster.double import write_kube_config
from tests.conftest import MonkeyPatch

IMAGE = "registry.example/you/d2plm-trainer:0.1.0"
WORKSPACE = "d2plm-workspace"
CLAIM_CHECK = f"claim {WORKSPACE}"
Arrange = Callable[[Cluster], object]


def put(cluster: Cluster, plural: str, name: str, **content: Any) -> None:
    """Make an object, or replace it."""
    place = "" if plural in ("nodes", "namespaces") else NAMESPACE
    cluster.store.remove(plural, place, name)
    cluster.store.create(plural, {"metadata": {"name": name, "namespace": place}, **content})


def put_claim(cluster: Cluster, phase: str, mode: str, **status: Any) -> None:
    content = {"spec": {"accessModes": [mode]}, "status": {"phase": phase, **status}}
    put(cluster, "persistentvolumeclaims", WORKSPACE, **content)


def put_nodes(cluster: Cluster, **gpus: int) -> None:
    """These nodes alone."""
    for node in cluster.store.list("nodes"):
        cluster.store.remove("nodes", "", node["metadata"]["name"])
    for name, number in gpus.items():
        allocatable = {"cpu": "16", **({"nvidia.com/gpu": str(number)} if number else {})}
        put(cluster, "nodes", name, status={"allocatable": allocatable})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Cluster]:
    """A healthy cluster, whose user may do everything."""
    with Cluster(tmp_path / "cluster", role=None) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        put(double, "namespaces", NAMESPACE)
        put(double, "localqueues", "team")
        put_claim(double, "Bound", "ReadWriteMany")
        put_nodes(double, first=8, second=8, small=0)
        yield double


def cluster_for(kind: str = "auto", timeout_seconds: float = 5, **changes: Any) -> ClusterChecks:
    """The checks for a launcher's job, which is as shipped but for `changes`."""
    whole = {"claims": {WORKSPACE: "/workspace"}, **changes}
    return ClusterChecks(kind, TrainingJob("doctor", IMAGE, (), **whole), timeout_seconds)


def verdicts(**changes: Any) -> Verdicts:
    return examine(cluster_for(**changes).checks(), limit_seconds=20)


def dry_runs(cluster: Cluster) -> dict[str, Any]:
    sent = [one for one in cluster.api.requests if one.query.get("dryRun") == "All"]
    return {one.resource: one.body for one in sent}


def test_a_healthy_cluster_is_ok_and_the_job_that_training_would_create_is_tried(
    cluster: Cluster,
) -> None:
    version = cluster.store.version
    found = verdicts(gpus=8, nodes=2, queue="team")
    assert found.pop("image").status == "skipped"
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(found, "ok")
    assert found["GPUs"].found == "16 nvidia.com/gpu; 2 nodes × 8 requested"
    address = f"http://127.0.0.1:{cluster.api.port}"
    assert cluster_for().reach().found == f"v1.36.2 at {address}"
    # Unlike the version, the groups are only for accounts that the server knows.
    assert "/apis" in [one.path for one in cluster.api.requests]
    assert cluster.store.version == version  # nothing has changed
    tried = dry_runs(cluster)
    assert {*tried} == {"pytorchjobs", "pods"}
    job = tried["pytorchjobs"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    container = tried["pods"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def lacking(*plurals: str) -> Arrange:
    return lambda cluster: [cluster.api.served.pop(plural) for plural in plurals]


def forbidden(*pairs: tuple[str, str]) -> Arrange:
    return lambda cluster: [cluster.forbid(*pair) for pair in pairs]


def without_namespace(cluster: Cluster) -> None:
    cluster.store.remove("namespaces", "", NAMESPACE)


def test_the_job_is_of_the_launchers_kind(cluster: Cluster) -> None:
    for arrange, kind in ((lacking(), "trainjob"), (lacking("pytorchjobs"), "auto")):
        cluster.api.requests.clear()
        arrange(cluster)
        # The webhook misses the runtime, which a dry run does not create.
        assert verdicts(kind=kind)["job"].status == "ok"
        assert {*dry_runs(cluster)} == {"trainingruntimes", "trainjobs", "pods"}


OF_JOBS = forbidden(("create", "pytorchjobs"), ("delete", "pytorchjobs"), ("get", "pods/log"))
OF_TRAINJOBS = forbidden(("create", "trainjobs"), ("create", "trainingruntimes"))
NO_PODS = forbidden(("create", "pods"))
FAILING = partial(Cluster.fail_next, times=100)
INVALID = partial(FAILING, status=422, verb="create", resource="pytorchjobs")
NO_REVIEWS = partial(FAILING, status=403, verb="create", resource=REVIEWS)
BROKEN = partial(FAILING, status=500, verb="list", resource="nodes")
PENDING = partial(put_claim, phase="Pending", mode="ReadWriteMany")
ONE_MODE = partial(put_claim, phase="Bound", mode="ReadWriteOnce")
BOTH_MODES = partial(ONE_MODE, accessModes=["ReadWriteOnce", "ReadWriteMany"])
ONE_NODE, TWO_NODES = partial(put_nodes, a=8, b=0), partial(put_nodes, a=8, b=8)


@pytest.mark.parametrize(
    ("check", "changes", "arrange", "status", "said"),
    [
        # What the server rejects.
        ("job", {"namespace": "other"}, lacking(), "failed", "create namespace other"),
        ("job", {}, OF_JOBS, "failed", "access.yaml"),
        ("job", {}, INVALID, "failed", "a fault of a test"),
        ("job", {"kind": "trainjob"}, forbidden(("create", "trainjobs")), "failed", "cannot"),
        ("job", {"kind": "pytorchjob"}, lacking("pytorchjobs"), "failed", "no pytorchjobs"),
        ("job", {}, lacking("pytorchjobs", "trainjobs"), "failed", "neither"),
        ("pod", {}, Cluster.over_quota, "failed", "raise the names"),
        ("pod", {}, NO_PODS, "skipped", ""),
        # Permissions.
        ("permissions", {}, OF_JOBS, "failed", "get pods/log"),
        ("permissions", {"kind": "trainjob"}, OF_TRAINJOBS, "failed", "trainjobs"),
        ("permissions", {}, OF_TRAINJOBS, "ok", ""),
        ("permissions", {}, NO_PODS, "ok", ""),
        ("permissions", {}, without_namespace, "failed", "no namespace d2plm"),
        # What may not be seen, and what is broken.
        ("permissions", {}, NO_REVIEWS, "skipped", "(403)"),
        ("GPUs", {}, BROKEN, "failed", "500"),
        # Claims.
        (CLAIM_CHECK, {}, PENDING, "warning", "Pending"),
        (CLAIM_CHECK, {}, ONE_MODE, "warning", "Bound"),
        (CLAIM_CHECK, {}, BOTH_MODES, "ok", "ReadWriteMany"),
        ("claim extra", {"claims": {"extra": "/e"}}, lacking(), "failed", "no Persistent"),
        # GPUs and queues.
        ("GPUs", {"gpus": 8, "nodes": 2}, ONE_NODE, "warning", "8 nvidia.com/gpu; 2 "),
        ("GPUs", {"gpus": 4, "nodes": 2, "same_node": True}, TWO_NODES, "ok", ""),
        ("GPUs", {"gpus": 8, "nodes": 2, "same_node": True}, TWO_NODES, "warning", ""),
        ("GPUs", {}, partial(put_nodes, a=0), "ok", ""),
        ("Kueue", {"queue": "absent"}, lacking(), "failed", "no LocalQueue absent"),
        ("Kueue", {}, lacking(), "skipped", ""),
        ("Kueue", {"queue": "team"}, lacking("localqueues", "workloads"), "failed", "no LocalQ"),
    ],
)
def test_what_is_amiss_is_found(
    cluster: Cluster, check: str, changes: dict[str, Any], arrange: Arrange, status: str, said: str
) -> None:
    arrange(cluster)
    found = verdicts(**changes)[check]
    assert found.status == status and said in f"{found.found} {found.fix}", found


def test_a_pod_that_waits_for_the_image_is_named(cluster: Cluster) -> None:
    assert f"--image={IMAGE}" in verdicts()["image"].fix
    cluster.script(Script(seconds=None))
    spec = {"containers": [{"name": "pytorch", "image": IMAGE}]}
    for name, arrange, states in (
        ("pulled", lacking(), "running"),
        ("waits", Cluster.without_image, "ImagePullBackOff"),
    ):
        arrange(cluster)
        put(cluster, "pods", name, spec=spec, status={})
        cluster.wait_for(lambda: states in str(cluster.pod(name)["status"]))  # noqa: B023
        found = verdicts()["image"]
        assert found.status == ("ok" if name == "pulled" else "failed")
    assert "in waits: ImagePullBackOff: " in found.found


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
    cluster: Cluster, monkeypatch: MonkeyPatch, server: str, said: str
) -> None:
    cluster.fail_next(1, 401)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = 9 if server == "gone" else listening.getsockname()[1]
        config = write_kube_config(cluster.folder / "other", f"http://127.0.0.1:{port}")
        if server == "unconfigured":
            config.write_text("clusters: 7\n")
        if server != "rejects":
            monkeypatch.setenv("KUBECONFIG", str(config))
        reach = cluster_for(timeout_seconds=0.3).reach
        found = examine({"API server": reach}, 10)["API server"]
    assert found.status == "failed" and said in found.found and "\n" not in found.found
    assert time.monotonic() - began < 5
