"""PackingSampler: every sequence once, nothing over budget, little padding, all from the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d2plm.data.packing import Bin, PackingSampler
from d2plm.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)


def sampler(
    lengths: list[int], *, budget: int = 128, bins: int = 1, max_length: int = 64, seed: int = 0
) -> PackingSampler:
    return PackingSampler(
        np.array(lengths),
        token_budget=budget,
        bins_per_batch=bins,
        max_length=max_length,
        seed=seed,
    )


def flat(batches: list[list[Bin]]) -> list[int]:
    return [int(i) for batch in batches for packed in batch for i in packed.sequences]


@given(
    lengths=LENGTHS,
    budget=st.integers(64, 400),
    bins=st.integers(1, 5),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
@settings(deadline=None, max_examples=150)
def test_an_epoch_holds_every_sequence_once_within_every_limit(
    lengths: list[int], budget: int, bins: int, seed: int, epoch: int
) -> None:
    plan = sampler(lengths, budget=budget, bins=bins, seed=seed)
    batches = plan.epoch(epoch)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == bins
        assert len(batch[0].sequences) > 0
        ids = np.concatenate([packed.draw_ids for packed in batch])
        assert ids.tolist() == list(range(len(ids)))
        for packed in batch:
            tokens = [min(lengths[i] + 2, 64) for i in packed.sequences]
            assert sum(tokens) <= budget
            # One segment is kept for the padding tail.
            assert len(tokens) <= plan.max_segments - 1
            assert packed.global_sequences == len(ids)
            assert packed.epoch == epoch
            assert tokens == sorted(tokens, reverse=True)


@given(lengths=LENGTHS, seed=st.integers(0, 9), epoch=st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_the_plan_is_a_function_of_seed_and_epoch_alone(
    lengths: list[int], seed: int, epoch: int
) -> None:
    used = sampler(lengths, seed=seed)
    used.epoch(epoch + 1)
    fresh = sampler(lengths, seed=seed)
    assert flat(used.epoch(epoch)) == flat(fresh.epoch(epoch))


def test_epochs_and_seeds_give_different_orders() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 300).tolist()
    plans = [sampler(lengths, seed=seed).epoch(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(flat(plan)) for plan in plans}) == 4


def test_the_first_in_line_is_never_left_waiting_for_long() -> None:
    """A long sequence that does not fit one bin opens the next."""
    lengths = np.random.default_rng(1).integers(1, 62, 5000)
    plan = sampler(lengths.tolist(), budget=64)
    order = np.random.default_rng([0, 0]).permutation(len(lengths))
    place = {int(sequence): i for i, sequence in enumerate(order)}
    taken = [place[i] for i in flat(plan.epoch(0))]
    lag = [position - i for position, i in enumerate(taken)]
    assert max(lag) <= 1100  # about the look-ahead window


@pytest.mark.parametrize(("budget", "share"), [(8192, 0.03), (65_536, 0.004)])
def test_padding_of_real_lengths_is_small(
    proteins: list[np.ndarray], budget: int, share: float
) -> None:
    lengths = [len(tokens) for tokens in proteins]
    batches = sampler(lengths, budget=budget, max_length=1024).epoch(0)
    tokens = sum(min(n + 2, 1024) for n in lengths)
    assert 1 - tokens / (len(batches) * budget) <= share


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"budget": 63}, "data.token_budget"),
        ({"max_length": 2}, "data.max_length"),
        ({"bins": 0}, "gradient_accumulation_steps"),
    ],
)
def test_impossible_limits_are_refused_by_name(changes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        sampler([5, 6], **changes)


def test_no_sequences_is_a_data_error() -> None:
    with pytest.raises(DataError, match="no sequences"):
        sampler([])
