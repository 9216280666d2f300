"""The launcher against a double of the Kubernetes API, over real HTTP with the real client."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from d2plm.cli import main
from d2plm.config import read, save
from d2plm.core.errors import ClusterError, LaunchError
from d2plm.launch import client as requests
from d2plm.launch import job_log, logs, run_job
from d2plm.launch.client import INDEXED_JOB, PYTORCHJOB, TRAINJOB, JobKind, connect, where_to_train
from d2plm.launch.job_spec import ShardedJob, TrainingJob, pytorchjob
from d2plm.launch.run_job import train_in_cluster
from d2plm.settings.commands import PipelineSettings
from pipelines import record
from pipelines import steps as pipeline_steps
from tests.cluster import NAMESPACE, Cluster, Script
from tests.cluster.kubelet import worker_of
from tests.conftest import Captured, Logged, MonkeyPatch
from tests.integration.conftest import Finished, Prepared, steps

JOB = TrainingJob("mine", "d2plm-trainer:1", ("-m", "d2plm", "train"), nodes=2, cpu="1")
LATE = replace(JOB, start_deadline_seconds=1.0)
BOTH = pytest.mark.parametrize("kind", [PYTORCHJOB, TRAINJOB], ids=lambda kind: kind.name)
LINES = tuple(f"step {number}" for number in range(100))
LONG = Script(seconds=60)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", mounts={"/workspace": tmp_path / "workspace"}) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        for module, name, value in (
            (requests, "WATCH_SECONDS", 0.3),
            (requests, "FIRST_PAUSE_SECONDS", 0.05),
            (requests, "LONGEST_PAUSE_SECONDS", 0.2),
            (requests, "REPORT_SECONDS", (0.1, 60.0)),
            (requests, "LOG_SECONDS", 0.5),
            (requests, "QUIET_LOG_SECONDS", 1),
            (logs, "PAUSE_SECONDS", 0.05),
            (logs, "PAUSE_AFTER_ERROR_SECONDS", 0.1),
            (run_job, "EVENTS_SECONDS", (0.1, 60.0)),
            (run_job, "LOG_SECONDS", 1),
        ):
            monkeypatch.setattr(module, name, value)
        yield double
        for thread in threading.enumerate():
            if thread.name == "pods":  # ends at the next change; without a server, much later
                thread.join(5)


class Launch(threading.Thread):
    """The launcher at work, as in a pipeline's step: what it has said, and the error it raised."""

    def __init__(self, kind: JobKind = PYTORCHJOB, job: TrainingJob = JOB) -> None:
        super().__init__(daemon=True)
        self.kind, self.job = kind, job
        self.said: list[str] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            train_in_cluster(connect(), self.kind, self.job, say=self.said.append)
        except BaseException as error:
            self.error = error

    def finish(self, seconds: float = 180) -> list[str]:
        """What it said, once it has ended well."""
        self.join(seconds)
        assert not self.is_alive(), self.said
        if self.error is not None:
            raise self.error
        return self.said

    def failure(self, kind: type[ClusterError | LaunchError] = LaunchError) -> Any:
        with pytest.raises(kind) as caught:
            self.finish()
        return caught.value

    def steps(self) -> list[str]:
        return [line for line in self.said if line.startswith("step")]

    def has_said(self, *texts: str) -> bool:
        """Whether a line contains all of these."""
        return any(all(text in line for text in texts) for line in self.said)


def running(cluster: Cluster, number: int, but: Container[str] = ()) -> Any:
    """The pod of a worker, if it runs."""
    for pod in cluster.pods():
        metadata = pod["metadata"]
        ends = "deletionTimestamp" in metadata or metadata["uid"] in but
        if worker_of(pod) == number and not ends and pod["status"].get("phase") == "Running":
            return pod
    return None


def both_run(cluster: Cluster) -> list[str]:
    """The names of the two workers' pods, once they run."""
    pods = cluster.wait_for(lambda: [pod for n in (0, 1) if (pod := running(cluster, n))][1:])
    assert pods
    return [running(cluster, number)["metadata"]["name"] for number in (0, 1)]


def is_gone(cluster: Cluster, kind: JobKind = PYTORCHJOB) -> bool:
    return cluster.job("mine", kind.plural) is None


