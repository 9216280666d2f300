"""Training jobs: the shipped manifests follow the specification, which rejects invalid values."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from d2plm.cli import main
from d2plm.core.errors import ConfigError
from d2plm.launch.elastic import GRACE_SECONDS
from d2plm.launch.job_spec import (
    TrainingJob,
    persistent_volume_claim,
    pytorchjob,
    training_runtime,
    trainjob,
)
from tests.conftest import Captured
from tests.manifests import K8S, documents, render

JOB = TrainingJob(
    "mine",
    "registry.example/d2plm-trainer:1",
    ("-m", "d2plm", "train", "model=35m"),
    claims={"d2plm-workspace": "/workspace", "proteins": "/proteins"},
)


def pods(job: TrainingJob) -> list[dict[str, Any]]:
    """The pod templates of both kinds."""
    replicated = training_runtime(job)["spec"]["template"]["spec"]["replicatedJobs"][0]
    return [
        pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"],
        replicated["template"]["spec"]["template"],
    ]


SETTINGS = json.loads((K8S / "job_settings.json").read_text())


@pytest.mark.parametrize("file", SETTINGS["written"])
def test_a_shipped_manifest_is_what_its_settings_show(file: str, capsys: Captured) -> None:
    assert main(["job", "show", *SETTINGS["written"][file]]) == 0
    assert capsys.readouterr().out == (K8S / file).read_text()


def test_the_patch_for_several_nodes_makes_what_its_settings_show(
    tmp_path: Path, capsys: Captured
) -> None:
    patch = K8S / "overlays" / "multi-node" / "job.yaml"
    overlay = {
        "resources": [os.path.relpath(K8S / "job", tmp_path)],
        "patches": [{"target": {"kind": "PyTorchJob"}, "path": os.path.relpath(patch, tmp_path)}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    words = SETTINGS["patched"]["overlays/multi-node/job.yaml"]
    assert main(["job", "show", *words]) == 0
    (shown,) = documents(capsys.readouterr().out)
    assert render(tmp_path, "--load-restrictor=LoadRestrictionsNone") == [shown]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"name": "Mine"}, "name"),
        ({"name": "1mine"}, "name"),
        ({"name": "m" * 64}, "name"),
        ({"image": ""}, "image"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes"),
        ({"gpus": -1}, "gpus"),
        ({"processes": 0}, "processes"),
        ({"memory": "8 GB"}, "memory"),
        ({"cpu": "two"}, "cpu"),
        ({"memory": "1Gi", "shared_memory": "1024Mi"}, "shared_memory"),
    ],
)
def test_an_impossible_value_is_rejected_by_its_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        replace(JOB, **change)


def test_processes_follow_the_gpus_which_are_requested_as_they_are_limited() -> None:
    job = replace(JOB, gpus=8, nodes=2)
    assert pytorchjob(job)["spec"]["nprocPerNode"] == "8"
    assert trainjob(job)["spec"]["trainer"]["numProcPerNode"] == 8
    resources = trainjob(job)["spec"]["trainer"]["resourcesPerNode"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 8
    other = pytorchjob(replace(JOB, processes=3))["spec"]
    assert other["nprocPerNode"] == "3"
    assert "nvidia.com/gpu" not in str(other)


def test_threads_follow_the_cpus_that_are_requested() -> None:
    def threads(**change: Any) -> str:
        environment = trainjob(replace(JOB, **change))["spec"]["trainer"]["env"]
        return {e["name"]: e["value"] for e in environment}["OMP_NUM_THREADS"]

    assert threads(cpu="8", processes=2) == "4"
    assert threads(cpu="500m") == "1"


def test_fewer_nodes_may_continue_where_a_minimum_is_given() -> None:
    policy = pytorchjob(replace(JOB, nodes=4))["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == (4, 4)
    policy = pytorchjob(replace(JOB, nodes=4, min_nodes=2))["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == (2, 4)


def test_a_pod_has_longer_to_end_than_its_workers_to_save() -> None:
    for pod in pods(JOB):
        assert pod["spec"]["terminationGracePeriodSeconds"] > GRACE_SECONDS


def test_volumes_are_mounted_in_the_container_and_in_the_preparation() -> None:
    for pod in pods(replace(JOB, preparation=("d2plm", "prepare"))):
        named = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
            mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
            assert {m["name"] for m in mounts.values()} == named
            assert len(mounts) == 4  # with /tmp and /dev/shm


def test_placement_reaches_the_pods_of_both_kinds() -> None:
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    job = replace(
        JOB,
        same_node=True,
        node_selector={"pool": "a100"},
        tolerations=[toleration],
        priority_class="low",
        service_account="d2plm-trainer",
    )
    for pod in pods(job):
        spec, labels = pod["spec"], pod["metadata"]["labels"]
        assert spec["nodeSelector"] == {"pool": "a100"}
        assert spec["tolerations"] == [toleration]
        assert spec["priorityClassName"] == "low"
        assert spec["serviceAccountName"] == "d2plm-trainer"
        terms = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert terms[0]["labelSelector"]["matchLabels"].items() <= labels.items()
        assert pod["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"


def test_a_queue_is_named_on_the_job_alone() -> None:
    job = replace(JOB, queue="research")
    label = "kueue.x-k8s.io/queue-name"
    assert pytorchjob(job)["metadata"]["labels"][label] == "research"
    assert trainjob(job)["metadata"]["labels"][label] == "research"
    assert label not in str(training_runtime(job))
    assert label not in str(persistent_volume_claim(job, "d2plm-workspace", "1Gi", True))


def test_an_owner_takes_the_job_and_not_its_volume_along() -> None:
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u"}
    job = replace(JOB, owners=[owner])
    for manifest in (pytorchjob(job), trainjob(job), training_runtime(job)):
        assert manifest["metadata"]["ownerReferences"] == [owner]
    claim = persistent_volume_claim(job, "d2plm-workspace", "1Gi", shared=True)
    assert "ownerReferences" not in claim["metadata"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_trainjob_says_what_its_runtime_does_not() -> None:
    job = replace(JOB, nodes=3)
    trainer = trainjob(job)["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (3, JOB.image)
    assert trainer["args"] == list(JOB.arguments)
    reference = trainjob(job)["spec"]["runtimeRef"]
    runtime = training_runtime(job)
    assert (reference["kind"], reference["name"]) == (runtime["kind"], job.name)
    assert runtime["metadata"]["name"] == job.name


def test_settings_go_to_the_pods_without_those_of_the_launcher(capsys: Captured) -> None:
    words = ["launcher=pytorchjob", "launcher.name=mine", "model=35m"]
    assert main(["job", "show", *words, "data.input=/proteins/a b.fasta"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    pod = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    settings = ["model=35m", "data.input=/proteins/a b.fasta"]
    assert pod["containers"][0]["args"] == ["-m", "d2plm", "train", *settings]
    assert pod["initContainers"][0]["command"][:4] == ["d2plm", "prepare", *settings]
    assert main(["job", "show", *words, "launcher.prepare=false"]) == 0
    assert "initContainers" not in capsys.readouterr().out
    assert main(["job", "show", *words]) == 2
    assert "data.input" in capsys.readouterr().err


def test_gpus_without_a_trainer_for_them_and_the_other_way_round_are_rejected(
    capsys: Captured,
) -> None:
    words = ["job", "show", "launcher=pytorchjob", "launcher.name=mine", "launcher.prepare=false"]
    words.append("trainer.global_batch_tokens=131072")
    assert main([*words, "launcher.gpus=8"]) == 2
    assert "trainer=multi_gpu" in capsys.readouterr().err
    assert main([*words, "trainer=multi_gpu"]) == 2
    assert "gpus" in capsys.readouterr().err
    assert main([*words, "trainer=multi_gpu", "launcher.gpus=8"]) == 0
    assert "nprocPerNode: '8'" in capsys.readouterr().out


def test_dimensions_that_do_not_fit_the_pods_are_rejected_before_there_are_any(
    capsys: Captured,
) -> None:
    words = ["job", "show", "launcher=pytorchjob", "launcher.name=mine", "launcher.prepare=false"]
    assert main([*words, "launcher.nodes=3", "distributed.tensor=2"]) == 2
    assert "distributed.tensor=2" in capsys.readouterr().err
    words += ["launcher.nodes=2", "launcher.min_nodes=1"]
    assert main([*words, "distributed.tensor=2"]) == 2  # one pod alone could not go on
    words += ["distributed.processes=2", "data.token_budget=1024"]
    words += ["trainer.global_batch_tokens=2048"]
    assert main([*words, "distributed.tensor=2"]) == 0
    capsys.readouterr()
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "trainer.global_batch_tokens=2048: its 2 bins" in said and "4 processes" in said


def test_settings_that_would_not_reach_the_pods_are_rejected(
    tmp_path: Path, capsys: Captured
) -> None:
    words = ["job", "show", "launcher=pytorchjob", "launcher.name=mine", "launcher.prepare=false"]
    assert main([*words, "--config-name", "train"]) == 2
    assert "not passed to" in capsys.readouterr().err
    assert main([*words, "launcher.claims=null"]) == 2
    assert "launcher.claims=null: must be a mapping" in capsys.readouterr().err


def test_numbers_are_text_where_the_api_wants_text() -> None:
    job = replace(JOB, cpu=1.5, memory="2Gi")  # type: ignore[arg-type]  # as YAML gives it
    assert trainjob(job)["spec"]["trainer"]["resourcesPerNode"]["requests"]["cpu"] == "1.5"
    with pytest.raises(ConfigError, match=r"^node_selector=.*: must be a mapping to text"):
        replace(JOB, node_selector={"gpu": True})
