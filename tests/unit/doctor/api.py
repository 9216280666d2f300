"""A double of the Kubernetes API: answers with the objects that a test put at its paths.

It speaks real HTTP to the real client, and keeps what it was asked.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_server import JSON, listening

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
NAMESPACE = "/api/v1/namespaces/d2plm"
CLAIM = f"{NAMESPACE}/persistentvolumeclaims/d2plm-workspace"
PODS = f"{NAMESPACE}/pods"
NODES = "/api/v1/nodes"
QUEUE = "/apis/kueue.x-k8s.io/v1beta1/namespaces/d2plm/localqueues/team"
PYTORCHJOBS = "/apis/kubeflow.org/v1"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1"
CREATE_PYTORCHJOB = f"{PYTORCHJOBS}/namespaces/d2plm/pytorchjobs"
CREATE_RUNTIME = f"{TRAINJOBS}/namespaces/d2plm/trainingruntimes"
CREATE_TRAINJOB = f"{TRAINJOBS}/namespaces/d2plm/trainjobs"
CREATED = (CREATE_PYTORCHJOB, CREATE_RUNTIME, CREATE_TRAINJOB)
IMAGE = "registry.example/you/d2plm-trainer:0.1.0"

Answer = dict[str, Any] | int  # an object, or the status of a refusal


class Api:
    def __init__(self) -> None:
        self.answers: dict[str, Answer] = healthy()
        self.rejected: dict[str, tuple[int, str]] = {}  # where nothing may be created
        self.forbidden: set[tuple[str, str]] = set()  # (verb, resource) that reviews deny
        self.asked: list[tuple[str, str, Any]] = []  # method or DRY-RUN, path and body

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(url)
        path = parts.path.rstrip("/")  # the client asks for /version/
        query = parse_qs(parts.query)
        self.asked.append(("DRY-RUN" if query.get("dryRun") == ["All"] else method, path, body))
        if method == "POST" and path in self.rejected:
            status, message = self.rejected[path]
            return status, {"kind": "Status", "status": "Failure", "message": message}
        given = self.answers.get(path, 404)
        if isinstance(given, int):
            message = f"{path} says no"
            return given, {"kind": "Status", "status": "Failure", "message": message}
        if path == REVIEWS:
            return 201, {**body, "status": {"allowed": self._allows(body)}}
        if method == "POST":
            return 201, body
        return 200, given

    def _allows(self, review: Any) -> bool:
        wanted = review["spec"]["resourceAttributes"]
        assert wanted["namespace"] == "d2plm"
        resource = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
        return (wanted["verb"], resource) not in self.forbidden

    def lacks(self, *groups: str) -> None:
        for path in [one for one in self.answers if one.split("/")[2:3] in [[g] for g in groups]]:
            del self.answers[path]


@contextmanager
def serving(api: Api) -> Iterator[str]:
    """The API over HTTP on a free port; gives its address."""

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
        given = json.loads(body) if body else None
        status, said = api.answer(request.command, request.path, given)
        return status, JSON, (said if isinstance(said, str) else json.dumps(said)).encode()

    with listening(answer) as port:
        yield f"http://127.0.0.1:{port}"


def healthy() -> dict[str, Answer]:
    version = dict.fromkeys(("buildDate", "compiler", "gitCommit", "gitTreeState", "platform"), "")
    version |= {"gitVersion": "v1.33.1", "goVersion": "", "major": "1", "minor": "33"}
    return {
        "/version": version,
        "/apis": {"kind": "APIGroupList", "groups": []},
        "/apis/kueue.x-k8s.io": {"preferredVersion": {"version": "v1beta1"}},
        PYTORCHJOBS: resources("kubeflow.org/v1", "pytorchjobs", "pytorchjobs/status"),
        TRAINJOBS: resources("trainer.kubeflow.org/v1alpha1", "trainjobs", "trainingruntimes"),
        **{path: {} for path in (REVIEWS, NAMESPACE, *CREATED)},
        CLAIM: claim(),
        PODS: {"items": []},
        NODES: {"items": [node("gpu-a", gpus=8), node("gpu-b", gpus=8), node("small")]},
        QUEUE: {"status": {"conditions": [{"type": "Active", "status": "True"}]}},
    }


def resources(version: str, *names: str) -> dict[str, Any]:
    fixed = {"singularName": "", "namespaced": True, "kind": "K", "verbs": []}
    return {"groupVersion": version, "resources": [{"name": name, **fixed} for name in names]}


def claim(phase: str = "Bound", mode: str = "ReadWriteMany") -> dict[str, Any]:
    return {
        "metadata": {"name": "d2plm-workspace"},
        "spec": {"accessModes": [mode], "storageClassName": "shared"},
        "status": {"phase": phase, "capacity": {"storage": "500Gi"}},
    }


def node(name: str, gpus: int = 0) -> dict[str, Any]:
    allocatable = {"cpu": "16", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {"metadata": {"name": name}, "status": {"allocatable": allocatable}}


def pod(name: str, state: dict[str, Any], created: str, image_id: str = "") -> dict[str, Any]:
    """A pod of the training image, whose one container is in `state`."""
    container = {"name": "pytorch", "image": IMAGE}
    status = {**container, "imageID": image_id, "ready": False, "restartCount": 0, "state": state}
    return {
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"containers": [container]},
        "status": {"phase": "Pending", "containerStatuses": [status]},
    }
