"""A Kubeflow Pipelines server for tests of submitting."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import follow
from tests.kfp_server import KfpServer, kfp_server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[KfpServer]:
    for name in ("KFP_TOKEN", "KFP_NAMESPACE", "D2PLM_REGISTRY", "D2PLM_TAG", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("kfp.Client._LOCAL_KFP_CONTEXT", str(tmp_path / "context.json"))
    with kfp_server() as double:
        monkeypatch.setenv("KFP_HOST", double.url)
        yield double
