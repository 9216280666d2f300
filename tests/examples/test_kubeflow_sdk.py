"""examples/kubeflow_sdk.py: the real SDK and the shipped runtime against the cluster's double."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.cluster import NAMESPACE, Cluster, Script
from tests.conftest import FASTA
from tests.manifests import K8S

if find_spec("kubeflow") is None:
    pytest.skip("the Kubeflow SDK is not installed", allow_module_level=True)

EXAMPLE = FASTA.parents[1] / "kubeflow_sdk.py"


def test_the_sdk_prints_the_log_of_a_job_that_fails(tmp_path: Path) -> None:
    """In a cluster with the runtime, whose user may do everything."""
    from kubernetes.client import CustomObjectsApi
    from kubernetes.config import new_client_from_config

    runtime = yaml.safe_load((K8S / "clustertrainingruntime.yaml").read_text())
    mounts = {"/workspace": tmp_path / "work space"}
    with Cluster(tmp_path / "cluster", mounts=mounts, role=None) as cluster:
        api = CustomObjectsApi(new_client_from_config(str(cluster.kube_config)))
        group, version = runtime["apiVersion"].split("/")
        api.create_cluster_custom_object(group, version, "clustertrainingruntimes", runtime)
        cluster.script(Script(lines=("step 1", "d2plm: error: no"), exit_code=2))
        words = [sys.executable, str(EXAMPLE), f"--namespace={NAMESPACE}", "--cpu=3"]
        environment = {**os.environ, "KUBECONFIG": str(cluster.kube_config)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
        (pod,) = cluster.pods()
    assert done.returncode == 1
    assert "step 1\nd2plm: error: no\n" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("is Failed")
    assert "Traceback" not in done.stderr
    (container,) = pod["spec"]["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert variables["PET_NPROC_PER_NODE"] == "3"
    assert variables["D2PLM_SETTINGS"] == "experiment=cluster"
