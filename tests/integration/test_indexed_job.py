"""Work in shards as an Indexed Job, against the double of a cluster: retries, failures, results."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from d2plm.cli import main
from d2plm.core.errors import LaunchError
from d2plm.core.vocabulary import CANONICAL
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.launch import client as requests
from d2plm.launch import logs
from d2plm.launch.client import INDEXED_JOB, connect
from d2plm.launch.job_spec import ShardedJob
from d2plm.launch.run_job import train_in_cluster
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.cluster import Cluster, Script

JOB = ShardedJob("mine", "d2plm-trainer:1", ("embed",), shards=range(4), count=4)
WELL, WRONG, CRASHED = Script(), Script(("no such file",), exit_code=1), Script(exit_code=137)
WAITING = Script(seconds=None)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", mounts={"/workspace": tmp_path}) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        monkeypatch.setattr(requests, "WATCH_SECONDS", 1)
        monkeypatch.setattr(logs, "PAUSE_SECONDS", 0.05)
        yield double


class Launch(threading.Thread):
    """The launcher at work."""

    def __init__(self, job: ShardedJob) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            train_in_cluster(connect(), INDEXED_JOB, self.job, say=self.said.append)
        except BaseException as error:
            self.error = error

    def finish(self) -> list[str]:
        self.join(60)
        assert not self.is_alive(), self.said
        if self.error is not None:
            raise self.error
        return self.said


def running(cluster: Cluster, index: int, but: frozenset[str] | set[str] = frozenset()) -> Any:
    """The pod of an index that runs; `but` those of these uids."""

    def found() -> Any:
        pods = [pod for pod in cluster.pods("mine") if pod["metadata"]["uid"] not in but]
        pods = [pod for pod in pods if pod["metadata"]["name"].startswith(f"mine-{index}-")]
        return next((pod for pod in pods if pod["status"].get("phase") == "Running"), None)

    return cluster.wait_for(found)


def shards_of(cluster: Cluster) -> Any:
    """The last argument of the job's pods."""
    job: Any = cluster.job("mine", "jobs")
    return job["spec"]["template"]["spec"]["containers"][0]["args"][-1]


def test_every_shard_is_run_and_counted(cluster: Cluster) -> None:
    cluster.script(Script(("shard 0",)), worker=0)
    cluster.script(WELL)
    said = Launch(replace(JOB, parallel=2)).finish()
    assert {"created Job d2plm/mine", "shard 0", "Job d2plm/mine: 4 of 4 shards are done"} <= {
        *said
    }
    assert shards_of(cluster) == "shard='0-3/4'"
    assert len(cluster.pods("mine")) == 4


def test_a_wrong_shard_fails_alone_and_the_same_command_runs_only_it(cluster: Cluster) -> None:
    cluster.script(WRONG, worker=2)
    cluster.script(WELL)
    with pytest.raises(LaunchError) as caught:
        Launch(JOB).finish()
    assert caught.value.exit_code == 1
    assert "; shards 2 of 4 are missing: correct the cause, and the same" in str(caught.value)
    assert "no such file" in str(caught.value)
    assert len(cluster.pods("mine")) == 4, "exit code 1 is not retried"
    cluster.script(WELL, worker=2)
    assert "Job d2plm/mine: 1 of 1 shards are done" in Launch(JOB).finish()
    assert shards_of(cluster) == "shard='2/4'"


def test_a_crash_is_retried_so_often_and_a_disruption_does_not_count(cluster: Cluster) -> None:
    cluster.script(CRASHED, worker=0)
    cluster.script(CRASHED, CRASHED, WELL, worker=1)
    cluster.script(WAITING, WAITING, WAITING, WELL, worker=3)
    cluster.script(WELL)
    launch, seen = Launch(replace(JOB, restarts=2)), set[str]()
    for _ in range(3):
        pod = running(cluster, 3, but=seen)
        seen.add(pod["metadata"]["uid"])
        cluster.preempt(pod["metadata"]["name"])
    with pytest.raises(LaunchError, match="shards 0 of 4 are missing") as caught:
        launch.finish()
    assert caught.value.exit_code == 137
    crashed = [pod for pod in cluster.pods("mine") if pod["metadata"]["name"].startswith("mine-0-")]
    assert len(crashed) == 3


def test_a_deleted_pod_is_replaced_when_it_has_ended(cluster: Cluster) -> None:
    cluster.script(WAITING, WELL, worker=1)
    cluster.script(WELL)
    launch = Launch(JOB)
    cluster.delete_pod(running(cluster, 1)["metadata"]["name"])
    launch.finish()


def test_a_deadline_names_what_is_missing(cluster: Cluster) -> None:
    cluster.script(WAITING, worker=3)
    cluster.script(WELL)
    with pytest.raises(LaunchError, match="longer than specified deadline") as caught:
        Launch(replace(JOB, deadline_seconds=3)).finish()
    assert "shards 3 of 4 are missing" in str(caught.value)


def test_a_queue_holds_it_as_it_holds_training(cluster: Cluster) -> None:
    cluster.script(WELL)
    cluster.kueue(team="couldn't assign flavors")
    launch = Launch(replace(JOB, queue="team"))
    held = "Job d2plm/mine: Kueue holds it in queue team: Pending: couldn't assign flavors"
    cluster.wait_for(lambda: held in launch.said)
    assert cluster.pods("mine") == []
    cluster.kueue(team="")
    launch.finish()


@pytest.mark.parametrize(
    ("shards", "killed"),
    [(2, [1]), pytest.param(8, [1, 2], marks=pytest.mark.thorough)],
    ids=["one-of-two", "two-of-eight"],
)
def test_killed_shards_give_the_vectors_of_one_machine(
    cluster: Cluster,
    tmp_path: Path,
    tiny_dit: Callable[..., Any],
    shards: int,
    killed: list[int],
) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice([*CANONICAL], size=n)) for n in rng.integers(3, 100, 1000)]
    fasta = "".join(f">p{number}\n{text}\n" for number, text in enumerate(texts))
    (tmp_path / "proteins.fasta").write_text(fasta)
    lengths = LengthHistogram.of(np.array([10, 12, 40]), 126)
    save_export(tmp_path / "model", tiny_dit(), AbsorbingDiffusion(), lengths, {})

    def words(workspace: object, output: str) -> list[str]:
        given = [f"model_dir={workspace}/model", f"input={workspace}/proteins.fasta"]
        return [*given, f"output={workspace}/{output}", "device=cpu"]

    def kill() -> None:
        for index in killed:
            name = running(cluster, index)["metadata"]["name"]
            for process in cluster.wait_for(lambda name=name: cluster.processes(name)):
                os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    own = [
        "command=embed",
        f"shards={shards}",
        "parallel=3",
        "launcher.name=mine",
        "launcher.cpu=1",
    ]
    assert main(["job", "run", *own, *words("/workspace", "joined")]) == 0, cluster.describe()
    killer.join()
    assert len(cluster.pods("mine")) == shards + len(killed)
    assert main(["embed", *words(tmp_path, "one")]) == 0
    one, joined = (pq.read_table(tmp_path / n / "part-00000.parquet") for n in ("one", "joined"))
    assert joined["name"].to_pylist() == [f"p{number}" for number in range(1000)]
    found, expected = (np.stack(table["embedding"].to_numpy()) for table in (joined, one))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
