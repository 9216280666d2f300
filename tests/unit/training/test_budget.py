"""Steps for a FLOP budget: against the FLOPs of the very batches that the loader packs."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from d2plm.core.errors import ConfigError
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import token_parameters, training_flops
from d2plm.training.budget import steps_for
from tests.conftest import TINY_SIZES

CONFIG = DiTConfig(**TINY_SIZES)
MAX_LENGTH = 128


def flops_of(length: int) -> float:
    """Forward and backward of one sequence, the sum written out."""
    layers, width = CONFIG.num_hidden_layers, CONFIG.hidden_size
    return length * 6 * token_parameters(CONFIG) + length * length * 12 * layers * width


def test_the_flops_of_a_batch_are_the_sum_over_its_sequences() -> None:
    lengths = [3, 128, 57]
    expected = sum(flops_of(length) for length in lengths)
    assert training_flops(CONFIG, lengths) == pytest.approx(expected, rel=1e-12)
    assert training_flops(CONFIG, np.array(lengths)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("by_cluster", [False, True])
def test_the_budget_pays_for_the_batches_that_the_loader_packs(
    by_cluster: bool, tiny_store: SequenceStore
) -> None:
    class Clustered:
        """The store, with its longest half in one cluster."""

        digest, lengths = tiny_store.digest, tiny_store.lengths
        clusters = np.where(lengths > np.median(lengths), 0, np.arange(len(lengths)) + 1)
        copy_into = tiny_store.copy_into

    loader = PackedLoader(
        [Collection(Clustered(), by_cluster=by_cluster)],
        token_budget=512,
        max_length=MAX_LENGTH,
        micro_batches=2,
    )
    epochs = 20
    steps, stream = 0, loader.stream(Position())
    tokens, flops = 0, 0.0
    for batch in stream:
        steps += 1
        tokens += sum(batch.segment_lengths)
        flops += sum(flops_of(length) for length in batch.segment_lengths)
        if batch.following == Position(epochs, 0):
            break
    drawn = tiny_store.lengths[loader.sampler.draws.epoch(0)]
    found = steps_for(flops, CONFIG, drawn, tokens / steps, MAX_LENGTH)
    assert found == pytest.approx(steps, rel=0.02)
    if by_cluster:  # what is drawn decides, and not what is there
        every = steps_for(flops, CONFIG, tiny_store.lengths, tokens / steps, MAX_LENGTH)
        assert every < found


def lengths() -> NDArray[np.int32]:
    return np.array([10, 40, 500], dtype=np.int32)


def test_the_steps_of_a_budget_are_exact_for_whole_multiples() -> None:
    segments = [12, 42, MAX_LENGTH]  # with <cls> and <eos>, and cropped
    one = sum(map(flops_of, segments)) * 1000 / sum(segments)
    for steps in (1, 7, 1234):
        assert steps_for(one * (steps + 0.5), CONFIG, lengths(), 1000, MAX_LENGTH) == steps


@pytest.mark.parametrize("budget", [0, -1e9, "much", float("nan"), float("inf"), None, 1e3])
def test_a_budget_that_pays_for_no_step_is_refused_by_name(budget: Any) -> None:
    with pytest.raises(ConfigError, match=r"^flops_budget="):
        steps_for(budget, CONFIG, lengths(), 1000, MAX_LENGTH)
