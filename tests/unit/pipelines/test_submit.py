"""Submitting, over real HTTP and through the real client, to a test double of the KFP API."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from d2plm.cli import main as d2plm
from d2plm.launch import kfp_server as kfp_server_module
from d2plm.launch.kfp_server import MOST_LOG_BYTES
from pipelines import follow, pipeline
from pipelines.submit import compile_pipeline
from tests.cluster import NAMESPACE, Cluster
from tests.conftest import Captured, MonkeyPatch
from tests.kfp_server import KfpServer, certified, kfp_server, run, step

DEBUG = ("experiment=debug",)
SUBMIT = ("pipeline", "submit", *DEBUG)
SWEEP = ("sweep=compare", "experiment=debug", "arms={a: {}, b: {}}")
LOGIN = "<!doctype html><html><title>Log in to Your Account</title></html>"


COMPILED: dict[str, str] = {}
define = cache(pipeline.define)


def compile_once(output: Path, *given: Any) -> None:
    """Each pipeline with the same defaults once: it takes most of a submission's time."""
    if (key := str(given)) not in COMPILED:
        compile_pipeline(output, *given)
        COMPILED[key] = output.read_text()
    output.write_text(COMPILED[key])


@pytest.fixture
def server(quick_kfp: None, monkeypatch: MonkeyPatch, tmp_path: Path) -> Iterator[KfpServer]:
    for name in ("KFP_TOKEN", "KFP_NAMESPACE", "D2PLM_REGISTRY", "D2PLM_TAG", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    monkeypatch.setattr("pipelines.pipeline.define", define)
    monkeypatch.setattr("pipelines.submit.compile_pipeline", compile_once)
    with kfp_server() as double:
        monkeypatch.setenv("KFP_HOST", double.url)
        yield double


def test_a_submission_prints_the_address_alone(server: KfpServer, capsys: Captured) -> None:
    words = ("model=35m", "trainer.max_steps=7", "launcher.gpus=4", "data.max_length=256")
    assert d2plm([*SUBMIT, *words, "registry=registry.example/us", "claim=mine"]) == 0
    assert capsys.readouterr().out == f"{server.url}/#/runs/details/r1\n"
    (sent,) = server.posted("/runs")
    parameters = sent["runtime_config"]["parameters"]
    expected = {"model": "35m", "max_steps": 7, "gpus": 4, "overrides": "data.max_length=256"}
    expected |= {"claim": "mine", "work_dir": "/workspace/debug"}
    assert parameters | expected == parameters
    assert parameters["trainer_image"].startswith("registry.example/us/d2plm-trainer:")
    assert "input" not in parameters  # the experiment's is a path of this repository
    assert "service_account" not in sent  # the server's own, which k8s/ gives the rights to
    assert sent["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v1"}
    form = server.versions[0]["pipeline_spec"]["pipeline_spec"]["root"]["inputDefinitions"]
    assert form["parameters"]["claim"]["defaultValue"] == "mine"  # of the cluster, unlike the run's
    assert form["parameters"]["experiment"]["defaultValue"] == "demo"


def test_a_definition_is_uploaded_once_as_a_version_or_not_at_all(server: KfpServer) -> None:
    for words in (["trainer.max_steps=7"], [], ["tag=7"], ["once=true", "tag=8"]):
        assert d2plm([*SUBMIT, *words]) == 0
    assert [one["display_name"] for one in server.pipelines] == ["d2plm"]
    assert len({one["display_name"] for one in server.versions}) == len(server.versions) == 2
    references = [run.get("pipeline_version_reference") for run in server.posted("/runs")]
    assert [one and one["pipeline_version_id"] for one in references] == ["v1", "v1", "v2", None]
    assert server.posted("/runs")[-1]["pipeline_spec"]["platform_spec"]


def test_the_token_is_sent_and_the_namespace_to_a_server_that_has_one_for_each_user(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("KFP_TOKEN", "secret")
    server.multi_user = True
    assert d2plm([*SUBMIT]) == 1
    assert "set KFP_NAMESPACE" in capsys.readouterr().err
    monkeypatch.setenv("KFP_NAMESPACE", "team-proteins")
    for server.multi_user, namespace in ((True, "team-proteins"), (False, None)):
        server.experiments.clear()
        assert d2plm([*SUBMIT]) == 0
        assert (server.experiments[0].get("namespace") or None) == namespace
    assert set(server.tokens) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/", (401, {"message": "Request header"}), ["401 Request header", "KFP_TOKEN"]),
        ("/", (404, LOGIN), ["404", "KFP_HOST"]),
        ("/", (503, "<html>no healthy upstream</html>"), ["503", "ml-pipeline"]),
        ("/", (200, LOGIN), ["a web page instead of data", "KFP_TOKEN"]),
        ("/", (200, {}), ["another server"]),
        ("/runs", (403, {"message": "alice may not"}), ["403 alice may not", "KFP_NAMESPACE"]),
    ],
)
def test_a_refusal_is_one_line_with_what_was_said_and_what_to_set(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured, path: str, answer: Any, said: Any
) -> None:
    monkeypatch.setenv("KFP_TOKEN", "secret")
    server.refusals[path] = (1000, answer)
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    output, error = capsys.readouterr()
    assert error.count("\n") == 1 and not output
    for text in [f"d2plm: error: Kubeflow Pipelines at {server.url}", *said]:
        assert text in error
    assert "html" not in error and "secret" not in error
    assert len(server.requests) == 1 or path != "/" or answer[1] == {}  # it does not hammer


