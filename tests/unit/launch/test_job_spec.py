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
    SHARDS,
    TrainingJob,
    persistent_volume_claim,
    pytorchjob,
    training_runtime,
    trainjob,
)
from d2plm.launch.run_job import missing_shards
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


def test_the_patch_for_nodes_makes_what_is_shown(tmp_path: Path, capsys: Captured) -> None:
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
    "change",
    [
        *({"name": name} for name in ("Mine", "1mine", "m" * 64)),
        *({"image": ""}, {"nodes": 0}, {"gpus": -1}, {"processes": 0}),
        *({"memory": "8 GB"}, {"cpu": "two"}, {"node_selector": {"gpu": True}}),
        {"min_nodes": 3, "nodes": 2},
        {"shared_memory": "1024Mi", "memory": "1Gi"},
    ],
)
def test_an_impossible_value_is_rejected_by_its_key(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(change))}="):
        replace(JOB, **change)


def test_processes_follow_the_gpus_threads_the_cpus_and_limits_the_requests() -> None:
    job = replace(JOB, gpus=8, nodes=4, min_nodes=2)
    assert pytorchjob(job)["spec"]["nprocPerNode"] == "8"
    policy = pytorchjob(job)["spec"]["elasticPolicy"]
    assert (policy["minReplicas"], policy["maxReplicas"]) == (2, 4)
    trainer = trainjob(job)["spec"]["trainer"]
    assert (trainer["numProcPerNode"], trainer["numNodes"]) == (8, 4)
    resources = trainer["resourcesPerNode"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 8
    cases: Any = (("8", "2"), ("7500m", "2"), (1.5, "1"))  # a number, as YAML gives it
    for cpu, threads in cases:
        job = replace(JOB, processes=3, cpu=cpu)
        assert pytorchjob(job)["spec"]["nprocPerNode"] == "3"
        assert "nvidia.com/gpu" not in str(pytorchjob(job))
        trainer = trainjob(job)["spec"]["trainer"]
        assert trainer["resourcesPerNode"]["requests"]["cpu"] == str(cpu)
        assert {e["name"]: e["value"] for e in trainer["env"]}["OMP_NUM_THREADS"] == threads


def test_volumes_are_mounted_in_all_containers_which_have_time_to_save() -> None:
    for pod in pods(replace(JOB, preparation=("d2plm", "prepare"))):
        assert pod["spec"]["terminationGracePeriodSeconds"] > GRACE_SECONDS
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


def test_a_queue_and_an_owner_are_named_on_the_job_and_not_on_its_volume() -> None:
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "w", "uid": "u"}
    job = replace(JOB, queue="research", owners=[owner])
    label = "kueue.x-k8s.io/queue-name"
    for manifest in (pytorchjob(job), trainjob(job), training_runtime(job)):
        assert manifest["metadata"]["ownerReferences"] == [owner]
        queue = manifest["metadata"].get("labels", {}).get(label)
        assert queue == (None if manifest["kind"] == "TrainingRuntime" else "research")
    claim = persistent_volume_claim(job, "d2plm-workspace", "1Gi", shared=True)
    assert "ownerReferences" not in claim["metadata"] and label not in str(claim)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


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


SHOW = ["job", "show", "launcher=pytorchjob", "launcher.name=mine", "launcher.prepare=false"]
TWO_BINS = ["data.token_budget=1024", "trainer.global_batch_tokens=2048"]
MULTI_GPU = ["trainer=multi_gpu", "trainer.global_batch_tokens=131072"]
FEWER = ["launcher.nodes=2", "launcher.min_nodes=1"]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["launcher.nodes=3", "distributed.tensor=2"], "distributed.tensor="),
        ([*FEWER, "distributed.tensor=2"], "distributed.tensor="),  # one pod could not continue
        ([*FEWER, "distributed.processes=2", *TWO_BINS], "trainer.global_batch_tokens="),
        ([*FEWER, "distributed.processes=2", *TWO_BINS, "distributed.tensor=2"], None),
        (["launcher.gpus=8", MULTI_GPU[1]], "trainer=multi_gpu"),
        (MULTI_GPU, "gpus"),
        ([*MULTI_GPU, "launcher.gpus=8"], None),
        (["--config-name", "train"], "not passed to"),
        (["launcher.claims=null"], "launcher.claims="),
    ],
)
def test_pods_fit_their_settings(capsys: Captured, words: list[str], key: str | None) -> None:
    assert main([*SHOW, *words]) == (0 if key is None else 2)
    assert key is None or key in capsys.readouterr().err


def test_the_shards_that_a_repeated_job_has_not_completed_are_missing() -> None:
    """Its indices count the shards that it was given."""
    job = {"metadata": {"annotations": {SHARDS: "1,3/4"}}, "status": {"completedIndexes": "1"}}
    assert missing_shards(job) == [1]
