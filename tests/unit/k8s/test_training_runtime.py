"""The runtime for the Kubeflow SDK: a TrainJob's, with a command that takes settings from `env`."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from d2plm.launch.job_spec import IMAGE, TrainingJob, training_runtime
from tests.cluster.schema import errors
from tests.cluster.store import RESOURCES
from tests.manifests import K8S, documents, pod_security_complaints

(RUNTIME,) = documents((K8S / "clustertrainingruntime.yaml").read_text())
JOB = TrainingJob("d2plm", IMAGE, (), claims={"d2plm-workspace": "/workspace"})


def container(runtime: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    found: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_it_is_the_runtime_of_a_trainjob_with_what_the_sdk_does_not_set() -> None:
    expected = training_runtime(JOB)
    own = {key: container(RUNTIME)[key] for key in ("command", "args", "env", "resources")}
    container(expected).update(own)
    assert {**expected, "kind": "ClusterTrainingRuntime"} == RUNTIME
    # Without limits: the SDK refuses a runtime whose limits name neither CPUs nor an accelerator.
    assert own["resources"].keys() == {"requests"}


def test_the_schema_and_pod_security_accept_it() -> None:
    assert errors(RESOURCES["clustertrainingruntimes"], RUNTIME) == []
    template = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert pod_security_complaints(template["template"]) == []


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, Any]:
    """How to run the command with programs that print their arguments, a line each."""
    for name, last in (
        ("d2plm", 'test -z "$SECONDS_TO_TAKE" || sleep "$SECONDS_TO_TAKE"'),
        ("python", ""),
    ):
        script = f"#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\n{last}\nexit ${{STATUS:-0}}\n"
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    command = [*container(RUNTIME)["command"], *container(RUNTIME)["args"]]
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    return {"args": command, "env": environment, "stdout": subprocess.PIPE, "text": True}


def test_both_commands_receive_the_settings_as_they_are_quoted(shell: dict[str, Any]) -> None:
    shell["env"]["D2PLM_SETTINGS"] = "'work_dir=/a b' *=x model=35m"
    done = subprocess.run(**shell, check=True)
    settings = ["work_dir=/a b", "*=x", "model=35m"]
    own = ["data.keep_prepared=true", "tracking.trackers=[]"]
    prepared = ["d2plm", "prepare", *settings, *own]
    trained = ["python", "-m", "d2plm.launch.elastic", "-m", "d2plm", "train", *settings]
    assert done.stdout.splitlines() == prepared + trained
    shell["env"] |= {"STATUS": "2"}  # of a preparation that fails
    done = subprocess.run(**shell, check=False)
    assert done.returncode == 2 and "python" not in done.stdout


def test_sigterm_ends_the_preparation_without_waiting_for_it(shell: dict[str, Any]) -> None:
    shell["env"] |= {"D2PLM_SETTINGS": "", "SECONDS_TO_TAKE": "60"}
    with subprocess.Popen(**shell, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "d2plm\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        os.killpg(process.pid, signal.SIGKILL)  # in a pod, all else ends with its first process