def test_a_certificate_of_an_unknown_authority_is_reported_and_taken_with_its_authority(
    server: KfpServer, monkeypatch: MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    context, certificate = certified(tmp_path)
    with kfp_server(context) as secured:
        monkeypatch.setenv("KFP_HOST", secured.url)
        assert d2plm([*SUBMIT]) == 1
        assert "SSL_CERT_FILE" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert d2plm([*SUBMIT]) == 0
    monkeypatch.setenv("KFP_HOST", secured.url)  # it is down
    assert d2plm([*SUBMIT]) == 1
    assert "Connection refused" in capsys.readouterr().err


def test_waiting_reports_each_steps_changes(server: KfpServer, capsys: Captured) -> None:
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


LOG = f"""\
{"9" * MOST_LOG_BYTES}
I1126 03:00:00.123456      17 launcher_v2.go:151] PipelineSpec
d2plm: error: of an earlier attempt
── train ──
d2plm: error: PyTorchJob team/d2plm-1 failed: exceeded its memory
  d2plm-1-worker-0: exit code 137 (OOMKilled)

F1126 03:10:00.123456      17 main.go:57] failed to execute component: exit status 137
time="2026-11-26T03:10:01.000Z" level=info msg="sub-process exited" argo=true
"""
SAID = "PyTorchJob team/d2plm-1 failed: exceeded its memory\n  d2plm-1-worker-0: exit code 137 (OOM"


@pytest.mark.parametrize(
    ("node", "log", "said"),
    [
        ("d2plm-wrq7f-train", LOG, SAID),
        ("d2plm-wrq7f-train(0)", LOG, SAID),
        ("task-train(0)", LOG, SAID),
        ("d2plm-wrq7f-train", "100/500 steps\n", "100/500 steps\n"),
        ("none", "", "its log"),
    ],
    ids=["node", "inner node", "task", "killed", "no log"],
)
def test_a_run_that_fails_is_reported_with_the_last_lines_of_its_steps_log(
    server: KfpServer, capsys: Captured, node: str, log: str, said: str
) -> None:
    server.logs[node] = log
    failed = [step("prepare", "SUCCEEDED"), step("train", "FAILED"), step("finish", "SUCCEEDED")]
    server.script = [run("FAILED", *failed, error={}, run_id="r1")]
    assert d2plm([*SUBMIT, "wait=true"]) == 1
    start = f"d2plm: error: the run has failed, see {server.url}/#/runs/details/r1: train: "
    assert capsys.readouterr().err.startswith(start + said)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (
            [run("CANCELING", step("train", "RUNNING")), run("FAILED", step("train", "FAILED"))],
            "the run was cancelled",
        ),
        ([{"state": "FAILED", "error": {"code": 3, "message": "no such claim"}}], "no such claim"),
        ([{"state": "PENDING"}], "within start_deadline_seconds=0.1: the run is pending"),
    ],
)
def test_a_run_that_is_cancelled_rejected_or_does_not_start_is_an_error(
    server: KfpServer, capsys: Captured, states: list[dict[str, Any]], said: str
) -> None:
    server.script = states
    assert d2plm([*SUBMIT, "wait=true", "launcher.start_deadline_seconds=0.1"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "status", "said"),
    [
        ("SchedulingGated", None, "left its queue within queue_deadline_seconds=0.4"),
        # A failure of the cluster does not end the watch over the deadline; a refusal does.
        ("Unschedulable", 503, "started within start_deadline_seconds=0.3: Unschedulable: later"),
        ("Unschedulable", 403, None),
    ],
)
def test_every_wait_for_a_pod_has_an_end_and_lines_about_it(
    server: KfpServer,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: Captured,
    reason: str,
    status: int | None,
    said: str | None,
) -> None:
    monkeypatch.setattr(follow, "REPORT_SECONDS", 0.1)
    monkeypatch.setenv("KFP_NAMESPACE", NAMESPACE)
    server.multi_user = True
    server.script = [*[run("RUNNING", step("prepare", "RUNNING"))] * 60, run("SUCCEEDED")]
    condition = {"type": "PodScheduled", "status": "False", "reason": reason, "message": "later"}
    labels = {"pipeline/runid": "r1"}
    pod = {
        "metadata": {"name": "pod", "namespace": NAMESPACE, "labels": labels},
        "spec": {},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    limits = ("launcher.start_deadline_seconds=0.3", "launcher.queue_deadline_seconds=0.4")
    with Cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kube_config))
        cluster.store.create("pods", pod)
        if status is not None:
            cluster.fail_next(2, status, "list", "pods")
        assert d2plm([*SUBMIT, "wait=true", *limits]) == (said is not None)
    output, error = capsys.readouterr()
    assert output.count("waiting: ") >= 2
    assert said is None or f"no pod has {said}" in error