@BOTH
def test_a_job_is_followed_line_by_line_and_succeeds(cluster: Cluster, kind: JobKind) -> None:
    owner = workflow(cluster)
    cluster.script(Script(lines=LINES, seconds=0.1))
    launch = Launch(kind, replace(JOB, owners=[owner]))
    assert f"created {kind.name} d2plm/mine" in launch.finish()
    assert launch.steps() == list(LINES)
    *made, job = filter(None, map(partial(cluster.job, "mine"), ("trainingruntimes", kind.plural)))
    references = made[0]["metadata"] if made else owner  # it belongs to its runtime
    assert [one["uid"] for one in job["metadata"]["ownerReferences"]] == [references["uid"]]
    assert all(one["metadata"]["ownerReferences"] == [owner] for one in made)


def cut(cluster: Cluster) -> None:
    for _ in range(2):
        time.sleep(0.1)
        cluster.cut_streams()
        time.sleep(0.1)
        cluster.expire_watches()
    cluster.fail_next(3, 500)
    cluster.fail_next(2, 429)


@pytest.mark.parametrize(
    "disturb", [cut, partial(Cluster.restart_api, seconds=0.7)], ids=["cut", "restart"]
)
def test_breaks_lose_no_line(
    cluster: Cluster, disturb: Callable[[Cluster], None], caplog: Logged
) -> None:
    cluster.script(Script(lines=LINES, seconds=0.5))  # ends before the server is back
    launch = Launch()
    cluster.wait_for(lambda: running(cluster, 0))
    disturb(cluster)
    launch.finish()
    assert launch.steps() == list(LINES)
    assert disturb is cut or any("no answer (" in line for line in caplog.messages)


@BOTH
def test_a_failure_reports_the_code_and_log_of_its_pod_and_a_retry_replaces_the_job(
    cluster: Cluster, kind: JobKind
) -> None:
    cluster.script(Script(lines=("worker 0 saves",), exit_code=143, seconds=600), worker=0)
    cluster.script(Script(lines=("no such key: 'modle'",), exit_code=2, seconds=0.2), worker=1)
    error = Launch(kind).failure()
    assert error.exit_code == 2
    report, _, log = str(error).partition("the last lines of ")
    assert "exit code 2" in report and "no such key: 'modle'" in log
    cluster.script(Script(lines=("step 1",)), worker=0)
    cluster.script(Script(), worker=1)
    again = Launch(kind)
    again.finish()
    assert again.steps()


@BOTH
def test_what_runs_out_of_memory_is_not_tried_for_ever(cluster: Cluster, kind: JobKind) -> None:
    cluster.script(LONG)
    launch = Launch(kind)
    killed: set[str] = set()
    while launch.is_alive():
        if pod := running(cluster, 1, but=killed):
            killed.add(pod["metadata"]["uid"])
            cluster.oom_kill(pod["metadata"]["name"])
        launch.join(0.1)
    error = launch.failure()
    assert error.exit_code == 137 and "OOMKilled" in str(error)
    cluster.wait_for(lambda: is_gone(cluster, kind))


@pytest.mark.parametrize(
    ("kind", "trouble", "reason"),
    [
        (PYTORCHJOB, Cluster.full, "Insufficient nvidia.com/gpu"),
        (TRAINJOB, Cluster.without_image, "failed to resolve reference"),
        (PYTORCHJOB, Cluster.over_quota, "exceeded quota: team"),
        (TRAINJOB, Cluster.over_quota, "exceeded quota: team"),
    ],
)
def test_what_does_not_start_is_given_up_with_the_reason_reported_once(
    cluster: Cluster, kind: JobKind, trouble: Callable[[Cluster], None], reason: str
) -> None:
    trouble(cluster)
    launch = Launch(kind, LATE)
    error = str(launch.failure())
    assert "start_deadline_seconds=1" in error and reason in error
    said = [line for line in launch.said if reason in line]
    assert said and len(said) == len({*said})
    cluster.wait_for(lambda: is_gone(cluster, kind))


