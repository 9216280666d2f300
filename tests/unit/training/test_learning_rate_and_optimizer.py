"""Schedules by their closed forms, steps of a FLOP budget, what AdamW decays, the average."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from d2plm.core.errors import ConfigError
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import token_parameters
from d2plm.settings.training import (
    AdamWSettings,
    ConstantSettings,
    CosineSettings,
    ScheduleSettings,
    TrainerSettings,
    WsdSettings,
)
from d2plm.training.ema import EMA
from d2plm.training.learning_rate import Schedule, constant, cosine, linear, wsd
from d2plm.training.optimizer import build_adamw
from d2plm.training.training_length import number_of_steps
from tests.conftest import TINY_SIZES

SETTINGS: dict[Callable[..., Schedule], type[ScheduleSettings]] = {
    cosine: CosineSettings,
    linear: CosineSettings,
    constant: ConstantSettings,
    wsd: WsdSettings,
}


def made(schedule: Callable[..., Schedule], steps: int, **settings: Any) -> Schedule:
    return schedule(steps, SETTINGS[schedule](**settings))


WARM = {"warmup_steps": 10, "floor_ratio": 0.2}
WSD = {"warmup_steps": 9, "decay_steps": 40, "floor_ratio": 0.1}
POINTS: list[tuple[Callable[..., Schedule], dict[str, Any], dict[int, float]]] = [
    (cosine, WARM, {0: 1 / 11, 4: 5 / 11, 9: 10 / 11, 10: 1, 60: 0.6, 110: 0.2, 500: 0.2}),
    (cosine, WARM, {35: 0.2 + 0.8 * (2 + math.sqrt(2)) / 4}),
    (linear, WARM, {0: 1 / 11, 9: 10 / 11, 10: 1, 35: 0.8, 109: 0.2 + 0.8 / 100, 500: 0.2}),
    (linear, {"warmup_ratio": 0.1}, {0: 1 / 12, 10: 11 / 12, 11: 1, 110: 0}),
    (constant, {"warmup_steps": 4}, {0: 0.2, 3: 0.8, 4: 1, 99: 1, 500: 1}),
    (wsd, {**WSD, "decay_shape": "linear"}, {4: 0.5, 9: 1, 70: 1, 90: 0.55, 110: 0.1, 500: 0.1}),
    (wsd, {**WSD, "decay_shape": "1-sqrt"}, {70: 1, 90: 1 - 0.9 * math.sqrt(0.5), 110: 0.1}),
    (wsd, {"decay_ratio": 0.4, "decay_shape": "linear"}, {66: 1, 77: 0.75, 110: 0}),
    *((kind, {"warmup_ratio": 0.0}, {0: 1}) for kind in SETTINGS),
]


@pytest.mark.parametrize(("schedule", "settings", "points"), POINTS)
def test_schedules_at_their_closed_form_points(
    schedule: Callable[..., Schedule], settings: dict[str, Any], points: dict[int, float]
) -> None:
    factor = made(schedule, 110, **settings)
    assert {step: factor(step) for step in points} == pytest.approx(points)


def test_impossible_schedules_are_rejected_by_name() -> None:
    impossible = [(kind, {"warmup_steps": 10}) for kind in SETTINGS]
    impossible += [(wsd, {"decay_steps": 10}), (wsd, {"decay_steps": 6, "warmup_steps": 5})]
    for schedule, settings in impossible:
        with pytest.raises(ConfigError, match=f"^{next(iter(settings))}="):
            made(schedule, 10, **settings)


class Tied(nn.Module):
    """An embedding that is also the output matrix, a norm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_only_matrices_decay_and_tied_ones_appear_once(tiny_dit: Callable[..., nn.Module]) -> None:
    model = Tied()
    decayed, kept = build_adamw(model, settings=AdamWSettings(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    given = AdamWSettings(learning_rate=0.2, betas=[0.7, 0.8], eps=1e-4)
    for group in build_adamw(model, settings=given).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.2, (0.7, 0.8), 1e-4)
    assert [id(p) for p in decayed["params"]] == [id(model.inner.weight)]
    expected = [model.embedding.weight, *model.norm.parameters(), model.inner.bias]
    assert sorted(map(id, kept["params"])) == sorted(map(id, [*expected, model.output.bias]))
    dit = tiny_dit()
    matrices = {id(p) for p in build_adamw(dit).param_groups[0]["params"]}
    for name, parameter in dit.named_parameters():
        plain = name.endswith((".bias", "_norm.weight")) or name == "token_embedding.weight"
        assert (id(parameter) in matrices) != plain, name


def test_impossible_settings_are_rejected_by_name() -> None:
    for betas in ([0.9, 1.0], [0.9]):
        with pytest.raises(ConfigError, match=r"^betas="):
            build_adamw(nn.Linear(2, 2), settings=AdamWSettings(betas=betas))
    for decay in (-0.1, 1.0):
        with pytest.raises(ConfigError, match=r"^ema_decay="):
            EMA(dict(nn.Linear(2, 2).named_parameters()), decay)


@pytest.mark.parametrize("cap", [0.9999, 0.3])
def test_the_average_follows_its_recursion(cap: float) -> None:
    model = nn.Linear(3, 2)
    average = EMA(dict(model.named_parameters()), cap)
    expected: list[torch.Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for number in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        average.update()
        # The first update takes the weights as they are: the initial ones carry nothing.
        decay = 0.0 if number == 0 else min(cap, (1 + number) / (10 + number))
        weights = [parameter.detach().double().clone() for parameter in model.parameters()]
        expected = [
            decay * (before if expected else 0) + (1 - decay) * now
            for before, now in zip(expected or weights, weights, strict=True)
        ]
    shadow = average.shadow
    assert average.updates == 30
    assert list(shadow) == ["weight", "bias"]
    for found, wanted in zip(shadow.values(), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


CONFIG = DiTConfig(**TINY_SIZES)
MAX_LENGTH = 128


def flops_of(length: int) -> float:
    """Forward and backward of one sequence, the sum written out."""
    layers, width = CONFIG.num_hidden_layers, CONFIG.hidden_size
    return length * 6 * token_parameters(CONFIG) + length * length * 12 * layers * width


def loader_of(store: SequenceStore, by_cluster: bool = False) -> PackedLoader:
    class Clustered:
        """The store, with its longest half in one cluster."""

        digest, lengths, copy_into = store.digest, store.lengths, store.copy_into
        vocabulary = store.vocabulary
        clusters = np.where(lengths > np.median(lengths), 0, np.arange(len(lengths)) + 1)

    collection = Collection(Clustered(), by_cluster=by_cluster)
    return PackedLoader([collection], token_budget=512, max_length=MAX_LENGTH)


def steps_of(budget: Any, loader: PackedLoader) -> int:
    return number_of_steps(loader, CONFIG, TrainerSettings(flops_budget=budget))


@pytest.mark.parametrize("by_cluster", [False, True])
def test_the_budget_pays_for_the_packed_batches(
    by_cluster: bool, tiny_store: SequenceStore
) -> None:
    loader = loader_of(tiny_store, by_cluster)
    steps, flops = 0, 0.0
    for batch in loader.stream(Position()):
        steps += 1
        flops += sum(flops_of(length) for length in batch.segment_lengths)
        if batch.following == Position(1, 0):
            break
    for epochs in (1, 100):
        assert steps_of(flops * (epochs + 0.5 / steps), loader) == epochs * steps


@pytest.mark.parametrize("budget", [0, "much", float("nan"), float("inf"), 1e3])
def test_a_budget_that_pays_for_no_step_is_named(budget: Any, tiny_store: SequenceStore) -> None:
    with pytest.raises(ConfigError, match=r"^flops_budget="):
        steps_of(budget, loader_of(tiny_store))