def test_silence_is_given_up(server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(kfp_server_module, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(follow, "PATIENCE_SECONDS", 0.0)
    for path, words in (("/runs/r1", ["wait=true"]), ("/runs", [])):
        server.script, server.silent = [run("RUNNING")], path
        assert d2plm([*SUBMIT, *words]) == 1
        assert "Read timed out" in capsys.readouterr().err


def test_a_server_that_is_away_is_asked_again_and_reported_in_every_interval_or_given_up(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    server.script = [run("SUCCEEDED", step("prepare", "SUCCEEDED"))]
    for status, times, patience, interval, reports in (
        *((502, 3, 600.0, 60.0, 1), (502, 3, 600.0, 0.0, 3)),
        *((401, 9, 600.0, 60.0, None), (502, 9, 0.0, 60.0, None)),  # 401: the token has expired
    ):
        monkeypatch.setattr(follow, "PATIENCE_SECONDS", patience)
        monkeypatch.setattr(follow, "REPORT_SECONDS", interval)
        server.refusals["/runs/r1"] = (times, (status, {"message": "gone"}))
        assert d2plm([*SUBMIT, "wait=true"]) == (reports is None)
        output, error = capsys.readouterr()
        assert output.count("; retrying for up to ") == (reports or 0)
        assert ("the run itself continues" in error) == (reports is None)


def test_an_interrupt_ends_the_following_alone(server: KfpServer, capsys: Captured) -> None:
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


def test_a_schedule_becomes_a_recurring_run(server: KfpServer, capsys: Captured) -> None:
    weekly = "/workspace/weekly-%Y-%m-%d"
    words = [f"work_dir={weekly}", "cron=0 0 3 * * 1", "service_account=mine"]
    assert d2plm([*SUBMIT, *words]) == 0
    assert capsys.readouterr().out == f"{server.url}/#/recurringrun/details/s1\n"
    (sent,) = server.posted("/recurringruns")
    assert sent["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"
    expected = {"max_concurrency": 1, "no_catchup": True, "mode": "ENABLE"}
    assert {**sent, **expected, "service_account": "mine"} == sent
    assert sent["runtime_config"]["parameters"]["work_dir"] == weekly


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([*DEBUG, "cron=0 3 * * 1"], "cron="),
        ([*DEBUG, "cron=0 0 3 * * 1", "wait=true"], "wait="),
        ([*DEBUG, "tracking.trackers=[]"], "tracking.trackers="),
        ([*DEBUG, "work_dir=runs/mine"], "work_dir="),
        ([*DEBUG, "work_dir='/workspace/[[ScheduledTime]]'"], "work_dir="),
        ([*DEBUG, "tolerations=gpu"], "tolerations="),
        ([*DEBUG, "prepare_memory=12Gx"], "prepare_memory="),
        ([*DEBUG, "evaluate_gpus=one"], "evaluate_gpus="),
        ([*DEBUG, "claim=BAD_NAME"], "claim="),
        ([*DEBUG, "prepare_cpuu=1"], "did you mean 'prepare_cpu'"),
        ([*DEBUG, "output=d2plm.yaml"], "output:"),
        (["sweep=scalin"], "did you mean 'scaling'"),
        (["sweep=train", *DEBUG], "no key has several values"),
        ([*SWEEP, "dry_run=true"], "dry-run"),
        ([*SWEEP, "launcher.name=mine"], "launcher.name="),
        (["sweep=train", *DEBUG, "data.input=/a,/b"], "data.input"),
        ([*SWEEP, "arms.c.trainer.max_step=2"], "arms.c: unknown key 'trainer.max_step'"),
    ],
)
def test_words_are_checked(server: KfpServer, capsys: Captured, words: list[str], key: str) -> None:
    assert d2plm(["pipeline", "submit", *words]) == 2
    error = capsys.readouterr().err
    assert key in error and error.count("\n") == 1
    assert not server.posted("/runs")


def test_keys_that_vary_reach_the_pods_as_written(server: KfpServer, capsys: Captured) -> None:
    words = ["paradigm=diffusion,flow_matching", "trainer.seed=1,2"]
    given = ["sweep=train", "experiment=debug", "tracking=none", "launcher.nodes=2"]
    assert d2plm(["pipeline", "submit", *given, *words]) == 0
    (sent,) = server.posted("/runs")
    parameters = sent["runtime_config"]["parameters"]
    assert parameters["paradigm"] == "diffusion,flow_matching"
    assert parameters["overrides"] == "tracking=none launcher.nodes=2 trainer.seed=1,2"
    assert [one["display_name"] for one in server.pipelines] == ["d2plm-sweep-train"]


def test_the_steps_ask_for_what_the_experiment_needs(server: KfpServer) -> None:
    for words in ("experiment=demo", "model=nano", "prepare_memory=2Gi"):
        assert d2plm(["pipeline", "submit", words]) == 0
    sent = [one["runtime_config"]["parameters"] for one in server.posted("/runs")]
    assert [one.get("prepare_memory") for one in sent] == [None, "16Gi", "2Gi"]  # None: 4Gi


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


def test_a_proxy_is_not_used_for_this_machine_and_named_where_it_refuses(
    server: KfpServer, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    with kfp_server() as proxy:
        proxy.refusals[""] = (1000, (503, "no upstream"))
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        assert d2plm([*SUBMIT]) == 0
        assert not proxy.requests
        monkeypatch.setenv("KFP_HOST", "http://kubeflow.example")
        assert d2plm([*SUBMIT]) == 1
        assert f"the proxy {proxy.url}" in capsys.readouterr().err