def test_a_lost_node_is_named(cluster: Cluster, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(run_job, "STUCK_SECONDS", 0.2)
    monkeypatch.setattr(run_job, "REPORT_SECONDS", 0.2)
    job = replace(JOB, stall_deadline_seconds=3)
    cluster.script(LONG)
    launch = Launch(job=job)
    name = both_run(cluster)[1]
    cluster.lose_node(name)
    force = f"kubectl delete pod {name} --namespace d2plm --force --grace-period=0"
    cluster.wait_for(lambda: launch.has_said(force))
    cluster.delete_pod(name)  # as the node controller does after a time
    error = str(launch.failure())
    assert "stall_deadline_seconds=3" in error and force in error
    assert force in "\n".join(launch.said).partition("cancelled: ")[2]
    with monkeypatch.context() as patched:
        patched.setattr(run_job, "GONE_SECONDS", 0.3)
        assert force in str(Launch(job=job).failure(ClusterError))
    following = Launch(job=job)
    cluster.wait_for(lambda: following.has_said(force))
    cluster.script(Script(lines=("step 1",)))
    cluster.delete_pod(name, grace_seconds=0)
    following.finish()
    assert following.steps()


def test_fewer_nodes_train_on_for_longer_than_the_deadline(cluster: Cluster) -> None:
    cluster.script(Script(seconds=3), worker=0)
    cluster.script(LONG, Script(), worker=1)
    launch = Launch(job=replace(JOB, min_nodes=1, stall_deadline_seconds=1))
    both_run(cluster)
    cluster.lose_node("mine-worker-1")
    time.sleep(2)
    cluster.delete_pod("mine-worker-1", grace_seconds=0)
    launch.finish()


def test_a_log_that_cannot_be_read_holds_nothing_up(cluster: Cluster) -> None:
    """A pod that ended with its node may have no container statuses either."""
    cluster.fail_next(10_000, 500, "get", "pods/log")
    cluster.script(LONG, Script(seconds=1), worker=0)
    cluster.script(LONG, Script(seconds=1, exit_code=1), worker=1)
    launch = Launch()
    both_run(cluster)
    message = "Pod was terminated in response to imminent node shutdown."
    cluster.evict("mine-worker-1", "Terminated", message)
    cluster.wait_for(lambda: launch.has_said("mine-worker-1", f"Terminated: {message}"), 10)
    assert "mine-worker-1: exit code 1" in str(launch.failure())


def test_a_log_that_hangs_holds_nothing_up(cluster: Cluster) -> None:
    cluster.script(Script(lines=("step 1",), seconds=600), Script(lines=("step 2",)), worker=0)
    cluster.script(LONG, Script(), worker=1)
    launch = Launch()
    both_run(cluster)
    cluster.wait_for(launch.steps)
    cluster.lose_node("mine-worker-0", answers=False)
    cluster.evict("mine-worker-1", "Evicted", "The node was low on resource: memory.")
    cluster.wait_for(lambda: launch.has_said("Evicted"), 5)
    cluster.delete_pod("mine-worker-0", grace_seconds=0)
    launch.finish()
    assert launch.steps() == ["step 1", "step 2"]


@BOTH
def test_a_missing_queue_ends_the_job_and_a_full_one_waits(cluster: Cluster, kind: JobKind) -> None:
    message = "couldn't assign flavors to pod set worker: 50m more needed"
    cluster.kueue(research=message)
    text = str(Launch(kind, replace(JOB, queue="nope")).failure())
    assert "in queue nope: Inadmissible: LocalQueue nope doesn't exist" in text
    cluster.wait_for(lambda: is_gone(cluster, kind))
    cluster.script(Script(lines=("step 1",)))
    launch = Launch(kind, replace(JOB, queue="research"))
    cluster.wait_for(lambda: launch.has_said(message))
    time.sleep(0.5)  # more than one listing
    assert sum(message in line for line in launch.said) == 1
    cluster.kueue(research="")
    launch.finish()
    assert launch.steps()


def test_unlisted_events_delay_neither_the_end_nor_the_deadlines(cluster: Cluster) -> None:
    cluster.fail_next(10_000, 500, "list", "events")
    cluster.script(Script(seconds=1))
    (failure,) = [line for line in Launch().finish() if "warnings cannot be reported" in line]
    assert "(500)" in failure
    connect().delete(PYTORCHJOB, "mine")
    cluster.full()
    text = str(Launch(job=LATE).failure())
    assert "start_deadline_seconds=1" in text and "Insufficient nvidia.com/gpu" in text


@pytest.mark.parametrize("status", [403, 503])  # 403: of an older Role
def test_workloads_that_cannot_be_listed_delay_neither_the_deadline_nor_the_start(
    cluster: Cluster, status: int, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(run_job, "REPORT_SECONDS", 0.3)
    cluster.fail_next(10_000, status, "list", "workloads")
    cluster.kueue(research="50m more needed")
    launch = Launch(job=replace(JOB, queue="research", queue_deadline_seconds=2))
    text = str(launch.failure())
    assert "queue_deadline_seconds=2: Kueue holds it" in text and f"({status})" in text
    assert launch.has_said("of 2 s (queue_deadline_seconds): Kueue holds it")
    launch = Launch(job=replace(LATE, queue="research"))
    cluster.wait_for(lambda: cluster.job("mine"))
    time.sleep(1.5)  # longer than it may take to start
    cluster.script(Script())
    cluster.kueue(research="")
    launch.finish()


def test_a_long_preparation_is_no_late_start_and_its_log_is_followed(cluster: Cluster) -> None:
    words = "import time; print('step 0', flush=True); time.sleep(2)"
    echo = ("--no-python", "echo", "step 1")
    launch = Launch(job=replace(LATE, nodes=1, preparation=("python", "-c", words), arguments=echo))
    launch.finish()
    assert launch.steps() == ["step 0", "step 1"]


@BOTH
def test_a_failed_preparation_is_not_retried_for_ever(cluster: Cluster, kind: JobKind) -> None:
    words = "print('no such file: mine.fasta'); raise SystemExit(1)"
    error = Launch(kind, replace(JOB, nodes=1, preparation=("python", "-c", words))).failure()
    assert error.exit_code == 1 and "no such file: mine.fasta" in str(error)


def test_a_step_that_is_tried_again_adopts_its_job_if_the_settings_are_the_same(
    cluster: Cluster,
) -> None:
    cluster.script(Script(lines=("step 1",), seconds=2))
    first = Launch()
    cluster.wait_for(lambda: running(cluster, 0))
    second = Launch()
    other = Launch(job=replace(JOB, arguments=("-m", "d2plm", "train", "model=35m")))
    assert "other settings" in str(other.failure(ClusterError))
    for launch in (first, second, Launch()):
        launch.finish()
    assert second.steps() == ["step 1"]
    assert cluster.count("create", "pytorchjobs") == 1


@pytest.mark.parametrize(
    ("plural", "policy"),
    [("trainjobs", "Background"), ("trainingruntimes", "Foreground"), ("workflows", "Foreground")],
)
def test_a_trainjob_goes_whatever_is_deleted(cluster: Cluster, plural: str, policy: str) -> None:
    cluster.script(LONG)
    launch = Launch(TRAINJOB, replace(JOB, owners=[workflow(cluster)]))
    both_run(cluster)
    cluster.delete(plural, "mine", policy)
    assert "was deleted while it was running" in str(launch.failure(ClusterError))
    cluster.wait_for(lambda: is_gone(cluster, TRAINJOB) and not cluster.pods())


def test_warnings_about_other_jobs_and_a_former_one_are_not_this_jobs(cluster: Cluster) -> None:
    def warn(name: str, message: str) -> None:
        metadata = {"name": name, "namespace": NAMESPACE, "uid": message}
        about = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}
        cluster.store.warn(about, "Failed", message)

    warn("mine-worker-0", "of a former one")
    time.sleep(1)  # times are in whole seconds
    cluster.script(Script(seconds=1.5))
    launch = Launch()
    cluster.wait_for(lambda: cluster.job("mine"))
    warn("mine-2-worker-0", "of another")
    warn("mine-worker-1", "of its own")
    launch.finish()
    texts = ("of a former one", "of another", "of its own")
    assert [launch.has_said(text) for text in texts] == [False, False, True]


def test_an_absent_api_server_is_given_up(cluster: Cluster, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PATIENCE_SECONDS", 2)
    cluster.script(LONG)
    launch = Launch()
    cluster.wait_for(lambda: running(cluster, 0))
    cluster.api.stop()
    assert "no answer (" in str(launch.failure(ClusterError))
    assert not is_gone(cluster)


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "pytorchjobs"), ("watch", "pytorchjobs"), ("list", "pods")]
)
def test_a_missing_permission_is_named(cluster: Cluster, verb: str, resource: str) -> None:
    cluster.script(LONG)
    cluster.forbid(verb, resource)
    text = str(Launch().failure(ClusterError))
    assert f'cannot {verb} resource "{resource}"' in text and "(403)" in text
    assert "\n" not in text


