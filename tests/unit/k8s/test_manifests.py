"""The manifests, as an API server, the operators' webhooks and a platform engineer see them."""

import copy
import gzip
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from d2plm import __version__
from d2plm.cli import main
from tests.manifests import (
    DEFINITIONS,
    K8S,
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

pytestmark = [
    pytest.mark.skipif(
        shutil.which("kubectl") is None and "CI" not in os.environ,
        reason="kubectl is not installed",
    ),
    pytest.mark.xdist_group("manifests"),  # each is rendered once
]
needs_definitions = pytest.mark.skipif(
    "D2PLM_CRD_DIR" not in os.environ and "CI" not in os.environ,
    reason="D2PLM_CRD_DIR names no folder with the custom resources' definitions",
)

KUBERNETES = ("1.34", "1.37")  # what the kind workflow runs on
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
JOBS = ("pytorchjob.yaml", "trainjob.yaml")
SHARDED = "examples/embed_job.yaml"
OF_KIND = ("kind/job", "kind/steps.yaml")
# Of these each wants one or the other: stores in the cluster, stores elsewhere, or none.
ELSEWHERE = ("external-postgres", "external-s3", "mlflow-auth", "backup")
NONE = ("mlflow-sqlite",)
ANYWHERE = ("gpu", "istio", "kueue", "nccl", "shared-workspace")
CASES = [
    *((name, ()) for name in ("base", *OVERLAYS, *JOBS, SHARDED, *OF_KIND)),
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
    folder = {"base": K8S / "base"}.get(name, K8S / "overlays" / name)
    if name in (*JOBS, SHARDED):
        folder = K8S / name
    elif name == "kind/job":
        return render(K8S / name, "--load-restrictor=LoadRestrictionsNone")
    elif name == "kind/steps.yaml":
        return list(documents((K8S / name).read_text())[0]["items"])
    elif not components:
        return render(folder)
    with tempfile.TemporaryDirectory() as scratch:
        return compose(Path(scratch).resolve(), folder, components)


@pytest.fixture(params=CASES, ids=lambda case: "+".join((case[0], *case[1])))
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """An overlay, or a job, with components."""
    return rendered(*request.param)


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def names(manifests: list[Manifest], kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in of_kind(manifests, kind)}


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_every_object_fits_its_closed_schema(manifests: list[Manifest], kubernetes: str) -> None:
    assert manifests
    for manifest in manifests:
        assert schema_complaints(manifest, kubernetes) == []


@needs_definitions
def test_the_custom_resources_definitions_are_at_hand() -> None:
    assert "D2PLM_CRD_DIR" in os.environ, "run .github/custom_resources.sh FOLDER and name it"
    folder = Path(os.environ["D2PLM_CRD_DIR"])
    assert [file for file in DEFINITIONS.values() if not (folder / file).exists()] == []


def test_the_operators_webhooks_accept_every_job(manifests: list[Manifest]) -> None:
    for manifest in of_kind(manifests, *DEFINITIONS):
        assert webhook_complaints(manifest) == []


def test_every_pod_is_restricted(manifests: list[Manifest]) -> None:
    for manifest, template in pod_templates(manifests):
        assert (manifest["metadata"]["name"], pod_security_complaints(template)) == (
            manifest["metadata"]["name"],
            [],
        )


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
            if manifest["kind"] == "TrainingRuntime" and container["name"] == "node":
                (job,) = of_kind(manifests, "TrainJob")
                resources = job["spec"]["trainer"]["resourcesPerNode"]
                images = [container["image"], job["spec"]["trainer"]["image"]]
            else:
                resources, images = container["resources"], [container["image"]]
            assert {"cpu", "memory"} <= set(resources["requests"])
            assert resources["limits"]["memory"] == resources["requests"]["memory"] or (
                manifest["kind"] == "Deployment"  # kind's may take more where there is more
            )
            assert len({image for image in images if "postgres" in image}) <= 1
            for image in images:
                tag = image.partition(":")[2]
                assert tag
                assert tag != "latest"
                assert not image.startswith("d2plm-") or tag == __version__


def test_every_server_is_probed_and_every_pod_ends_in_peace(manifests: list[Manifest]) -> None:
    for manifest, template in pod_templates(manifests):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert template["spec"]["terminationGracePeriodSeconds"] >= 60
            for container in template["spec"]["containers"]:
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
                startup = container["startupProbe"]
                assert startup["periodSeconds"] * startup["failureThreshold"] >= 120
        elif manifest["kind"] in DEFINITIONS:
            assert template["spec"]["terminationGracePeriodSeconds"] >= 120


def test_every_pod_has_the_labels_and_stays_out_of_the_mesh(manifests: list[Manifest]) -> None:
    for _, template in pod_templates(manifests):
        labels = template["metadata"]["labels"]
        wanted = {"name", "component", "part-of", "version", "managed-by"}
        assert wanted <= {label.removeprefix("app.kubernetes.io/") for label in labels}
        assert labels["app.kubernetes.io/version"] == __version__
        assert labels["sidecar.istio.io/inject"] == "false"


def test_a_new_version_changes_nothing_that_cannot_be_changed(manifests: list[Manifest]) -> None:
    for workload in of_kind(manifests, "Deployment", "StatefulSet"):
        fixed = [workload["spec"]["selector"], workload["spec"].get("volumeClaimTemplates")]
        assert __version__ not in str(fixed)


def test_all_that_pods_refer_to_is_there_or_documented(manifests: list[Manifest]) -> None:
    if not of_kind(manifests, "ServiceAccount"):  # a job, which comes into the base's namespace
        manifests = [*manifests, *rendered("base", ())]
    for manifest, template in pod_templates(manifests):
        spec = template["spec"]
        accounts = names(manifests, "ServiceAccount") | {"default"}
        assert spec.get("serviceAccountName", "default") in accounts
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claims <= names(manifests, "PersistentVolumeClaim"), manifest["metadata"]["name"]
        maps, secrets = set(), set()
        for volume in spec["volumes"]:
            maps |= {volume["configMap"]["name"]} if "configMap" in volume else set()
            secrets |= {volume["secret"]["secretName"]} if "secret" in volume else set()
        for container in containers(template):
            sources = [*container.get("envFrom", ())]
            sources += [
                item["valueFrom"] for item in container.get("env", ()) if "valueFrom" in item
            ]
            for source in sources:
                for key, target in (("configMap", maps), ("secret", secrets)):
                    reference = source.get(f"{key}Ref") or source.get(f"{key}KeyRef")
                    if reference and not reference.get("optional"):
                        target.add(reference["name"])
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounts <= {volume["name"] for volume in spec["volumes"]} | {
                claim["metadata"]["name"]
                for claim in manifest["spec"].get("volumeClaimTemplates", ())
            }
        assert maps <= names(manifests, "ConfigMap")
        assert secrets <= SECRETS


def test_every_service_finds_the_pods_of_one_workload(manifests: list[Manifest]) -> None:
    for service in of_kind(manifests, "Service"):
        selector = service["spec"]["selector"].items()
        found = [
            template
            for _, template in pod_templates(manifests)
            if selector <= template["metadata"]["labels"].items()
        ]
        assert len(found) == 1
        ports = {port["name"] for port in found[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_roles_allow_what_the_launcher_does_and_no_more(manifests: list[Manifest]) -> None:
    assert of_kind(manifests, "ClusterRole", "ClusterRoleBinding") == []
    for role in of_kind(manifests, "Role"):
        granted = {
            (group, resource): set(rule["verbs"])
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }
        jobs = {"create", "get", "list", "watch", "patch", "delete"}
        assert granted == {
            ("batch", "jobs"): jobs,
            ("kubeflow.org", "pytorchjobs"): jobs,
            ("trainer.kubeflow.org", "trainjobs"): jobs,
            ("trainer.kubeflow.org", "trainingruntimes"): jobs,
            ("trainer.kubeflow.org", "trainingruntimes/finalizers"): {"update"},
            ("", "pods"): {"get", "list", "watch"},
            ("", "pods/log"): {"get"},
            ("", "events"): {"list"},
            ("argoproj.io", "workflows"): {"get"},
            ("kueue.x-k8s.io", "workloads"): {"list"},
        }


def test_everything_is_in_one_namespace(manifests: list[Manifest]) -> None:
    found = {
        manifest["metadata"].get("namespace")
        for manifest in manifests
        if manifest["kind"] != "Namespace"
    }
    assert len(found) == 1
    (namespace,) = found
    for binding in of_kind(manifests, "RoleBinding"):
        assert {subject["namespace"] for subject in binding["subjects"]} == {namespace}
    for configuration in of_kind(manifests, "ConfigMap"):
        uri = configuration["data"].get("MLFLOW_TRACKING_URI")
        assert uri in (None, f"http://mlflow.{namespace}.svc:5000")


def test_a_namespace_of_our_own_enforces_restricted_pods(manifests: list[Manifest]) -> None:
    for namespace in of_kind(manifests, "Namespace"):
        levels = {
            namespace["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"]
            for mode in ("enforce", "audit", "warn")
        }
        assert levels == {"restricted"}


def test_the_network_allows_what_is_needed_and_no_more() -> None:
    base = rendered("base", ("backup",))
    assert allowed(base, "trainer", "trainer", 40123)
    assert allowed(base, "trainer", "mlflow", 5000)
    assert allowed(base, "trainer", "object-store", 8333)
    assert allowed(base, "pipeline", "mlflow", 5000)
    assert allowed(base, "pipeline", None, 6443)
    assert allowed(base, "mlflow", "postgres", 5432)
    assert allowed(base, "mlflow", "object-store", 8333)
    assert allowed(base, "backup", "postgres", 5432)
    for component in ("trainer", "pipeline", "mlflow", "postgres", "object-store", "stranger"):
        assert allowed(base, component, None, 53)
    assert not allowed(base, "trainer", None, 443)
    assert not allowed(base, "trainer", "postgres", 5432)
    assert not allowed(base, "mlflow", "trainer", 22)
    assert not allowed(base, "mlflow", "object-store", 28333)
    assert not allowed(base, "postgres", None, 443)
    assert not allowed(base, "stranger", "mlflow", 5000)
    assert not allowed(base, None, "mlflow", 5000)
    assert not allowed(base, None, "trainer", 23456)


def test_the_network_of_stores_elsewhere_is_open_to_them() -> None:
    outside = rendered("base", (*ELSEWHERE, *ANYWHERE))
    assert allowed(outside, "mlflow", None, 5432)
    assert allowed(outside, "mlflow", None, 443)
    assert allowed(outside, "trainer", None, 443)
    assert allowed(outside, "backup", None, 5432)
    assert names(outside, "StatefulSet") == set()


def test_a_profile_keeps_its_own_pods_free_and_its_namespace_untouched() -> None:
    profile = rendered("kubeflow-profile", ())
    assert of_kind(profile, "Namespace") == []
    assert allowed(profile, "stranger", "mlflow", 5000)
    assert allowed(profile, "stranger", None, 443)
    assert allowed(profile, "pipeline", None, 443)
    assert allowed(profile, "trainer", "mlflow", 5000)
    assert not allowed(profile, "trainer", None, 443)
    assert not allowed(profile, "stranger", "postgres", 5432)


def test_several_nodes_share_a_volume_and_one_holds_its_own() -> None:
    for name, mode in (("multi-node", "ReadWriteMany"), ("gpu", "ReadWriteOnce")):
        manifests = rendered(name, ())
        claims = of_kind(manifests, "PersistentVolumeClaim")
        (claim,) = [c for c in claims if c["metadata"]["name"] == "d2plm-workspace"]
        assert claim["spec"]["accessModes"] == [mode]
        (job,) = of_kind(manifests, "PyTorchJob")
        assert (job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] > 1) == (
            mode == "ReadWriteMany"
        )


def test_the_workspace_is_the_same_to_the_base_and_to_a_job_by_itself() -> None:
    claims = [
        of_kind(rendered(name, ()), "PersistentVolumeClaim")[0]["spec"] for name in ("base", *JOBS)
    ]
    assert claims[0] == claims[1] == claims[2]


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


def commands() -> list[list[str]]:
    """What the manifests run of d2plm's."""
    found = []
    for case in (*JOBS, "gpu", "multi-node", *OF_KIND):
        manifests = rendered(case, ())
        trainers = [job["spec"]["trainer"] for job in of_kind(manifests, "TrainJob")]
        of_pods = [c for _, template in pod_templates(manifests) for c in containers(template)]
        for container in [*trainers, *of_pods]:
            words = [*container.get("command", ()), *container.get("args", ())]
            if "d2plm" in words:
                found.append(words[words.index("d2plm") + 1 :])
    return [words for index, words in enumerate(found) if words not in found[:index]]


def test_the_settings_of_every_command_compose(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(commands()) >= 10
    for words in commands():
        assert main([*words, "--cfg", "job"]) == 0, words
    capsys.readouterr()


def test_the_versions_of_what_runs_in_kind_are_said_alike() -> None:
    makefile = (K8S.parent / "Makefile").read_text()
    workflow = yaml.safe_load((K8S.parent / ".github/workflows/kind.yml").read_text())
    nodes = workflow["jobs"]["smoke"]["strategy"]["matrix"]["kubernetes"]
    assert tuple(node.split(".")[0].lstrip("v") + "." + node.split(".")[1] for node in nodes) == (
        KUBERNETES
    )
    assert any(f"kindest/node:{node}\n" in makefile for node in nodes)
    assert f"KIND_VERSION := {workflow['env']['KIND_VERSION']}\n" in makefile


def test_the_documented_command_applies_a_trainjob_that_trainer_rejects_at_first(
    tmp_path: Path,
) -> None:
    text = (K8S.parent / "docs" / "cluster.md").read_text()
    (command,) = re.findall(r"^kubectl apply .*trainjob\.yaml.*$", text, re.MULTILINE)
    # As Trainer's webhook does, which looks in a cache for the runtime of the same file.
    kubectl = '#!/bin/sh\necho "$@" >> applied\ntest $(wc -l < applied) -gt 1\n'
    for name, script in {"kubectl": kubectl, "sleep": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "applied").read_text() == "apply -f k8s/trainjob.yaml\n" * 2


@needs_definitions
def test_ci_takes_the_definitions_that_are_at_hand() -> None:
    script = (K8S.parent / ".github/custom_resources.sh").read_text()
    for file in DEFINITIONS.values():
        text = gzip.decompress((Path(os.environ["D2PLM_CRD_DIR"]) / file).read_bytes())
        assert f"{file.removesuffix('.gz')} \\\n  {sha256(text).hexdigest()}" in script


def test_the_smoke_test_runs_every_step_there_is() -> None:
    script = (K8S / "kind" / "smoke.sh").read_text()
    steps = [job["metadata"]["labels"]["step"] for job in rendered("kind/steps.yaml", ())]
    assert f"for name in {' '.join(steps)}; do" in script


def planted(case: str, kind: str, change: Callable[[Any], object]) -> Manifest:
    manifest = copy.deepcopy(of_kind(rendered(case, ()), kind)[0])
    change(manifest)
    return manifest


def worker(job: Manifest) -> Any:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]


def misspell(mapping: Manifest, key: str, other: str) -> None:
    mapping[other] = mapping.pop(key)


CORE_TYPOS: list[tuple[str, Callable[[Any], object], str]] = [
    ("Deployment", lambda d: misspell(d["spec"], "strategy", "stratgy"), "stratgy"),
    (
        "Deployment",
        lambda d: misspell(d["spec"]["template"]["spec"]["containers"][0], "envFrom", "envForm"),
        "envForm",
    ),
    ("Deployment", lambda d: d["spec"].update(replicas="1"), "'1' is not"),
    ("StatefulSet", lambda s: s["spec"].pop("selector"), "selector"),
    ("Service", lambda s: misspell(s["spec"], "selector", "selectors"), "selectors"),
    ("NetworkPolicy", lambda n: misspell(n["spec"], "podSelector", "podselector"), "podselector"),
    ("Role", lambda r: misspell(r["rules"][0], "verbs", "verb"), "verb"),
    ("PersistentVolumeClaim", lambda p: misspell(p["spec"], "accessModes", "accessMode"), "access"),
]
JOB_TYPOS: list[tuple[str, Callable[[Any], object], str]] = [
    ("PyTorchJob", lambda j: misspell(j["spec"], "runPolicy", "runpolicy"), "runpolicy"),
    ("PyTorchJob", lambda j: j["spec"].update(nprocPerNode=1), "is not of type 'string'"),
    ("PyTorchJob", lambda j: j["spec"]["elasticPolicy"].update(minReplica=1), "minReplica"),
    (
        "PyTorchJob",
        lambda j: misspell(worker(j)["template"]["spec"], "volumes", "volume"),
        "volume",
    ),
    ("PyTorchJob", lambda j: j.update(apiVersion="kubeflow.org/v2"), "kubeflow.org/v1"),
    ("TrainJob", lambda j: misspell(j["spec"]["trainer"], "numNodes", "nodes"), "nodes"),
    ("TrainJob", lambda j: misspell(j["spec"], "runtimeRef", "runtime"), "runtime"),
    ("TrainingRuntime", lambda r: misspell(r["spec"], "mlPolicy", "mlpolicy"), "mlpolicy"),
]
WEBHOOK_TYPOS: list[tuple[str, Callable[[Any], object], str]] = [
    (
        "PyTorchJob",
        lambda j: worker(j)["template"]["spec"]["containers"][0].update(name="trainer"),
        "container named pytorch",
    ),
    ("PyTorchJob", lambda j: j["spec"]["runPolicy"].update(cleanPodPolicy="running"), "cleanPod"),
    ("PyTorchJob", lambda j: worker(j).update(restartPolicy="Exitcode"), "restartPolicy"),
    ("PyTorchJob", lambda j: j["spec"].update(nprocPerNode="two"), "nprocPerNode"),
    ("PyTorchJob", lambda j: j["metadata"].update(name="2nd"), "DNS-1035"),
    (
        "PyTorchJob",
        lambda j: j["spec"]["pytorchReplicaSpecs"].update(Master=worker(j)),
        "Workers alone",
    ),
    ("PyTorchJob", lambda j: worker(j).update(replicas=9), "maxReplicas"),
    (
        "TrainJob",
        lambda j: j["spec"]["trainer"]["env"].append({"name": "PET_NNODES", "value": "2"}),
        "PET_",
    ),
    (
        "TrainingRuntime",
        lambda r: r["spec"]["template"]["spec"]["replicatedJobs"][0].update(name="worker"),
        "named node",
    ),
]


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize(("kind", "typo", "told"), CORE_TYPOS)
def test_a_typo_in_a_core_object_is_caught(
    kind: str, typo: Callable[[Any], object], told: str, kubernetes: str
) -> None:
    assert told in "".join(schema_complaints(planted("base", kind, typo), kubernetes))


@needs_definitions
@pytest.mark.parametrize(("kind", "typo", "told"), JOB_TYPOS)
def test_a_typo_in_a_job_is_caught(kind: str, typo: Callable[[Any], object], told: str) -> None:
    case = JOBS[0] if kind == "PyTorchJob" else JOBS[1]
    assert told in "".join(schema_complaints(planted(case, kind, typo), KUBERNETES[0]))


@pytest.mark.parametrize(("kind", "typo", "told"), WEBHOOK_TYPOS)
def test_what_a_schema_allows_and_a_webhook_does_not_is_caught(
    kind: str, typo: Callable[[Any], object], told: str
) -> None:
    case = JOBS[0] if kind == "PyTorchJob" else JOBS[1]
    assert told in "".join(webhook_complaints(planted(case, kind, typo)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda pod, _: pod.update(hostNetwork=True), "hostNetwork"),
        (
            lambda pod, _: pod["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
            "hostPath",
        ),
        (lambda pod, _: pod["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
        (lambda pod, _: pod["securityContext"].update(runAsUser=0), "runAsUser"),
        (lambda pod, _: pod["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (lambda _, own: own["capabilities"].update(drop=["NET_RAW"]), "capabilities.drop"),
        (lambda _, own: own["capabilities"].update(add=["IPC_LOCK"]), "capabilities.add"),
        (lambda _, own: own.pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation"),
        (lambda _, own: own.update(privileged=True), "privileged"),
        (lambda _, own: own.pop("readOnlyRootFilesystem"), "readOnlyRootFilesystem"),
    ],
)
def test_a_pod_that_is_not_restricted_is_caught(
    change: Callable[[Any, Any], object], told: str
) -> None:
    deployment = copy.deepcopy(of_kind(rendered("base", ()), "Deployment")[0])
    spec = deployment["spec"]["template"]["spec"]
    change(spec, spec["containers"][0]["securityContext"])
    assert told in "".join(pod_security_complaints(deployment["spec"]["template"]))
