"""The checks of a cluster, over real HTTP with the real client, against a double of the API."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2plm.doctor.cluster_checks import ClusterChecks
from d2plm.doctor.verdicts import Verdict, Verdicts, examine
from d2plm.launch.job_spec import TrainingJob
from tests.unit.doctor.api import (
    CLAIM,
    CREATE_PYTORCHJOB,
    CREATE_RUNTIME,
    CREATE_TRAINJOB,
    IMAGE,
    ISTIO,
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
    write_kube_config,
)

CLAIM_CHECK = "claim d2plm-workspace"


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture(autouse=True)
def address(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(api) as address:
        monkeypatch.setenv("KUBECONFIG", str(write_kube_config(tmp_path / "config", address)))
        yield address


def cluster_for(
    kind: str = "auto",
    timeout_seconds: float = 5,
    image: str = IMAGE,
    tracking_uri: str | None = None,
    **changes: Any,
) -> ClusterChecks:
    """The checks for a launcher's job, which is as shipped but for `changes`."""
    whole = {"claims": {"d2plm-workspace": "/workspace"}, **changes}
    job = TrainingJob("doctor", image, (), **whole)
    return ClusterChecks(kind, job, timeout_seconds, tracking_uri)


def verdicts(**changes: Any) -> Verdicts:
    one = cluster_for(**changes)
    assert one.reach().status == "ok"
    return examine(one.checks(), limit_seconds=20)


def verdict(check: str, **changes: Any) -> Verdict:
    return verdicts(**changes)[check]


def test_in_a_healthy_cluster_nothing_is_amiss(api: Api) -> None:
    api.answers[PODS] = {"items": [pod("train-0", {"running": {}}, "2026-01-01T00:00:00Z", "sha")]}
    found = verdicts(gpus=8, nodes=2, queue="team")
    assert {name: one.status for name, one in found.items()} == dict.fromkeys(found, "ok")
    assert found["job"].found == "d2plm accepts the PyTorchJob (dry run)"
    assert found["pod"].found == "d2plm admits a pod of the job (dry run)"
    assert found[CLAIM_CHECK].found == "Bound, ReadWriteMany"
    assert found["GPUs"].found == "16 nvidia.com/gpu; 2 nodes × 8 requested"


def test_looking_changes_nothing_in_the_cluster(api: Api) -> None:
    verdicts()
    changing = {path for method, path, _ in api.asked if method not in ("GET", "DRY-RUN")}
    assert changing == {REVIEWS}


def test_the_server_and_its_version_are_reported(address: str) -> None:
    assert cluster_for().reach().found == f"v1.33.1 at {address}"


def test_the_job_that_training_would_create_is_tried(api: Api) -> None:
    verdicts(gpus=8, nodes=2, queue="team")
    tried = {path: body for method, path, body in api.asked if method == "DRY-RUN"}
    assert {*tried} == {CREATE_PYTORCHJOB, PODS}
    job = tried[CREATE_PYTORCHJOB]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    container = tried[PODS]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_the_namespace_is_the_contexts_unless_the_launcher_names_another(api: Api) -> None:
    verdicts(namespace="other")
    tried = {path for method, path, _ in api.asked if method == "DRY-RUN"}
    assert CREATE_PYTORCHJOB.replace("d2plm", "other") in tried and CREATE_PYTORCHJOB not in tried


@pytest.mark.parametrize(
    ("status", "message", "fix"),
    [
        (404, 'namespaces "d2plm" not found', "kubectl create namespace d2plm"),
        (403, 'pytorchjobs is forbidden: User "me" cannot create', "k8s/base/access.yaml"),
        (422, "spec.nprocPerNode: Invalid value", "correct the setting"),
    ],
)
def test_a_job_that_the_server_rejects_fails_with_its_reason(
    api: Api, status: int, message: str, fix: str
) -> None:
    api.rejected[CREATE_PYTORCHJOB] = (status, message)
    found = verdict("job")
    assert found.status == "failed" and fix in found.found
    assert status == 404 or message in found.found


def test_the_job_is_of_the_kind_that_the_launcher_would_create(api: Api) -> None:
    verdicts(kind="trainjob")
    tried = {path for method, path, _ in api.asked if method == "DRY-RUN"}
    assert tried == {CREATE_RUNTIME, CREATE_TRAINJOB, PODS}
    api.lacks("kubeflow.org")
    assert "accepts the TrainJob" in verdict("job").found


def test_a_trainjob_whose_runtime_a_dry_run_has_not_created_is_well(api: Api) -> None:
    api.rejected[CREATE_TRAINJOB] = (403, "denied: trainingruntime d2plm/doctor not found")
    assert verdict("job", kind="trainjob").status == "ok"
    api.rejected[CREATE_TRAINJOB] = (403, "denied: numNodes must be 1")
    assert verdict("job", kind="trainjob").status == "failed"


