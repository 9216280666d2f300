"""The cluster's test double behaves as a real cluster, seen through the official client."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
from kubernetes.client.exceptions import ApiException

from d2plm.launch.job_spec import TrainingJob, pytorchjob, training_runtime, trainjob
from tests.cluster import NAMESPACE, Cluster, Script
from tests.cluster.store import owner as owner_of
from tests.cluster.trainjob import CACHE_SECONDS

GROUP = """
import os, torch, torch.distributed as distributed
distributed.init_process_group("gloo")
total = torch.ones(())
distributed.all_reduce(total)
print(f"{os.environ['WORD']} {distributed.get_rank()} of {int(total)}", flush=True)
distributed.barrier()
distributed.destroy_process_group()
"""
RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
JOB = TrainingJob("run", "image:1", ("/workspace/group.py",), nodes=2)
LONG = Script(seconds=None)
TORCH_SECONDS = 120  # it is imported by four processes, on a machine that may be busy


class Client:
    """The official client's calls, shortened."""

    def __init__(self, cluster: Cluster) -> None:
        self.api = kubernetes.config.new_client_from_config(str(cluster.kube_config))
        self.core = kubernetes.client.CoreV1Api(self.api)
        self.objects = kubernetes.client.CustomObjectsApi(self.api)
        self.pytorchjobs = ("kubeflow.org", "v1", NAMESPACE, "pytorchjobs")

    def create(self, job: TrainingJob = JOB) -> Any:
        return self.objects.create_namespaced_custom_object(*self.pytorchjobs, pytorchjob(job))

    def create_trainjob(self, job: TrainingJob = JOB, pause: float = 2 * CACHE_SECONDS) -> None:
        where = ("trainer.kubeflow.org", "v1alpha1", NAMESPACE)
        for plural, build in {"trainingruntimes": training_runtime, "trainjobs": trainjob}.items():
            self.objects.create_namespaced_custom_object(*where, plural, build(job))
            time.sleep(pause)

    def delete(self) -> None:
        self.objects.delete_namespaced_custom_object(*self.pytorchjobs, "run")

    def watch(self, **settings: Any) -> Iterator[Any]:
        function = self.objects.list_namespaced_custom_object
        return kubernetes.watch.Watch().stream(function, *self.pytorchjobs, **settings)

    def follow(self, pod: str) -> Iterator[str]:
        watch = kubernetes.watch.Watch()
        return watch.stream(self.core.read_namespaced_pod_log, pod, NAMESPACE, follow=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, mounts={"/workspace": tmp_path}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Client:
    return Client(cluster)


def condition(cluster: Cluster, kind: str, plural: str = "pytorchjobs", seconds: float = 90) -> Any:
    """A condition of the job, once it holds."""

    def find() -> Any:
        job = cluster.job("run", plural)
        conditions = (job or {}).get("status", {}).get("conditions", ())
        return next((c for c in conditions if (c["type"], c["status"]) == (kind, "True")), None)

    return cluster.wait_for(find, seconds)


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def state(client: Client, pod: str) -> Any:
    return client.core.read_namespaced_pod(pod, NAMESPACE).status.container_statuses[0].state


def test_two_pods_commands_run_as_torchrun_and_form_one_group(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "group.py").write_text(GROUP)
    cluster.configure("configmaps", "d2plm-config", {"WORD": "rank"})
    client.create()
    condition(cluster, "Succeeded", seconds=TORCH_SECONDS)
    logs = [cluster.log(f"run-worker-{index}") for index in (0, 1)]
    # Each agent gives its own process a rank; which of them is the first is not settled.
    assert sorted(line for log in logs for line in log.splitlines() if "rank" in line) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ], logs


def test_two_nodes_of_a_trainjob_form_one_group(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "group.py").write_text(RANK)
    client.create_trainjob()
    condition(cluster, "Complete", "trainjobs", TORCH_SECONDS)
    assert "rank 0 of 2" in cluster.log("run-node-0-0-")
    assert "rank 1 of 2" in cluster.log("run-node-0-1-")


