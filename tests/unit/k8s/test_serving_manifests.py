"""The serving manifests: valid, restricted, and the same server with and without KServe."""

import copy
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from mlflow.models.cli import serve

from d2plm import __version__
from d2plm.tracking.served_model import LIMIT

SERVING = Path(__file__).parents[3] / "k8s" / "serving"
KUBERNETES = "1.34"
# What a predictor has beside the fields of a pod (KServe's ComponentExtensionSpec).
EXTENSIONS = {"minReplicas", "maxReplicas", "timeout", "labels", "annotations"}
SELECTED = {"app.kubernetes.io/name": "d2plm", "app.kubernetes.io/component": "serving"}

Manifest = dict[str, Any]

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None and "CI" not in os.environ, reason="kubectl is not installed"
)


def rendered(folder: Path) -> dict[str, Manifest]:
    """Each object of a kustomization, by kind and name."""
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {f"{m['kind']}/{m['metadata']['name']}": m for m in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def plain() -> dict[str, Manifest]:
    return rendered(SERVING)


@pytest.fixture(scope="module")
def kserve() -> dict[str, Manifest]:
    return rendered(SERVING / "kserve")


@pytest.fixture(scope="module")
def pods(plain: dict[str, Manifest], kserve: dict[str, Manifest]) -> list[Manifest]:
    """The Deployment's pod and KServe's, as pods."""
    template = plain["Deployment/d2plm-serving"]["spec"]["template"]
    predictor = kserve["InferenceService/d2plm-diffusion"]["spec"]["predictor"]
    spec = {key: value for key, value in predictor.items() if key not in EXTENSIONS}
    return [
        pod(template["metadata"]["labels"], template["spec"]),
        pod(predictor["labels"], spec),
    ]


def pod(labels: dict[str, str], spec: Manifest) -> Manifest:
    metadata = {"name": "serving", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def validate(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_object_fits_its_closed_schema(
    plain: dict[str, Manifest], kserve: dict[str, Manifest], pods: list[Manifest]
) -> None:
    assert {*plain} - {*kserve} == {"Deployment/d2plm-serving", "Service/d2plm-serving"}
    assert {*kserve} - {*plain} == {"InferenceService/d2plm-diffusion"}
    for manifest in [*plain.values(), *pods]:
        validate(manifest)
    typo = copy.deepcopy(pods[1])
    typo["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(typo)


def test_the_pods_are_restricted(pods: list[Manifest]) -> None:
    for manifest in pods:
        spec = manifest["spec"]
        (container,) = spec["containers"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "runAsGroup": 10001,
            "fsGroup": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert all("emptyDir" in volume for volume in spec["volumes"])


def test_both_ways_run_the_same_server(pods: list[Manifest]) -> None:
    pods = copy.deepcopy(pods)
    for manifest in pods:
        (container,) = manifest["spec"]["containers"]
        del container["name"]
        (port,) = container["ports"]
        assert port.pop("name") in ("http", "http1")  # KServe's ports carry their protocol
        assert SELECTED.items() <= manifest["metadata"].pop("labels").items()
    assert pods[0] == pods[1]
    assert container["image"] == f"d2plm-trainer:{__version__}"


def test_the_command_is_one_that_mlflow_takes(pods: list[Manifest]) -> None:
    spec = pods[0]["spec"]
    (container,) = spec["containers"]
    assert container["command"][:3] == ["mlflow", "models", "serve"]
    options = serve.make_context("serve", container["command"][3:]).params
    assert options["model_uri"] == "models:/d2plm-diffusion@champion"
    assert options["env_manager"] == "local"
    assert options["host"] == "0.0.0.0"  # noqa: S104  # the pod's own
    assert options["port"] == container["ports"][0]["containerPort"]
    assert options["timeout"] < spec["terminationGracePeriodSeconds"]
    assert LIMIT in {variable["name"] for variable in container["env"]}
    (tmp,) = container["volumeMounts"]
    assert tmp["mountPath"] == "/tmp"  # noqa: S108  # the pod's own


def test_what_selects_the_pods_finds_them(
    plain: dict[str, Manifest], kserve: dict[str, Manifest]
) -> None:
    spec = plain["Service/d2plm-serving"]["spec"]
    assert spec["selector"] == SELECTED
    assert plain["Deployment/d2plm-serving"]["spec"]["selector"]["matchLabels"] == SELECTED
    for manifests in (plain, kserve):
        own = manifests["NetworkPolicy/d2plm-serving"]["spec"]
        assert own["podSelector"]["matchLabels"] == SELECTED
        mlflow = manifests["NetworkPolicy/mlflow-from-serving"]["spec"]
        (source,) = mlflow["ingress"][0]["from"]
        assert source["podSelector"]["matchLabels"] == SELECTED


def test_a_registry_is_put_before_the_image_of_both(tmp_path: Path) -> None:
    for folder in (SERVING, SERVING / "kserve"):
        overlay = tmp_path / folder.name
        overlay.mkdir()
        (overlay / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "resources": [os.path.relpath(folder, overlay.resolve())],
                    "images": [{"name": "d2plm-trainer", "newName": "registry.example/you/t"}],
                }
            )
        )
        assert f"registry.example/you/t:{__version__}" in str(rendered(overlay))
