"""Checking manifests as a cluster would, without a cluster.

Core kinds are checked by their published schemas, custom ones by those of their definitions in
$D2PLM_CRD_DIR, both closed: an API server drops a key that it does not know, and the typo with it.
What schemas cannot say is here as functions that give a list of complaints: the training operators'
webhooks, and the restricted profile of Pod Security.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from tests.cluster.schema import errors
from tests.cluster.store import RESOURCES

Manifest = dict[str, Any]

NEEDS_KUBECTL = pytest.mark.skipif(
    shutil.which("kubectl") is None and "CI" not in os.environ, reason="kubectl is not installed"
)
KUBERNETES = ("1.34", "1.37")  # what the kind workflow runs on
K8S = Path(__file__).parents[1] / "k8s"
CUSTOM = ("PyTorchJob", "TrainJob", "TrainingRuntime")  # defined in $D2PLM_CRD_DIR
# Their schemas are not at hand.
UNCHECKED = ("InferenceService", "LocalQueue", "ClusterQueue", "ResourceFlavor", "VirtualService")
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
# Without it, all schemas would be read for every object.
utils.schema_contents = cache(utils.schema_contents)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.load_all(text, _LOADER) if document]


def render(folder: Path, *options: str) -> list[Manifest]:
    """What `kubectl kustomize` makes of `folder`."""
    command = ["kubectl", "kustomize", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    return documents(done.stdout)


def compose(folder: Path, resource: Path, components: Sequence[str] = ()) -> list[Manifest]:
    """`resource` with `components`, as an overlay in the empty `folder` has them."""
    settings = resource / "kustomization.yaml"
    given = yaml.safe_load(settings.read_text()) if settings.exists() else {}
    overlay = {
        "namespace": given.get("namespace", "d2plm"),
        "resources": [os.path.relpath(resource, folder)],
        "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return render(folder, "--load-restrictor=LoadRestrictionsNone")


def schema_complaints(manifest: Manifest, kubernetes: str) -> list[str]:
    """What the schema of its kind has against `manifest`, in a `kubernetes` version.

    Custom kinds pass where $D2PLM_CRD_DIR is unset.
    """
    return _schema_complaints(json.dumps(manifest), kubernetes)


@cache
def _schema_complaints(text: str, kubernetes: str) -> list[str]:
    manifest = json.loads(text)
    kind = manifest["kind"]
    if kind in UNCHECKED:
        return []
    if kind not in CUSTOM:
        try:
            kubernetes_validate.validate(manifest, kubernetes, strict=True)
        except kubernetes_validate.ValidationError as error:
            return [_complaint(kind, error)]
        except kubernetes_validate.SchemaNotFoundError as error:
            return [error.message]
        return []
    (resource,) = (one for one in RESOURCES.values() if one.kind == kind)
    if manifest["apiVersion"] != resource.api_version:
        return [f"{kind}.apiVersion: must be {resource.api_version}"]
    return [f"{kind}.{error}" for error in errors(resource, manifest)]


def webhook_complaints(manifest: Manifest) -> list[str]:
    """What the training operators and their webhooks reject, or take for something else."""
    if manifest["kind"] not in CUSTOM:
        return []
    spec: Any = manifest["spec"]
    checks: dict[str, object]
    if manifest["kind"] == "PyTorchJob":
        worker = spec["pytorchReplicaSpecs"]["Worker"]
        names = [one["name"] for one in worker["template"]["spec"]["containers"]]
        checks = {
            "an elastic job has Workers alone": {*spec["pytorchReplicaSpecs"]} == {"Worker"},
            "nprocPerNode": re.fullmatch(r"auto|cpu|gpu|[1-9]\d*", spec["nprocPerNode"]),
            "cleanPodPolicy": spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None"),
            "restartPolicy": worker["restartPolicy"] in ("OnFailure", "Never", "ExitCode"),
            "a container is named pytorch": "pytorch" in names,
        }
    elif manifest["kind"] == "TrainJob":
        variables = spec["trainer"].get("env", ())
        checks = {"PET_ is the operator's": not any("PET_" in one["name"] for one in variables)}
    else:
        (replicated,) = spec["template"]["spec"]["replicatedJobs"]
        step = "trainer.kubeflow.org/trainjob-ancestor-step"
        template = replicated["template"]["spec"]["template"]["spec"]
        checks = {
            "the job is named node": replicated["name"] == "node",
            "the step is trainer": replicated["template"]["metadata"]["labels"][step] == "trainer",
            "a container is named node": "node" in [one["name"] for one in template["containers"]],
            "a podFailurePolicy wants restartPolicy Never": template["restartPolicy"] == "Never",
        }
    checks["the name is a DNS-1035 label"] = _DNS_1035.fullmatch(manifest["metadata"]["name"])
    return [complaint for complaint, passed in checks.items() if not passed]


def pod_templates(manifests: Sequence[Manifest]) -> Iterator[tuple[Manifest, Manifest]]:
    """Each manifest that makes pods, and each of its pod templates."""
    for manifest in manifests:
        yield from ((manifest, template) for template in _templates(manifest.get("spec")))


def _templates(node: Any) -> Iterator[Manifest]:
    if isinstance(node, dict):
        if isinstance(node.get("spec"), dict) and "containers" in node["spec"]:
            yield node
        node = list(node.values())
    for value in node if isinstance(node, list) else ():
        yield from _templates(value)


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def pod_security_complaints(template: Manifest) -> list[str]:
    """What the restricted profile of Pod Security rejects, and a read-only root.

    See https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    spec = template["spec"]
    pod = spec.get("securityContext", {})
    complaints = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    complaints += ["hostProcess"] if pod.get("windowsOptions", {}).get("hostProcess") else []
    for volume in spec.get("volumes", ()):
        complaints += [f"a volume of {one}" for one in {*volume} - {"name"} - RESTRICTED_VOLUMES]
    for container in containers(template):
        own = container.get("securityContext", {})
        both = {**pod, **own}
        capabilities = own.get("capabilities", {})
        checks = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities.drop": capabilities.get("drop") == ["ALL"],
            "capabilities.add": set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": isinstance(both.get("runAsUser"), int) and both["runAsUser"] > 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
            "hostPort": not any("hostPort" in port for port in container.get("ports", ())),
        }
        complaints += [f"{container['name']}: {key}" for key, is_so in checks.items() if not is_so]
    return complaints


