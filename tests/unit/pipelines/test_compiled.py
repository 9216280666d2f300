"""The compiled pipeline: settings that only a cluster needs."""

from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from d2plm import __version__
from d2plm.cli import main as d2plm
from d2plm.core.errors import ConfigError
from pipelines import steps
from pipelines.local import step_command
from tests.conftest import MonkeyPatch

STEPS = {"configure", "prepare", "train", "evaluate", "register", "generate"}
Specification = dict[str, Any]


@pytest.fixture(scope="module")
def documents(quick_kfp: None, tmp_path_factory: pytest.TempPathFactory) -> list[Specification]:
    output = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    words = ["experiment=debug", "paradigm=flow_matching", "model.hidden_size=64"]
    images = ["registry=registry.example/us", "tag=1.2"]
    assert d2plm(["pipeline", "compile", *words, *images, f"output={output}"]) == 0
    return list(yaml.safe_load_all(output.read_text()))


@pytest.fixture
def specification(documents: list[Specification]) -> Specification:
    return documents[0]


@pytest.fixture
def pods(documents: list[Specification]) -> dict[str, Specification]:
    executors = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): pod for name, pod in executors.items()}


def containers(specification: Specification) -> dict[str, Specification]:
    executors = specification["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): e["container"] for name, e in executors.items()}


def test_it_has_the_settings_as_its_defaults(specification: Specification) -> None:
    parameters = specification["root"]["inputDefinitions"]["parameters"]
    defaults = {name: parameter["defaultValue"] for name, parameter in parameters.items()}
    expected = {
        "paradigm": "flow_matching",
        "experiment": "debug",
        "overrides": "model.hidden_size=64",
        "work_dir": "/workspace/debug",
        "input": "/opt/d2plm/examples/data/uniprot_20k.fasta.gz",
    }
    assert defaults | expected == defaults
    types = {name: parameter["parameterType"] for name, parameter in parameters.items()}
    assert {n for n, t in types.items() if t == "NUMBER_INTEGER"} == {"max_steps", "nodes", "gpus"}
    assert (types["tolerations"], types["node_selector"]) == ("LIST", "STRUCT")


def test_every_input_is_there(specification: Specification, pods: dict[str, Specification]) -> None:
    handler = specification["components"]["comp-exit-handler-1"]
    assert set(handler["dag"]["tasks"]) == STEPS
    for component in (handler, specification["root"]):
        given = component["inputDefinitions"]["parameters"]
        for name, task in component["dag"]["tasks"].items():
            values = [*task["inputs"]["parameters"].values()]
            if pod := pods.get(name):
                values += [pod["pvcMount"][0]["pvcNameParameter"]]
                values += [pod["tolerations"][0]["tolerationJson"]]
                values += [pod["nodeSelector"]["nodeSelectorJson"]]
            wanted = {value.get("componentInputParameter") for value in values}
            assert wanted - {None} <= {*given}, name


def producer(task: Specification, name: str) -> str:
    source: str = task["inputs"]["parameters"][name]["taskOutputParameter"]["producerTask"]
    return source


def test_tasks_are_not_cached_are_retried_and_know_their_run(specification: Specification) -> None:
    inner = specification["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    finish = specification["root"]["dag"]["tasks"]["finish"]
    assert finish["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    status = finish["inputs"]["parameters"]["status"]["taskFinalStatus"]
    assert status["producerTask"] == "exit-handler-1"
    for name, task in (*inner.items(), ("finish", finish)):
        given = task["inputs"]["parameters"]
        assert task["cachingOptions"] == {}, name
        assert given["modules"]["componentInputParameter"].endswith("modules")
        if name in ("configure", "finish"):
            run_id, time = (given[key]["runtimeValue"]["constant"] for key in ("run_id", "time"))
            assert run_id == "{{$.pipeline_job_uuid}}"  # the driver replaces it where alone
            assert time == "{{$.pipeline_job_schedule_time_utc}}"
        else:
            assert producer(task, "config") == "configure"
    for task in inner.values():
        policy = task["retryPolicy"]
        assert (policy["maxRetryCount"], policy["backoffDuration"]) == (2, "5s")
    assert producer(inner["train"], "data_digest") == "prepare"


def test_a_step_imports_the_modules(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    from pipelines import components

    (tmp_path / "parts_of_mine.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="parts_of_mine"):
        components.evaluate.python_func("run.yaml", "parts_of_mine", "model", None, None)


def test_images_are_parameters_of_registry_and_tag(specification: Specification) -> None:
    parameters = specification["root"]["inputDefinitions"]["parameters"]
    trainer, mmseqs2 = parameters["trainer_image"], parameters["mmseqs2_image"]
    assert trainer["defaultValue"] == "registry.example/us/d2plm-trainer:1.2"
    assert mmseqs2["defaultValue"] == "registry.example/us/d2plm-mmseqs2:1.2"
    # A parameter with anything around it would be lost by KFP's driver.
    used = {name: container["image"] for name, container in containers(specification).items()}
    of_trainer = "{{$.inputs.parameters['pipelinechannel--trainer_image']}}"
    of_mmseqs2 = "{{$.inputs.parameters['pipelinechannel--mmseqs2_image']}}"
    assert used.pop("configure") == used.pop("prepare") == of_mmseqs2
    assert used.pop("finish") == of_trainer
    assert set(used.values()) == {of_trainer}


def test_every_pod_has_its_volume_user_labels_and_settings(pods: dict[str, Specification]) -> None:
    assert set(pods) == {*STEPS, "finish"}
    for pod in pods.values():
        (mount,), (secret,), (config,) = pod["pvcMount"], pod["secretAsEnv"], pod["configMapAsEnv"]
        assert mount["mountPath"] == "/workspace"
        assert pod["emptyDirMounts"] == [{"mountPath": "/tmp", "volumeName": "tmp"}]  # noqa: S108
        assert (secret["secretName"], secret["optional"]) == ("d2plm-secrets", True)
        assert (config["configMapName"], config["optional"]) == ("d2plm-config", True)
        keys = {pair["secretKey"] for pair in secret["keyToEnv"]}
        assert {"MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"} <= keys
        assert config["keyToEnv"][0]["envVar"] == "MLFLOW_TRACKING_URI"
        user = {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert pod["securityContext"] == user
        labels = pod["podMetadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == "pipeline"
        assert labels["app.kubernetes.io/version"] == __version__
    deadlines = {name: pod.get("activeDeadlineSeconds") for name, pod in pods.items()}
    assert deadlines.pop("train") is None  # however long training lasts
    assert None not in deadlines.values()


def test_resources_are_parameters_where_steps_compute(specification: Specification) -> None:
    used = {name: container["resources"] for name, container in containers(specification).items()}
    assert used["train"]["resourceMemoryLimit"] == "2Gi"
    assert "accelerator" not in used["train"]
    for name, parameter in (("prepare", "prepare_memory"), ("evaluate", "evaluate_memory")):
        expected = f"{{{{$.inputs.parameters['pipelinechannel--{parameter}']}}}}"
        assert used[name]["resourceMemoryLimit"] == expected
    for name in ("evaluate", "generate"):
        assert "gpu_resource" in used[name]["accelerator"]["resourceType"]
        assert "evaluate_gpus" in used[name]["accelerator"]["resourceCount"]


def test_a_local_run_has_the_steps_in_their_order(specification: Specification) -> None:
    inner = specification["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    before = {name: set(task.get("dependentTasks", [])) for name, task in inner.items()}
    ordered = [name for name in TopologicalSorter(before).static_order() if name != "configure"]
    assert ordered == list(steps.STEPS)
    for name, container in containers(specification).items():
        called = f"steps.{name}("  # the component's body, which KFP keeps as text
        assert any(called in word for word in container["args"] + container["command"]), name
    file = Path("runs/a/pipeline_runs/1.yaml")
    assert step_command("train", file)[1:] == ["-m", "pipelines.steps", "train", str(file)]
