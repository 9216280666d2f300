"""Muon: the step by singular values, what it moves, and how the work is shared out."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.training import AdamWSettings, MuonSettings
from d2plm.training.muon import (
    Muon,
    Sharding,
    assign_to_ranks,
    build_muon,
    orthogonalise,
    orthogonalise_shards,
    polar_factors,
)
from d2plm.training.optimizer import build_adamw
from tests.conftest import randomise
from tests.ranks import run

RATE, DECAY, MOMENTUM = 0.01, 0.1, 0.9
LEAST, MOST = 0.68, 1.21  # singular values after five iterations, of those above 0.003


SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 40, "time_embedding_dim": 16}


def model(**changes: int) -> DiT:
    made = DiT(DiTConfig(**SIZES, **changes)).double()
    randomise(made)
    return made


def with_gradients(made: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def muon(made: DiT) -> Muon:
    given = {"learning_rate": RATE, "weight_decay": DECAY, "momentum": MOMENTUM}
    return build_muon(made, settings=MuonSettings(**given, base_width=None))


def test_the_second_step_has_the_singular_vectors_of_nesterovs_momentum() -> None:
    made = model()
    optimizer, name = muon(made), "blocks.1.feed_forward.down_proj.weight"
    weight = made.get_parameter(name)
    with_gradients(made, 1)
    assert weight.grad is not None
    first = weight.grad.clone()
    optimizer.step()
    before = with_gradients(made, 2)[name]
    optimizer.step()
    average = (1 - MOMENTUM) * (MOMENTUM * first + weight.grad)
    direction = MOMENTUM * average + (1 - MOMENTUM) * weight.grad
    step = (before * (1 - RATE * DECAY) - weight.detach()) / RATE
    u, _, v = torch.linalg.svd(direction, full_matrices=False)
    values = u.mT @ step @ v.mT / (0.2 * max(weight.shape) ** 0.5)
    torch.testing.assert_close(values, torch.diag(values.diag()), atol=1e-12, rtol=0)
    assert values.diag().min() > LEAST and values.diag().max() < MOST


def test_each_matrix_of_a_stack_moves_as_one_of_its_own() -> None:
    made = model(num_experts=3)
    before, optimizer = with_gradients(made), muon(made)
    optimizer.step()
    name = "blocks.1.feed_forward.experts.gate_up_weight"
    stack = dict(made.named_parameters())[name]
    steps = (before[name] * (1 - RATE * DECAY) - stack.detach()) / RATE
    assert stack.grad is not None
    for step, grad in zip(steps, stack.grad, strict=True):
        [expected] = orthogonalise([grad], torch.float64)
        size = 0.2 * max(grad.shape) ** 0.5
        torch.testing.assert_close(step, size * expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-15])
def test_a_momentum_that_vanishes_is_no_infinity(scale: float) -> None:
    x = scale * torch.randn(1, 20, 50, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(polar_factors(x)).all()


def test_a_step_whose_gradient_overflows_changes_nothing() -> None:
    made = model().float()
    optimizer = muon(made)
    for seed in range(2):
        with_gradients(made, seed)
        optimizer.step()
    before = copy.deepcopy((dict(made.named_parameters()), optimizer.state_dict()["state"]))
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.found_inf = torch.ones(())  # as `LossScale` sets it
    optimizer.step()
    after = (dict(made.named_parameters()), optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)


SHAPES = [(4, 6), (9, 2), (1, 5)]


def orthogonalise_on_ranks(output: Path) -> None:
    """Three matrices on three ranks, one of which has no row of the first or third."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    matrices = [
        torch.randn(shape, generator=torch.Generator().manual_seed(n))
        for n, shape in enumerate(SHAPES)
    ]
    rank, group = dist.get_rank(), dist.group.WORLD
    shardings = [Sharding(shape, torch.device("cpu"), group) for shape in SHAPES]
    rows = [[sharding.shard(r)[0] for r in range(world)] for sharding in shardings]
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        own = [m.split(each)[rank].clone() for m, each in zip(matrices, rows, strict=True)]
        found = orthogonalise_shards(own, shardings, dtype)
        expected = orthogonalise(matrices, dtype)
        for one, whole, each in zip(found, expected, rows, strict=True):
            torch.testing.assert_close(one, whole.split(each)[rank], rtol=1e-5, atol=1e-6)
        (output / f"{name}-{rank}").touch()
    dist.destroy_process_group()


def test_ranks_without_rows_or_without_a_matrix_take_part(tmp_path: Path) -> None:
    run(orthogonalise_on_ranks, tmp_path, world_size=4)
    assert len([*tmp_path.iterdir()]) == 8


def test_everything_else_moves_as_under_adamw() -> None:
    ours, theirs = model(), model()
    with_gradients(ours), with_gradients(theirs)
    muon(ours).step()
    build_adamw(theirs, settings=AdamWSettings(learning_rate=RATE, weight_decay=DECAY)).step()
    differing = {
        name
        for name, parameter in ours.named_parameters()
        if not torch.equal(parameter, theirs.get_parameter(name))
    }
    matrices = {n for n, p in ours.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert differing == matrices


def test_steps_shrink_with_the_width_so_that_one_learning_rate_serves_every_width() -> None:
    """By √m of Muon's matrices and by m of AdamW's, m = base width ÷ inputs (arXiv:2203.03466)."""
    steps = []
    for base_width in (None, 8):
        made = model()
        before = with_gradients(made)
        build_muon(made, settings=MuonSettings(weight_decay=0.0, base_width=base_width)).step()
        steps.append({name: p.detach() - before[name] for name, p in made.named_parameters()})
    for name, step in steps[0].items():
        of_time = ".modulation." in name or name.startswith("time_embedding.")
        narrower = 8 / SIZES["time_embedding_dim" if of_time else "hidden_size"]
        is_matrix = step.ndim == 2 and name != "token_embedding.weight"
        power = (0.5 if name.startswith("blocks.") else 1.0) if is_matrix else 0.0
        torch.testing.assert_close(steps[1][name], narrower**power * step, rtol=1e-9, atol=1e-12)


def test_the_work_is_shared_evenly() -> None:
    costs = [5, 3, 3, 2, 2, 1]
    assert sorted(sum(costs[i] for i in own) for own in assign_to_ranks(costs, 2)) == [8, 8]
    assert sorted(i for own in assign_to_ranks(costs, 9) for i in own) == list(range(6))
