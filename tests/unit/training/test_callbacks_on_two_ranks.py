"""Callbacks and metrics where parameters are sharded over two processes (gloo)."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from d2plm.core.batch import PackedBatch
from d2plm.data.loader import Position
from d2plm.settings.callbacks import EarlyStoppingSettings
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.gradient_health import dump_step
from d2plm.training.distributed import Process, setup_process
from d2plm.training.metrics import StepState
from d2plm.training.plan import Plan
from d2plm.training.shards import LocalParameters
from tests.ranks import run

RANKS = 2


def on_ranks(folder: Path) -> None:
    process = setup_process("cpu", Plan())
    for check in CHECKS:
        check(process, folder)


def sharded_model(process: Process) -> tuple[nn.Module, nn.Module]:
    """(over both ranks, whole) with equal weights; one of them is too small for two shards."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    fully_shard(sharded, mesh=process.mesh)
    return sharded, whole


def the_norm_is_of_all_shards(process: Process, folder: Path) -> None:
    sharded, whole = sharded_model(process)
    expected = torch.cat([p.detach().flatten() for p in whole.parameters()]).norm()
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    loader = SimpleNamespace(epochs_done=lambda position: 1.5)
    stub: Any = SimpleNamespace(
        parameters=LocalParameters(sharded).local,
        splits={},
        process=process,
        grad_norm=expected,
        optimizer=optimizer,
        loader=loader,
        position=None,
    )
    norms = {"grad_norm": float(expected), "parameter_norm": float(expected)}
    assert StepState().read(stub) == pytest.approx({"learning_rate": 0.1, **norms, "epoch": 1.5})


def a_failed_step_is_kept_by_all_ranks_together(process: Process, folder: Path) -> None:
    sharded, _ = sharded_model(process)
    for number, parameter in enumerate(sharded.parameters()):
        gradient = torch.full(parameter.shape, 1.0 + number)
        if number == 1:
            gradient[0] = math.inf  # on rank 0's shard alone
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
    parameters = LocalParameters(sharded)
    parameters.take_gradients()
    saved: list[Path] = []
    batch = PackedBatch.pack(
        [torch.full((4 + process.rank,), 7, dtype=torch.uint8).numpy()],
        sequence_ids=[40 + process.rank],
        draw_ids=[process.rank],
        token_budget=16,
    )
    trainer: Any = SimpleNamespace(
        parameters=parameters.local,
        splits={},
        process=process,
        step=9,
        position=Position(1, 4),
        loss=torch.tensor(2.0),
        grad_norm=torch.tensor(math.inf),
        batch=SimpleNamespace(micro_batches=[batch]),
        save_state=saved.append,
    )
    dump_step(trainer, folder / "failed")
    assert saved == [folder / "failed" / "state"]
    dist.barrier()
    for rank in range(RANKS):
        described = json.loads((folder / "failed" / f"batch.rank{rank}.json").read_text())
        assert (described["step"], described["rank"], described["world_size"]) == (10, rank, RANKS)
        (packed,) = described["micro_batches"]
        assert packed["sequence_ids"] == [40 + rank]
        assert packed["segment_lengths"] == [4 + rank]
    gradients = json.loads((folder / "failed" / "gradients.json").read_text())
    assert gradients["not_finite"] == ["0.bias"]
    assert gradients["norms"]["0.weight"] == pytest.approx(15**0.5)
    assert gradients["norms"]["1.weight"] == pytest.approx(3 * 3**0.5)


def both_ranks_stop_together(process: Process, folder: Path) -> None:
    ended: list[str] = []
    trainer: Any = SimpleNamespace(process=process, end_training=ended.append)
    stopping = EarlyStopping(EarlyStoppingSettings(patience=1))
    values = ([2.0, 2.0], [2.0, 1.0])[process.rank]  # by its own, rank 1 would continue
    for value in values:
        stopping.on_evaluate(trainer, {"validation_nelbo": value})
    assert len(ended) == 1


CHECKS = (
    the_norm_is_of_all_shards,
    a_failed_step_is_kept_by_all_ranks_together,
    both_ranks_stop_together,
)


def test_what_callbacks_measure_keep_and_decide_is_of_all_ranks(tmp_path: Path) -> None:
    run(on_ranks, tmp_path, world_size=RANKS)
