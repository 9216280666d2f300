"""Submitting, over real HTTP and through the real client, to a test double of the KFP API."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from kubernetes.client import ApiException

from d2plm.cli import main as d2plm
from d2plm.core.errors import ClusterError
from d2plm.launch import kfp_server as kfp_server_module
from d2plm.launch.kfp_server import MOST_LOG_BYTES, SERVER_FAILS
from pipelines import follow
from tests.cluster import Cluster
from tests.conftest import Captured, MonkeyPatch
from tests.kfp_server import KfpServer, certified, kfp_server, run, step

SUBMIT = ("pipeline", "submit", "experiment=debug")
SWEEP = ("sweep=compare", "experiment=debug", "arms={a: {}, b: {}}")
LOGIN = "<!doctype html><html><title>Log in to Your Account</title></html>"


@pytest.fixture
def server(monkeypatch: MonkeyPatch, tmp_path: Path) -> Iterator[KfpServer]:
    for name in ("KFP_TOKEN", "KFP_NAMESPACE", "D2PLM_REGISTRY", "D2PLM_TAG", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    # It reads the source of every caller at every setting of a step, for the sake of a message.
    monkeypatch.setattr("kfp.dsl.pipeline_task.inspect", Mock(stack=lambda: [[""] * 4] * 2))
    with kfp_server() as double:
        monkeypatch.setenv("KFP_HOST", double.url)
        yield double


def test_a_submission_sends_the_compiled_pipeline_and_prints_the_runs_address_alone(
    server: KfpServer, capsys: Captured
) -> None:
    words = ("model=35m", "trainer.max_steps=7", "launcher.gpus=4", "data.max_length=256")
    assert d2plm([*SUBMIT, *words, "registry=registry.example/us", "claim=mine"]) == 0
    assert capsys.readouterr().out == f"{server.url}/#/runs/details/r1\n"
    (sent,) = server.posted("/runs")
    parameters = sent["runtime_config"]["parameters"]
    assert parameters["model"] == "35m"
    assert parameters["max_steps"] == 7
    assert parameters["gpus"] == 4
    assert parameters["overrides"] == "data.max_length=256"
    assert parameters["claim"] == "mine"
    assert parameters["work_dir"] == "/workspace/debug"
    assert parameters["trainer_image"].startswith("registry.example/us/d2plm-trainer:")
    assert "input" not in parameters  # the experiment's is a path of this repository
    assert "service_account" not in sent  # the server's own, which k8s/ gives the rights to
    assert sent["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v1"}
    (uploaded,) = (version["pipeline_spec"] for version in server.versions)
    assert uploaded["platform_spec"]["platforms"]["kubernetes"]
    form = uploaded["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    assert form["claim"]["defaultValue"] == "mine"  # of the cluster, unlike the run's own
    assert form["experiment"]["defaultValue"] == "demo"
    assert server.experiments[0]["display_name"] == "d2plm-diffusion"


def test_a_definition_is_uploaded_once_as_a_version_of_the_pipeline_or_not_at_all(
    server: KfpServer,
) -> None:
    for words in (["trainer.max_steps=7"], [], ["tag=7"], ["once=true", "tag=8"]):
        assert d2plm([*SUBMIT, *words]) == 0
    assert [one["display_name"] for one in server.pipelines] == ["d2plm"]
    assert len({one["display_name"] for one in server.versions}) == len(server.versions) == 2
    references = [run.get("pipeline_version_reference") for run in server.posted("/runs")]
    assert [one and one["pipeline_version_id"] for one in references] == ["v1", "v1", "v2", None]
    assert server.posted("/runs")[-1]["pipeline_spec"]["platform_spec"]


@pytest.mark.parametrize(
    ("words", "memory"),
    [(["experiment=demo"], None), (["model=nano"], "16Gi"), (["prepare_memory=2Gi"], "2Gi")],
)
def test_the_steps_ask_for_what_the_experiment_needs(
    server: KfpServer, words: list[str], memory: str | None
) -> None:
    assert d2plm(["pipeline", "submit", *words]) == 0
    (sent,) = server.posted("/runs")
    assert sent["runtime_config"]["parameters"].get("prepare_memory") == memory  # None: 4Gi


def test_the_token_and_the_namespace_are_sent(server: KfpServer, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_TOKEN", "secret")
    monkeypatch.setenv("KFP_NAMESPACE", "team-proteins")
    server.multi_user = True
    assert d2plm([*SUBMIT]) == 0
    assert set(server.tokens) == {"Bearer secret"}
    assert server.experiments[0]["namespace"] == "team-proteins"


def test_a_server_with_a_namespace_for_each_user_reports_it_and_no_other_does(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    server.multi_user = True
    assert d2plm([*SUBMIT]) == 1
    assert "set KFP_NAMESPACE to yours" in capsys.readouterr().err
    server.multi_user = False
    monkeypatch.setenv("KFP_NAMESPACE", "team-proteins")
    assert d2plm([*SUBMIT]) == 0
    assert not server.experiments[0].get("namespace")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, {"message": "Request header error"}, ["401 Request header error", "KFP_TOKEN"]),
        (404, LOGIN, ["404", "KFP_HOST must be the address"]),
        (503, "<html>no healthy upstream</html>", ["503", "ml-pipeline", "try again"]),
        (200, LOGIN, ["a web page instead of data", "login page", "KFP_TOKEN"]),
        (401, "Jwt is missing", ["401 Jwt is missing", "KFP_TOKEN"]),
        (403, "RBAC: access denied", ["403 RBAC: access denied", "KFP_TOKEN"]),
    ],
)
def test_a_refusal_is_one_line_that_says_what_and_how_to_fix_it(
    server: KfpServer, capsys: Captured, status: int, body: object, said: list[str]
) -> None:
    server.refusals["/"] = (1000, (status, body))
    assert d2plm([*SUBMIT]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for text in [f"d2plm: error: Kubeflow Pipelines at {server.url}", *said]:
        assert text in error
    assert "html" not in error
    assert len(server.requests) == 1  # it does not hammer


def test_a_refusal_of_the_run_itself_is_reported_in_the_servers_words(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("KFP_TOKEN", "secret")
    refusal = {"message": "User alice is not authorized to create runs in team-proteins"}
    server.refusals["/runs"] = (1, (403, refusal))
    assert d2plm([*SUBMIT]) == 1
    error = capsys.readouterr().err
    assert "403 User alice is not authorized to create runs in team-proteins; request" in error
    assert "KFP_NAMESPACE" in error


@pytest.mark.parametrize("words", [["wait=true"], ["cron=0 0 3 * * 1"]])
def test_a_server_that_accepts_anything_is_no_pipelines_server(
    server: KfpServer, capsys: Captured, words: list[str]
) -> None:
    server.refusals["/"] = (1000, (200, {}))
    assert d2plm([*SUBMIT, *words]) == 1
    captured = capsys.readouterr()
    assert "gives no id to what it creates, so it is another server" in captured.err
    assert not captured.out


def test_a_proxy_is_not_used_for_this_machine_and_named_where_it_refuses(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    with kfp_server() as proxy:
        proxy.refusals[""] = (1000, (503, "no upstream"))
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert d2plm([*SUBMIT]) == 0
        assert not proxy.requests
        capsys.readouterr()
        monkeypatch.setenv("KFP_HOST", "http://kubeflow.example")
        assert d2plm([*SUBMIT]) == 1
        assert (
            f"503 no upstream; {SERVER_FAILS}; the request went through the proxy {proxy.url}"
            in (capsys.readouterr().err)
        )
        monkeypatch.setenv("KFP_HOST", "https://kubeflow.example")  # by CONNECT
        assert d2plm([*SUBMIT]) == 1
        assert (
            "example: Tunnel connection failed: 501 Unsupported method" in capsys.readouterr().err
        )


def test_a_server_that_is_down_is_reported(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("KFP_HOST", address)
    assert d2plm([*SUBMIT]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{address}: " in error
    assert "Connection refused" in error
    assert "port-forward" in error


def test_a_certificate_of_an_unknown_authority_is_reported_and_taken_with_its_authority(
    server: KfpServer, monkeypatch: MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    context, certificate = certified(tmp_path)
    with kfp_server(context) as secured:
        monkeypatch.setenv("KFP_HOST", secured.url)
        assert d2plm([*SUBMIT]) == 1
        error = capsys.readouterr().err
        assert "certificate verify failed" in error
        assert "SSL_CERT_FILE" in error
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert d2plm([*SUBMIT]) == 0


def test_waiting_reports_each_steps_changes_in_order_and_succeeds(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [
        {"state": "PENDING"},
        run("RUNNING", step("prepare", "RUNNING")),
        run("RUNNING", step("prepare", "RUNNING")),
        run("RUNNING", step("prepare", "SUCCEEDED"), step("train", "RUNNING")),
        run("SUCCEEDED", step("prepare", "SUCCEEDED"), step("train", "SUCCEEDED")),
    ]
    assert d2plm([*SUBMIT, "wait=true"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("prepare: running", "prepare: succeeded", "train: running", "train: succeeded"),
        f"the run has succeeded: {server.url}/#/runs/details/r1",
    ]


@pytest.mark.parametrize("node", ["d2plm-wrq7f-train", "d2plm-wrq7f-train(0)", "task-train(0)"])
def test_a_run_that_fails_is_reported_with_the_last_lines_of_its_steps_log(
    server: KfpServer, capsys: Captured, node: str
) -> None:
    server.logs[node] = f"""\
{"9" * MOST_LOG_BYTES}
I1126 03:00:00.123456      17 launcher_v2.go:151] PipelineSpec
d2plm: error: of an earlier attempt
── train ──
d2plm: error: PyTorchJob team/d2plm-1 failed: exceeded its memory
  d2plm-1-worker-0: exit code 137 (OOMKilled)

