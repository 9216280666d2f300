"""Fixtures: exports, and requests over HTTP to the application in this process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi.testclient import TestClient

from d2plm.export.exported_model import load_export
from d2plm.serving.app import application
from d2plm.serving.service import Service
from tests.conftest import Exports

JSON = "application/json"
LIMIT = 126  # residues of the exports
Answer = tuple[int, Any]  # status, document
Ask = Callable[..., Answer]


@contextmanager
def asking(service: Service, timeout: float = 60) -> Iterator[Ask]:
    """(body, content type) → (status, document)."""
    app = application(service, timeout)
    with TestClient(app, raise_server_exceptions=False) as client:

        def ask(body: Any, content_type: str | None = JSON) -> Answer:
            content = json.dumps(body).encode() if isinstance(body, dict | list) else body
            headers = {} if content_type is None else {"Content-Type": content_type}
            response = client.post("/invocations", content=content, headers=headers)
            return response.status_code, response.json()

        yield ask


@pytest.fixture(scope="session")
def service(exports: Exports) -> Service:
    """Of the diffusion model, with the limit of `d2plm serve`."""
    return Service(load_export(exports.masked), 65536)


@pytest.fixture(scope="session")
def ask(service: Service) -> Iterator[Ask]:
    with asking(service) as ask:
        yield ask