@pytest.mark.parametrize(
    "message", ["exceeded quota: requested: memory=64Gi", "violates PodSecurity restricted"]
)
def test_a_pod_that_the_namespace_does_not_admit_fails_with_the_reason(
    api: Api, message: str
) -> None:
    api.rejected[PODS] = (403, f'pods "doctor" is forbidden: {message}')
    found = verdict("pod")
    assert found.status == "failed" and message in found.found
    assert ("raise the namespace's quota" in found.found) == ("quota" in message)
    assert ("access.yaml" in found.found) == ("quota" not in message)


def test_an_account_that_may_not_create_pods_tries_none(api: Api) -> None:
    api.forbidden = {("create", "pods")}
    found = verdicts()
    assert found["pod"].status == "skipped"
    assert found["permissions"].status == "ok"  # the launcher creates jobs alone
    assert ("DRY-RUN", PODS) not in {one[:2] for one in api.asked}


def test_a_job_kind_that_the_launcher_wants_and_the_cluster_lacks_fails(api: Api) -> None:
    api.lacks("kubeflow.org")
    found = verdict("job", kind="pytorchjob")
    assert found.status == "failed"
    assert "no pytorchjobs.kubeflow.org; install the Kubeflow training operator" in found.found
    api.lacks("trainer.kubeflow.org")
    assert "has neither" in verdict("job").found


def test_the_group_alone_is_not_taken_for_the_job_kind(api: Api) -> None:
    api.answers[PYTORCHJOBS] = {"groupVersion": "kubeflow.org/v1", "resources": []}  # Katib's
    assert "accepts the TrainJob" in verdict("job").found


def test_missing_permissions_are_named_with_their_verbs(api: Api) -> None:
    api.forbidden = {("create", "pytorchjobs"), ("delete", "pytorchjobs"), ("get", "pods/log")}
    found = verdict("permissions", kind="pytorchjob")
    assert found.status == "failed"
    assert "create pytorchjobs, delete pytorchjobs" in found.found and "get pods/log" in found.found
    assert "d2plm-launcher" in found.fix


def test_permissions_for_a_job_kind_that_is_not_used_are_not_asked_for(api: Api) -> None:
    api.forbidden = {("create", "trainjobs"), ("create", "trainingruntimes")}
    assert verdict("permissions", kind="pytorchjob").status == "ok"
    assert verdict("permissions", kind="trainjob").status == "failed"


@pytest.mark.parametrize(
    ("check", "path"), [("permissions", REVIEWS), (CLAIM_CHECK, CLAIM), ("GPUs", NODES)]
)
def test_what_may_not_be_seen_is_skipped_and_the_rest_continues(
    api: Api, check: str, path: str
) -> None:
    api.answers[path] = 403
    found = verdicts()
    assert found[check].status == "skipped" and "says no (403)" in found[check].found
    assert found["Kueue"].status == "skipped"


def test_a_broken_answer_fails_its_own_check_alone(api: Api) -> None:
    api.answers[NODES] = 500
    found = verdicts()
    assert found["GPUs"].status == "failed" and "500" in found["GPUs"].found
    assert found["job"].status == "ok"


def test_a_missing_claim_fails(api: Api) -> None:
    del api.answers[CLAIM]
    assert "no PersistentVolumeClaim d2plm-workspace" in verdict(CLAIM_CHECK).found


@pytest.mark.parametrize(
    ("seen", "status"),
    [(claim(), "ok"), (claim(mode="ReadWriteOnce"), "warning"), (claim("Pending"), "warning")],
)
def test_a_claim_is_shown_with_its_phase_and_access_mode(
    api: Api, seen: dict[str, Any], status: str
) -> None:
    api.answers[CLAIM] = seen
    found = verdict(CLAIM_CHECK)
    assert found.status == status
    assert found.found.startswith(f"{seen['status']['phase']}, {seen['spec']['accessModes'][0]}")


def test_every_claim_of_the_launcher_is_looked_at() -> None:
    found = verdicts(claims={"d2plm-workspace": "/w", "extra": "/e"})
    assert found["claim extra"].status == "failed"


def test_a_claim_has_the_access_modes_of_its_volume(api: Api) -> None:
    seen = claim(mode="ReadWriteOnce")
    seen["status"]["accessModes"] = ["ReadWriteOnce", "ReadWriteMany"]
    api.answers[CLAIM] = seen
    assert verdict(CLAIM_CHECK) == Verdict("ok", "Bound, ReadWriteOnce, ReadWriteMany")


