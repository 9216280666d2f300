"""The double's API server: HTTP in front of the store, with faults on request.

It speaks discovery, objects, lists, watches, pods' logs and access reviews, as much as the official
Python client asks for. Every request is recorded, refused ones too.
"""

import json
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.cluster.kubelet import Kubelet, Line, Log
from tests.cluster.store import NAMESPACE, RESOURCES, Change, Object, Refusal, Resource, Store
from tests.http_server import Server

USER = "system:serviceaccount:d2plm:d2plm-launcher"
REVIEWS = "selfsubjectaccessreviews"
POLL_SECONDS = 0.05  # a stream looks so often whether its client is still there
_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<part>[^/]+))?"
)
_TERM = re.compile(r"([^\s,=]+)(?:=+([^,]+)|\s+in\s+\(([^)]*)\))")
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Request:
    path: str
    query: dict[str, str]
    verb: str
    resource: str
    namespace: str
    name: str
    body: Any = None


@dataclass
class Fault:
    """An answer that the next `times` matching requests get."""

    times: int
    refusal: Refusal
    verb: str | None
    resource: str | None


Admission = Callable[[str, Object, bool], None]  # plural name, object, whether it is new


class ApiServer:
    """Serves resources of a store on 127.0.0.1; may be stopped and started on the same port.

    A test takes out of `served` what its cluster lacks.
    """

    def __init__(self, store: Store, kubelet: Kubelet, admit: Admission) -> None:
        self.store, self.kubelet, self.admit = store, kubelet, admit
        self.served = dict(RESOURCES)
        self.allowed: frozenset[tuple[str, str]] | None = None  # (resource, verb); None: everything
        self.forbidden = set[tuple[str, str]]()
        self.faults: list[Fault] = []
        self.cuts = 0  # how often all streams were cut
        self.requests: list[Request] = []
        self.port = 0
        self.stopping = False
        self._server: _Server | None = None

    def permits(self, resource: str, verb: str) -> bool:
        granted = self.allowed is None or (resource, verb) in self.allowed
        return granted and (resource, verb) not in self.forbidden

    def start(self) -> None:
        """Listen; on the port of the last time, if there was one."""
        self.stopping = False
        handler = type("Handler", (_Handler,), {"api": self, "store": self.store})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening and drop every connection; returns when no thread is left."""
        if self._server is not None:
            self.stopping = True
            self._server.shutdown()
            for connection in list(self._server.connections):
                drop(connection)
            self._server.server_close()
            self._server = None


class _Server(Server):
    """One thread a connection, all of which end with `server_close`."""

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self.connections = set[socket.socket]()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)


def drop(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a head waits 40 ms for its body
    api: ApiServer
    store: Store

    def log_message(self, *_: Any) -> None:
        """Requests are recorded instead."""

    def _handle(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        path = url.path.rstrip("/")
        match = _PATH.fullmatch(path)
        parts = match.groupdict(default="") if match else {}
        watching = query.get("watch", "").lower() in ("1", "true")
        request = Request(
            path=path,
            query=query,
            verb=_verb(self.command, parts, watching),
            resource="/".join(filter(None, (parts.get("plural"), parts.get("part")))),
            namespace=parts.get("namespace", ""),
            name=parts.get("name", ""),
            body=json.loads(content) if content else None,
        )
        self.api.requests.append(request)
        try:
            for fault in self.api.faults:
                meets = fault.verb in (None, request.verb)
                if meets and fault.times > 0 and fault.resource in (None, request.resource):
                    fault.times -= 1
                    raise fault.refusal
            self._answer(request, parts)
        except Refusal as refusal:
            self._send(refusal.code, refusal.status())

    do_GET = do_POST = do_PATCH = do_DELETE = _handle  # noqa: N815  # names of http.server

    def _answer(self, request: Request, parts: dict[str, str]) -> None:
        if request.verb == "discover":
            self._send(200, self._discover(request.path))
            return
        if request.resource == REVIEWS:
            self._send(201, {**request.body, "status": {"allowed": self._allows(request.body)}})
            return
        resource = self.api.served.get(parts["plural"])
        asked = (parts["group"], parts["version"])
        if resource is None or (resource.group, resource.version) != asked:
            self._send(404, "404 page not found\n")  # no Status, as the real server's
            return
        if not self.api.permits(request.resource, request.verb):
            what = f'User "{USER}" cannot {request.verb} resource "{request.resource}"'
            raise Refusal(403, "Forbidden", f"{resource.plural} is forbidden: {what}")
        if request.resource == "pods/log":
            self._log(request)
        elif request.verb == "watch":
            self._watch(request, resource)
        else:
            code, body = getattr(self, f"_{request.verb}")(request, resource)
            self._send(code, body)

    def _allows(self, review: Object) -> bool:
        wanted = review["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (wanted["resource"], wanted["subresource"])))
        is_here = wanted["namespace"] == NAMESPACE
        return is_here and self.api.permits(resource, wanted["verb"])

    def _discover(self, path: str) -> Object:
        if path == "/version":
            return {"gitVersion": "v1.36.2"}
        if path == "/apis":
            return {"kind": "APIGroupList", "groups": []}
        served = self.api.served.values()
        for resource in served:
            if path == f"/apis/{resource.group}":
                version = {"groupVersion": resource.api_version, "version": resource.version}
                known = {"versions": [version], "preferredVersion": version}
                return {"kind": "APIGroup", "apiVersion": "v1", "name": resource.group, **known}
        of_path = [r for r in served if path.removesuffix(r.api_version) in ("/apis/", "/api/")]
        if not of_path:
            raise Refusal(404, "NotFound", "the server could not find the requested resource")
        resources = [{"name": r.plural, "kind": r.kind} for r in of_path]
        return {"kind": "APIResourceList", "resources": resources}

    def _create(self, request: Request, resource: Resource) -> tuple[int, Object]:
        content = request.body
        place = content.setdefault("metadata", {}).setdefault("namespace", request.namespace)
        if place != (NAMESPACE if resource.is_namespaced else ""):
            raise Refusal(404, "NotFound", f'namespaces "{place}" not found')
        self.api.admit(resource.plural, content, True)
        if request.query.get("dryRun") == "All":
            return 201, content
        return 201, self.store.create(resource.plural, content)

    def _get(self, request: Request, resource: Resource) -> tuple[int, Object]:
        return 200, self.store.get(resource.plural, request.namespace, request.name)

    def _list(self, request: Request, resource: Resource) -> tuple[int, Object]:
        with self.store.changed:
            chosen = _chosen(request)
            items = self.store.list(resource.plural, request.namespace or None, chosen)
            version = str(self.store.version)
        return 200, {
            "apiVersion": resource.api_version,
            "kind": f"{resource.kind}List",
            "metadata": {"resourceVersion": version},
            "items": items,
        }

    def _patch(self, request: Request, resource: Resource) -> tuple[int, Object]:
        assert "merge-patch" in self.headers["Content-Type"]
        with self.store.edit(resource.plural, request.namespace, request.name) as edited:
            merged = merge(edited, request.body)
            self.api.admit(resource.plural, merged, False)
            edited.clear()
            edited.update(merged)
        return self._get(request, resource)

    def _delete(self, request: Request, resource: Resource) -> tuple[int, Object]:
        options = {**request.query, **(request.body or {})}
        place, name, plural = request.namespace, request.name, resource.plural
        self.store.delete(plural, place, name, options.get("propagationPolicy", "Background"))
        return 200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _watch(self, request: Request, resource: Resource) -> None:
        chosen = _chosen(request)
        self._begin_stream("application/json")
        for change in self._changes(request, resource, chosen):
            line = json.dumps({"type": change.type, "object": change.object}) + "\n"
            self._send_piece(line.encode())
            if change.type == "ERROR":
                break
        self._send_piece(b"")

    def _changes(
        self, request: Request, resource: Resource, chosen: Callable[[Object], bool]
    ) -> Iterator[Change]:
        store, place = self.store, request.namespace
        seconds = float(request.query.get("timeoutSeconds", 1800))
        end = time.monotonic() + seconds
        cuts = self.api.cuts
        given = int(request.query.get("resourceVersion") or 0)
        with store.changed:
            at = given or store.version
            beginning = [] if given else store.list(resource.plural, place or None, chosen)
        yield from (Change(0, resource.plural, "ADDED", content) for content in beginning)
        while time.monotonic() < end and self._is_wanted(cuts):
            with store.changed:
                if at < store.oldest:
                    message = f"too old resource version: {at} ({store.oldest})"
                    gone = Refusal(410, "Expired", message).status()
                    new = [Change(at, resource.plural, "ERROR", gone)]
                else:
                    new = [c for c in store.history if c.version > at]
                    if not new:
                        store.changed.wait(min(POLL_SECONDS, max(end - time.monotonic(), 0)))
            for change in new:
                at = max(at, change.version)
                mine = change.plural == resource.plural and place in (
                    "",
                    change.object.get("metadata", {}).get("namespace"),
                )
                if change.type == "ERROR" or (mine and chosen(change.object)):
                    yield change

    def _log(self, request: Request) -> None:
        query = request.query
        pod = self.store.get("pods", request.namespace, request.name)
        container = query.get("container", pod["spec"]["containers"][0]["name"])
        uid, cuts = pod["metadata"]["uid"], self.api.cuts
        if uid in self.api.kubelet.lost:
            while not self.api.kubelet.lost[uid] and self._is_wanted(cuts):
                time.sleep(POLL_SECONDS)
            raise Refusal(500, "", "dial tcp 10.0.0.9:10250: connect: no route to host")
        log = self.api.kubelet.log_of(uid, container)
        if log is None:
            what = f'container "{container}" in pod "{request.name}" is waiting to start'
            raise Refusal(400, "BadRequest", f"{what}: ContainerCreating")
        self._begin_stream("text/plain")
        is_stamped = query.get("timestamps", "").lower() == "true"
        for at, content in self._lines(log, query):
            self._send_piece(f"{at:%Y-%m-%dT%H:%M:%S.%f}Z ".encode() * is_stamped + content)
        self._send_piece(b"")

    def _lines(self, log: Log, query: dict[str, str]) -> Iterator[Line]:
        since = datetime.fromisoformat(query.get("sinceTime", "1970-01-01T00:00:00Z"))
        following = query.get("follow", "").lower() == "true"
        cuts = self.api.cuts
        ended, lines = log.ended, log.lines[:]
        at = len(lines)
        lines = [line for line in lines if line[0] >= since]
        lines = lines[-int(query.get("tailLines", len(lines))) :]
        yield from lines
        while following and not ended and self._is_wanted(cuts):
            time.sleep(POLL_SECONDS / 5)
            ended, lines = log.ended, log.lines[at:]
            at += len(lines)
            yield from lines

    def _is_wanted(self, cuts: int) -> bool:
        """Whether a stream continues; hangs up if it was cut since."""
        if self.api.cuts != cuts:
            drop(self.connection)
            raise ConnectionAbortedError
        readable, _, _ = select.select([self.connection], [], [], 0)
        hung_up = bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        return not hung_up and not self.api.stopping

    def _begin_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def _send_piece(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _send(self, code: int, body: Object | str) -> None:
        is_text = isinstance(body, str)
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def merge(content: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    merged = dict(content) if isinstance(content, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _verb(method: str, parts: dict[str, str], watching: bool) -> str:
    if not parts or (parts["plural"] not in RESOURCES and not parts["name"] and method == "GET"):
        return "discover"
    if method == "GET" and not parts["name"]:
        return "watch" if watching else "list"
    return _VERBS[method]


def _chosen(request: Request) -> Callable[[Object], bool]:
    """A predicate of objects from selectors such as `a=b,g in (h,i)` and `metadata.name=x`."""
    labels: dict[str, set[str]] = {}
    for key, value, values in _TERM.findall(request.query.get("labelSelector", "")):
        labels[key] = {value} if value else {one.strip() for one in values.split(",")}
    fields = [term.split("=") for term in request.query.get("fieldSelector", "").split(",") if term]

    def chosen(content: Object) -> bool:
        own = content["metadata"].get("labels", {})
        are_fields = all(_field(content, path) == value for path, value in fields)
        return are_fields and all(own.get(key) in values for key, values in labels.items())

    return chosen


def _field(content: Any, path: str) -> Any:
    for part in path.split("."):
        content = content.get(part, {})
    return content
