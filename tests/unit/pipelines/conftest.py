"""A quick definition of pipelines, and one MLflow store, for the tests of pipelines."""

from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from d2plm.tracking.sqlite_store import create_store
from tests.conftest import MonkeyPatch, shared_folder


@pytest.fixture(scope="session")
def quick_kfp() -> Iterator[None]:
    """KFP without reading the source of every caller at every setting of a step.

    It does so for the sake of a message, and takes seconds in a process with many modules.
    """
    with MonkeyPatch.context() as patch:
        patch.setattr("kfp.dsl.pipeline_task.inspect", Mock(stack=lambda: [[""] * 4] * 2))
        yield


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of an SQLite store; making its tables takes seconds."""
    folder = shared_folder(
        tmp_path_factory, "pipelines", lambda folder: create_store(folder / "mlflow.db")
    )
    return f"sqlite:///{folder / 'mlflow.db'}"