def test_a_job_is_reported_in_the_operators_words(cluster: Cluster, client: Client) -> None:
    cluster.script(Script(lines=("one", "two"), interval=0.1))
    client.create()
    seen = []
    for event in client.watch(timeout_seconds=20):
        status = event["object"].get("status", {})
        seen.append([c["type"] for c in status.get("conditions", ()) if c["status"] == "True"])
        if "Succeeded" in seen[-1]:
            break
    assert ["Created", "Running"] in seen
    assert seen[-1] == ["Created", "Succeeded"]
    selector = "training.kubeflow.org/job-name=run,training.kubeflow.org/replica-index in (0, 1)"
    pods = client.core.list_namespaced_pod(NAMESPACE, label_selector=selector).items
    assert [pod.metadata.name for pod in pods] == ["run-worker-0", "run-worker-1"]
    variables = {v.name: v.value for v in pods[1].spec.containers[0].env}
    assert variables["PET_RDZV_ENDPOINT"] == "run-worker-0:23456"
    assert (variables["PET_NNODES"], variables["PET_NPROC_PER_NODE"]) == ("2:2", "1")
    log = client.core.read_namespaced_pod_log("run-worker-0", NAMESPACE, tail_lines=1)
    assert log == "two\n"


def test_an_exit_code_from_128_on_brings_a_new_pod_and_a_lower_one_ends_the_job(
    cluster: Cluster, client: Client
) -> None:
    cluster.script(
        Script(exit_code=143, seconds=0.2), Script(lines=("bad",), exit_code=2), worker=1
    )
    cluster.script(LONG)
    client.create()
    first = cluster.wait_for(lambda: cluster.pod("run-worker-1"))["metadata"]["uid"]
    text = condition(cluster, "Failed")["message"]
    assert text == 'job "run" is failing because "Worker" replica(s) failed.'
    assert cluster.pod("run-worker-1")["metadata"]["uid"] != first
    assert state(client, "run-worker-1").terminated.exit_code == 2
    # cleanPodPolicy Running: the pod that has ended stays, with its log.
    cluster.wait_for(lambda: len(cluster.pods("run")) == 1)
    assert client.core.read_namespaced_pod_log("run-worker-1", NAMESPACE) == "bad\n"


def test_pods_that_are_killed_evicted_or_preempted_report_it(
    cluster: Cluster, client: Client
) -> None:
    cluster.script(LONG)
    client.create()
    condition(cluster, "Running")
    reasons: dict[str, Any] = {}

    def end(how: Any, pod: str) -> None:
        cluster.wait_for_phase(pod, "Running")
        version = client.core.list_namespaced_pod(NAMESPACE).metadata.resource_version
        how(pod)
        watch = kubernetes.watch.Watch()
        pods = client.core.list_namespaced_pod
        for event in watch.stream(pods, NAMESPACE, resource_version=version, timeout_seconds=20):
            status = event["object"].status
            if status.phase == "Failed" and event["object"].metadata.name == pod:
                terminated = status.container_statuses[0].state.terminated
                reasons[how.__name__] = (status.reason, terminated.reason, terminated.exit_code)
                watch.stop()

    end(cluster.oom_kill, "run-worker-0")
    end(cluster.evict, "run-worker-1")
    end(cluster.preempt, "run-worker-0")
    assert reasons == {
        "oom_kill": (None, "OOMKilled", 137),
        "evict": ("Evicted", "Error", 137),
        "preempt": (None, "Error", 143),
    }
    condition(cluster, "Running")


def test_deleting_a_job_ends_its_processes_also_those_that_do_not_listen(
    cluster: Cluster, client: Client
) -> None:
    cluster.script(Script(seconds=None, on_terminate=None))
    manifest = pytorchjob(JOB)
    worker = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    client.objects.create_namespaced_custom_object(*client.pytorchjobs, manifest)
    condition(cluster, "Running")
    cluster.wait_for_phase("run-worker-1", "Running")
    processes = cluster.processes("run-worker-0") + cluster.processes("run-worker-1")
    assert len(processes) >= 2
    client.delete()
    cluster.wait_for(lambda: not cluster.pods())
    assert not any(map(is_running, processes))


