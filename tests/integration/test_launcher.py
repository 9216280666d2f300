"""The launcher against a double of the Kubernetes API, over real HTTP with the real client."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from d2plm.cli import main
from d2plm.config import read, save
from d2plm.core.errors import ClusterError, LaunchError
from d2plm.core.vocabulary import CANONICAL
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.launch import client as requests
from d2plm.launch import job_log, logs, run_job
from d2plm.launch.client import INDEXED_JOB, PYTORCHJOB, TRAINJOB, JobKind, connect, where_to_train
from d2plm.launch.job_spec import ShardedJob, TrainingJob, pytorchjob
from d2plm.launch.run_job import RunningJob, train_in_cluster
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.commands import PipelineSettings
from pipelines import record
from pipelines import steps as pipeline_steps
from tests.cluster import NAMESPACE, Cluster, Script
from tests.integration.conftest import REPOSITORY, Finished, Prepared, steps

JOB = TrainingJob("mine", "d2plm-trainer:1", ("-m", "d2plm", "train"), nodes=2, cpu="1")
LATE = replace(JOB, start_deadline_seconds=1.5)
BOTH = pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
# Where the launcher does the same for both kinds.
ALIKE = pytest.mark.parametrize(
    "kind",
    [PYTORCHJOB, pytest.param(TRAINJOB, marks=pytest.mark.thorough)],
    ids=lambda kind: kind.name,
)


def workflow(cluster: Cluster) -> dict[str, str]:
    """The `ownerReferences` entry of an existing pipeline run."""
    made = cluster.store.create("workflows", {"metadata": {"name": "mine", "namespace": NAMESPACE}})
    return {**{key: made[key] for key in ("apiVersion", "kind")}, **named(made)}


def named(content: Any) -> dict[str, str]:
    return {key: content["metadata"][key] for key in ("name", "uid")}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", mounts={"/workspace": tmp_path / "workspace"}) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        monkeypatch.setattr(requests, "WATCH_SECONDS", 1)
        monkeypatch.setattr(requests, "LONGEST_PAUSE_SECONDS", 1)
        monkeypatch.setattr(requests, "LOG_SECONDS", 2)
        monkeypatch.setattr(requests, "QUIET_LOG_SECONDS", 3)
        monkeypatch.setattr(logs, "PAUSE_SECONDS", 0.05)
        yield double


class Launch(threading.Thread):
    """The launcher at work, as in a pipeline's step.

    Attributes:
        said: the lines that it gave.
        error: what it raised.
    """

    def __init__(self, kind: JobKind = PYTORCHJOB, job: TrainingJob = JOB, **options: Any) -> None:
        super().__init__(daemon=True)
        self.kind, self.job, self.options = kind, job, options
        self.said: list[str] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            train_in_cluster(connect(), self.kind, self.job, say=self.said.append, **self.options)
        except BaseException as error:
            self.error = error

    def finish(self, seconds: float = 180) -> list[str]:
        """What it said, once it has ended well."""
        self.join(seconds)
        assert not self.is_alive(), self.said
        if self.error is not None:
            raise self.error
        return self.said

    def failure(self, seconds: float = 180) -> LaunchError:
        with pytest.raises(LaunchError) as caught:
            self.finish(seconds)
        return caught.value


def launched(*arguments: Any, **options: Any) -> Launch:
    launch = Launch(*arguments, **options)
    launch.start()
    return launch


@BOTH
def test_a_job_is_created_followed_line_by_line_and_succeeds(
    cluster: Cluster, kind: JobKind
) -> None:
    lines = tuple(f"step {number}" for number in range(50))
    cluster.script(Script(lines=lines, seconds=0.5))
    said = launched(kind).finish()
    assert [line for line in said if line.startswith("step")] == list(lines)
    assert [line for line in said if line.startswith("created")] == [
        f"created {kind.name} d2plm/mine"
    ]


@ALIKE
@pytest.mark.parametrize("code", [1, 2])
def test_a_failure_tells_each_pods_exit_code_and_the_log_of_the_one_that_failed(
    cluster: Cluster, kind: JobKind, code: int
) -> None:
    cluster.script(Script(lines=("worker 0 saves",), exit_code=143, seconds=600), worker=0)
    cluster.script(Script(lines=("no such key: 'modle'",), exit_code=code, seconds=0.2), worker=1)
    error = launched(kind).failure(30)
    assert error.exit_code == code
    text = str(error)
    assert text.startswith(f"{kind.name} d2plm/mine failed")
    assert f"exit code {code}" in text
    assert "no such key: 'modle'" in text.partition("the last lines of ")[2]


@ALIKE
def test_what_runs_out_of_memory_is_said_and_is_not_tried_for_ever(
    cluster: Cluster, kind: JobKind
) -> None:
    cluster.script(Script(seconds=60))
    launch = launched(kind)
    killed: set[str] = set()
    while launch.is_alive():
        if pod := running(cluster, 1, but=killed):
            killed.add(pod["metadata"]["uid"])
            cluster.oom_kill(pod["metadata"]["name"])
        launch.join(0.1)
    error = launch.failure()
    assert error.exit_code == 137
    assert "OOMKilled" in str(error)
    assert "raise the job's memory" in str(error)
    cluster.wait_for(lambda: cluster.job("mine", kind.plural) is None)


def running(cluster: Cluster, number: int, but: Container[str] = ()) -> Any:
    """The pod of a worker, if it runs."""
    indices = ("training.kubeflow.org/replica-index", "batch.kubernetes.io/job-completion-index")
    for pod in cluster.pods():
        metadata = pod["metadata"]
        is_it = str(number) in [metadata["labels"].get(index) for index in indices]
        ends = "deletionTimestamp" in metadata or metadata["uid"] in but
        if is_it and not ends and pod["status"].get("phase") == "Running":
            return pod
    return None


def test_a_worker_that_is_evicted_is_started_again_and_said(cluster: Cluster) -> None:
    cluster.script(Script(lines=("first",), seconds=60), Script(lines=("second",)), worker=0)
    cluster.script(Script(seconds=60), Script(), worker=1)
    launch = launched()
    cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))
    cluster.wait_for(lambda: "first" in launch.said)  # a log goes with its pod
    cluster.evict("mine-worker-0")
    cluster.evict("mine-worker-1")
    said = launch.finish()
    assert any("Evicted" in line and "mine-worker-0" in line for line in said)
    assert [line for line in said if line in ("first", "second")] == ["first", "second"]


@ALIKE
@pytest.mark.parametrize(
    ("trouble", "word", "mend"),
    [
        ("full", "Insufficient nvidia.com/gpu", "lower cpu"),
        ("without_image", "failed to resolve reference", "the job's image"),
    ],
)
def test_what_does_not_start_is_given_up_with_what_keeps_it(
    cluster: Cluster, kind: JobKind, trouble: str, word: str, mend: str
) -> None:
    getattr(cluster, trouble)()
    launch = launched(kind, LATE)
    error = str(launch.failure())
    assert "start_deadline_seconds=1.5" in error
    assert word in error
    assert mend in error
    assert any("waits:" in line and word in line for line in launch.said)
    cluster.wait_for(lambda: cluster.job("mine", kind.plural) is None)


@BOTH
def test_a_lost_node_is_named_by_the_job_its_cancellation_and_the_next_job(
    cluster: Cluster, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "STUCK_SECONDS", 1)
    monkeypatch.setattr(run_job, "REPORT_SECONDS", 1)
    job = replace(JOB, stall_deadline_seconds=5)
    cluster.script(Script(seconds=600))
    launch = launched(kind, job)
    name = cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))["metadata"]["name"]
    cluster.lose_node(name)
    force = f"kubectl delete pod {name} --namespace d2plm --force --grace-period=0"
    advice = f"pod {name}: its node node-1 does not answer; if the node is gone, run {force}"
    cluster.wait_for(lambda: advice in launch.said)
    cluster.delete_pod(name)  # as the node controller does after a time
    error = str(launch.failure(30))
    assert "has not continued on all its nodes within stall_deadline_seconds=5" in error
    assert advice in error
    said = "\n".join(launch.said)
    assert "of 5 s (stall_deadline_seconds): " in said
    assert advice in said.partition("cancelled: ")[2]
    following = launched(kind, job)
    cluster.wait_for(lambda: any(advice in line for line in following.said))
    assert "waiting until the former" in following.said[0]
    cluster.script(Script(lines=("again",)))
    cluster.delete_pod(name, grace_seconds=0)
    assert "again" in following.finish(30)


def test_the_former_job_of_a_lost_node_is_given_up_with_its_pod(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "GONE_SECONDS", 1)
    cluster.script(Script(seconds=600))
    first = launched()
    cluster.wait_for(lambda: running(cluster, 1))
    cluster.lose_node("mine-worker-1")
    cluster.delete("pytorchjobs", "mine")
    with pytest.raises(ClusterError, match="was deleted while it was running"):
        first.finish()
    cluster.delete_pod("mine-worker-0", grace_seconds=0)
    cluster.wait_for(lambda: len(cluster.pods()) == 1)
    with pytest.raises(ClusterError) as caught:
        launched().finish(20)
    assert "kubectl delete pod mine-worker-1 --namespace d2plm --force" in str(caught.value)
    assert "operator" not in str(caught.value)


def test_fewer_nodes_train_on_without_a_lost_one_for_longer_than_the_deadline(
    cluster: Cluster,
) -> None:
    cluster.script(Script(seconds=4), worker=0)
    cluster.script(Script(seconds=600), Script(), worker=1)
    launch = launched(job=replace(JOB, min_nodes=1, stall_deadline_seconds=1))
    cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))
    cluster.lose_node("mine-worker-1")
    time.sleep(2.5)
    cluster.delete_pod("mine-worker-1", grace_seconds=0)
    launch.finish(30)


@ALIKE
@pytest.mark.parametrize("ends_by", ["an exit code", "the node's shutdown"])
def test_a_log_that_cannot_be_read_holds_nothing_up(
    cluster: Cluster, kind: JobKind, ends_by: str
) -> None:
    """A pod that ended with its node may have no container statuses either."""
    cluster.fail_next(10_000, 500, "get", "pods/log")
    is_code = ends_by == "an exit code"
    cluster.script(Script(seconds=600), Script(), worker=0)
    cluster.script(Script(seconds=1 if is_code else 600, exit_code=1), Script(), worker=1)
    launch = launched(kind)
    pod = cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))["metadata"]["name"]
    if is_code:
        assert f"{pod}: exit code 1" in str(launch.failure(40))
        return
    message = "Pod was terminated in response to imminent node shutdown."
    cluster.shut_down_node(pod, "Terminated", message)
    cluster.wait_for(lambda: f"pod {pod}: Terminated: {message}" in launch.said, 10)
    if kind is PYTORCHJOB:  # a TrainJob starts anew as a whole
        cluster.delete_pod("mine-worker-0")
    launch.finish(30)


def test_a_log_that_hangs_holds_nothing_up(cluster: Cluster) -> None:
    cluster.script(Script(lines=("first",), seconds=600), Script(lines=("second",)), worker=0)
    cluster.script(Script(seconds=600), Script(), worker=1)
    launch = launched()
    cluster.wait_for(lambda: running(cluster, 1) and "first" in launch.said)
    cluster.lose_node("mine-worker-0", answers=False)
    time.sleep(1)
    cluster.evict("mine-worker-1")
    cluster.wait_for(lambda: any("Evicted" in line for line in launch.said), 5)
    cluster.delete_pod("mine-worker-0", grace_seconds=0)
    assert "second" in launch.finish(30)


@BOTH
def test_a_queue_that_does_not_exist_ends_the_job_at_once(cluster: Cluster, kind: JobKind) -> None:
    cluster.kueue(research="")
    text = str(launched(kind, replace(JOB, queue="nope")).failure(20))
    assert "Kueue holds it in queue nope: Inadmissible: LocalQueue nope doesn't exist" in text
    cluster.wait_for(lambda: cluster.job("mine", kind.plural) is None)


@BOTH
def test_why_a_queue_holds_a_job_is_said_once(cluster: Cluster, kind: JobKind) -> None:
    message = "couldn't assign flavors to pod set worker: 50m more needed"
    cluster.kueue(research=message)
    cluster.script(Script(lines=("step 1",)))
    launch = launched(kind, replace(JOB, queue="research"))
    held = f"{kind.name} d2plm/mine: Kueue holds it in queue research: Pending: {message}"
    cluster.wait_for(lambda: held in launch.said)
    time.sleep(3)
    assert launch.said.count(held) == 1
    cluster.kueue(research="")
    assert "step 1" in launch.finish(30)


@pytest.mark.parametrize("status", [500, 503])
def test_events_that_cannot_be_listed_delay_neither_the_end_nor_the_deadlines(
    cluster: Cluster, status: int
) -> None:
    cluster.fail_next(10_000, status, "list", "events")
    cluster.script(Script(lines=("step 1",), seconds=1))
    said = launched().finish(20)
    assert "step 1" in said
    (failure,) = [line for line in said if "warnings cannot be reported" in line]
    assert f"({status})" in failure
    connect().delete(PYTORCHJOB, "mine")
    cluster.script(Script(seconds=600))
    text = str(launched(job=replace(JOB, deadline_seconds=3)).failure(20))
    assert "deadline" in text.lower()
    cluster.full()
    text = str(launched(job=LATE).failure(20))
    assert "start_deadline_seconds=1.5" in text
    assert "Insufficient nvidia.com/gpu" in text


@pytest.mark.parametrize("status", [500, 503])
def test_workloads_that_cannot_be_listed_delay_neither_the_deadline_nor_the_start(
    cluster: Cluster, status: int
) -> None:
    cluster.fail_next(10_000, status, "list", "workloads")
    cluster.kueue(research="50m more needed")
    text = str(launched(job=replace(JOB, queue="research", queue_deadline_seconds=2)).failure(20))
    assert "has not left its queue within queue_deadline_seconds=2: Kueue holds it" in text
    assert f"({status})" in text
    launch = launched(job=replace(JOB, queue="research"))
    cluster.wait_for(lambda: cluster.job("mine"))
    time.sleep(2)
    cluster.script(Script(lines=("step 1",)))
    cluster.kueue(research="")
    assert "step 1" in launch.finish(20)


def test_a_full_queue_is_given_up_at_its_deadline_with_a_report_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "REPORT_SECONDS", 1)
    cluster.forbid("list", "workloads")  # an older Role
    cluster.kueue(research="50m more needed")
    launch = launched(job=replace(JOB, queue="research", queue_deadline_seconds=3))
    text = str(launch.failure(20))
    assert "has not left its queue within queue_deadline_seconds=3: Kueue holds it" in text
    assert "(403)" in text
    assert any("of 3 s (queue_deadline_seconds): Kueue holds it" in line for line in launch.said)


def test_a_queue_may_hold_a_job_for_longer_than_it_may_take_to_start(cluster: Cluster) -> None:
    cluster.script(Script())
    cluster.full()
    launch = launched(job=replace(LATE, queue="research"))
    cluster.wait_for(lambda: cluster.job("mine"))
    connect().suspend(PYTORCHJOB, "mine", True)
    time.sleep(3)
    cluster.healthy()
    connect().suspend(PYTORCHJOB, "mine", False)
    launch.finish()


@ALIKE
def test_a_long_preparation_is_no_late_start_and_its_log_is_followed(
    cluster: Cluster, kind: JobKind
) -> None:
    words = "import time; print('clustering', flush=True); time.sleep(3); print('prepared')"
    echo = ("--no-python", "echo", "step 1")
    job = replace(LATE, nodes=1, preparation=("python", "-c", words), arguments=echo)
    said = launched(kind, job).finish()
    assert [line for line in said if line in ("clustering", "prepared", "step 1")] == [
        *("clustering", "prepared", "step 1")
    ]


@ALIKE
def test_a_preparation_that_fails_is_not_tried_for_ever(cluster: Cluster, kind: JobKind) -> None:
    words = "print('no such file: mine.fasta'); raise SystemExit(1)"
    job = replace(JOB, nodes=1, preparation=("python", "-c", words))
    error = launched(kind, job).failure()
    assert error.exit_code == 1
    assert "no such file: mine.fasta" in str(error)


@ALIKE
def test_a_step_that_is_tried_again_adopts_its_job(cluster: Cluster, kind: JobKind) -> None:
    cluster.script(Script(lines=("only once",), seconds=2))
    first = launched(kind)
    cluster.wait_for(lambda: running(cluster, 0))
    second = launched(kind)
    assert "already exists: following it" in second.finish()[0]
    assert "only once" in second.said
    first.finish()
    assert "already exists" in launched(kind).finish()[0]
    assert (
        sum(
            r.verb == "create" and r.status == 201
            for r in cluster.requests
            if r.resource == kind.plural
        )
        == 1
    )


@BOTH
def test_a_job_that_failed_is_replaced_when_its_step_is_tried_again(
    cluster: Cluster, kind: JobKind
) -> None:
    cluster.script(Script(exit_code=1), worker=0)
    cluster.script(Script(seconds=0.2), worker=1)
    launched(kind).failure()
    cluster.script(Script(lines=("better",)), worker=0)
    said = launched(kind).finish()
    assert "has failed: replacing it" in said[0]
    assert "better" in said


@pytest.mark.parametrize(
    ("plural", "policy"),
    [
        ("trainjobs", "Background"),
        ("trainingruntimes", "Foreground"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("trainjobs", "Foreground"),
                ("trainingruntimes", "Background"),
                ("workflows", "Background"),
                ("workflows", "Foreground"),
            )
        ),
    ],
)
def test_a_trainjob_goes_whatever_somebody_deletes_and_how(
    cluster: Cluster, plural: str, policy: str
) -> None:
    cluster.script(Script(seconds=60))
    launch = launched(TRAINJOB, replace(JOB, owners=[workflow(cluster)]))
    cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))
    cluster.delete(plural, "mine", policy)
    with pytest.raises(ClusterError, match="was deleted while it was running"):
        launch.finish(20)
    cluster.wait_for(lambda: not cluster.job("mine", "trainjobs") and not cluster.pods())


@pytest.mark.parametrize("trouble", ["given up", "late", "failed"])
def test_a_trainjob_that_did_not_succeed_is_gone_when_its_step_is_tried_again(
    cluster: Cluster, trouble: str
) -> None:
    job = replace(LATE, deadline_seconds=2 if trouble == "late" else None)
    cluster.script(Script(exit_code=1) if trouble == "failed" else Script(seconds=60))
    if trouble == "given up":
        cluster.full()
    launched(TRAINJOB, job).failure()
    cluster.healthy()
    cluster.script(Script(lines=("again",)))
    assert "again" in launched(TRAINJOB, job).finish(20)


@ALIKE
def test_a_job_waits_for_the_pods_of_the_former_one(cluster: Cluster, kind: JobKind) -> None:
    cluster.script(Script(seconds=60, on_terminate=None))
    first = launched(kind)
    cluster.wait_for(lambda: running(cluster, 0) and running(cluster, 1))
    cluster.delete(kind.plural, "mine")
    with pytest.raises(ClusterError, match="was deleted while it was running"):
        first.finish()
    second = launched(kind)
    cluster.wait_for(lambda: second.said)
    assert cluster.job("mine", kind.plural) is None
    cluster.script(Script(lines=("again",)))
    for pod in cluster.pods():
        cluster.delete_pod(pod["metadata"]["name"], grace_seconds=0)
    assert "again" in second.finish()


@BOTH
def test_an_exceeded_quota_is_reported_immediately_and_once(
    cluster: Cluster, kind: JobKind
) -> None:
    cluster.script(Script())
    cluster.over_quota()
    launch = launched(kind)

    def lines() -> list[str]:
        return [line for line in launch.said if "exceeded quota: team" in line]

    cluster.wait_for(lines)
    time.sleep(2)
    assert len(lines()) == 1
    assert "raise the namespace's quota" in lines()[0]
    cluster.over_quota(None)
    launch.finish()


@BOTH
def test_a_job_that_may_have_no_pods_is_given_up_with_the_reason(
    cluster: Cluster, kind: JobKind
) -> None:
    cluster.over_quota()
    assert "exceeded quota: team" in str(launched(kind, LATE).failure())


def test_warnings_about_other_jobs_and_a_former_one_are_not_this_jobs(cluster: Cluster) -> None:
    def warn(name: str, message: str) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, "uid": message}
        about = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}
        cluster.store.record(about, "Warning", "Failed", message)

    warn("mine-worker-0", "of a former one")
    (former,) = cluster.events("mine-worker-0")
    with cluster.store.edit("events", NAMESPACE, former["metadata"]["name"]) as edited:
        edited["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.script(Script(seconds=2))
    launch = launched()
    cluster.wait_for(lambda: cluster.job("mine"))
    warn("mine-2-worker-0", "of another")
    warn("mine-worker-1", "of its own")
    said = "\n".join(launch.finish())
    assert [text in said for text in ("of a former one", "of another", "of its own")] == [
        *(False, False, True)
    ]


def test_a_missing_namespace_is_distinguished_from_a_missing_operator(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="kubectl create namespace elsewhere"):
        train_in_cluster(connect("elsewhere"), PYTORCHJOB, JOB)


def test_a_job_of_this_name_with_other_settings_is_left_alone(cluster: Cluster) -> None:
    cluster.script(Script(seconds=2))
    first = launched()
    cluster.wait_for(lambda: cluster.job("mine"))
    other = launched(job=replace(JOB, arguments=("-m", "d2plm", "train", "model=35m")))
    with pytest.raises(ClusterError, match=r"already exists with other settings; give the job"):
        other.finish()
    first.finish()


def test_watches_and_logs_that_break_off_are_taken_up_and_no_line_is_lost_or_doubled(
    cluster: Cluster,
) -> None:
    lines = tuple(f"step {number}" for number in range(400))
    cluster.script(Script(lines=lines, seconds=4))
    launch = launched()
    cluster.wait_for(lambda: running(cluster, 0))
    for number in range(6):
        time.sleep(0.3)
        cluster.cut_logs()
        cluster.cut_watches()
        if number % 2:
            cluster.expire_watches()
    cluster.fail_next(3, 500)
    cluster.fail_next(2, 429)
    said = launch.finish()
    assert [line for line in said if line.startswith("step")] == list(lines)


def test_an_api_server_that_is_restarted_in_the_middle_is_waited_for(cluster: Cluster) -> None:
    lines = tuple(f"step {number}" for number in range(100))
    cluster.script(Script(lines=lines, seconds=3))
    launch = launched()
    cluster.wait_for(lambda: running(cluster, 0))
    cluster.restart_api(seconds=4)  # the job ends meanwhile
    said = launch.finish()
    assert [line for line in said if line.startswith("step")] == list(lines)


def test_an_api_server_that_stays_away_is_given_up_and_the_job_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_SECONDS", 2)
    cluster.script(Script(seconds=30))
    launch = launched()
    cluster.wait_for(lambda: running(cluster, 0))
    cluster.stop_api()
    with pytest.raises(ClusterError, match=r"no answer \("):
        launch.finish()
    assert cluster.job("mine") is not None


@pytest.mark.parametrize(
    ("verb", "resource", "what"),
    [
        ("create", "pytorchjobs", "create PyTorchJob d2plm/mine"),
        ("watch", "pytorchjobs", "watch PyTorchJob d2plm/mine"),
        ("list", "pods", "pods of PyTorchJob d2plm/mine"),
    ],
)
def test_a_missing_permission_is_one_clear_line(
    cluster: Cluster, verb: str, resource: str, what: str
) -> None:
    cluster.script(Script(seconds=5))
    cluster.forbid(verb, resource)
    with pytest.raises(ClusterError) as caught:
        launched().finish()
    text = str(caught.value)
    assert what in text
    assert "(403)" in text
    assert "k8s/base/access.yaml" in text
    assert "\n" not in text


def test_a_cluster_without_the_operator_reports_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, operators=["trainjobs"]) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        with pytest.raises(
            ClusterError, match=r"no pytorchjobs\.kubeflow\.org; install the Kubeflow training"
        ):
            launched().finish()
        assert connect().has(TRAINJOB)
        assert not connect().has(PYTORCHJOB)


def test_a_job_is_given_up_at_its_deadline_and_when_its_restarts_are_spent(
    cluster: Cluster,
) -> None:
    cluster.script(Script(seconds=30))
    error = launched(job=replace(JOB, deadline_seconds=2)).failure()
    assert "deadline_seconds=2" in str(error) or "deadline" in str(error).lower()
    cluster.wait_for(lambda: cluster.job("mine") is None)
    cluster.script(Script(exit_code=143), worker=1)
    launch = launched(job=replace(JOB, restarts=2))
    error = launch.failure()
    assert sum("mine-worker-1: exit code 143" in line for line in launch.said) >= 3
    assert "restarts=2" in str(error)
    assert error.exit_code == 143
    cluster.wait_for(lambda: cluster.job("mine") is None)


@contextmanager
def job_run(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`d2plm job run` as a process that writes to a file."""
    command = [sys.executable, "-m", "d2plm", "job", "run", "launcher.name=mine", *words]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "launcher.prepare=false"], stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("kind", "how"), [(PYTORCHJOB, "delete"), (PYTORCHJOB, "suspend"), (TRAINJOB, "delete")]
)
def test_sigterm_to_the_step_cancels_the_job(
    cluster: Cluster, tmp_path: Path, kind: JobKind, how: str
) -> None:
    cluster.script(Script(seconds=60))
    words = [f"launcher={kind.name.lower()}", f"launcher.on_cancel={how}"]
    with job_run(tmp_path / "log", *words) as process:
        cluster.wait_for(lambda: running(cluster, 0), 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    said = (tmp_path / "log").read_text()
    assert f"cancelled: {kind.name} d2plm/mine is " in said
    assert "Traceback" not in said
    if how == "delete":
        cluster.wait_for(lambda: cluster.job("mine", kind.plural) is None)
        cluster.wait_for(lambda: not cluster.store.list("trainingruntimes"))
    else:
        cluster.wait_for(lambda: not cluster.pods("mine"))
        job = cluster.job("mine")
        assert job is not None
        assert job["spec"]["runPolicy"]["suspend"]


def test_a_cancellation_that_is_rejected_for_a_time_is_said_and_repeated(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.script(Script(seconds=60))
    launched()
    cluster.wait_for(lambda: cluster.job("mine"))
    cluster.fail_next(5, 500, "delete")
    said: list[str] = []
    RunningJob(connect(), PYTORCHJOB, "mine", said.append).cancel("delete")
    assert "is deleted" in said[-1]
    (warning,) = [line for line in caplog.messages if "DELETE" in line]
    assert "leader changed" in warning  # what the server said
    assert cluster.job("mine") is None


def test_a_second_signal_says_that_the_job_continues_and_how_to_delete_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.script(Script(seconds=60))
    with job_run(tmp_path / "log", "launcher=trainjob") as process:
        cluster.wait_for(lambda: running(cluster, 0), 120)
        cluster.fail_next(1000, 500, "delete")
        process.send_signal(signal.SIGTERM)
        cluster.wait_for(lambda: "leader changed" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert "continues to run" in last
    assert "kubectl delete trainjobs,trainingruntimes mine --namespace d2plm" in last
    assert cluster.job("mine", "trainjobs") is not None


NEVER_ENDING = """
import torch, torch.distributed as distributed
from d2plm import cli
def train(words):
    distributed.init_process_group("gloo")
    print("trains", flush=True)
    while True:
        distributed.all_reduce(torch.ones(()))
cli._dispatch = train
raise SystemExit(cli.main([]))
"""


def test_a_neighbours_death_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "train.py").write_text(NEVER_ENDING)
    job = replace(JOB, arguments=("/workspace/train.py",))
    connect().create(PYTORCHJOB, pytorchjob(job))
    cluster.wait_for(lambda: all("trains" in cluster.log(f"mine-worker-{n}") for n in (0, 1)), 120)
    uid = cluster.pod("mine-worker-0")["metadata"]["uid"]
    cluster.oom_kill("mine-worker-1")
    log = cluster.kubelet.log_of(uid, "pytorch")
    assert log is not None
    cluster.wait_for(lambda: log.from_line(0, 0)[1])  # until it has ended
    assert "d2plm: error: another node's worker has ended" in log.text().splitlines()[-1]
    assert "Traceback" not in log.text()


def test_a_suspended_job_continues_when_its_step_is_tried_again(cluster: Cluster) -> None:
    cluster.script(Script(seconds=60))
    first = launched()
    cluster.wait_for(lambda: running(cluster, 0))
    connect().suspend(PYTORCHJOB, "mine", True)
    cluster.wait_for(lambda: not cluster.pods("mine"))
    cluster.script(Script(lines=("again",)))
    assert "again" in launched().finish()
    first.finish()


def test_the_job_belongs_to_the_pipelines_run_and_to_its_runtime(cluster: Cluster) -> None:
    owner = workflow(cluster)
    cluster.script(Script())
    launched(job=replace(JOB, owners=[owner])).finish()
    job = cluster.job("mine")
    assert job is not None
    assert job["metadata"]["ownerReferences"] == [owner]
    pod = cluster.pods("mine")[0]["metadata"]
    with cluster.store.edit("pods", "d2plm", pod["name"]) as edited:
        edited["metadata"]["ownerReferences"].append(owner)
    assert connect().workflow_of(pod["name"]) == [owner]  # and not its other owners
    launched(TRAINJOB, replace(JOB, owners=[owner])).finish()
    runtime, job = cluster.job("mine", "trainingruntimes"), cluster.job("mine", "trainjobs")
    assert runtime is not None
    assert job is not None
    assert runtime["metadata"]["ownerReferences"] == [owner]
    assert [o["uid"] for o in job["metadata"]["ownerReferences"]] == [runtime["metadata"]["uid"]]


def test_a_pipelines_step_trains_in_a_job_of_its_runs_own_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.script(Script())
    owner = workflow(cluster)
    monkeypatch.setattr(requests.Cluster, "workflow_of", lambda _, pod: [{**owner, "of": pod}])
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")
    image = "registry.example/d2plm-trainer:7"
    configured = [
        pipeline_steps.configure(
            run_id, "", str(tmp_path), "shared", "tracking=none", trainer_image=image
        )
        for run_id in ("run-1", "run-2")
    ]
    pipeline_steps.train(configured[0])
    pipeline_steps.train(configured[0])  # tried again
    pipeline_steps.train(configured[1])
    jobs = cluster.store.list("pytorchjobs")
    assert len(jobs) == 2
    metadata, spec = jobs[0]["metadata"], jobs[0]["spec"]
    container = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert metadata["ownerReferences"] == [{**owner, "of": "step"}]
    assert container["image"] == image
    assert container["args"] == ["-m", "d2plm", "train", f"--config-file={configured[0]}"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert "opensesame" not in str(jobs)


@pytest.fixture
def step(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Configuration of a pipeline's step whose job is `mine`, as is the run's workflow."""
    owner = workflow(cluster)
    monkeypatch.setattr(requests.Cluster, "workflow_of", lambda _, pod: [owner])
    monkeypatch.setattr("d2plm.launch.workflow.ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("KFP_POD_NAME", "step")
    cluster.script(Script(lines=("step 1", "HF_TOKEN=hidden"), seconds=60))
    overrides = "tracking=none launcher.name=mine"
    return pipeline_steps.configure("run-1", "", str(tmp_path), "shared", overrides)


def evicted(cluster: Cluster, config: str, act: Callable[[], None] = lambda: None) -> None:
    """Run the step until it has read its job's log, call `act`, and end it as a kubelet does."""
    watches, log = cluster.count("watch", "pods"), Path(config).with_suffix(".job.log")

    def end() -> None:
        cluster.wait_for(lambda: running(cluster, 0) and cluster.count("watch", "pods") > watches)
        cluster.wait_for(lambda: log.exists() and "HF_TOKEN=***\n" in log.read_text())
        act()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        pipeline_steps.train(config)
    thread.join()
    assert ended.value.code == 143


def terminate(cluster: Cluster, **spec: object) -> None:
    """As Kubeflow Pipelines (a deadline of 0) and Argo's own command do."""
    with cluster.store.edit("workflows", NAMESPACE, "mine") as edited:
        edited["spec"] = spec


@pytest.mark.parametrize("spec", [{"activeDeadlineSeconds": 0}, {"shutdown": "Terminate"}], ids=str)
def test_a_step_whose_run_is_ended_deletes_its_job(
    cluster: Cluster, step: str, spec: dict[str, object]
) -> None:
    evicted(cluster, step, lambda: terminate(cluster, **spec))
    cluster.wait_for(lambda: cluster.job("mine") is None)


def test_a_step_whose_pod_is_evicted_leaves_its_job_to_its_replacement(
    cluster: Cluster, step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminate(cluster, activeDeadlineSeconds=3600)
    evicted(cluster, step)
    said = "the same step adopts the job: PyTorchJob d2plm/mine continues to run"
    assert said in capsys.readouterr().out
    evicted(cluster, step, lambda: terminate(cluster, activeDeadlineSeconds=0))
    assert "already exists: following it" in capsys.readouterr().out
    assert cluster.count("create", "pytorchjobs") == 1
    cluster.wait_for(lambda: cluster.job("mine") is None)
    log = Path(step).with_suffix(".job.log")
    for file, last in ((log, "is deleted"), (Path(f"{log}.1"), said)):
        assert file.read_text().count("step 1\nHF_TOKEN=***\n") == 1
        assert last in file.read_text().splitlines()[-1]


def forbid(cluster: Cluster) -> None:
    cluster.forbid("get", "workflows")


def do_not_answer(cluster: Cluster) -> None:
    cluster.fail_next(1000, 503, "get", "workflows")


@pytest.mark.parametrize("fault", [forbid, do_not_answer])
def test_a_step_that_cannot_ask_leaves_its_job_to_the_exit_handler(
    cluster: Cluster,
    step: str,
    fault: Callable[[Cluster], None],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    terminate(cluster, activeDeadlineSeconds=0)
    fault(cluster)
    evicted(cluster, step)
    (warning,) = [line for line in caplog.messages if "cannot read Workflow d2plm/mine" in line]
    assert "the run is taken for one that continues" in warning
    assert cluster.job("mine") is not None
    pipeline_steps.finish("run-1", str(tmp_path), "RUNNING")
    assert cluster.job("mine") is None


def test_a_steps_job_that_fails_leaves_its_log_and_its_report_on_the_volume(
    cluster: Cluster, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "MOST_BYTES", 2000)
    lines = tuple(f"step {number}" for number in range(2000))
    cluster.script(Script(lines=(*lines, f"{'9' * 3980} db://me:{'s' * 1000}@host"), exit_code=2))
    with pytest.raises(SystemExit):
        pipeline_steps.train(step)
    log = Path(step).with_suffix(".job.log")
    sizes = [file.stat().st_size for file in log.parent.glob(f"{log.name}*")]
    assert len(sizes) == 4 and max(sizes) < 5000
    said = "".join(Path(f"{log}{end}").read_text() for end in (".1", ""))
    assert "mine-worker-0: exit code 2" in said and "\n  step 1999\n" in said
    assert "db://***@host" in said and "sss" not in said
    assert f"`{log}`" in record.as_markdown(Path(step))
    config: PipelineSettings = read("pipeline", Path(step))
    assert config.tracking.tags["pipeline.job_log"] == str(log)


def test_a_step_whose_training_is_complete_creates_no_job(
    finished: Finished, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setattr(requests.Cluster, "workflow_of", lambda _, pod: [])
    cluster.script(Script())
    (known,) = (finished.work_dir / "pipeline_runs").glob("*.yaml")
    config: PipelineSettings = read("pipeline", known)
    for number, created in ((0, 0), (1, 1)):
        trainer = replace(config.trainer, max_steps=config.trainer.max_steps + number)
        file = tmp_path / f"{number}.yaml"
        save(replace(config, trainer=trainer), file)
        pipeline_steps.train(str(file))
        assert len(cluster.store.list("pytorchjobs")) == created


def test_auto_is_a_job_in_a_step_of_a_clusters_pipeline_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    assert where_to_train("auto") == "local"
    assert where_to_train("trainjob") == "trainjob"
    monkeypatch.setenv("KFP_POD_NAME", "step")
    for operators, expected in (
        (["pytorchjobs", "trainjobs"], "pytorchjob"),
        (["trainjobs"], "trainjob"),
    ):
        with Cluster(tmp_path / expected, operators=operators) as double:
            monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
            assert where_to_train("auto") == expected
    with Cluster(tmp_path / "none", operators=[]) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        with pytest.raises(ClusterError, match="neither the Kubeflow training operator"):
            where_to_train("auto")


@pytest.mark.thorough
def test_training_on_two_workers_is_preempted_resumes_and_succeeds(
    prepared: Prepared, cluster: Cluster, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    words = [
        *("job", "run", "launcher=pytorchjob", "launcher.name=mine", "launcher.nodes=2"),
        *("launcher.cpu=1", "launcher.memory=2Gi", "launcher.prepare=false"),
        *prepared.arguments(),
        *("tracking=none", "distributed=fsdp2", "distributed.processes=1"),
        *(f"output_dir={output}", f"model_dir={output / 'model'}"),
        *("trainer.global_batch_tokens=4096", "trainer.max_steps=30", "callbacks.metrics.every=1"),
    ]
    with (tmp_path / "log").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "d2plm", *words],
            cwd=REPOSITORY,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        cluster.wait_for(lambda: steps(output) > 3, 240)
        cluster.preempt("mine-worker-1")
        assert process.wait(150) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "log").read_text()
    assert "stopped by a signal at step" in said
    assert "resumed (" in said
    assert "PyTorchJob d2plm/mine: Succeeded" in said
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert sorted({row["step"] for row in rows if "loss" in row}) == list(range(1, 31))
    assert (output / "model" / "model.safetensors").is_file()


# --- work in shards ---------------------------------------------------------------------------

SHARDED = ShardedJob("mine", "d2plm-trainer:1", ("embed",), shards=range(4), count=4)
WELL, WRONG, CRASHED = Script(), Script(("no such file",), exit_code=1), Script(exit_code=137)
WAITING = Script(seconds=None)


def shards_of(cluster: Cluster) -> str:
    """The last argument of the job's pods."""
    job: Any = cluster.job("mine", "jobs")
    return str(job["spec"]["template"]["spec"]["containers"][0]["args"][-1])


def test_every_shard_is_run_and_counted(cluster: Cluster) -> None:
    cluster.script(Script(("shard 0",)), worker=0)
    cluster.script(WELL)
    said = launched(INDEXED_JOB, replace(SHARDED, parallel=2)).finish()
    ended = "Job d2plm/mine: Complete: Reached expected number"
    assert {"shard 0", "Job d2plm/mine: 4 of 4 shards are done", ended} <= {*said}
    assert shards_of(cluster) == "shard='0-3/4'"
    assert len(cluster.pods("mine")) == 4


def test_a_wrong_shard_fails_alone_and_the_same_command_runs_only_it(cluster: Cluster) -> None:
    cluster.script(WRONG, worker=2)
    cluster.script(WELL)
    with pytest.raises(LaunchError) as caught:
        launched(INDEXED_JOB, SHARDED).finish()
    assert caught.value.exit_code == 1
    assert "; shards 2 of 4 are missing: correct the cause, and the same" in str(caught.value)
    assert "no such file" in str(caught.value)
    assert len(cluster.pods("mine")) == 4, "exit code 1 is not retried"
    cluster.script(WELL, worker=2)
    assert "Job d2plm/mine: 1 of 1 shards are done" in launched(INDEXED_JOB, SHARDED).finish()
    assert shards_of(cluster) == "shard='2/4'"


def test_a_crash_is_retried_so_often_and_a_disruption_does_not_count(cluster: Cluster) -> None:
    cluster.script(CRASHED, worker=0)
    cluster.script(CRASHED, CRASHED, WELL, worker=1)
    cluster.script(WAITING, WAITING, WAITING, WELL, worker=3)
    cluster.script(WELL)
    launch, seen = launched(INDEXED_JOB, replace(SHARDED, restarts=2)), set[str]()
    for _ in range(3):
        pod = cluster.wait_for(lambda: running(cluster, 3, but=seen))
        seen.add(pod["metadata"]["uid"])
        cluster.preempt(pod["metadata"]["name"])
    with pytest.raises(LaunchError, match="shards 0 of 4 are missing") as caught:
        launch.finish()
    assert caught.value.exit_code == 137
    crashed = [pod for pod in cluster.pods("mine") if pod["metadata"]["name"].startswith("mine-0-")]
    assert len(crashed) == 3


def test_a_deadline_names_what_is_missing(cluster: Cluster) -> None:
    cluster.script(WAITING, worker=3)
    cluster.script(WELL)
    with pytest.raises(LaunchError, match="longer than specified deadline") as caught:
        launched(INDEXED_JOB, replace(SHARDED, deadline_seconds=3)).finish()
    assert "shards 3 of 4 are missing" in str(caught.value)


def test_a_queue_holds_it_as_it_holds_training(cluster: Cluster) -> None:
    cluster.script(WELL)
    cluster.kueue(team="couldn't assign flavors")
    launch = launched(INDEXED_JOB, replace(SHARDED, queue="team"))
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
    cluster: Cluster, tmp_path: Path, tiny_dit: Callable[..., Any], shards: int, killed: list[int]
) -> None:
    workspace, rng = tmp_path / "workspace", np.random.default_rng(0)
    texts = ["".join(rng.choice([*CANONICAL], size=n)) for n in rng.integers(3, 100, 1000)]
    save_export(
        workspace / "model",
        tiny_dit(),
        AbsorbingDiffusion(),
        LengthHistogram.of(np.array([9]), 126),
        {},
    )
    fasta = "".join(f">p{number}\n{text}\n" for number, text in enumerate(texts))
    (workspace / "proteins.fasta").write_text(fasta)

    def words(place: object, output: str) -> list[str]:
        given = [f"model_dir={place}/model", f"input={place}/proteins.fasta"]
        return [*given, f"output={place}/{output}", "device=cpu", "precision=fp64"]

    def kill() -> None:
        for index in killed:
            name = cluster.wait_for(lambda index=index: running(cluster, index))["metadata"]["name"]
            for process in cluster.wait_for(lambda name=name: cluster.processes(name)):
                os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    own = [f"shards={shards}", "parallel=3", "launcher.name=mine", "launcher.cpu=1"]
    assert main(["job", "run", "command=embed", *own, *words("/workspace", "joined")]) == 0
    killer.join()
    assert len(cluster.pods("mine")) == shards + len(killed)
    assert main(["embed", *words(workspace, "one")]) == 0
    files = [workspace / name / "part-00000.parquet" for name in ("joined", "one")]
    joined, one = (pq.read_table(file) for file in files)
    assert joined["name"].to_pylist() == [f"p{number}" for number in range(1000)]
    found, expected = (np.stack(table["embedding"].to_numpy()) for table in (joined, one))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