def test_a_job_ends_at_its_deadline_and_after_its_restarts(cluster: Cluster) -> None:
    cluster.script(LONG)
    assert "deadline" in str(Launch(job=replace(JOB, deadline_seconds=2)).failure())
    cluster.wait_for(lambda: is_gone(cluster))
    cluster.script(Script(exit_code=143), worker=1)
    launch = Launch(job=replace(JOB, restarts=2))
    error = launch.failure()
    assert sum("mine-worker-1: exit code 143" in line for line in launch.said) >= 3
    assert error.exit_code == 143 and "restarts=2" in str(error)
    cluster.wait_for(lambda: is_gone(cluster))


def ended_by_sigterm(act: Callable[[], object], run: Callable[[], object]) -> None:
    """Run what SIGTERM ends as soon as `act` has returned."""

    def end() -> None:
        try:
            act()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    try:
        with pytest.raises(SystemExit) as ended:
            run()
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def job_run(*words: str) -> int:
    return main(["job", "run", "launcher.name=mine", "launcher.prepare=false", *words])


@pytest.mark.parametrize(("kind", "how"), [(PYTORCHJOB, "suspend"), (TRAINJOB, "delete")])
def test_sigterm_to_the_launcher_cancels_the_job(cluster: Cluster, kind: JobKind, how: str) -> None:
    cluster.script(LONG)
    words = [f"launcher={kind.name.lower()}", f"launcher.on_cancel={how}"]
    ended_by_sigterm(lambda: cluster.wait_for(lambda: running(cluster, 0)), lambda: job_run(*words))
    cluster.wait_for(lambda: not cluster.pods("mine"))
    if how == "delete":
        cluster.wait_for(lambda: is_gone(cluster, kind))
        cluster.wait_for(lambda: not cluster.store.list("trainingruntimes"))
        return
    job: Any = cluster.job("mine")
    assert job["spec"]["runPolicy"]["suspend"]
    cluster.script(Script(lines=("step 1",)))
    assert job_run(*words) == 0  # it continues
    assert cluster.count("create", "pytorchjobs") == 1
    assert "step 1" in cluster.log("mine-worker-0")


