"""The pipeline of a sweep in KFP's local runner: runs that are killed, and the table after all."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d2plm.assembly import sweep
from d2plm.commands import compare
from d2plm.config import compose, save
from tests.commands import ROOT, d2plm
from tests.conftest import MonkeyPatch
from tests.integration.conftest import Prepared

pytestmark = pytest.mark.thorough  # trains several models, each step in a new interpreter

# A callback that kills the training of an arm in its second step.
KILLER = """
import os, signal
from d2plm.settings.registry import register
from d2plm.training.callbacks.callback import Callback

class Killer(Callback):
    def on_step_end(self, trainer, *_):
        if trainer.step == 2 and trainer.output_dir.parent.name == os.environ.get("KILLED_ARM"):
            os.kill(os.getpid(), signal.SIGKILL)

register("callback", "killer", Killer)
"""
NUMBER = r"[-+]?\d+\.\d+"
SHARED = (
    *("name=two", "arms.short.trainer.max_steps=3", "arms.long.trainer.max_steps=4"),
    *("seeds=[1]", "parallel=2", "tracking=none", "callbacks.checkpoint.every=1"),
    *("callbacks.evaluation=null", "evaluation.generated=0", "evaluation.masks_per_sequence=1"),
)


@pytest.fixture
def submitted(
    prepared: Prepared, tmp_path: Path, monkeypatch: MonkeyPatch
) -> Callable[[], dict[str, str]]:
    """Runs the pipeline of the two runs; returns the records of those that it executed."""
    from kfp import dsl, local

    from pipelines import pipeline

    (tmp_path / "killer.py").write_text(KILLER)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The runner does not know the time, and retries what a server does not: an exit code.
    monkeypatch.setattr(dsl, "PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER", "2026-11-30T03:00:00Z")
    monkeypatch.setattr(pipeline, "RETRIES", 0)
    monkeypatch.setattr(local.config.LocalExecutionConfig, "instance", None)
    work_dir = tmp_path / "a sweep"
    shutil.copytree(prepared.work_dir / "data", work_dir / "data")

    def submit() -> dict[str, str]:
        before = {*(work_dir / "pipeline_runs").glob("*/")}
        runner = local.SubprocessRunner(use_venv=False)
        local.init(runner, pipeline_root=str(tmp_path / "root"), raise_on_error=False)
        pipeline.define("compare", 2)(
            experiment="debug",
            trainer="debug",
            input=str(prepared.input),
            work_dir=str(work_dir),
            overrides=" ".join([*SHARED, "callbacks.killer={}"]),
            modules=str(tmp_path / "killer.py"),
        )
        (folder,) = {*(work_dir / "pipeline_runs").glob("*/")} - before
        records = {file.parent.name.split("-")[0]: file for file in folder.glob("*/run.jsonl")}
        return {name: file.read_text() for name, file in records.items()}

    return submit


def test_two_runs_of_which_one_is_killed_end_with_the_table_of_one_machine(
    prepared: Prepared,
    submitted: Callable[[], dict[str, str]],
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setenv("KILLED_ARM", "long")
    records = submitted()
    assert {*records} == {"short,_seed_1", "long,_seed_1"}
    for name, text in records.items():
        assert ("exit code 137" in text) == ("long" in name), name
        assert ('"evaluate", "state": "succeeded"' in text) == ("short" in name), name
    assert not (tmp_path / "a sweep" / "two.md").exists()
    (summary,) = (tmp_path / "root").glob("*/finish/summary")
    assert "long" in summary.read_text() and "short" not in summary.read_text()

    monkeypatch.delenv("KILLED_ARM")
    assert {*submitted()} == {"long,_seed_1"}  # what has finished is skipped

    def execute(runs: dict[str, Any], commands: Any, parallel: int) -> None:
        for config in runs.values():
            file = Path(config.output_dir) / "config.requested.yaml"
            save(config, file)
            for command in commands:
                assert d2plm(command, f"--config-file={file}").returncode == 0

    monkeypatch.setattr(sweep, "_run_here", execute)
    data = f"data.prepared_dir='{prepared.work_dir / 'data'}'"
    words = [*prepared.arguments(), f"work_dir='{tmp_path / 'one machine'}'", data, *SHARED]
    compare.run(compose("compare", words))
    comparison = json.loads((tmp_path / "one machine" / "two.json").read_text())["arms"]
    assert comparison["short"]["difference"] is None
    low, high = comparison["long"]["difference"]["interval"]
    assert low < comparison["long"]["difference"]["value"] < high
    assert (tmp_path / "one machine" / "two.png").stat().st_size > 5_000
    (shown,) = (tmp_path / "root").glob("*/reduce/table")
    texts = [file.read_text() for file in (shown, tmp_path / "one machine" / "two.md")]
    found, expected = ([float(x) for x in re.findall(NUMBER, text)] for text in texts)
    assert found == pytest.approx(expected, abs=2e-3) and found
    assert len({re.sub(NUMBER, "", text) for text in texts}) == 1
    (page,) = (tmp_path / "root").glob("*/reduce/figure")
    assert "data:image/png;base64," in page.read_text()
