"""A test double of the Kubeflow Pipelines API: enough of its HTTP for the real `kfp.Client`.

It keeps what it is sent, and holds a run to what a server holds it to: the specifications parse,
and every argument is a parameter of the pipeline, of its type. Its runs go on by a script: each
question for a run is answered with the script's next state.
"""

import email
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from google.protobuf.json_format import ParseDict
from kfp.pipeline_spec import pipeline_spec_pb2

from tests.http_server import JSON, listening

API, LOGS = "/apis/v2beta1", "/apis/v1alpha1/runs/r1/nodes/"
Answer = tuple[int, Any]  # status and body; text is sent as a page


@dataclass
class KfpServer:
    """The double.

    Attributes:
        script: the states of a run, one for each question; the last one stays.
        refusals: beginning of a path → how often its requests are answered so.
        silent: a path whose requests get no answer while the double is there.
        requests: method, path, query and body of all requests.
    """

    url: str = ""
    multi_user: bool = False
    script: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, tuple[int, Answer]] = field(default_factory=dict)
    silent: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, dict[str, list[str]], Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    experiments: list[dict[str, Any]] = field(default_factory=list)
    pipelines: list[dict[str, Any]] = field(default_factory=list)
    versions: list[dict[str, Any]] = field(default_factory=list)

    def posted(self, path: str) -> list[Any]:
        return [body for how, at, _, body in self.requests if (how, at) == ("POST", API + path)]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Answer:
        """What a server would say."""
        self.requests.append((method, path, query, body))
        for beginning, (times, refusal) in self.refusals.items():
            if path.startswith(API + beginning) and times > 0:
                self.refusals[beginning] = (times - 1, refusal)
                return refusal
        match method, path.removeprefix(API):
            case "GET", "/healthz":
                return 200, {"multi_user": self.multi_user}
            case "GET", "/experiments" | "/pipelines" | "/pipelines/p1/versions":
                wanted = json.loads(query["filter"][0])["predicates"][0]["stringValue"]
                key = "pipeline_versions" if path.endswith("versions") else path.rpartition("/")[2]
                known = getattr(self, key.removeprefix("pipeline_"))
                return 200, {key: [one for one in known if one["display_name"] == wanted]}
            case "POST", "/pipelines":
                self.pipelines.append({**body, "pipeline_id": "p1"})
                return 200, self.pipelines[-1]
            case "POST", "/pipelines/upload_version":
                specification, platform = body
                given = {"pipeline_spec": specification, "platform_spec": platform}
                made = {"pipeline_id": query["pipelineid"][0], "display_name": query["name"][0]}
                made["pipeline_version_id"] = f"v{len(self.versions) + 1}"
                self.versions.append({**made, "pipeline_spec": given})
                return 200, self.versions[-1]
            case "POST", "/experiments":
                self.experiments.append({**body, "experiment_id": "e1"})
                return 200, self.experiments[-1]
            case "POST", "/runs":
                return self.refused(body) or (200, {**body, "run_id": "r1", "state": "PENDING"})
            case "POST", "/recurringruns":
                return self.refused(body) or (200, {**body, "recurring_run_id": "s1"})
            case "GET", "/runs/r1":
                state = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                return 200, {"run_id": "r1", **state}
            case "POST", "/runs/r1:terminate":
                return 200, {}
            case "GET", at if at.startswith(LOGS) and (node := at.split("/")[-2]) in self.logs:
                return 200, self.logs[node]
        return 404, {"code": 5, "message": f"{path} not found"}

    def refused(self, body: dict[str, Any]) -> Answer | None:
        """Why a server would not take a run, if it would not."""
        given = body.get("pipeline_spec")
        if given is None:
            wanted = body["pipeline_version_reference"]["pipeline_version_id"]
            (version,) = (one for one in self.versions if one["pipeline_version_id"] == wanted)
            given = version["pipeline_spec"]
        try:
            specification = ParseDict(given["pipeline_spec"], pipeline_spec_pb2.PipelineSpec())
            ParseDict(given["platform_spec"], pipeline_spec_pb2.PlatformSpec())
        except Exception as error:
            return 400, {"code": 3, "message": str(error)}
        parameters = specification.root.input_definitions.parameters
        for key, value in body["runtime_config"].get("parameters", {}).items():
            kind = parameters[key].parameter_type if key in parameters else 0
            if not isinstance(value, PYTHON_KINDS.get(KINDS.Name(kind), ())):
                return 400, {"code": 3, "message": f"{key}={value!r} is no parameter"}
        return None


KINDS = pipeline_spec_pb2.ParameterType.ParameterTypeEnum
PYTHON_KINDS: dict[str, Any] = {"STRING": str, "NUMBER_INTEGER": int, "LIST": list, "STRUCT": dict}


def step(name: str, state: str, **more: Any) -> dict[str, Any]:
    """One entry of a run's details, as the server gives it: `pod_name` is a node's id, no pod's."""
    known = {"task_id": f"task-{name}", "display_name": name, "pod_name": f"d2plm-wrq7f-{name}"}
    return {**known, "state": state, **more}


def run(state: str, *tasks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A run's state, as Kubeflow Pipelines 2.17 gives it.

    The tasks have no order, and those that KFP starts beside the steps are among them. Errors are
    empty.
    """
    own = [step("root", state), step("root-driver", "SUCCEEDED"), step("exit-handler-1", state)]
    for task in tasks:
        parent = {"parent_task_id": task["task_id"]}
        own.append(step(f"{task['display_name']}-driver", "SUCCEEDED", **parent))
        own.append(step(f"{task['display_name']}(0)", task["state"], **parent))
    details = {"task_details": [*reversed(tasks), *own]}
    return {"state": state, "run_details": details, **more}


def content(kind: str, text: bytes) -> Any:
    """A request's content: JSON, or the YAML documents of an uploaded file."""
    if not kind.startswith("multipart/"):
        return json.loads(text)
    parts: Any = email.message_from_bytes(f"Content-Type: {kind}\n\n".encode() + text)
    return list(yaml.safe_load_all(parts.get_payload()[0].get_payload(decode=True)))


def certified(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """The context of a server with a certificate for localhost, and the certificate's file."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@contextmanager
def kfp_server(context: ssl.SSLContext | None = None) -> Iterator[KfpServer]:
    """The double, listening; with a context, over TLS."""
    double = KfpServer()

    def answer(request: BaseHTTPRequestHandler, text: bytes) -> tuple[int, str, bytes] | None:
        double.tokens.append(request.headers.get("Authorization"))
        split = urlsplit(request.path)
        body = content(request.headers.get("Content-Type", ""), text) if text else None
        if double.silent is not None and split.path == API + double.silent:
            double.ended.wait()
            return None
        status, said = double.answer(request.command, split.path, parse_qs(split.query), body)
        if not isinstance(said, str):
            return status, JSON, json.dumps(said).encode()
        return status, "text/html" if said.startswith("<") else "text/plain", said.encode()

    with listening(answer, context) as port:
        double.url = f"{'https' if context else 'http'}://localhost:{port}"
        try:
            yield double
        finally:
            double.ended.set()
