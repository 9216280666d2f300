"""What makes training fast changes nothing that it learns.

Each is switched off, and losses, gradients of all steps, the weights and their averages are
compared. (Sharding and micro-batches are in test_covering_array; packing is in test_dit, attention
in test_attention.)
"""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from d2plm.training import trainer as training
from tests.ranks import run
from tests.runs import SHORT, assert_same_run, build, train_each
from tests.unit.training.conftest import Recorder

STEPS = 4
RECOMPUTED = {"plan": {"activation_checkpointing": 1}}
SIZES = {"num_hidden_layers": 2, "initial_gate": 1.0}  # every block acts at once
MODEL: dict[str, Any] = {"sizes": SIZES, "max_steps": STEPS}
DROPOUT = {"sizes": {**SIZES, "hidden_dropout_prob": 0.2}, "precision": "bf16"}
# Where there is a compiler, and on two ranks: the blocks' hooks stand around what is compiled.
COMPILED: dict[str, dict[str, Any]] = {"compiled": {"compile": True, **RECOMPUTED, **MODEL}}


def outcome(store: Path, output: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What training with these settings, in this process, comes to."""
    recorder = Recorder()
    settings = {**SHORT, **MODEL, "every": 0, "log": False, "callbacks": [recorder], **settings}
    trainer = build(store, output, **settings)
    trainer.train()
    return {
        "losses": torch.tensor(recorder.losses, dtype=torch.float64),
        "gradients": dict(enumerate(recorder.gradients)),
        "weights": {name: weight.detach() for name, weight in trainer.parameters.items()},
        "averages": dict(trainer.ema.shadow),
    }


@pytest.mark.parametrize(
    ("on", "off"),
    [({"num_workers": 2}, {"async_prefetch": False}), (RECOMPUTED, {})],
    ids=["loader processes", "recomputation"],
)
def test_without_it_all_is_the_same_bit_for_bit(
    on: dict[str, Any], off: dict[str, Any], store: Path, tmp_path: Path
) -> None:
    found = outcome(store, tmp_path / "on", {**DROPOUT, **on})
    expected = outcome(store, tmp_path / "off", {**DROPOUT, **off})
    assert len(found["losses"]) == STEPS
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.skipif(
    not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")),
    reason="torch.compile needs a C++ compiler on the CPU",
)
@pytest.mark.thorough
def test_two_ranks_train_compiled_as_one_uncompiled(store: Path, tmp_path: Path) -> None:
    run(train_each, store, tmp_path, {"plain": MODEL})
    run(train_compiled, store, tmp_path, COMPILED, world_size=2, seconds=280)
    assert_same_run(tmp_path / "compiled", tmp_path / "plain", 1e-10)


def train_compiled(store: Path, output: Path, runs: dict[str, dict[str, Any]]) -> None:
    """As `train_each`, and nothing runs uncompiled or is compiled again."""
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        mock.patch.object(training, "compile_blocks", compiled_for_sure),
    ):
        train_each(store, output, runs)


def compiled_for_sure(*arguments: Any) -> bool:
    assert COMPILE(*arguments)
    return True


COMPILE = training.compile_blocks
