"""MLflow's database is created atomically and once, whatever happens to its first users."""

import shutil
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from mlflow import MlflowClient

from d2plm.core.errors import TrackingError
from d2plm.tracking.mlflow_run import RUN_FILE, begin_mlflow_run, open_client
from tests.commands import python_c

FIRST_USE = """
import sys
from pathlib import Path
from d2plm.tracking.mlflow_run import begin_mlflow_run
begin_mlflow_run(Path(sys.argv[2]), uri=sys.argv[1])
"""
# Killed when MLflow has made its tables and not yet migrated them.
KILLED = """
import os, signal
from alembic import command
command.upgrade = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
# Killed when the store has the run, and the output folder does not know it.
KILLED_LATER = """
import os, signal
from mlflow import MlflowClient
create = MlflowClient.create_run
def then_die(*arguments, **more):
    create(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)
MlflowClient.create_run = then_die
"""


def ended(script: str, folder: Path, name: str = "run") -> "CompletedProcess[str]":
    return python_c(script, f"sqlite:///{folder / 'mlflow.db'}", str(folder / name), seconds=120)


def test_two_first_uses_at_once_after_one_that_was_killed_both_succeed(tmp_path: Path) -> None:
    assert ended(KILLED + FIRST_USE, tmp_path).returncode == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(lambda name: ended(FIRST_USE, tmp_path, name), ("one", "two"))
    assert [one.returncode for one in both] == [0, 0]
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", "one", "two"}
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    known = client.get_experiment_by_name("d2plm")
    assert known is not None
    assert len(client.search_runs([known.experiment_id])) == 2


def test_a_run_whose_creator_was_killed_is_found_again(
    tmp_path: Path, new_mlflow_store: Path
) -> None:
    uri = f"sqlite:///{shutil.copy(new_mlflow_store, tmp_path)}"
    assert ended(KILLED_LATER + FIRST_USE, tmp_path).returncode == -signal.SIGKILL
    run = begin_mlflow_run(tmp_path / "run", uri=uri)
    experiment = run.client.get_run(run.id).info.experiment_id
    assert [found.info.run_id for found in run.client.search_runs([experiment])] == [run.id]
    assert run.id in (tmp_path / "run" / RUN_FILE).read_text()


def test_a_damaged_database_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE mcp_servers (id INTEGER)")  # as an interrupted first use
    with pytest.raises(TrackingError, match="away if it is damaged") as raised:
        open_client(f"sqlite:///{file}")
    assert "\n" not in str(raised.value)
