"""What makes training fast changes nothing that it learns: the gate of every optimisation.

Each is switched off, or something plain takes its place, and losses, gradients of all steps, the
weights and their averages are compared. (bf16 against fp32, and sharding, are in test_equality.)
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.data.loader import GlobalBatch, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.model import attention, layers
from d2plm.training import trainer as training
from tests.ranks import run
from tests.runs import SHORT, assert_same_run, build, train_each
from tests.unit.training.conftest import Recorder


def segments_one_by_one(cu_seqlens: Tensor) -> list[tuple[int, int, int]]:
    """In place of the runs of equally long segments."""
    bounds = pairwise(cu_seqlens.tolist())
    return [(start, 1, stop - start) for start, stop in bounds if stop > start]


def indexed(modulation: Tensor, layout: layers.Layout, parts: int) -> list[Tensor]:
    """In place of `expand_modulation`, whose gradient is an operator of its own."""
    return [part[layout.segments] for part in modulation.chunk(parts, dim=-1)]


@contextmanager
def sequences_one_by_one() -> Iterator[None]:
    """Each sequence is a micro-batch by itself, without padding; its draws keep their keys."""
    packed_stream = PackedLoader.stream

    def alone(packed: PackedBatch) -> Iterator[PackedBatch]:
        for index, tokens in enumerate(packed.split()):
            yield PackedBatch.pack(
                [tokens.numpy()],
                draw_ids=packed.draw_ids[index : index + 1].numpy(),
                sequence_ids=packed.sequence_ids[index : index + 1].numpy(),
                global_sequences=packed.global_sequences,
            )

    def stream(self: PackedLoader, start: Position) -> Iterator[GlobalBatch]:
        for batch in packed_stream(self, start):
            single = [one for packed in batch.micro_batches for one in alone(packed)]
            yield replace(batch, micro_batches=single)

    with mock.patch.object(PackedLoader, "stream", stream):
        yield


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimisation:
    """How it is switched on and off, and how far results may be apart, relative and absolute.

    Attributes:
        tolerance: 0 demands the same bits; in fp64, sums in another order differ by 1e-15, which
            steps of Adam enlarge.
        without: what takes its place where no setting switches it off.
        shared: settings of both runs.
    """

    tolerance: float
    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] = field(default_factory=dict)
    without: Callable[[], AbstractContextManager[Any]] = nullcontext
    shared: dict[str, Any] = field(default_factory=dict)


ROUNDING, STEPS = 1e-10, 4
RECOMPUTED = {"plan": {"activation_checkpointing": 1}}
SIZES = {"num_hidden_layers": 2, "initial_gate": 1.0}  # every block acts at once
MODEL: dict[str, Any] = {"sizes": SIZES, "max_steps": STEPS}
DROPOUT = {"sizes": {**SIZES, "hidden_dropout_prob": 0.2}, "precision": "bf16"}
OPTIMISATIONS = {
    # The host's side moves bytes alone.
    "loader processes": Optimisation(0, on={"num_workers": 2}),
    # The same kernels on the same numbers, dropout's draws included.
    "recomputation": Optimisation(0, on=RECOMPUTED, shared=DROPOUT),
    # The same sums in another order.
    "packed rows": Optimisation(ROUNDING, without=sequences_one_by_one),
    "equally long segments in one call": Optimisation(
        ROUNDING,
        without=lambda: mock.patch.object(attention, "_equal_length_runs", segments_one_by_one),
    ),
    "sums over segments": Optimisation(
        ROUNDING, without=lambda: mock.patch.object(layers, "expand_modulation", indexed)
    ),
}
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


@pytest.fixture(scope="module")
def usual(tiny_store: SequenceStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome where nothing is switched on or off."""
    return outcome(tiny_store.path, tmp_path_factory.mktemp("usual"), {})


@pytest.mark.parametrize("name", OPTIMISATIONS)
def test_without_it_all_is_the_same(
    name: str, store: Path, usual: dict[str, Any], tmp_path: Path
) -> None:
    it = OPTIMISATIONS[name]
    on = {**it.shared, **it.on}
    found = outcome(store, tmp_path / "on", on) if on else usual
    with it.without():
        expected = outcome(store, tmp_path / "off", {**it.shared, **it.off})
    assert len(found["losses"]) == STEPS
    torch.testing.assert_close(found, expected, rtol=it.tolerance, atol=it.tolerance)


@pytest.mark.skipif(
    not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")),
    reason="torch.compile needs a C++ compiler on the CPU",
)
@pytest.mark.thorough
def test_two_ranks_train_compiled_as_one_uncompiled(store: Path, tmp_path: Path) -> None:
    run(train_each, store, tmp_path, {"plain": MODEL})
    run(train_compiled, store, tmp_path, COMPILED, world_size=2, seconds=280)
    assert_same_run(tmp_path / "compiled", tmp_path / "plain", ROUNDING)


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