F1126 03:10:00.123456      17 main.go:57] failed to execute component: exit status 137
time="2026-11-26T03:10:01.000Z" level=info msg="sub-process exited" argo=true
"""
    failed = [step("prepare", "SUCCEEDED"), step("train", "FAILED"), step("finish", "SUCCEEDED")]
    server.script = [run("FAILED", *failed, error={}, run_id="r1")]
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    assert capsys.readouterr().err == (
        f"d2plm: error: the run has failed, see {server.url}/#/runs/details/r1: train: "
        "PyTorchJob team/d2plm-1 failed: exceeded its memory\n"
        "  d2plm-1-worker-0: exit code 137 (OOMKilled)\n"
    )


@pytest.mark.parametrize(("log", "said"), [("100/500 steps\n", "100/500 steps"), (None, "its log")])
def test_a_step_that_was_killed_is_reported_with_the_end_of_its_log_if_there_is_one(
    server: KfpServer, capsys: Captured, log: str | None, said: str
) -> None:
    server.logs |= {} if log is None else {"d2plm-wrq7f-prepare": log}
    server.script = [run("FAILED", step("prepare", "FAILED"))]
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    assert f"prepare: {said}" in capsys.readouterr().err


def test_a_cancelled_run_is_said_to_be_cancelled_although_it_ends_as_failed(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [
        run("CANCELING", step("train", "RUNNING")),
        run("FAILED", step("train", "FAILED"), step("finish", "SUCCEEDED")),
    ]
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    error = capsys.readouterr().err
    assert error == f"d2plm: error: the run was cancelled; see {server.url}/#/runs/details/r1\n"


@pytest.mark.parametrize("may_read", [True, False])
def test_a_step_that_waits_says_why_and_is_not_followed_for_longer_than_it_may_wait(
    server: KfpServer, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured, may_read: bool
) -> None:
    monkeypatch.setenv("KFP_NAMESPACE", "d2plm")
    server.multi_user = True
    server.script = [*[run("RUNNING", step("prepare", "RUNNING"))] * 50, run("SUCCEEDED")]
    pod = {
        "metadata": {
            "name": "d2plm-wrq7f-system-container-impl-1",
            "namespace": "d2plm",
            "labels": {"pipeline/runid": "r1"},
        },
        "spec": {"containers": [{"name": "main", "image": "d2plm-mmseqs2"}]},
    }
    with Cluster(tmp_path / "cluster") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kube_config))
        cluster.full("0/1 nodes are available: 1 Insufficient cpu.")
        if not may_read:
            cluster.forbid("list", "pods")
        cluster.store.create("pods", pod)
        code = d2plm([*SUBMIT, "wait=true", "launcher.start_deadline_seconds=0.2"])
    output, error = capsys.readouterr()
    assert code == may_read
    assert output.count("waiting: Unschedulable: 0/1 nodes") == may_read
    assert ("within start_deadline_seconds=0.2: Unschedulable: 0/1 nodes" in error) == may_read


def following_lines(monkeypatch: MonkeyPatch, capsys: Captured, report_seconds: float) -> list[str]:
    """The lines of a run that is followed with such an interval between two about a wait."""
    monkeypatch.setattr(follow, "REPORT_SECONDS", report_seconds)
    d2plm([*SUBMIT, "wait=true"])
    return capsys.readouterr().out.splitlines()


def test_a_wait_without_readable_pods_says_in_every_interval_what_is_waited_for(
    server: KfpServer, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("d2plm.launch.client._ACCOUNT", tmp_path)
    server.script = [*[run("RUNNING", step("train", "RUNNING"))] * 30, run("SUCCEEDED")]
    lines = following_lines(monkeypatch, capsys, 0.1)
    said = [line for line in lines if line.startswith("waiting: train is running, for ")]
    assert len(said) >= 2
    assert said[0].endswith("; its pods cannot be read")


def test_a_run_whose_first_step_does_not_start_is_not_followed_for_ever(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [{"state": "PENDING"}]
    assert d2plm([*SUBMIT, "wait=true", "launcher.start_deadline_seconds=0.1"]) == 1
    assert "within start_deadline_seconds=0.1: the run is pending" in capsys.readouterr().err


class Pods:
    """A cluster whose list of the run's pods is a script; its last entry stays."""

    def __init__(self, *answers: dict[str, object] | int) -> None:
        self.answers = list(answers)

    def path(self, kind: object) -> str:
        return "pods"

    def call(self, *_: object, **__: object) -> dict[str, object]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, int):
            raise ClusterError("cannot list the run's pods") from ApiException(status=answer)
        return {"items": [answer]}


