"""The compiled pipeline: settings that only a cluster needs."""

from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp.components import load_component_from_file

from d2plm import __version__
from d2plm.cli import main as d2plm
from d2plm.core.errors import ConfigError
from pipelines import components, steps
from pipelines.local import step_command

STEPS = {"configure", "prepare", "train", "evaluate", "register", "generate"}
Specification = dict[str, Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    words = ["experiment=debug", "paradigm=flow_matching", "model.hidden_size=64"]
    images = ["registry=registry.example/us", "tag=1.2"]
    assert d2plm(["pipeline", "compile", *words, *images, f"output={output}"]) == 0
    return output


@pytest.fixture(scope="module")
def specification(compiled: Path) -> Specification:
    return next(yaml.safe_load_all(compiled.read_text()))


@pytest.fixture(scope="module")
def pods(compiled: Path) -> dict[str, Specification]:
    """What kfp-kubernetes says of each step."""
    _, platforms = yaml.safe_load_all(compiled.read_text())
    executors = platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): pod for name, pod in executors.items()}


def tasks(specification: Specification) -> dict[str, Specification]:
    """All tasks, of the pipeline and of its exit handler."""
    inner = specification["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    return {**specification["root"]["dag"]["tasks"], **inner}


def containers(specification: Specification) -> dict[str, Specification]:
    executors = specification["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): e["container"] for name, e in executors.items()}


def test_it_loads_again_with_the_settings_as_its_defaults(
    compiled: Path, specification: Specification
) -> None:
    assert load_component_from_file(str(compiled)).name == "d2plm"
    parameters = specification["root"]["inputDefinitions"]["parameters"]
    defaults = {name: parameter["defaultValue"] for name, parameter in parameters.items()}
    assert defaults["paradigm"] == "flow_matching"
    assert defaults["experiment"] == "debug"
    assert defaults["overrides"] == "model.hidden_size=64"
    assert defaults["work_dir"] == "/workspace/debug"
    assert defaults["input"] == "/opt/d2plm/examples/data/uniprot_20k.fasta.gz"


def test_the_form_has_for_each_parameter_a_type_a_default_and_a_description(
    specification: Specification,
) -> None:
    parameters = specification["root"]["inputDefinitions"]["parameters"]
    for name, parameter in parameters.items():
        assert "defaultValue" in parameter, name
        assert len(parameter["description"]) > 10, name
    types = {name: parameter["parameterType"] for name, parameter in parameters.items()}
    assert {n for n, t in types.items() if t == "NUMBER_INTEGER"} == {"max_steps", "nodes", "gpus"}
    assert (types["tolerations"], types["node_selector"]) == ("LIST", "STRUCT")


def test_all_that_a_task_asks_its_surroundings_for_is_there(specification: Specification) -> None:
    handler = specification["components"]["comp-exit-handler-1"]
    given = handler["inputDefinitions"]["parameters"]
    assert set(handler["dag"]["tasks"]) == STEPS
    for name, task in handler["dag"]["tasks"].items():
        for source in wanted(task["inputs"]["parameters"].values()):
            assert source in given, (name, source)
    root = specification["root"]
    for task in root["dag"]["tasks"].values():
        for source in wanted(task["inputs"]["parameters"].values()):
            assert source in root["inputDefinitions"]["parameters"]


def test_what_a_pod_is_given_by_parameter_is_among_its_tasks_inputs(
    specification: Specification, pods: dict[str, Specification]
) -> None:
    handler = specification["components"]["comp-exit-handler-1"]["inputDefinitions"]["parameters"]
    root = specification["root"]["inputDefinitions"]["parameters"]
    for name, pod in pods.items():
        values = [pod["pvcMount"][0]["pvcNameParameter"], pod["tolerations"][0]["tolerationJson"]]
        values.append(pod["nodeSelector"]["nodeSelectorJson"])
        assert set(wanted(values)) <= set(root if name == "finish" else handler)


def wanted(values: Any) -> Iterator[str]:
    """What these inputs take from the component around them."""
    for value in values:
        if "componentInputParameter" in value:
            yield value["componentInputParameter"]


def test_each_step_has_named_outputs_and_artifacts_of_kfps_own_types(
    specification: Specification,
) -> None:
    outputs = {
        name.removeprefix("comp-"): component["outputDefinitions"]
        for name, component in specification["components"].items()
        if "outputDefinitions" in component
    }
    assert {name: set(found.get("parameters", ())) for name, found in outputs.items()} == {
        "configure": {"config"},
        "prepare": {"digest"},
        "train": {"model_dir"},
        "evaluate": {"perplexity"},
        "register": {"version"},
        "generate": {"file"},
        "finish": set(),
    }
    artifacts = {
        (step, name): artifact["artifactType"]["schemaTitle"].removeprefix("system.")
        for step, found in outputs.items()
        for name, artifact in found.get("artifacts", {}).items()
    }
    assert artifacts == {
        ("prepare", "dataset"): "Dataset",
        ("train", "model"): "Model",
        ("evaluate", "metrics"): "Metrics",
        ("evaluate", "report"): "HTML",
        ("register", "registered"): "Model",
        ("generate", "sequences"): "Artifact",
        ("generate", "designs"): "Artifact",
        ("generate", "report"): "HTML",
        ("finish", "summary"): "Markdown",
    }


def test_no_step_is_ever_taken_from_the_cache(specification: Specification) -> None:
    for name, task in tasks(specification).items():
        if name != "exit-handler-1":
            assert task["cachingOptions"] == {}, name
    train = tasks(specification)["train"]["inputs"]["parameters"]
    assert train["data_digest"]["taskOutputParameter"]["producerTask"] == "prepare"


def test_the_exit_handler_learns_how_the_steps_ended(specification: Specification) -> None:
    finish = specification["root"]["dag"]["tasks"]["finish"]
    assert finish["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    status = finish["inputs"]["parameters"]["status"]["taskFinalStatus"]
    assert status["producerTask"] == "exit-handler-1"


def test_lost_pods_are_replaced_within_seconds_and_the_first_and_the_last_know_the_run(
    specification: Specification,
) -> None:
    inner = {name: task for name, task in tasks(specification).items() if name in STEPS}
    for task in inner.values():
        policy = task["retryPolicy"]
        assert (policy["maxRetryCount"], policy["backoffDuration"]) == (2, "5s")
    finish = tasks(specification)["finish"]
    for task in (inner["configure"], finish):
        given = task["inputs"]["parameters"]
        run_id, time = (given[name]["runtimeValue"]["constant"] for name in ("run_id", "time"))
        assert run_id == "{{$.pipeline_job_uuid}}"  # the driver replaces it where it stands alone
        assert time == "{{$.pipeline_job_schedule_time_utc}}"


def test_the_settings_are_composed_once_and_passed_on_by_path(specification: Specification) -> None:
    for name, task in tasks(specification).items():
        if name in STEPS - {"configure"}:
            source = task["inputs"]["parameters"]["config"]["taskOutputParameter"]
            assert source["producerTask"] == "configure"


def test_every_step_is_told_which_modules_to_import(specification: Specification) -> None:
    steps_and_handler = tasks(specification)
    del steps_and_handler["exit-handler-1"]
    for name, task in steps_and_handler.items():
        given = task["inputs"]["parameters"]["modules"]
        assert given["componentInputParameter"].endswith("modules"), name


def test_a_step_imports_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_mine.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="parts_of_mine"):
        components.evaluate.python_func("run.yaml", "parts_of_mine", "model", None, None)


def test_the_images_are_parameters_of_the_registry_and_the_tag(
    specification: Specification,
) -> None:
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


def test_every_pod_has_the_volume_and_the_surroundings_that_may_be_absent(
    pods: dict[str, Specification],
) -> None:
    assert set(pods) == {*STEPS, "finish"}
    for name, pod in pods.items():
        (mount,) = pod["pvcMount"]
        assert mount["mountPath"] == "/workspace"
        assert pod["emptyDirMounts"] == [{"mountPath": "/tmp", "volumeName": "tmp"}]  # noqa: S108
        (secret,), (config,) = pod["secretAsEnv"], pod["configMapAsEnv"]
        assert secret["secretName"] == "d2plm-secrets" and secret["optional"] is True, name
        assert config["configMapName"] == "d2plm-config" and config["optional"] is True, name
        keys = {pair["secretKey"] for pair in secret["keyToEnv"]}
        assert {"MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY"} <= keys
        assert config["keyToEnv"][0]["envVar"] == "MLFLOW_TRACKING_URI"


def test_every_pod_is_of_our_user_labelled_and_placed(pods: dict[str, Specification]) -> None:
    for pod in pods.values():
        user = {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert pod["securityContext"] == user
        assert pod["imagePullPolicy"] == "IfNotPresent"
        labels = pod["podMetadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == "pipeline"
        assert labels["app.kubernetes.io/version"] == __version__
    deadlines = {name: pod.get("activeDeadlineSeconds") for name, pod in pods.items()}
    assert deadlines.pop("train") is None  # however long training lasts
    assert None not in deadlines.values()


def test_resources_are_parameters_but_of_the_steps_that_only_wait(
    specification: Specification,
) -> None:
    used = {name: container["resources"] for name, container in containers(specification).items()}
    assert used["train"]["resourceMemoryLimit"] == "2Gi"
    assert "accelerator" not in used["train"]
    for name, parameter in (("prepare", "prepare_memory"), ("evaluate", "evaluate_memory")):
        expected = f"{{{{$.inputs.parameters['pipelinechannel--{parameter}']}}}}"
        assert used[name]["resourceMemoryLimit"] == expected
    for name in ("evaluate", "generate"):
        assert "gpu_resource" in used[name]["accelerator"]["resourceType"]
        assert "evaluate_gpus" in used[name]["accelerator"]["resourceCount"]


def test_a_local_run_has_the_steps_of_the_compiled_pipeline_in_their_order(
    specification: Specification,
) -> None:
    inner = specification["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    before = {name: set(task.get("dependentTasks", [])) for name, task in inner.items()}
    ordered = [name for name in TopologicalSorter(before).static_order() if name != "configure"]
    assert ordered == list(steps.STEPS)
    for name, container in containers(specification).items():
        called = f"steps.{name}("  # the component's body, which KFP keeps as text
        assert any(called in word for word in container["args"] + container["command"]), name
    file = Path("runs/a/pipeline_runs/1.yaml")
    assert step_command("train", file)[1:] == ["-m", "pipelines.steps", "train", str(file)]
