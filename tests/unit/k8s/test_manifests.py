"""The manifests, as an API server, the operators' webhooks and a platform engineer see them."""

import copy
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from d2plm import __version__
from d2plm.cli import main
from d2plm.config import compose as composed
from tests.cluster.double import LAUNCHER_ROLE
from tests.cluster.store import RESOURCES
from tests.conftest import Captured
from tests.manifests import (
    CUSTOM,
    K8S,
    KUBERNETES,
    NEEDS_KUBECTL,
    Manifest,
    allowed,
    compose,
    containers,
    documents,
    pod_security_complaints,
    pod_templates,
    render,
    schema_complaints,
    webhook_complaints,
)

pytestmark = NEEDS_KUBECTL

COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
JOBS = ("pytorchjob.yaml", "trainjob.yaml")
SHARDED = "examples/embed_job.yaml"
SERVING = ("serving", "serving/kserve")
OF_KIND = ("kind/job", "kind/steps.yaml")
# Of these each wants one or the other: stores in the cluster, stores elsewhere, or none.
ELSEWHERE = ("external-postgres", "external-s3", "mlflow-auth", "backup")
NONE = ("mlflow-sqlite",)
ANYWHERE = ("gpu", "istio", "kueue", "nccl", "shared-workspace")
CASES = [
    *((name, ()) for name in ("base", *SERVING, *OVERLAYS, *JOBS, SHARDED, *OF_KIND)),
    *(("base", (component,)) for component in COMPONENTS),
    ("base", (*ELSEWHERE, *ANYWHERE)),
    ("base", (*NONE, *ANYWHERE)),
    ("kind", ANYWHERE),
    *((name, ("mlflow-auth", "backup", *ANYWHERE)) for name in OVERLAYS if name != "kind"),
    *((name, ("gpu", "kueue", "nccl")) for name in JOBS),
]
# Made from k8s/secrets, or by other means of the user's; no pod need have d2plm-secrets.
SECRETS = {"mlflow-backend", "object-store", "mlflow-auth", "d2plm-secrets"}


@cache
def rendered(name: str, components: tuple[str, ...]) -> list[Manifest]:
    folder = K8S / (f"overlays/{name}" if name in OVERLAYS else name)
    if name == "kind/steps.yaml":
        return list(documents((K8S / name).read_text())[0]["items"])
    if name == "kind/job":
        return render(folder, "--load-restrictor=LoadRestrictionsNone")
    if folder.is_dir() and not components:
        return render(folder)
    with tempfile.TemporaryDirectory() as scratch:
        return compose(Path(scratch).resolve(), folder, components)


@pytest.fixture(params=CASES, ids=lambda case: "+".join((case[0], *case[1])))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(*request.param)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def names(manifests: list[Manifest], kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in of_kind(manifests, kind)}


def test_every_object_is_valid(manifests: list[Manifest]) -> None:
    assert manifests
    for manifest in manifests:
        for kubernetes in KUBERNETES:
            assert schema_complaints(manifest, kubernetes) == []
        assert webhook_complaints(manifest) == []


def test_every_pod_is_restricted_labelled_and_outside_the_mesh(manifests: list[Manifest]) -> None:
    for _, template in pod_templates(manifests):
        assert pod_security_complaints(template) == []
        labels = template["metadata"]["labels"]
        wanted = {"name", "component", "part-of", "version", "managed-by"}
        assert wanted <= {label.removeprefix("app.kubernetes.io/") for label in labels}
        assert labels["app.kubernetes.io/version"] == __version__
        is_serving = labels["app.kubernetes.io/component"] == "serving"
        assert labels.get("sidecar.istio.io/inject") == (None if is_serving else "false")
    for namespace in of_kind(manifests, "Namespace"):
        labels = namespace["metadata"]["labels"]
        levels = {labels[f"pod-security.kubernetes.io/{m}"] for m in ("enforce", "audit", "warn")}
        assert levels == {"restricted"}