def test_an_administrator_has_no_permissions_in_a_namespace_that_does_not_exist(api: Api) -> None:
    del api.answers[NAMESPACE]
    found = verdict("permissions")
    assert found.status == "failed" and found.found == "the cluster has no namespace d2plm"
    api.forbidden = {("get", "namespaces")}  # an account that cannot know
    assert verdict("permissions").status == "ok"


def policy(mode: str, namespace: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": mode.lower(), "namespace": namespace}
    return {"metadata": metadata, "spec": {"mtls": {"mode": mode}, **spec}}


@pytest.mark.parametrize(
    ("own", "of_mesh", "strict"),
    [
        (["STRICT"], [], "mlflow/strict"),
        ([], ["STRICT"], "istio-system/strict"),
        (["PERMISSIVE"], ["STRICT"], None),
        ([], [], None),
    ],
)
def test_a_strict_peer_authentication_is_named(
    api: Api, own: list[str], of_mesh: list[str], strict: str | None
) -> None:
    api.answers[ISTIO] = {"preferredVersion": {"version": "v1"}}
    for namespace, modes in (("mlflow", own), ("istio-system", of_mesh)):
        items = [policy(mode, namespace) for mode in modes]
        path = f"{ISTIO}/v1/namespaces/{namespace}/peerauthentications"
        api.answers[path] = {"items": items}
    found = verdict("Istio", tracking_uri="http://server.mlflow.svc.cluster.local:5000")
    assert found.status == ("ok" if strict is None else "warning")
    assert strict is None or (strict in found.found and "PERMISSIVE" in found.fix)


def test_too_few_gpus_are_warned_of(api: Api) -> None:
    api.answers[NODES] = {"items": [node("gpu-a", gpus=8), node("small")]}
    found = verdict("GPUs", gpus=8, nodes=2)
    assert found.status == "warning"
    assert found.found == "8 nvidia.com/gpu; 2 nodes × 8 requested"


def test_nodes_that_must_be_on_one_machine_need_its_gpus_together(api: Api) -> None:
    api.answers[NODES] = {"items": [node("gpu-a", gpus=8), node("gpu-b", gpus=8)]}
    assert verdict("GPUs", gpus=4, nodes=2, same_node=True).status == "ok"
    assert verdict("GPUs", gpus=8, nodes=2, same_node=True).status == "warning"


def test_a_cluster_without_gpus_is_well_for_a_job_that_asks_for_none(api: Api) -> None:
    api.answers[NODES] = {"items": [node("small")]}
    assert verdict("GPUs").status == "ok"
    assert verdict("GPUs", gpus=1).status == "warning"


def test_a_queue_needs_kueue_and_must_exist(api: Api) -> None:
    assert "no LocalQueue absent" in verdict("Kueue", queue="absent").found
    api.lacks("kueue.x-k8s.io")
    assert verdict("Kueue").status == "skipped"
    assert verdict("Kueue", queue="team").status == "failed"


def test_a_pod_that_waits_for_the_image_fails(api: Api) -> None:
    pulled = pod("new", {"running": {}}, "2026-02-01T00:00:00Z", "sha")
    api.answers[PODS] = {"items": [pulled]}
    assert verdict("image").status == "ok"
    cannot = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    api.answers[PODS] = {"items": [pulled, pod("old", cannot, "2026-01-01T00:00:00Z")]}
    found = verdict("image")
    assert found.status == "failed" and "in old: ImagePullBackOff: not found" in found.found


def test_an_image_that_no_pod_has_used_is_skipped_with_the_way_to_try_it() -> None:
    found = verdict("image")
    assert found.status == "skipped" and f"--image={IMAGE}" in found.fix


def reached(**changes: Any) -> Verdict:
    return examine({"API server": cluster_for(**changes).reach}, 10)["API server"]


def test_a_server_that_rejects_the_account_reports_it(api: Api) -> None:
    api.answers["/apis"] = 401
    found = reached()
    assert found.status == "failed" and "(401); renew the credentials" in found.found


def test_a_server_that_is_gone_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as freed:
        port = freed.getsockname()[1]
    config = write_kube_config(tmp_path / "gone", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("KUBECONFIG", str(config))
    found = reached()
    assert found.status == "failed" and "no answer (" in found.found


def test_a_server_that_never_answers_is_given_up_after_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(write_kube_config(tmp_path / "silent", address)))
        began = time.monotonic()
        found = reached(timeout_seconds=0.3)
    assert found.status == "failed" and "timed out" in found.found
    assert time.monotonic() - began < 3


def test_an_invalid_configuration_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_text("clusters: 7\n")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    found = reached()
    assert found.status == "failed"
    assert "KUBECONFIG" in found.found and "\n" not in found.found
