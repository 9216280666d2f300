"""Connecting to the Kubeflow Pipelines server at `KFP_HOST`, with errors in one line.

The server's health is requested first, without retries, because the client's own first request
tries five times, prints a traceback each time, and accepts a login page as a response.
"""

import io
import json
import logging
import os
import ssl
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from d2plm.core.errors import MAX_SHOWN, ClusterError, first_line
from d2plm.core.redaction import redacted
from d2plm.core.waiting import waiting

if TYPE_CHECKING:
    from requests import Response

POD_VARIABLE = "KFP_POD_NAME"  # KFP sets it in a step's pod
HEALTH = "apis/v2beta1/healthz"
LOG = "apis/v1alpha1/runs/{run}/nodes/{node}/log"
MOST_LOG_BYTES = 2**20  # of a step's log that are kept
TIMEOUT_SECONDS = 30  # for connecting, and between two parts of a response
NAMESPACE = "kubeflow"  # used by servers without profiles; the client's default
REMEDIES = {
    401: "set KFP_TOKEN to a valid token, such as that of kubectl create token default "
    "--audience=pipelines.kubeflow.org -n YOUR_NAMESPACE",
    403: "request permission to run pipelines in the namespace, and set KFP_NAMESPACE to yours",
    404: "KFP_HOST must be the address of the Kubeflow Pipelines UI, such as "
    "https://kubeflow.example/pipeline",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # never through a proxy
SERVER_FAILS = "check the log of its ml-pipeline deployment and try again"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """A reachable server.

    Attributes:
        namespace: the user's namespace on a multi-user server, otherwise None.
    """

    host: str
    namespace: str | None
    client: Any

    @property
    def step_namespace(self) -> str:
        """Namespace in which the server runs the steps."""
        return self.namespace or NAMESPACE

    def run_url(self, run_id: str, *, recurring: bool = False) -> str:
        return f"{self.host}/#/{'recurringrun' if recurring else 'runs'}/details/{run_id}"

    def log(self, run_id: str, node: str) -> str:
        """End of a step's log, by the id of its node; empty if the server has none."""
        with reaching(self.host):
            response, end = _get(self.host, LOG.format(run=run_id, node=node)), b""
            for part in response.iter_content(2**16):
                end = (end + part)[-MOST_LOG_BYTES:]
        return end.decode(errors="replace") if response.ok else ""

    def require_id(self, created: str | None) -> str:
        """Return an id; `ClusterError` if there is none, as in the answers of other servers."""
        if created:
            return created
        raise ClusterError(
            f"Kubeflow Pipelines at {self.host}: gives no id to what it creates, so it is another "
            f"server; {REMEDIES[404]}"
        )


def connect() -> Server:
    """Connect to the server at `KFP_HOST`, with `KFP_TOKEN` and `KFP_NAMESPACE` if set.

    `SSL_CERT_FILE` is a file of trusted certificate authorities.

    Raises:
        ClusterError: if `KFP_HOST` is not set, or the server cannot be reached or denies access.
    """
    given = os.environ.get("KFP_HOST", "").rstrip("/")
    if not given:
        raise ClusterError(
            "KFP_HOST is not set: give the address of your Kubeflow Pipelines server, such as "
            "KFP_HOST=http://localhost:8080 after kubectl port-forward -n kubeflow "
            "svc/ml-pipeline-ui 8080:80"
        )
    host, is_multi_user = reach(given)
    namespace = os.environ.get("KFP_NAMESPACE") or None
    if namespace and not is_multi_user:
        log.info("KFP_NAMESPACE=%s is ignored: the server is not multi-user", namespace)
        namespace = None
    with reaching(host):
        from kfp import Client

        class KnowingClient(Client):
            """Does not repeat the request of `reach`, which would have no time limit."""

            def get_kfp_healthz(self, *_: Any) -> Any:
                return SimpleNamespace(multi_user=is_multi_user)

        client = KnowingClient(
            host=host,
            existing_token=os.environ.get("KFP_TOKEN"),
            ssl_ca_cert=os.environ.get("SSL_CERT_FILE"),
            namespace=namespace or NAMESPACE,
            proxy=_proxy(host),
        )
        _limit_requests(client)
    if is_multi_user and not client.get_user_namespace():
        raise ClusterError(
            f"Kubeflow Pipelines at {host}: each user has a namespace; set KFP_NAMESPACE to yours"
        )
    return Server(host, namespace, client)


def reach(host: str, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[str, bool]:
    """Return the full address of the server at `host`, and whether it is multi-user.

    Raises:
        ClusterError: if the server cannot be reached or denies access.
    """
    host = host.rstrip("/") if "://" in host else f"https://{host.rstrip('/')}"
    with reaching(host):
        health = _get(host, HEALTH, timeout_seconds)
        health.raise_for_status()
        try:
            return host, health.json().get("multi_user", False)
        except (ValueError, AttributeError) as error:
            raise ClusterError(
                f"Kubeflow Pipelines at {host}: responds with a web page instead of data, probably "
                f"a login page ({health.url}) or another site; {REMEDIES[401]}; or correct "
                f"KFP_HOST: {REMEDIES[404]}"
            ) from error


@contextmanager
def reaching(host: str) -> Iterator[None]:
    """Raise the client's errors as a `ClusterError`, hide its output, and log a line a minute."""
    try:
        with (
            waiting(f"Kubeflow Pipelines at {host}"),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    except ClusterError:
        raise
    except Exception as error:  # the client raises any error of its transports
        response = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if status:
            fallback = SERVER_FAILS if status >= 500 else "check KFP_HOST"
            body = getattr(error, "body", None) or getattr(response, "text", None)
            is_anonymous = status == 403 and "KFP_TOKEN" not in os.environ
            remedy = REMEDIES[401] if is_anonymous else REMEDIES.get(status, fallback)
            text = f"{status}{_reason(body)}; {remedy}"
        else:
            remedy = "check KFP_HOST and the network; a port-forward may have ended"
            cause = _cause(error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                remedy = (
                    "set SSL_CERT_FILE to a file with the authority that signed its certificate"
                )
            elif isinstance(cause, ssl.SSLError):
                remedy = "correct https:// or http:// in KFP_HOST"
            text = f"{first_line(cause)}; {remedy}"
        if proxy := _proxy(host):
            text += f"; the request went through the proxy {redacted(proxy)}: see NO_PROXY"
        raise ClusterError(f"Kubeflow Pipelines at {host}: {text}") from error


def _limit_requests(client: Any) -> None:
    """Limit the time of every request of a `kfp.Client`, which itself sets no limit."""
    pool = client._run_api.api_client.rest_client.pool_manager  # shared by all its APIs
    request = pool.request

    def limited(*arguments: Any, **options: Any) -> Any:
        return request(*arguments, **{**options, "timeout": TIMEOUT_SECONDS})

    pool.request = limited


def _get(host: str, path: str, timeout_seconds: float = TIMEOUT_SECONDS) -> "Response":
    import requests

    token = os.environ.get("KFP_TOKEN")
    return requests.get(
        f"{host}/{path}",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=timeout_seconds,
        verify=os.environ.get("SSL_CERT_FILE") or True,
        proxies=None if _proxy(host) else {"no_proxy": "*"},
        stream=True,  # read when its content is asked for
    )


def _proxy(host: str) -> str | None:
    """The environment's proxy for requests to `host`; the client itself uses none."""
    from requests.utils import get_environ_proxies, select_proxy

    with suppress(ValueError):  # the request itself reports an invalid address
        if urlsplit(host).hostname not in LOOPBACK:
            return select_proxy(host, get_environ_proxies(host))
    return None


def _reason(body: str | bytes | None) -> str:
    """The message in the body of an error; empty for a web page."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        content = json.loads(text)
        text = str(content.get("message") or content.get("error") or "")
    except (ValueError, AttributeError):
        if text.lstrip().startswith("<"):
            return ""
    return f" {text.splitlines()[0][:MAX_SHOWN]}" if text.strip() else ""


def _cause(error: BaseException) -> BaseException:
    known = (getattr(error, name, None) for name in ("original_error", "reason"))
    inner = next(filter(None, known), None) or (error.args[0] if error.args else None)
    return _cause(inner) if isinstance(inner, BaseException) else error
