"""Fixtures: a local MLflow store, made once, and a folder for a run's outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from tests.conftest import MonkeyPatch

Refuse = Callable[..., None]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an SQLite store; making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store') / 'mlflow.db'}"


@pytest.fixture
def client(store: str, monkeypatch: MonkeyPatch) -> MlflowClient:
    """A client of the store, which is also MLflow's own for the length of the test."""
    # MLflow writes both of these itself, for its child processes.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    mlflow.set_tracking_uri(store)
    return MlflowClient(tracking_uri=store)


@pytest.fixture
def refuse(monkeypatch: MonkeyPatch) -> Refuse:
    """(method, error code) → that method of every client raises it from now on."""

    def make(method: str, code: str = "TEMPORARILY_UNAVAILABLE", message: str = "down") -> None:
        def fail(*_args: Any, **_named: Any) -> NoReturn:
            raise MlflowException(f"{message}\nsecond line", error_code=ErrorCode.Value(code))

        monkeypatch.setattr(MlflowClient, method, fail)

    return make


def repeat(monkeypatch: MonkeyPatch, store: type, method: str) -> None:
    """Have a store do everything twice, as for a client whose first answer a proxy has lost."""
    once = getattr(store, method)

    def twice(*arguments: Any, **named: Any) -> Any:
        once(*arguments, **named)
        return once(*arguments, **named)

    monkeypatch.setattr(store, method, twice)


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
