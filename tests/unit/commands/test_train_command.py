"""d2plm train in a folder that another training uses."""

import logging
import threading
import time
from pathlib import Path

import pytest

from d2plm.commands.train import run
from d2plm.config import compose
from d2plm.core.locks import locked


def test_a_training_waits_for_another_one_in_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(
        "train",
        [
            f"work_dir={tmp_path}",
            f"data.prepared_dir={tmp_path / 'none'}",
            *("data.residues=random", "data.token_budget=512", "data.max_length=64"),
            *("trainer.max_steps=1", "trainer.compile=false", "tracking=none"),
            *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
            *("model.intermediate_size=16", "callbacks.evaluation=null", "callbacks.export=null"),
        ],
    )
    output_dir = Path(config["output_dir"])
    held, ended = threading.Event(), []

    def other() -> None:
        with locked(output_dir / ".lock", "busy"):
            held.set()
            deadline = time.monotonic() + 60
            while "another training" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.05)
            ended.append(not (output_dir / "checkpoints").exists())

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(60)
    with caplog.at_level(logging.WARNING):
        run(config)
    thread.join()
    assert ended == [True], "nothing was written before the other had ended"
    assert "another training writes to" in caplog.text
    assert (output_dir / "checkpoints" / "step-00000001").is_dir()
    assert not (output_dir / ".lock").exists()