def allowed(
    manifests: Sequence[Manifest], source: str | None, target: str | None, port: int
) -> bool:
    """Whether a namespace's policies let a component (None: outside) connect to another's port."""
    policies = [manifest["spec"] for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    return _one_way(policies, "Egress", source, target, port) and _one_way(
        policies, "Ingress", target, source, port
    )


def _one_way(
    policies: Sequence[Manifest], direction: str, of: str | None, peer: str | None, port: int
) -> bool:
    applied = [
        policy
        for policy in policies
        if direction in policy["policyTypes"] and of and _selects(policy["podSelector"], of)
    ]
    peers = {"Egress": "to", "Ingress": "from"}[direction]
    return not applied or any(
        any(item.get("port", port) == port for item in rule.get("ports", ({},)))
        and (peers not in rule or any(_is_peer(item, peer) for item in rule[peers]))
        for policy in applied
        for rule in policy.get(direction.lower(), ())
    )


def _is_peer(item: Manifest, component: str | None) -> bool:
    return (
        component is not None
        and "namespaceSelector" not in item
        and _selects(item["podSelector"], component)
    )


def _selects(selector: Manifest, component: str) -> bool:
    labels = {"app.kubernetes.io/component": component}
    labels |= {"app.kubernetes.io/part-of": "d2plm"} if component != "stranger" else {}
    return all(
        labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()
    ) and all(
        (labels.get(item["key"]) in item["values"])
        == {"In": True, "NotIn": False}[item["operator"]]
        for item in selector.get("matchExpressions", ())
    )


def _complaint(kind: str, error: Any) -> str:
    return f"{kind}.{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}"