def held(reason: str) -> dict[str, object]:
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "later"}
    return {
        "metadata": {"name": "pod", "uid": "1"},
        "status": {"phase": "Pending", "conditions": [condition]},
    }


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([held("SchedulingGated")], "left its queue within queue_deadline_seconds=0.4"),
        # A failure of the cluster does not end the watch over the deadline; a refusal does.
        ([held("Unschedulable"), 503, 0, held("Unschedulable")], "started within start_deadline"),
        ([403, held("Unschedulable")], None),
    ],
)
def test_every_wait_for_a_pod_has_an_end_and_lines_about_it(
    server: KfpServer,
    monkeypatch: MonkeyPatch,
    capsys: Captured,
    answers: list[dict[str, object] | int],
    said: str | None,
) -> None:
    monkeypatch.setattr(follow, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr("d2plm.launch.client.is_configured", lambda: True)
    monkeypatch.setattr("d2plm.launch.client.connect", lambda *_, **__: Pods(*answers))
    server.script = [*[run("RUNNING", step("prepare", "RUNNING"))] * 60, run("SUCCEEDED")]
    limits = ("launcher.start_deadline_seconds=0.3", "launcher.queue_deadline_seconds=0.4")
    assert d2plm([*SUBMIT, "wait=true", *limits]) == (said is not None)
    output, error = capsys.readouterr()
    assert output.count("waiting: ") >= 2
    assert said is None or f"no pod has {said}" in error


@pytest.mark.parametrize("words", [["wait=true"], []])
def test_a_server_that_accepts_a_request_and_stays_silent_is_given_up(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured, words: list[str]
) -> None:
    monkeypatch.setattr(kfp_server_module, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(follow, "PATIENCE_SECONDS", 0.0)
    server.script = [run("RUNNING")]
    server.silent = "/runs/r1" if words else "/runs"
    began = time.monotonic()
    assert d2plm([*SUBMIT, *words]) == 1
    assert time.monotonic() - began < 10
    error = capsys.readouterr().err
    assert "Read timed out" in error
    assert error.count("\n") == 1 or words


def test_a_run_that_kfp_itself_rejects_is_reported_with_its_message(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [{"state": "FAILED", "error": {"code": 3, "message": "no such claim"}}]
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    assert "runs/details/r1: no such claim" in capsys.readouterr().err


def test_a_server_that_is_away_for_a_while_is_asked_again(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [run("SUCCEEDED", step("prepare", "SUCCEEDED"))]
    server.refusals["/runs/r1"] = (3, (502, "<html>bad gateway</html>"))
    assert d2plm([*SUBMIT, "wait=true"]) == 0
    output = capsys.readouterr().out
    assert output.count("; retrying for up to ") == 1
    assert "the run has succeeded" in output


@pytest.mark.parametrize(("status", "patience"), [(401, 600.0), (502, 0.0)])
def test_following_ends_where_the_token_has_expired_or_patience_has(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured, status: int, patience: float
) -> None:
    monkeypatch.setattr(follow, "PATIENCE_SECONDS", patience)
    server.script = [run("RUNNING")]
    server.refusals["/runs/r1"] = (1000, (status, {"message": "gone"}))
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    assert f"the run itself continues: {server.url}/#/runs/details/r1" in capsys.readouterr().err


def test_a_server_that_stays_away_is_reported_in_every_interval(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    server.script = [run("SUCCEEDED")]
    server.refusals["/runs/r1"] = (3, (502, "<html>bad gateway</html>"))
    lines = following_lines(monkeypatch, capsys, 0.0)
    assert sum("; retrying for up to " in line for line in lines) == 3


def test_an_interrupt_ends_the_following_and_not_the_run(
    server: KfpServer, capsys: Captured
) -> None:
    server.script = [run("RUNNING", step("train", "RUNNING"))]

    def interrupt_when_followed() -> None:
        while not any(path.endswith("/runs/r1") for _, path, _, _ in server.requests):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_followed, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        assert d2plm([*SUBMIT, "wait=true"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    output = capsys.readouterr().out
    assert f"the run continues: {server.url}/#/runs/details/r1" in output
    assert "d2plm pipeline cancel r1" in output
    assert not server.posted("/runs/r1:terminate")


def test_cancelling_asks_the_server_to_end_the_run(server: KfpServer, capsys: Captured) -> None:
    assert d2plm(["pipeline", "cancel", "r1"]) == 0
    assert server.posted("/runs/r1:terminate") == [None]
    assert "runs/details/r1" in capsys.readouterr().out
    assert d2plm(["pipeline", "cancel", "nope"]) == 1
    assert f"d2plm: error: no run nope at {server.url}" in capsys.readouterr().err


def test_a_schedule_becomes_a_recurring_run_one_at_a_time(
    server: KfpServer, capsys: Captured
) -> None:
    weekly = "work_dir=/workspace/weekly-%Y-%m-%d"
    assert d2plm([*SUBMIT, weekly, "cron=0 0 3 * * 1", "service_account=mine"]) == 0
    assert capsys.readouterr().out == f"{server.url}/#/recurringrun/details/s1\n"
    (sent,) = server.posted("/recurringruns")
    assert sent["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"
    assert sent["max_concurrency"] == 1
    assert sent["no_catchup"] is True
    assert sent["mode"] == "ENABLE"
    assert sent["service_account"] == "mine"
    work_dir = sent["runtime_config"]["parameters"]["work_dir"]
    assert work_dir == "/workspace/weekly-%Y-%m-%d"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cron=0 3 * * 1"], "cron='0 3 * * 1': must be six fields"),
        (["cron=0 0 3 * * 1", "wait=true"], "wait='true': must be false with cron"),
        (["tracking.trackers=[]"], "tracking.trackers=[]: must be a list that includes mlflow"),
        (["wait=yes"], "wait='yes': must be true or false"),
        (["work_dir=runs/mine"], "must be an absolute path on the volume, such as /workspace/mine"),
        (["work_dir='/workspace/[[ScheduledTime]]'"], "must be without [[…]]: use %Y-%m-%d"),
        (["tolerations=gpu"], "tolerations='gpu': must be YAML such as"),
        (["prepare_memory=12Gx"], "prepare_memory='12Gx': must be a Kubernetes quantity"),
        (["evaluate_gpus=one"], "evaluate_gpus='one': must be a number of GPUs"),
        (["claim=BAD_NAME"], "claim='BAD_NAME': must be a name of up to 63"),
        (["prepare_cpuu=1"], "unknown key 'prepare_cpuu' (did you mean 'prepare_cpu'?)"),
        (["output=d2plm.yaml"], "output: belongs to d2plm pipeline compile"),
    ],
)
def test_what_cannot_be_meant_is_rejected_before_the_server_is_asked(
    server: KfpServer, capsys: Captured, words: list[str], said: str
) -> None:
    assert d2plm([*SUBMIT, *words]) == 2
    assert said in capsys.readouterr().err
    assert not server.posted("/runs")


def test_without_an_address_the_error_says_where_one_comes_from(
    monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.delenv("KFP_HOST", raising=False)
    assert d2plm([*SUBMIT]) == 1
    assert "KFP_HOST is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep=scalin"], "did you mean 'scaling'"),
        (["sweep=train", "experiment=debug"], "no key has several values"),
        ([*SWEEP, "dry_run=true"], "use d2plm compare --dry-run"),
        ([*SWEEP, "launcher.name=mine"], "launcher.name='mine': must be null"),
        (["sweep=train", "experiment=debug", "data.input=/a,/b"], "the same in all runs"),
        ([*SWEEP, "work_dir=here"], "work_dir='here'"),
        ([*SWEEP, "arms.c.trainer.max_step=2"], "arms.c: unknown key 'trainer.max_step'"),
        (["sweep=scaling", "sizes.a.model.hidden=2"], "sizes.a: unknown key 'model.hidden'"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused_before_the_server_is_asked(
    words: list[str], said: str, capsys: Captured
) -> None:
    assert d2plm(["pipeline", "submit", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_keys_that_vary_reach_the_pods_as_they_were_written(
    server: KfpServer, capsys: Captured
) -> None:
    words = ["paradigm=diffusion,flow_matching", "trainer.seed=1,2"]
    given = ["sweep=train", "experiment=debug", "tracking=none", "launcher.nodes=2"]
    assert d2plm(["pipeline", "submit", *given, *words]) == 0
    (sent,) = server.posted("/runs")
    parameters = sent["runtime_config"]["parameters"]
    assert parameters["paradigm"] == "diffusion,flow_matching"
    assert parameters["overrides"] == "tracking=none launcher.nodes=2 trainer.seed=1,2"
    assert [one["display_name"] for one in server.pipelines] == ["d2plm-sweep-train"]


def test_steps_of_several_runs_are_numbered(server: KfpServer, capsys: Captured) -> None:
    server.logs["d2plm-wrq7f-train"] = "d2plm: error: b,_seed_1: no memory\n"
    early, late = ({"create_time": f"2026-11-30T03:00:0{n}Z", "task_id": n} for n in "01")
    first = step("train", "SUCCEEDED", **early)
    server.script = [
        run("RUNNING", step("train", "RUNNING", **early)),
        run("RUNNING", step("train", "RUNNING", **late), first),
        run("FAILED", step("train", "FAILED", **late), first),
    ]
    assert d2plm(["pipeline", "submit", *SWEEP, "wait=true"]) == 1
    said = capsys.readouterr()
    lines = ["train: running", "train: succeeded", "train 2: running", "train 2: failed"]
    assert said.out.splitlines()[1:] == lines
    assert said.err.endswith(": train 2: b,_seed_1: no memory\n")
