"""PackingSampler: every sequence once, nothing over budget, little padding, all from the seed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.errors import ConfigError, DataError
from d2plm.data.packing import Bin, PackingSampler

MAX_LENGTH = 64
LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)
TINY_LENGTHS = st.lists(st.integers(1, 3), min_size=1, max_size=200)
BINS = st.integers(1, 7)


def sampler(lengths: list[int], **changes: Any) -> PackingSampler:
    settings: dict[str, Any] = {"token_budget": 128, "max_length": MAX_LENGTH, **changes}
    return PackingSampler(np.array(lengths, dtype=np.int32), **settings)


def flat(batches: list[list[Bin]]) -> list[int]:
    return [index for batch in batches for packed in batch for index in packed.sequences.tolist()]


@given(
    lengths=LENGTHS | TINY_LENGTHS,
    budget=st.integers(MAX_LENGTH, 400),
    bins=BINS,
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_an_epoch_contains_every_sequence_once_within_every_limit(
    lengths: list[int], budget: int, bins: int, seed: int, epoch: int
) -> None:
    packing = sampler(lengths, token_budget=budget, seed=seed)
    plan = packing.plan(epoch)
    batches = list(plan.batches(bins))
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert len(batches) == -(-len(plan) // bins)
    done = 0
    for batch in batches:
        assert len(batch) == bins
        ids = np.concatenate([packed.draw_ids for packed in batch])
        assert ids.tolist() == list(range(len(ids)))
        for packed in batch:
            tokens = [min(lengths[i] + 2, MAX_LENGTH) for i in packed.sequences]
            assert sum(tokens) <= budget
            assert len(tokens) <= packing.max_sequences
            # There are segments enough for a tail in pieces of at most the longest length.
            pieces = -(-(budget - sum(tokens)) // MAX_LENGTH)
            assert len(tokens) + pieces <= packing.max_segments
            assert tokens == sorted(tokens, reverse=True)
            assert (packed.global_sequences, packed.epoch) == (len(ids), epoch)
            assert packed.place == done
            done += len(tokens)
    # Only bins after the last sequence are empty.
    filled = [len(packed.sequences) > 0 for batch in batches for packed in batch]
    assert filled == [True] * len(plan) + [False] * (len(batches) * bins - len(plan))


@pytest.mark.parametrize(("budget", "full", "epoch"), [(8192, 0.97, 0), (65_536, 0.996, 1)])
def test_bins_of_proteins_are_full(
    proteins: list[np.ndarray], budget: int, full: float, epoch: int
) -> None:
    lengths = [len(tokens) for tokens in proteins]
    bins = len(sampler(lengths, token_budget=budget, max_length=1024).plan(epoch))
    tokens = sum(min(length + 2, 1024) for length in lengths)
    assert tokens / (bins * budget) >= full
    assert bins <= -(-tokens // budget) + 1


@pytest.mark.parametrize(
    "changes", [{"token_budget": 63}, {"token_budget": 64.0}, {"max_length": 2}]
)
def test_impossible_limits_are_rejected_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        sampler([5, 6], **changes)
    with pytest.raises(DataError, match="no sequences"):
        sampler([])


def test_epochs_and_seeds_give_different_orders() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 300).tolist()
    plans = [sampler(lengths, seed=seed).plan(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(plan.order) for plan in plans}) == 4
