"""Fixtures: exports, and requests over HTTP to the application in this process."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from d2plm.export.exported_model import load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.serving.app import application
from d2plm.serving.service import Service

JSON = "application/json"
LIMIT = 126  # residues of the exports
PARADIGMS = {
    "diffusion": AbsorbingDiffusion,
    "flow": MaskFlowMatching,
    "uniform": UniformFlowMatching,
}
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
def served_exports(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    """Folder of an export of each paradigm, named as in `PARADIGMS`."""
    folder = tmp_path_factory.mktemp("exports")
    lengths = LengthHistogram.of(np.array([10, 12, 12, 40]), LIMIT)
    for name, paradigm in PARADIGMS.items():
        save_export(folder / name, tiny_dit(), paradigm(), lengths, {})
    return folder


@pytest.fixture(scope="session")
def service(served_exports: Path) -> Service:
    """Of the diffusion model, with the limit of `d2plm serve`."""
    return Service(load_export(served_exports / "diffusion"), 65536)


@pytest.fixture(scope="session")
def ask(service: Service) -> Iterator[Ask]:
    with asking(service) as ask:
        yield ask
