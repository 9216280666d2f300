"""The Kubeflow Pipelines server at `KFP_HOST`: connecting to it, and its refusals in one line.

The server's health is requested first, without retries: the client's own first request tries five
times, prints a traceback for each, and accepts a login page as an answer.
"""

import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from d2plm.core.errors import ClusterError, first_line

HEALTH = "apis/v2beta1/healthz"
TIMEOUT_SECONDS = 30
REMEDIES = {
    401: "set KFP_TOKEN to a token that it accepts, such as that of kubectl create token default "
    "--audience=pipelines.kubeflow.org -n YOUR_NAMESPACE",
    403: "ask for the right to run pipelines in the namespace, and set KFP_NAMESPACE to yours",
    404: "KFP_HOST must be the address at which the pipelines' own UI opens, such as "
    "https://kubeflow.example/pipeline",
}
SERVER_FAILS = "look at the log of its ml-pipeline deployment and try again"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        namespace: of the user, where it has several; None elsewhere.
    """

    host: str
    namespace: str | None
    client: Any

    def run_url(self, run_id: str, *, recurring: bool = False) -> str:
        """Address of a run in the server's UI."""
        return f"{self.host}/#/{'recurringrun' if recurring else 'runs'}/details/{run_id}"


def connect() -> Server:
    """The server at `KFP_HOST`, with `KFP_TOKEN` and `KFP_NAMESPACE` if they are set.

    `SSL_CERT_FILE` names the authorities that may have signed its certificate.

    Raises:
        ClusterError: without `KFP_HOST`, or if the server cannot be reached or refuses.
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
        log.info("KFP_NAMESPACE=%s is ignored: the server has one for all users", namespace)
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
            f"Kubeflow Pipelines at {host}: has a namespace for each user; set KFP_NAMESPACE to "
            "yours"
        )
    return Server(host, namespace, client)


def reach(host: str, timeout_seconds: float = TIMEOUT_SECONDS) -> tuple[str, bool]:
    """The address of the server at `host`, and whether it has a namespace for each user.

    Raises:
        ClusterError: if the server cannot be reached or refuses.
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
                f"Kubeflow Pipelines at {host}: answers with a web page instead of data, which is "
                f"a login page ({health.url}) or another site; {REMEDIES[401]}; or correct "
                f"KFP_HOST: {REMEDIES[404]}"
            ) from error


@contextmanager
def reaching(host: str) -> Iterator[None]:
    """Turn the client's errors into one line, and suppress what it prints.

    Raises:
        ClusterError: if the server cannot be reached or refuses.
    """
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except ClusterError:
        raise
    except Exception as error:  # the client raises whatever its transports raise
        response = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if status:
            fallback = SERVER_FAILS if status >= 500 else "check KFP_HOST"
            body = getattr(error, "body", None) or getattr(response, "text", None)
            text = f"{status}{_reason(body)}; {REMEDIES.get(status, fallback)}"
        else:
            remedy = "check KFP_HOST and the network; a port-forward may have ended"
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = (
                    "set SSL_CERT_FILE to a file of the authorities that signed its certificate"
                )
            elif "SSL" in str(error):
                remedy = "does it speak TLS there? correct https:// or http:// in KFP_HOST"
            text = f"{_cause(error)}; {remedy}"
        raise ClusterError(f"Kubeflow Pipelines at {host}: {text}") from error


def _reason(body: str | bytes | None) -> str:
    """The server's message about a refusal; empty for the page of a proxy."""
    try:
        content = json.loads(body or "")
        text = str(content.get("message") or content.get("error") or "")
    except (ValueError, AttributeError):
        return ""
    return f" {text.splitlines()[0]}" if text else ""


def _cause(error: BaseException) -> str:
    """The innermost message of the transport's nested errors."""
    inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
    return _cause(inner) if isinstance(inner, BaseException) else first_line(error)
