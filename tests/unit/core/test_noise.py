"""Stateless noise: the hash against pure Python, its distribution, and stratified times."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from d2plm.core.noise import Key, categorical, stratified, uniform

GOLDEN = 0x9E3779B97F4A7C15
WORD = 2**64
P_VALUE = 0.01  # with fixed seeds: a test either always passes or never


def split_mix(state: int) -> int:
    """One output of SplitMix64 (Steele et al., 2014), from the published reference code."""
    z = (state + GOLDEN) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def hashed(*words: int) -> float:
    """The chained hash of (seed, step, salt, indices…) as 53 bits of [0, 1)."""
    state = 0
    for number, word in enumerate(words):
        state = split_mix(word % WORD if number == 0 else state ^ (word % WORD))
    return (state >> 11) / 2**53


def salt_of(*names: str) -> int:
    salt = 0
    for name in names:
        for byte in name.encode():
            salt = split_mix(salt ^ byte)
    return salt


@given(
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    name=st.sampled_from(["mask", "time", "größe"]),
    first=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    second=st.integers(-1, 2**31),
)
@settings(max_examples=100)
def test_uniform_is_a_hash(seed: int, step: int, name: str, first: list[int], second: int) -> None:
    assert split_mix(1234567) == 6457827717110365317  # as published
    drawn = uniform(Key(seed, step).stream(name), torch.tensor(first), torch.tensor(second))
    expected = [hashed(seed, step, salt_of(name), index, second) for index in first]
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == expected
    nested = uniform(Key(seed, step).stream(name).stream("shared"), torch.tensor([5]))
    assert nested.item() == hashed(seed, step, salt_of(name, "shared"), 5)


def test_draws_are_uniform_and_independent() -> None:
    sequence, position = torch.arange(1, 251)[:, None], torch.arange(1000, 1400)
    mask = Key(11, 5).stream("mask")
    base = uniform(mask, sequence, position).flatten().numpy()
    assert stats.kstest(base, "uniform").pvalue > P_VALUE
    for other in (
        uniform(Key(11, 5).stream("time"), sequence, position),
        uniform(Key(11, 6).stream("mask"), sequence, position),
        uniform(Key(12, 5).stream("mask"), sequence, position),
        uniform(mask, sequence + 1, position),
        uniform(mask, sequence, position + 1),
        uniform(mask, position, sequence),
    ):
        second = other.flatten().numpy()
        table = np.histogram2d(base, second, bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.flatten()).pvalue > P_VALUE


@given(count=st.integers(1, 300), seed=st.integers(0, 1000))
@settings(max_examples=50)
def test_stratified_times_hit_each_stratum_once(count: int, seed: int) -> None:
    times = stratified(Key(seed), torch.arange(count), count).numpy()
    assert times.min() >= 0 and times.max() < 1
    strata = np.floor(times * count + 1e-9).astype(int)
    assert sorted(strata.tolist()) == list(range(count))
    within = times * count - strata
    np.testing.assert_allclose(within, within[0], atol=1e-9)


def test_stratified_times_do_not_depend_on_the_cut() -> None:
    ids = torch.arange(37)
    whole = stratified(Key(4, 2), ids, 37)
    for part in (ids[5:11], ids.flip(0)[::3], torch.tensor([36, -1, 0])):
        real = part >= 0
        assert torch.equal(stratified(Key(4, 2), part, 37)[real], whole[part[real]])


def test_stratified_times_are_uniform_over_steps_and_their_order_is_random() -> None:
    times = torch.stack([stratified(Key(0, step), torch.arange(8), 8) for step in range(2000)])
    for sequence in (0, 5):
        assert stats.kstest(times[:, sequence].numpy(), "uniform").pvalue > P_VALUE
    strata = np.floor(times.numpy() * 8)
    table = np.histogram2d(strata[:, 0], strata[:, 1], bins=8)[0]
    off_diagonal = table[~np.eye(8, dtype=bool)]
    assert np.trace(table) == 0
    assert stats.chisquare(off_diagonal).pvalue > P_VALUE


def test_categories_follow_their_unnormalised_probabilities() -> None:
    """A tail among them that noise in float32 would cut."""
    weights = np.array([0.0, 3.0, 0.0, 1e-4, 1.0, 2.0, 0.0])
    n = 1_000_000
    rows = torch.from_numpy(weights).expand(n, -1)
    drawn = categorical(Key(9).stream("residue"), rows, torch.arange(n))
    seen = np.bincount(drawn.numpy(), minlength=7)
    assert seen[weights == 0].sum() == 0
    kept = weights > 0
    expected = weights[kept] / weights.sum() * n
    assert stats.chisquare(seen[kept], expected).pvalue > P_VALUE
