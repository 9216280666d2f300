"""The SQLite file that holds MLflow's runs where there is no server."""

import logging
import re
from importlib.util import find_spec
from pathlib import Path

from d2plm.core.errors import TrackingError
from d2plm.core.files import written_beside
from d2plm.core.locks import locked

# With a driver and options, as SQLAlchemy reads it; an address of four slashes is absolute.
_ADDRESS = re.compile(r"sqlite(?:\+\w+)?:///(?P<file>[^?]+)(?:\?.*)?")

log = logging.getLogger(__name__)


def sqlite_file(address: str) -> Path | None:
    """The file of an SQLite address; None for other stores, and for one in memory."""
    found = _ADDRESS.fullmatch(address)
    return None if found is None or found["file"] == ":memory:" else Path(found["file"])


def create_store(file: Path) -> None:
    """Create MLflow's database if there is none: whole or not at all, and once.

    MLflow's own first use takes seconds. A kill in between leaves a schema that it can neither use
    nor complete, and so do two processes at once.

    Raises:
        DataError: if the file cannot be written.
        TrackingError: if only MLflow's client for servers is installed.
    """
    if find_spec("sqlalchemy") is None:
        raise TrackingError(
            f"{file}: MLflow's store in a file is not installed: pip install "
            "'d2plm[tracking-server]', or leave mlflow out of trackers"
        )
    if _is_there(file):
        return
    busy = f"another process creates {file}"
    with locked(file.with_name(f".{file.name}.lock"), busy, waiting=log.info, of=file):
        if _is_there(file):
            return
        from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        with written_beside(file) as partial:
            store = SqlAlchemyStore(f"sqlite:///{partial}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
            store.engine.dispose()  # nothing keeps the file open that is renamed


def _is_there(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 0  # SQLite makes an empty file at once