def test_no_pod_has_a_token_of_the_api_that_does_not_need_one(manifests: list[Manifest]) -> None:
    for _, template in pod_templates(manifests):
        launches = template["spec"].get("serviceAccountName") == "d2plm-launcher"
        assert template["spec"]["automountServiceAccountToken"] is launches
    for account in of_kind(manifests, "ServiceAccount"):
        mounted = account.get("automountServiceAccountToken", True)
        assert mounted == (account["metadata"]["name"] == "d2plm-launcher")


def test_every_container_states_its_resources_and_a_pinned_image(manifests: list[Manifest]) -> None:
    for manifest, template in pod_templates(manifests):
        for container in containers(template):
            stated = [container]
            if manifest["kind"] == "TrainingRuntime" and container["name"] == "node":
                (job,) = of_kind(manifests, "TrainJob")
                trainer = job["spec"]["trainer"]
                stated.append({**trainer, "resources": trainer["resourcesPerNode"]})
            resources = stated[-1]["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"])
            # Kind's Deployments may take more where there is more.
            is_limited = resources["limits"]["memory"] == resources["requests"]["memory"]
            assert is_limited or manifest["kind"] == "Deployment"
            for one in stated:
                tag = one["image"].partition(":")[2]
                assert tag not in ("", "latest")
                assert not one["image"].startswith("d2plm-") or tag == __version__


