"""The serving manifests: the same server with and without KServe; see also test_manifests.py."""

import copy
from pathlib import Path

import pytest

from d2plm import __version__
from d2plm.config import compose
from tests.manifests import K8S, NEEDS_KUBECTL, Manifest, allowed, render

SERVING = K8S / "serving"
# What a predictor has beside the fields of a pod (KServe's ComponentExtensionSpec).
EXTENSIONS = {"minReplicas", "maxReplicas", "timeout", "labels", "annotations"}
SELECTED = {"app.kubernetes.io/name": "d2plm", "app.kubernetes.io/component": "serving"}

pytestmark = NEEDS_KUBECTL


def rendered(folder: Path) -> dict[str, Manifest]:
    """Each object of a kustomization, by kind and name."""
    return {f"{m['kind']}/{m['metadata']['name']}": m for m in render(folder)}


@pytest.fixture(scope="module")
def plain() -> dict[str, Manifest]:
    return rendered(SERVING)


@pytest.fixture(scope="module")
def kserve() -> dict[str, Manifest]:
    return rendered(SERVING / "kserve")


@pytest.fixture
def pods(plain: dict[str, Manifest], kserve: dict[str, Manifest]) -> list[Manifest]:
    """The Deployment's pod and KServe's, as pods."""
    template = plain["Deployment/d2plm-serving"]["spec"]["template"]
    predictor = kserve["InferenceService/d2plm-diffusion"]["spec"]["predictor"]
    spec = {key: value for key, value in predictor.items() if key not in EXTENSIONS}
    of_kserve = {"metadata": {"labels": predictor["labels"]}, "spec": spec}
    return [copy.deepcopy(template), copy.deepcopy(of_kserve)]


def test_every_object_selects_the_pods(
    plain: dict[str, Manifest], kserve: dict[str, Manifest]
) -> None:
    assert {*plain} - {*kserve} == {"Deployment/d2plm-serving", "Service/d2plm-serving"}
    assert {*kserve} - {*plain} == {"InferenceService/d2plm-diffusion"}
    assert plain["Service/d2plm-serving"]["spec"]["selector"] == SELECTED
    assert plain["Deployment/d2plm-serving"]["spec"]["selector"]["matchLabels"] == SELECTED
    for manifests in (plain, kserve):
        policy = manifests["NetworkPolicy/d2plm-serving"]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= SELECTED.items()


def test_in_a_closed_namespace_it_reaches_mlflow_alone() -> None:
    manifests = [*render(K8S / "base"), *render(SERVING)]
    assert allowed(manifests, "serving", "mlflow", 5000)
    assert allowed(manifests, "trainer", "mlflow", 5000)
    assert not allowed(manifests, "serving", "postgres", 5432)
    assert not allowed(manifests, "serving", "object-store", 8333)


def test_both_ways_run_the_same_server(pods: list[Manifest]) -> None:
    for manifest in pods:
        (container,) = manifest["spec"]["containers"]
        del container["name"]
        (port,) = container["ports"]
        assert port.pop("name") in ("http", "http1")  # KServe's ports carry their protocol
        assert SELECTED.items() <= manifest.pop("metadata")["labels"].items()
    assert pods[0] == pods[1]
    assert pods[0]["spec"]["securityContext"]["runAsUser"] == 10001
    assert container["image"] == f"d2plm-trainer:{__version__}"


def test_the_command_is_one_that_d2plm_takes(pods: list[Manifest]) -> None:
    spec = pods[0]["spec"]
    (container,) = spec["containers"]
    assert container["command"][:2] == ["d2plm", "serve"]
    config = compose("serve", container["command"][2:])
    assert config.model_dir == "models:/d2plm-diffusion@champion"
    assert config.host == "0.0.0.0"  # noqa: S104  # the pod's own
    assert config.port == container["ports"][0]["containerPort"]
    assert config.timeout < spec["terminationGracePeriodSeconds"]
    (tmp,) = container["volumeMounts"]
    assert tmp["mountPath"] == "/tmp"  # noqa: S108  # the pod's own
