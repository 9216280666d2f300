"""Steps for a FLOP budget, against the FLOPs of the actual batches."""

from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import ConfigError
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import token_parameters
from d2plm.settings.training import TrainerSettings
from d2plm.training.training_length import number_of_steps
from tests.conftest import TINY_SIZES

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