def test_servers_are_probed_and_found_by_their_services(manifests: list[Manifest]) -> None:
    for manifest, template in pod_templates(manifests):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert template["spec"]["terminationGracePeriodSeconds"] >= 60
            for container in template["spec"]["containers"]:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
                startup = container["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 120
            # These cannot be changed by a new version.
            fixed = [manifest["spec"]["selector"], manifest["spec"].get("volumeClaimTemplates")]
            assert __version__ not in str(fixed)
        elif manifest["kind"] in CUSTOM:
            assert template["spec"]["terminationGracePeriodSeconds"] >= 120
    for service in of_kind(manifests, "Service"):
        selector = service["spec"]["selector"].items()
        (found,) = (
            template
            for _, template in pod_templates(manifests)
            if selector <= template["metadata"]["labels"].items()
        )
        ports = {port["name"] for port in found["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def references(node: Any, key: str, name: str = "name") -> set[str]:
    """The names that all `key` at any depth refer to, optional ones left out."""
    if isinstance(node, list):
        return set().union(*(references(item, key, name) for item in node))
    if not isinstance(node, dict):
        return set()
    found = set().union(*(references(value, key, name) for value in node.values()))
    of_key = node.get(key)
    if isinstance(of_key, dict) and name in of_key and not of_key.get("optional"):
        found.add(of_key[name])
    return found


def test_all_that_pods_refer_to_is_there_or_documented(manifests: list[Manifest]) -> None:
    if not of_kind(manifests, "ServiceAccount"):  # a job, which comes into the base's namespace
        manifests = [*manifests, *rendered("base", ())]
    for manifest, template in pod_templates(manifests):
        spec = template["spec"]
        accounts = names(manifests, "ServiceAccount") | {"default"}
        assert spec.get("serviceAccountName", "default") in accounts
        claims = references(spec, "persistentVolumeClaim", "claimName")
        assert claims <= names(manifests, "PersistentVolumeClaim")
        maps, secrets = (
            references(spec, key) | references(spec, f"{key}Ref") | references(spec, f"{key}KeyRef")
            for key in ("configMap", "secret")
        )
        assert maps <= names(manifests, "ConfigMap")
        assert secrets | references(spec, "secret", "secretName") <= SECRETS
        volumes = {volume["name"] for volume in spec["volumes"]} | {
            claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())
        }
        for container in containers(template):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


def test_roles_allow_what_the_launcher_does_and_no_more(manifests: list[Manifest]) -> None:
    assert of_kind(manifests, "ClusterRole", "ClusterRoleBinding") == []
    # The rights that the double grants, where the launcher is tested.
    expected = {(RESOURCES[of.partition("/")[0]].group, of, verb) for of, verb in LAUNCHER_ROLE}
    for role in of_kind(manifests, "Role"):
        granted = {
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        assert granted == expected


def test_everything_is_in_one_namespace(manifests: list[Manifest]) -> None:
    named = [one["metadata"] for one in manifests if one["kind"] != "Namespace"]
    (namespace,) = {metadata.get("namespace") for metadata in named}
    for binding in of_kind(manifests, "RoleBinding"):
        assert {subject["namespace"] for subject in binding["subjects"]} == {namespace}
    for configuration in of_kind(manifests, "ConfigMap"):
        uri = configuration["data"].get("MLFLOW_TRACKING_URI")
        assert uri in (None, f"http://mlflow.{namespace}.svc:5000")


# case → allowed, and not allowed: from, to (None: outside, or another namespace), port
NETWORK: Any = {
    ("base", ("backup",)): (
        [
            *(("trainer", "trainer", 40123), ("trainer", "mlflow", 5000), ("pipeline", None, 6443)),
            *(("trainer", "object-store", 8333), ("pipeline", "mlflow", 5000)),
            *(("mlflow", "postgres", 5432), ("mlflow", "object-store", 8333)),
            *(("backup", "postgres", 5432), ("trainer", None, 53), ("stranger", None, 53)),
        ],
        [
            *(("trainer", None, 443), ("trainer", "postgres", 5432), ("mlflow", "trainer", 22)),
            *(("mlflow", "object-store", 28333), ("postgres", None, 443)),
            *(("stranger", "mlflow", 5000), (None, "mlflow", 5000), (None, "trainer", 23456)),
        ],
    ),
    ("base", (*ELSEWHERE, *ANYWHERE)): (
        [*((source, None, 443) for source in ("mlflow", "trainer")), ("backup", None, 5432)],
        [],
    ),
    ("kubeflow-profile", ()): (
        [
            *(("stranger", "mlflow", 5000), ("stranger", None, 443), ("pipeline", None, 443)),
            ("trainer", "mlflow", 5000),
        ],
        [("trainer", None, 443), ("stranger", "postgres", 5432)],
    ),
}


@pytest.mark.parametrize("case", NETWORK)
def test_the_network_allows_what_is_needed_and_no_more(case: tuple[str, tuple[str, ...]]) -> None:
    manifests = rendered(*case)
    for connections, expected in zip(NETWORK[case], (True, False), strict=True):
        for source, target, port in connections:
            assert allowed(manifests, source, target, port) == expected, (source, target, port)
    assert case[0] == "base" or of_kind(manifests, "Namespace") == []  # the profile's is its own


SELECTED = {"app.kubernetes.io/name": "d2plm", "app.kubernetes.io/component": "serving"}
# What a predictor has beside the fields of a pod (KServe's ComponentExtensionSpec).
EXTENSIONS = {"minReplicas", "maxReplicas", "timeout", "labels", "annotations"}


def test_serving_is_the_same_with_and_without_kserve_and_reaches_mlflow_alone() -> None:
    plain, kserve = (copy.deepcopy(rendered(name, ())) for name in SERVING)
    (deployment,), (service,) = of_kind(plain, "Deployment"), of_kind(plain, "Service")
    (inference,) = of_kind(kserve, "InferenceService")
    assert [one for one in plain if one not in (deployment, service)] == [
        one for one in kserve if one != inference
    ]
    assert service["spec"]["selector"] == SELECTED
    assert deployment["spec"]["selector"]["matchLabels"] == SELECTED
    template, predictor = deployment["spec"]["template"], inference["spec"]["predictor"]
    pod, of_kserve = template["spec"], {k: v for k, v in predictor.items() if k not in EXTENSIONS}
    for spec, labels in ((pod, template["metadata"]["labels"]), (of_kserve, predictor["labels"])):
        assert SELECTED.items() <= labels.items()
        (container,) = spec["containers"]
        del container["name"]
        assert container["ports"][0].pop("name") in ("http", "http1")  # KServe's have a protocol
    assert pod == of_kserve
    assert pod["securityContext"]["runAsUser"] == 10001
    assert container["image"] == f"d2plm-trainer:{__version__}"
    assert container["command"][:2] == ["d2plm", "serve"]
    config = composed("serve", container["command"][2:])
    assert config.model_dir == "models:/d2plm-diffusion@champion"
    assert config.host == "0.0.0.0"  # noqa: S104  # the pod's own
    assert config.port == container["ports"][0]["containerPort"]
    assert config.timeout < pod["terminationGracePeriodSeconds"]
    (tmp,) = container["volumeMounts"]
    assert tmp["mountPath"] == "/tmp"  # noqa: S108  # the pod's own
    manifests = [*rendered("base", ()), *plain]
    for target, port in (("mlflow", 5000), ("postgres", 5432), ("object-store", 8333)):
        assert allowed(manifests, "serving", target, port) == (target == "mlflow")
    assert allowed(manifests, "trainer", "mlflow", 5000)


def test_several_nodes_share_a_volume_and_one_holds_its_own() -> None:
    modes = {}
    for name in ("base", *JOBS, "gpu", "multi-node"):
        claims = of_kind(rendered(name, ()), "PersistentVolumeClaim")
        (claim,) = [c for c in claims if c["metadata"]["name"] == "d2plm-workspace"]
        modes[name] = claim["spec"]["accessModes"]
    assert modes.pop("multi-node") == ["ReadWriteMany"]
    assert [*modes.values()] == [["ReadWriteOnce"]] * 4


@pytest.mark.parametrize("name", JOBS)
def test_components_reach_a_job_of_either_kind(name: str) -> None:
    manifests = rendered(name, ("gpu", "kueue", "nccl"))
    ((_, template),) = pod_templates(manifests)
    assert template["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    (job,) = of_kind(manifests, "PyTorchJob", "TrainJob")
    (queue,) = of_kind(manifests, "LocalQueue")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    of_job = job["spec"].get("trainer") or template["spec"]["containers"][0]
    assert {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "HOME"} <= {v["name"] for v in of_job["env"]}


def test_the_secrets_folder_makes_every_secret_and_git_ignores_it(tmp_path: Path) -> None:
    for file in (K8S / "secrets").iterdir():
        if not file.name.endswith(".env"):
            shutil.copy(file, tmp_path / file.name.removesuffix(".example"))
    manifests = render(tmp_path)
    assert names(manifests, "Secret") == SECRETS
    for manifest in manifests:
        assert schema_complaints(manifest, KUBERNETES[0]) == []
    ignored = (K8S.parent / ".gitignore").read_text().splitlines()
    assert "/k8s/secrets/*.env" in ignored


def test_the_settings_of_every_command_compose(capsys: Captured) -> None:
    found = set()
    for case in (*JOBS, "gpu", "multi-node", *OF_KIND):
        manifests = rendered(case, ())
        trainers = [job["spec"]["trainer"] for job in of_kind(manifests, "TrainJob")]
        of_pods = [c for _, template in pod_templates(manifests) for c in containers(template)]
        for container in [*trainers, *of_pods]:
            words = (*container.get("command", ()), *container.get("args", ()))
            if "d2plm" in words:
                found.add(words[words.index("d2plm") + 1 :])
    assert len(found) >= 10
    for words in found:
        assert main([*words, "--cfg", "job"]) == 0, words
    capsys.readouterr()


def test_the_smoke_test_runs_every_step_there_is() -> None:
    script = (K8S / "kind" / "smoke.sh").read_text()
    steps = [job["metadata"]["labels"]["step"] for job in rendered("kind/steps.yaml", ())]
    assert f"for name in {' '.join(steps)}; do" in script
