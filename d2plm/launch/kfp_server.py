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
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from d2plm.core.errors import ClusterError, first_line

POD_VARIABLE = "KFP_POD_NAME"  # KFP sets it in a step's pod
HEALTH = "apis/v2beta1/healthz"
TIMEOUT_SECONDS = 30
REMEDIES = {
    401: "set KFP_TOKEN to a valid token, such as that of kubectl create token default "
    "--audience=pipelines.kubeflow.org -n YOUR_NAMESPACE",
    403: "request permission to run pipelines in the namespace, and set KFP_NAMESPACE to yours",
    404: "KFP_HOST must be the address of the Kubeflow Pipelines UI, such as "
    "https://kubeflow.example/pipeline",
}
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

    def run_url(self, run_id: str, *, recurring: bool = False) -> str:
        return f"{self.host}/#/{'recurringrun' if recurring else 'runs'}/details/{run_id}"


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
    host, several = reach(given)
    namespace = os.environ.get("KFP_NAMESPACE") or None
    if namespace and not several:
        log.info("KFP_NAMESPACE=%s is ignored: the server is not multi-user", namespace)
        namespace = None
    with reaching(host):
        from kfp import Client

        client = Client(
            host=host,
            existing_token=os.environ.get("KFP_TOKEN"),
            ssl_ca_cert=os.environ.get("SSL_CERT_FILE"),
            namespace=namespace or "kubeflow",  # the client's own default
        )
    if several and not client.get_user_namespace():
        raise ClusterError(
            f"Kubeflow Pipelines at {host}: each user has a namespace; set KFP_NAMESPACE to yours"
        )
    return Server(host, namespace, client)


def reach(host: str, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[str, bool]:
    """Return the full address of the server at `host`, and whether it is multi-user.

    Raises:
        ClusterError: if the server cannot be reached or denies access.
    """
    import requests

    host = host.rstrip("/") if "://" in host else f"https://{host.rstrip('/')}"
    token = os.environ.get("KFP_TOKEN")
    with reaching(host):
        health = requests.get(
            f"{host}/{HEALTH}",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_seconds,
            verify=os.environ.get("SSL_CERT_FILE") or True,
        )
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
    """Convert the client's errors to one line, and suppress its output.

    Raises:
        ClusterError: if the server cannot be reached or denies access.
    """
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
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
            text = f"{status}{_reason(body)}; {REMEDIES.get(status, fallback)}"
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
        raise ClusterError(f"Kubeflow Pipelines at {host}: {text}") from error


def _reason(body: str | bytes | None) -> str:
    """The server's error message; empty for the web page of a proxy."""
    try:
        content = json.loads(body or "")
        text = str(content.get("message") or content.get("error") or "")
    except (ValueError, AttributeError):
        return ""
    return f" {text.splitlines()[0]}" if text else ""


def _cause(error: BaseException) -> BaseException:
    """The innermost of the transport's nested errors."""
    inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
    return _cause(inner) if isinstance(inner, BaseException) else error
