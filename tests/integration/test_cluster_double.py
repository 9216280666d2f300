"""The cluster's test double behaves as a real cluster was seen to."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from d2plm.core.errors import ClusterError
from d2plm.launch.client import OBJECTS, TRAINJOB, connect
from d2plm.launch.job_spec import TrainingJob
from tests.cluster import NAMESPACE, Cluster, Script, trainjob
from tests.cluster.store import owner as owner_of
from tests.conftest import MonkeyPatch

RANK = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
JOB = TrainingJob("run", "image:1", ("/workspace/rank.py",), nodes=2)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path, mounts={"/workspace": tmp_path}) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kube_config))
        yield cluster


def create(pause: float = 2 * trainjob.CACHE_SECONDS) -> None:
    for resource, make in OBJECTS[TRAINJOB]:
        connect().create(resource, make(JOB))
        time.sleep(pause)


def test_two_pods_of_a_trainjob_run_torchrun_as_a_group(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    create()

    def lines() -> list[str]:
        return "".join(cluster.log(pod["metadata"]["name"]) for pod in cluster.pods()).splitlines()

    cluster.wait_for(lambda: sorted(lines()) == ["rank 0 of 2", "rank 1 of 2"], 300)


def test_a_trainjob_whose_runtime_goes_first_stays_until_the_runtime_is_back(
    cluster: Cluster,
) -> None:
    cluster.script(Script(seconds=None))
    create()
    cluster.wait_for(lambda: len(cluster.pods("run")) == 2)
    job = cluster.store.get("trainjobs", NAMESPACE, "run")
    with cluster.store.edit("trainingruntimes", NAMESPACE, "run") as runtime:
        runtime["metadata"]["ownerReferences"] = [owner_of(job)]
    cluster.delete("trainjobs", "run", "Foreground")
    cluster.wait_for(lambda: not cluster.pods("run"))
    cluster.wait_for(lambda: cluster.job("run", "trainingruntimes") is None)
    time.sleep(0.3)
    assert cluster.job("run", "trainjobs") is not None
    metadata = {"name": "run", "namespace": NAMESPACE}
    cluster.store.create("trainingruntimes", {"spec": runtime["spec"], "metadata": metadata})
    cluster.wait_for(lambda: cluster.job("run", "trainjobs") is None)


def test_trainers_webhook_sees_a_runtime_later(cluster: Cluster, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob, "CACHE_SECONDS", 60)
    with pytest.raises(ClusterError, match="must be created before the TrainJob"):
        create(pause=0)