def test_requests_are_rejected_as_a_cluster_rejects_them(tmp_path: Path) -> None:
    with Cluster(tmp_path, operators=["pytorchjobs"]) as cluster:
        client = Client(cluster)

        def status_of(action: Any) -> int:
            with pytest.raises(ApiException) as refused:
                action()
            return int(refused.value.status)

        cluster.script(LONG)
        cluster.fail_next(1, 500, verb="create")
        assert status_of(client.create) == 500
        client.create()
        assert status_of(client.create) == 409
        assert status_of(client.create_trainjob) == 404  # not installed
        assert status_of(lambda: client.core.delete_namespaced_pod("x", NAMESPACE)) == 403
        cluster.forbid("delete", "pytorchjobs")
        assert status_of(client.delete) == 403
        asked = {"namespace": NAMESPACE, "verb": "delete", "resource": "pytorchjobs"}
        review = kubernetes.client.AuthorizationV1Api(client.api)
        answer = review.create_self_subject_access_review(
            {"spec": {"resourceAttributes": {**asked, "group": "kubeflow.org"}}}
        )
        assert not answer.status.allowed
        assert cluster.count("create", "pytorchjobs") == 3


def test_a_trainjob_starts_over_as_a_whole_but_not_after_a_permanent_error(
    cluster: Cluster, client: Client
) -> None:
    cluster.script(Script(exit_code=143, seconds=0.1), Script(exit_code=2, seconds=0.1), worker=1)
    cluster.script(LONG)
    client.create_trainjob(dataclasses.replace(JOB, restarts=3))
    first = cluster.wait_for(lambda: cluster.pod("run-node-0-0-"))["metadata"]["uid"]
    failed = condition(cluster, "Failed", "trainjobs")
    assert failed["reason"] == "FailJobSetFailurePolicyAction"
    of_second = [pod["metadata"]["uid"] for pod in cluster.pods("run-node-0-0")]
    assert first not in of_second
    restarts = [event for event in cluster.events("run") if event["reason"] == "JobSetRestarted"]
    assert len(restarts) == 1


@pytest.mark.parametrize("owner", ["runtime", "job"])
def test_a_trainjob_whose_runtime_goes_first_stays_until_the_runtime_is_back(
    cluster: Cluster, client: Client, owner: str
) -> None:
    cluster.script(LONG)
    client.create_trainjob()
    cluster.wait_for(lambda: len(cluster.pods("run")) == 2)
    place, runtime = cluster.store, cluster.job("run", "trainingruntimes")
    kinds = ["trainingruntimes", "trainjobs"][:: 1 if owner == "runtime" else -1]
    owns, owned = (cluster.job("run", plural) for plural in kinds)
    assert owns is not None
    assert owned is not None
    with place.edit(kinds[1], NAMESPACE, "run") as edited:
        edited["metadata"]["ownerReferences"] = [owner_of(owns)]
    cluster.delete("trainjobs", "run", "Foreground")
    cluster.wait_for(lambda: not cluster.pods("run"))
    if owner == "job":
        time.sleep(1)
        job = cluster.job("run", "trainjobs")
        assert job is not None
        assert "deletionTimestamp" in job["metadata"]
        assert cluster.job("run", "trainingruntimes") is None
        assert runtime is not None
        place.create(
            "trainingruntimes", {**runtime, "metadata": {"name": "run", "namespace": NAMESPACE}}
        )
    cluster.wait_for(lambda: cluster.job("run", "trainjobs") is None)


def test_trainers_webhook_sees_a_runtime_a_little_later(cluster: Cluster, client: Client) -> None:
    cluster.script(LONG)
    with pytest.raises(ApiException, match="must be created before the TrainJob"):
        client.create_trainjob(pause=0)


def test_nothing_outlives_the_double(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Cluster(tmp_path) as cluster:
        cluster.script(Script(seconds=None, on_terminate=None))
        client = Client(cluster)
        client.create()
        cluster.wait_for_phase("run-worker-1", "Running")
        cluster.wait_for_phase("run-worker-0", "Running")
        processes = cluster.processes("run-worker-0") + cluster.processes("run-worker-1")
        watching = threading.Thread(target=lambda: list(client.watch(timeout_seconds=1)))
        watching.start()
        cluster.wait_for(lambda: cluster.count("watch", "pytorchjobs"))
    watching.join(10)
    assert processes
    assert not any(map(is_running, processes))
    assert {t for t in set(threading.enumerate()) - before if not t.daemon} == set()
