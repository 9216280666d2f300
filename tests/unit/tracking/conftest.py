"""Fixtures: a local MLflow store, made once, and a folder for a run's outputs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ErrorCode

from tests.conftest import MonkeyPatch

Refuse = Callable[..., None]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the product handles it."""


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, new_mlflow_store: Path) -> str:
    """The address of an SQLite store."""
    return f"sqlite:///{shutil.copy(new_mlflow_store, tmp_path_factory.mktemp('store'))}"


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


def repeat(monkeypatch: MonkeyPatch, package: str, method: str) -> None:
    """Have MLflow's SQL store of `package` do everything twice, as after a lost answer."""
    store = resolve_name(f"mlflow.store.{package}.sqlalchemy_store:SqlAlchemyStore")
    once = getattr(store, method)

    def twice(*arguments: Any, **named: Any) -> Any:
        once(*arguments, **named)
        return once(*arguments, **named)

    monkeypatch.setattr(store, method, twice)


@pytest.fixture
def output_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"