def test_a_second_signal_says_how_to_delete_the_job(cluster: Cluster, capfd: Captured) -> None:
    cluster.script(LONG)

    def act() -> None:
        cluster.wait_for(lambda: running(cluster, 0))
        cluster.fail_next(1000, 500, "delete")
        os.kill(os.getpid(), signal.SIGTERM)
        cluster.wait_for(lambda: cluster.count("delete", "trainjobs") > 1)

    ended_by_sigterm(act, lambda: job_run("launcher=trainjob"))
    last = "".join(capfd.readouterr()).splitlines()[-1]
    assert "kubectl delete trainjobs,trainingruntimes mine --namespace d2plm" in last
    assert not is_gone(cluster, TRAINJOB)


def test_the_nodes_of_a_trainjob_are_one_group(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    program = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    (tmp_path / "workspace" / "rank.py").write_text(program)
    launch = Launch(TRAINJOB, replace(JOB, arguments=("/workspace/rank.py",)))
    assert "rank 0 of 2" in launch.finish()


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
    connect().create(PYTORCHJOB, pytorchjob(replace(JOB, arguments=("/workspace/train.py",))))
    cluster.wait_for(lambda: all("trains" in cluster.log(f"mine-worker-{n}") for n in (0, 1)), 300)
    uid = cluster.pod("mine-worker-0")["metadata"]["uid"]
    cluster.oom_kill("mine-worker-1")
    log: Any = cluster.kubelet.log_of(uid, "pytorch")
    cluster.wait_for(lambda: log.ended)
    assert "d2plm: error: another node's worker has ended" in log.text().splitlines()[-1]
    assert "Traceback" not in log.text()


def workflow(cluster: Cluster) -> dict[str, str]:
    """The `ownerReferences` entry of an existing pipeline run."""
    made = cluster.store.create("workflows", {"metadata": {"name": "mine", "namespace": NAMESPACE}})
    known = {**made, **made["metadata"]}
    return {key: known[key] for key in ("apiVersion", "kind", "name", "uid")}


def test_a_pipelines_step_trains_in_a_job_of_its_runs_own_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    cluster.script(Script())
    owner = workflow(cluster)
    other = {"apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "other"}
    metadata = {"name": "step", "namespace": NAMESPACE, "ownerReferences": [other, owner]}
    cluster.store.create("pods", {"metadata": metadata, "spec": {}})
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "opensesame")
    image = "registry.example/d2plm-trainer:7"
    given = (str(tmp_path), "shared", "tracking=none")
    first, second = (
        pipeline_steps.configure(run_id, "", *given, trainer_image=image)
        for run_id in ("run-1", "run-2")
    )
    for config in (first, first, second):  # the first is tried again
        pipeline_steps.train(config)
    jobs = cluster.store.list("pytorchjobs")
    assert len(jobs) == 2
    spec = jobs[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    container = spec["containers"][0]
    assert jobs[0]["metadata"]["ownerReferences"] == [owner]  # and not the pod's other owner
    assert container["image"] == image
    assert container["args"] == ["-m", "d2plm", "train", f"--config-file={first}"]
    environment = {e["name"]: e["value"] for e in container["env"]}
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert "opensesame" not in str(jobs)


@pytest.fixture
def step(cluster: Cluster, tmp_path: Path, monkeypatch: MonkeyPatch) -> str:
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

    def prepare() -> None:
        cluster.wait_for(lambda: running(cluster, 0) and cluster.count("watch", "pods") > watches)
        cluster.wait_for(lambda: log.exists() and "HF_TOKEN=***\n" in log.read_text())
        act()

    ended_by_sigterm(prepare, lambda: pipeline_steps.train(config))


def terminate(cluster: Cluster, **spec: object) -> None:
    """As Kubeflow Pipelines (a deadline of 0) and Argo's own command do."""
    with cluster.store.edit("workflows", NAMESPACE, "mine") as edited:
        edited["spec"] = spec


def test_only_a_step_whose_run_is_ended_deletes_its_job(cluster: Cluster, step: str) -> None:
    terminate(cluster, activeDeadlineSeconds=3600)
    evicted(cluster, step)
    assert not is_gone(cluster)
    evicted(cluster, step, lambda: terminate(cluster, activeDeadlineSeconds=0))
    assert cluster.count("create", "pytorchjobs") == 1
    cluster.wait_for(lambda: is_gone(cluster))
    log = Path(step).with_suffix(".job.log")
    for file, last in ((log, "is deleted"), (Path(f"{log}.1"), "continues to run")):
        assert file.read_text().count("step 1\nHF_TOKEN=***\n") == 1
        assert last in file.read_text().splitlines()[-1]
    evicted(cluster, step, lambda: terminate(cluster, shutdown="Terminate"))
    cluster.wait_for(lambda: is_gone(cluster))


@pytest.mark.parametrize("status", [403, 503])
def test_a_step_that_cannot_ask_leaves_its_job_to_the_exit_handler(
    cluster: Cluster, step: str, status: int, caplog: Logged, tmp_path: Path
) -> None:
    terminate(cluster, activeDeadlineSeconds=0)
    cluster.fail_next(1000, status, "get", "workflows")
    evicted(cluster, step)
    assert sum("cannot read Workflow d2plm/mine" in line for line in caplog.messages) == 1
    pipeline_steps.finish("run-2", str(tmp_path), "RUNNING")
    assert not is_gone(cluster)
    pipeline_steps.finish("run-1", str(tmp_path), "RUNNING")
    assert is_gone(cluster)


def test_a_failed_job_leaves_its_log(cluster: Cluster, step: str, monkeypatch: MonkeyPatch) -> None:
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
    finished: Finished, cluster: Cluster, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.setattr(requests.Cluster, "workflow_of", lambda _, pod: [])
    cluster.script(Script())
    (known,) = (finished.work_dir / "pipeline_runs").glob("*.yaml")
    config: PipelineSettings = read("pipeline", known)
    for more_steps in (0, 1):
        trainer = replace(config.trainer, max_steps=config.trainer.max_steps + more_steps)
        file = tmp_path / f"{more_steps}.yaml"
        save(replace(config, trainer=trainer), file)
        pipeline_steps.train(str(file))
        assert len(cluster.store.list("pytorchjobs")) == more_steps


def test_auto_is_a_job_in_a_clusters_step_alone(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    assert where_to_train("auto") == "local"
    monkeypatch.setenv("KFP_POD_NAME", "step")
    with Cluster(tmp_path) as double:
        monkeypatch.setenv("KUBECONFIG", str(double.kube_config))
        for kind in ("pytorchjob", "trainjob"):
            assert where_to_train("auto") == kind
            del double.api.served[f"{kind}s"]
        with pytest.raises(ClusterError):
            where_to_train("auto")


@pytest.mark.thorough
def test_training_on_two_workers_is_preempted_resumes_and_succeeds(
    prepared: Prepared, cluster: Cluster, tmp_path: Path, capfd: Captured
) -> None:
    output = tmp_path / "run"
    words = [
        *("launcher=pytorchjob", "launcher.nodes=2", "launcher.cpu=1", "launcher.memory=2Gi"),
        *(*prepared.arguments(), "tracking=none", "distributed=fsdp2", "distributed.processes=1"),
        *(f"output_dir={output}", f"model_dir={output / 'model'}"),
        *("trainer.global_batch_tokens=4096", "trainer.max_steps=30", "callbacks.metrics.every=1"),
    ]

    def preempt() -> None:
        cluster.wait_for(lambda: steps(output) > 3, 300)
        cluster.preempt("mine-worker-1")

    thread = threading.Thread(target=preempt)
    thread.start()
    assert job_run(*words) == 0
    thread.join()
    said = "".join(capfd.readouterr())
    assert "stopped by a signal at step" in said and "resumed (" in said
    rows = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert sorted({row["step"] for row in rows if "loss" in row}) == list(range(1, 31))
    assert (output / "model" / "model.safetensors").is_file()


SHARDED = ShardedJob("mine", "d2plm-trainer:1", ("embed",), shards=range(4), count=4)
WELL, WRONG, CRASHED = Script(), Script(("no such file",), exit_code=1), Script(exit_code=137)
WAITING = Script(seconds=None)


def shards_of(cluster: Cluster) -> str:
    """The last argument of the job's pods."""
    job: Any = cluster.job("mine", "jobs")
    return str(job["spec"]["template"]["spec"]["containers"][0]["args"][-1])


def test_every_shard_is_run_and_counted_once_its_queue_admits_the_job(cluster: Cluster) -> None:
    cluster.script(WELL)
    cluster.kueue(team="couldn't assign flavors")
    launch = Launch(INDEXED_JOB, replace(SHARDED, parallel=2, queue="team"))
    cluster.wait_for(lambda: launch.has_said("queue team", "couldn't assign flavors"))
    assert cluster.pods("mine") == []
    cluster.kueue(team="")
    assert "Job d2plm/mine: 4 of 4 shards are done" in launch.finish()
    assert shards_of(cluster) == "shard='0-3/4'"
    assert len(cluster.pods("mine")) == 4


def test_a_wrong_shard_fails_alone_and_the_same_command_runs_only_it(cluster: Cluster) -> None:
    cluster.script(WRONG, worker=2)
    cluster.script(WELL)
    error = Launch(INDEXED_JOB, SHARDED).failure()
    assert error.exit_code == 1
    assert "shards 2 of 4 are missing" in str(error) and "no such file" in str(error)
    assert len(cluster.pods("mine")) == 4, "exit code 1 is not retried"
    cluster.script(WELL, worker=2)
    assert "Job d2plm/mine: 1 of 1 shards are done" in Launch(INDEXED_JOB, SHARDED).finish()
    assert shards_of(cluster) == "shard='2/4'"


def test_a_crash_is_retried_so_often_and_a_disruption_does_not_count(cluster: Cluster) -> None:
    cluster.script(CRASHED, worker=0)
    cluster.script(CRASHED, CRASHED, WELL, worker=1)
    cluster.script(WAITING, WAITING, WAITING, WELL, worker=3)
    cluster.script(WELL)
    launch, seen = Launch(INDEXED_JOB, replace(SHARDED, restarts=2)), set[str]()
    for _ in range(3):
        pod = cluster.wait_for(lambda: running(cluster, 3, but=seen))
        seen.add(pod["metadata"]["uid"])
        cluster.preempt(pod["metadata"]["name"])
    error = launch.failure()
    assert error.exit_code == 137 and "shards 0 of 4 are missing" in str(error)
    crashed = [pod for pod in cluster.pods("mine") if pod["metadata"]["name"].startswith("mine-0-")]
    assert len(crashed) == 3


def test_a_deadline_names_what_is_missing(cluster: Cluster) -> None:
    cluster.script(WAITING, worker=3)
    cluster.script(WELL)
    error = str(Launch(INDEXED_JOB, replace(SHARDED, deadline_seconds=3)).failure())
    assert "longer than specified deadline" in error and "shards 3 of 4 are missing" in error
