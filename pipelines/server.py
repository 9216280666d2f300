"""The Kubeflow Pipelines server at `KFP_HOST`: reaching it, and saying in one line why it refuses.

The server is asked for its health first, with no retries: the client's own first request tries
five times and prints a traceback for each, and takes a login page for an answer.
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
MENDS = {
    401: "set KFP_TOKEN to a token that it takes, such as that of kubectl create token default "
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
        host: its address.
        namespace: of the user, where it has several; None elsewhere.
        client: the `kfp.Client`.
    """

    host: str
    namespace: str | None
    client: Any

    def run_url(self, run_id: str) -> str:
        """Where its UI shows a run."""
        return f"{self.host}/#/runs/details/{run_id}"

    def recurring_run_url(self, recurring_run_id: str) -> str:
        """Where its UI shows a recurring run."""
        return f"{self.host}/#/recurringrun/details/{recurring_run_id}"


def connect() -> Server:
    """The server at `KFP_HOST`, with `KFP_TOKEN` and `KFP_NAMESPACE` where they are set.

    `SSL_CERT_FILE` names the authorities that its certificate may come from.

    Raises:
        ClusterError: without `KFP_HOST`, or if the server cannot be reached or refuses.
    """
    host = os.environ.get("KFP_HOST", "").rstrip("/")
    if not host:
        raise ClusterError(
            "KFP_HOST is not set: give the address of your Kubeflow Pipelines server, such as "
            "KFP_HOST=http://localhost:8080 after kubectl port-forward -n kubeflow "
            "svc/ml-pipeline-ui 8080:80"
        )
    host = host if "://" in host else f"https://{host}"
    token, authorities = os.environ.get("KFP_TOKEN"), os.environ.get("SSL_CERT_FILE")
    namespace = os.environ.get("KFP_NAMESPACE") or None
    several = _health(host, token, authorities).get("multi_user", False)
    if namespace and not several:
        log.info(
            "KFP_NAMESPACE=%s: the server has one namespace for all, and runs in it", namespace
        )
        namespace = None
    with reaching(host):
        from kfp import Client

        client = Client(
            host=host,
            existing_token=token,
            ssl_ca_cert=authorities,
            namespace=namespace or "kubeflow",  # the client's own default
        )
    if several and not client.get_user_namespace():
        raise ClusterError(
            f"Kubeflow Pipelines at {host}: has a namespace for each user; set KFP_NAMESPACE to "
            "yours"
        )
    return Server(host, namespace, client)


@contextmanager
def reaching(host: str) -> Iterator[None]:
    """Turn a failure of the client into one line, and keep what it prints to itself.

    Raises:
        ClusterError: if the server cannot be reached or refuses.
    """
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # the client raises whatever its transports raise
        status = getattr(error, "status", None)
        if isinstance(status, int) and status > 0:
            raise _refused(host, status, getattr(error, "body", None)) from error
        raise _unreachable(host, error) from error


def _health(host: str, token: str | None, authorities: str | None) -> dict[str, Any]:
    """What the server says of itself."""
    import requests

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = requests.get(
            f"{host}/{HEALTH}",
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            verify=authorities or True,
        )
    except requests.RequestException as error:
        raise _unreachable(host, error) from error
    if not answer.ok:
        raise _refused(host, answer.status_code, answer.text)
    try:
        said: dict[str, Any] = answer.json()
    except ValueError as error:
        raise ClusterError(
            f"Kubeflow Pipelines at {host}: answers with a web page instead of data, which is a "
            f"login page ({answer.url}) or another site; {MENDS[401]}; or correct KFP_HOST: "
            f"{MENDS[404]}"
        ) from error
    return said


def _refused(host: str, status: int, body: str | bytes | None) -> ClusterError:
    mend = MENDS.get(status, SERVER_FAILS if status >= 500 else "check KFP_HOST and the settings")
    return ClusterError(f"Kubeflow Pipelines at {host}: {status}{_reason(body)}; {mend}")


def _reason(body: str | bytes | None) -> str:
    """What a refusal says: the server's own words, but not a proxy's page."""
    try:
        said = json.loads(body or "")
        text = str(said.get("message") or said.get("error") or "")
    except (ValueError, AttributeError):
        return ""
    return f" {text.splitlines()[0]}" if text else ""


def _unreachable(host: str, error: BaseException) -> ClusterError:
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        mend = "set SSL_CERT_FILE to a file of the authorities that its certificate comes from"
    elif "SSL" in text:
        mend = "does it speak TLS there? correct https:// or http:// in KFP_HOST"
    else:
        mend = "check KFP_HOST and the network; a port-forward may have ended"
    return ClusterError(f"Kubeflow Pipelines at {host}: {_cause(error)}; {mend}")


def _cause(error: BaseException) -> str:
    """The transport's own words, which its wrappers put into longer ones."""
    inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
    return _cause(inner) if isinstance(inner, BaseException) else first_line(error)
