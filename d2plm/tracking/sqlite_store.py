"""The SQLite file in which MLflow stores runs without a server."""

import re
from importlib.util import find_spec
from pathlib import Path

from d2plm.core.errors import TrackingError
from d2plm.core.files import written_beside
from d2plm.core.locks import locked

# As in SQLAlchemy, with optional driver and options; an address with four slashes is absolute.
_ADDRESS = re.compile(r"sqlite(?:\+\w+)?:///(?P<file>[^?]+)(?:\?.*)?")


def sqlite_file(address: str) -> Path | None:
    """File of an SQLite address; None for other stores and for in-memory stores."""
    found = _ADDRESS.fullmatch(address)
    return None if found is None or found["file"] == ":memory:" else Path(found["file"])


def create_store(file: Path) -> None:
    """Create MLflow's database atomically if it does not exist.

    MLflow itself creates it on first use, which takes seconds. A kill in between, or two processes
    at once, leave a schema that MLflow can neither use nor complete.

    Raises:
        DataError: if the file cannot be written.
        TrackingError: if only the MLflow client is installed, which needs a server.
    """
    if find_spec("sqlalchemy") is None:
        raise TrackingError(
            f"{file}: MLflow's SQLite store is not installed; pip install "
            "'d2plm[tracking-server]', or remove mlflow from trackers"
        )
    if _is_there(file):
        return
    busy = f"another process creates {file}"
    with locked(file.with_name(f".{file.name}.lock"), busy, of=file):
        if _is_there(file):
            return
        from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        with written_beside(file) as partial:
            store = SqlAlchemyStore(f"sqlite:///{partial}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
            store.engine.dispose()  # closes the file before it is renamed


def _is_there(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0  # SQLite first creates an empty file
