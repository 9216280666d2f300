"""Corruption, losses and bounds, against enumeration of every mask of a four-residue protein."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.noise import Key
from d2plm.core.vocabulary import MASK, RESIDUES, Vocabulary, encode
from d2plm.core.vocabulary import PROTEIN as PROTEINS
from d2plm.data.loader import framed
from d2plm.paradigms import load_paradigm
from d2plm.paradigms import masked as masked_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.masked import MaskedParadigm, random_subsets
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import MonkeyPatch
from tests.unit.paradigms import closed_forms
from tests.unit.paradigms import four_residues as four
from tests.unit.paradigms.numbered_tokens import NumberedTokens, of

SCHEDULES = pytest.mark.parametrize("schedule", closed_forms.ALPHA_BARS)
EITHER = pytest.mark.parametrize("paradigm_class", [AbsorbingDiffusion, MaskFlowMatching])
VOCABULARIES = pytest.mark.parametrize(
    "vocabulary", [PROTEINS, NumberedTokens(300)], ids=["20", "300"]
)


@SCHEDULES
def test_diffusion_times_are_the_steps_one_to_last_equally_often(schedule: str) -> None:
    steps, sequences = 10, 40
    draws = (torch.arange(sequences, dtype=torch.float64) + 0.3) / sequences
    times, _ = AbsorbingDiffusion(num_train_timesteps=steps, schedule=schedule).times_of(draws)
    counts = np.bincount((times * steps).round().long(), minlength=steps + 1)
    assert counts.tolist() == [0, *[sequences // steps] * steps]


@pytest.mark.parametrize(
    "paradigm",
    [
        AbsorbingDiffusion(),
        AbsorbingDiffusion(loss="mean", shift=True),
        MaskFlowMatching(loss="mean"),
        UniformFlowMatching(),
    ],
)
def test_masks_and_times_do_not_depend_on_how_the_global_batch_was_cut(paradigm: Paradigm) -> None:
    random = np.random.default_rng(0)
    sequences = [
        framed(random.integers(4, 24, size=n, dtype=np.uint8)) for n in random.integers(5, 60, 13)
    ]
    whole = PackedBatch.pack(sequences)
    key = Key(5, 17)
    expected = paradigm.corrupt(whole, key)
    at_once = torch.split(expected.tokens, [len(s) for s in sequences])
    weights = torch.split(expected.weights, [len(s) for s in sequences])
    total = torch.zeros((), dtype=torch.float64)
    for ids in ([12, 3, 4], [0], [11, 10, 9, 8, 7, 6, 5], [2, 1]):
        shape = {"global_sequences": 13, "token_budget": 600, "max_segments": 12}
        part = PackedBatch.pack([sequences[i] for i in ids], draw_ids=ids, **shape)
        corrupted = paradigm.corrupt(part, key)
        total += corrupted.count
        bounds = part.cu_seqlens.tolist()
        for place, i in enumerate(ids):
            row = slice(bounds[place], bounds[place + 1])
            assert torch.equal(corrupted.tokens[row], at_once[i])
            torch.testing.assert_close(corrupted.weights[row], weights[i])
            torch.testing.assert_close(corrupted.times[place], expected.times[i])
    assert total == expected.count


@EITHER
@pytest.mark.parametrize("loss", ["elbo", "mean"])
def test_only_canonical_residues_are_ever_corrupted_or_weighted(
    paradigm_class: type[Paradigm], loss: str, monkeypatch: MonkeyPatch
) -> None:
    paradigm = paradigm_class(loss=loss)
    batch = PackedBatch.pack([framed(encode(RESIDUES * 3))] * 4, token_budget=400)
    times = torch.full((5,), paradigm.prior_time, dtype=torch.float64)
    monkeypatch.setattr(paradigm, "times_of", lambda _: (times, paradigm.corruption_rate(times)))
    corrupted = paradigm.corrupt(batch, Key(0))
    canonical = (batch.tokens >= 4) & (batch.tokens <= 23)
    assert int(canonical.sum()) == 4 * 3 * 20
    assert (corrupted.tokens[canonical] == MASK).all()
    assert torch.equal(corrupted.tokens[~canonical], batch.tokens[~canonical])
    assert (corrupted.weights[~canonical] == 0).all()
    assert corrupted.count == 240
    assert torch.equal(corrupted.targets[canonical], batch.tokens[canonical].long() - 4)


@SCHEDULES
@pytest.mark.parametrize("steps", [1, 3])
@VOCABULARIES
def test_the_expected_diffusion_loss_is_the_discrete_elbo(
    schedule: str, steps: int, vocabulary: Vocabulary, monkeypatch: MonkeyPatch
) -> None:
    toy = four.Toy(1, time_slope=0.7, vocabulary=vocabulary)
    paradigm = of(AbsorbingDiffusion(num_train_timesteps=steps, schedule=schedule), vocabulary)
    a = [closed_forms.ALPHA_BARS[schedule](t, steps) for t in range(steps + 1)]
    expected = found = 0.0
    for t in range(1, steps + 1):
        weight = steps * (a[t - 1] - a[t]) / (1 - a[t])
        for masked in four.SUBSETS:
            chance = four.mask_probability(masked, 1 - a[t]) / steps
            expected += chance * weight * sum(toy.nats(masked, t / steps))
        found += four.expected_loss(monkeypatch, paradigm, toy, t / steps, 1 - a[t]) / steps
    assert found == pytest.approx(expected, rel=four.FP32)


@pytest.mark.parametrize(
    ("build", "shift"),
    [
        (AbsorbingDiffusion, 0),
        (partial(AbsorbingDiffusion, shift=True), 1),  # predicts from the previous position
        (MaskFlowMatching, 0),
    ],
)
@VOCABULARIES
def test_the_mean_loss_counts_each_masked_residue_once(
    build: Callable[..., Paradigm], shift: int, vocabulary: Vocabulary, monkeypatch: MonkeyPatch
) -> None:
    toy = four.Toy(4, time_slope=1.0, vocabulary=vocabulary)
    batch = four.toy_batch(1, vocabulary=vocabulary)
    paradigm = of(build(loss="mean"), vocabulary)
    for masked in four.SUBSETS:
        with monkeypatch.context() as patch:
            four.force(patch, paradigm, torch.tensor([0.5], dtype=torch.float64), [masked])
            corrupted = paradigm.corrupt(batch, Key(0))
        logits = toy(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
        nats, count = paradigm.loss(logits, batch, corrupted)
        expected = sum(toy.nats(masked, 0.5, shift))
        assert float(nats) == pytest.approx(expected, rel=four.FP32)
        assert count == sum(masked)


@pytest.mark.parametrize("loss", ["elbo", "mean"])
def test_shift_never_masks_counts_or_scores_a_first_token(loss: str) -> None:
    paradigm = AbsorbingDiffusion(num_train_timesteps=1, shift=True, loss=loss)  # masks everything
    crop = encode("ACDEFG")  # a window of a longer protein: no <cls>, a residue comes first
    batch = PackedBatch.pack([crop, framed(encode("HIK")), crop])
    corrupted = paradigm.corrupt(batch, Key(0))
    first = batch.positions() == 0
    assert torch.equal(corrupted.tokens[first], batch.tokens[first])
    assert (corrupted.weights[first] == 0).all()
    assert corrupted.count == 5 + 3 + 5
    uniform_model = torch.zeros(batch.num_tokens, 33)
    bound = paradigm.bound(lambda *_: uniform_model, batch, Key(0)).nats
    np.testing.assert_allclose(bound, np.array([5, 3, 5]) * math.log(20), rtol=four.FP32)


def bound_by_enumeration(
    monkeypatch: MonkeyPatch, paradigm: Paradigm, toy: four.Toy, control: Tensor | None
) -> float:
    """The expectation of the code's own estimator: every k and subset with its probability."""
    masks = [masked for masked in four.SUBSETS if any(masked)]
    sizes = torch.tensor([sum(masked) for masked in masks], dtype=torch.float64)
    batch = four.toy_batch(len(masks), vocabulary=toy.vocabulary)
    order = torch.tensor([[0.5, *(0.1 if m else 0.9 for m in masked), 0.5] for masked in masks])

    def scripted(key: Key, *indices: Tensor) -> Tensor:
        return (sizes - 0.5) / four.LENGTH if len(indices) == 1 else order.double().flatten()

    with monkeypatch.context() as patch:
        patch.setattr(masked_paradigm, "uniform", scripted)
        estimates = paradigm.bound(toy, batch, Key(0), control=control).nats
    chances = [1 / four.LENGTH / math.comb(four.LENGTH, sum(masked)) for masked in masks]
    assert sum(chances) == pytest.approx(1)
    return float(estimates @ torch.tensor(chances, dtype=torch.float64))


def unigram_nats(letters: int) -> Tensor:
    return -torch.log(torch.softmax(torch.linspace(-1, 2, letters, dtype=torch.float64), 0))


CONTROL = unigram_nats(20)


@EITHER
@pytest.mark.parametrize("controlled", [False, True], ids=["plain", "control"])
@VOCABULARIES
def test_the_bound_estimates_the_exact_k_nelbo(
    paradigm_class: type[Paradigm],
    controlled: bool,
    vocabulary: Vocabulary,
    monkeypatch: MonkeyPatch,
) -> None:
    paradigm = of(paradigm_class(schedule="linear"), vocabulary)
    toy = four.Toy(6, time_slope=0.9, vocabulary=vocabulary)
    flow = paradigm_class is MaskFlowMatching
    expected = four.exact_k(toy, time_of=lambda u: 1 - u if flow else u)
    control = unigram_nats(vocabulary.predicted) if controlled else None
    found = bound_by_enumeration(monkeypatch, paradigm, toy, control)
    assert found == pytest.approx(expected, rel=four.FP32)


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), UniformFlowMatching()])
def test_the_control_variate_makes_a_unigram_models_estimate_exact(paradigm: Paradigm) -> None:
    texts = [encode("MKVLAAGXXWY"), encode("ACCCD")]
    batch = PackedBatch.pack([framed(text) for text in texts])
    model = torch.zeros(batch.num_tokens, 33)
    model[:, 4:24] = -CONTROL.float()
    exact = [sum(float(CONTROL[t - 4]) for t in text if t < 24) for text in texts]
    plain = set()
    for seed in range(10):
        arguments = (lambda *_: model, batch, Key(seed))
        controlled = paradigm.bound(*arguments, control=CONTROL).nats
        np.testing.assert_allclose(controlled, exact, rtol=1e-5)
        plain.add(round(float(paradigm.bound(*arguments).nats[0]), 3))
    assert len(plain) > 5  # without it, a draw is far from exact


def test_random_subsets_are_uniform_and_of_the_asked_size() -> None:
    copies = 12_000
    batch = four.toy_batch(copies)
    eligible = AbsorbingDiffusion().maskable(batch)
    sizes = torch.full((copies,), 2.0, dtype=torch.float64)
    chosen = random_subsets(batch, eligible, sizes, Key(1).stream("x"), batch.segment_ids())
    assert not chosen[~eligible].any()
    rows = chosen.view(copies, -1)[:, 1:-1]
    assert (rows.sum(-1) == 2).all()
    counts = np.bincount((rows.long() * torch.tensor([1, 2, 4, 8])).sum(-1), minlength=16)
    assert stats.chisquare(counts[counts > 0]).pvalue > 0.01
    assert (counts > 0).sum() == math.comb(4, 2)


@pytest.mark.parametrize("paradigm", [AbsorbingDiffusion(), UniformFlowMatching()])
def test_a_bounds_draws_are_keyed_by_sequence_not_by_batch(paradigm: Paradigm) -> None:
    random = np.random.default_rng(0)
    sequences = [framed(random.integers(4, 24, n, dtype=np.uint8)) for n in (9, 30, 17, 5)]

    def model(tokens: Tensor, *_: object) -> Tensor:
        return (tokens[:, None] * torch.arange(33)).double().sin()

    def drawn(chosen: list[int], **shape: int) -> list[Tensor]:
        batch = PackedBatch.pack(
            [sequences[i] for i in chosen], draw_ids=chosen, global_sequences=99, **shape
        )
        found = paradigm.bound(model, batch, Key(4), draw=1, draws=3)
        return [found.nats, found.fraction, found.cross_entropy, found.predicted]

    whole = drawn([0, 1, 2, 3])
    for chosen in ([2], [3, 0], [1, 2, 0]):
        part = drawn(chosen, token_budget=128, max_segments=6)
        for mine, expected in zip(part, whole, strict=True):
            np.testing.assert_allclose(mine[: len(chosen)], expected[chosen], rtol=1e-12)
    assert len(set(whole[1].tolist())) == 4


@pytest.mark.parametrize(
    "build, key",
    [
        (lambda: AbsorbingDiffusion(schedule="cosin"), "schedule"),
        (lambda: AbsorbingDiffusion(beta_start=0.1, beta_end=0.01), "beta_end"),
        (lambda: MaskFlowMatching(loss="generalised_kl"), "loss"),
        (lambda: MaskFlowMatching(source="uniform"), "source"),
        (lambda: UniformFlowMatching(loss="mean", time_sampling="low_variance"), "time_s"),
    ],
)
def test_impossible_settings_are_rejected_by_name(build: Callable[[], Paradigm], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        build()


@pytest.mark.parametrize("content", [None, "{", "{}", json.dumps({"type": "gaussian"})])
def test_a_damaged_paradigm_file_is_a_model_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "paradigm_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"paradigm_config\.json"):
        load_paradigm(tmp_path)


PROCESSES: list[tuple[type[MaskedParadigm], dict[str, Any], closed_forms.Curve]] = [
    *(
        (AbsorbingDiffusion, {"schedule": schedule, "num_train_timesteps": None}, kept)
        for schedule, kept in closed_forms.CONTINUOUS_ALPHA_BARS.items()
    ),
    *((MaskFlowMatching, settings, kappa) for settings, kappa in closed_forms.KAPPAS),
]
EVERY = pytest.mark.parametrize(("kind", "settings", "kept"), PROCESSES)


@EVERY
def test_the_expected_loss_is_the_bounds_integral(
    kind: type[MaskedParadigm],
    settings: dict[str, Any],
    kept: closed_forms.Curve,
    monkeypatch: MonkeyPatch,
) -> None:
    """∫ |ᾱ′|/(1 − ᾱ)·E Σ_masked CE dt of a model told the time, through the code's loss."""
    paradigm, toy = kind(**settings), four.Toy(2, time_slope=0.5)
    found = expected = 0.0
    for t, width in zip(*closed_forms.logistic_nodes(step=1.0, reach=12.0), strict=True):
        masked_share = 1 - kept(t)
        found += width * four.expected_loss(monkeypatch, paradigm, toy, float(t), masked_share)
        step = min(1e-7, t / 8, (1 - t) / 8)
        rate = abs(kept(t - step) - kept(t + step)) / (2 * step)
        expected += sum(
            width * rate / masked_share * four.mask_probability(masked, masked_share)
            * sum(toy.nats(masked, float(t)))
            for masked in four.SUBSETS
        )  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-6)


@EVERY
@pytest.mark.parametrize("power", [1, 5])
def test_low_variance_times_keep_the_expectation_and_make_the_second_moment_finite(
    kind: type[MaskedParadigm], settings: dict[str, Any], kept: closed_forms.Curve, power: int
) -> None:
    """A summed cross-entropy of u^power: the bound is ∫ u^(power − 1), its second moment w²·u.

    With uniform times the latter is ∫ |dκ/dt|/u du: without end, as u comes in from e^−7 to e^−13
    it grows by six times the slope.
    """
    second: dict[tuple[str, float], float] = {}
    for sampling in ("uniform", "low_variance"):
        paradigm = kind(**settings, time_sampling=sampling)
        for reach in (7.0, 13.0):
            nodes, widths = closed_forms.logistic_nodes(step=0.1, reach=reach)
            times, rates = paradigm.times_of(torch.from_numpy(nodes))
            fraction = paradigm.corrupted_fraction(times)
            weights = (rates / fraction).numpy()
            u = fraction.numpy()
            first = float(widths @ (weights * u**power))
            second[sampling, reach] = float(widths @ (weights**2 * u))
        assert first == pytest.approx(1 / power, rel=2e-3)
    low, high = (second["low_variance", reach] for reach in (7.0, 13.0))
    assert high == pytest.approx(4, rel=1e-3)  # (∫ u^(−½) du)², the minimum
    assert high == pytest.approx(low, rel=0.01)
    uniform_low, uniform_high = (second["uniform", reach] for reach in (7.0, 13.0))
    assert uniform_high > 4 - 1e-2
    near_data = 1e-6 if kind is AbsorbingDiffusion else 1 - 1e-6
    slope = (1 - kept(near_data)) * 1e6
    assert uniform_high - uniform_low == pytest.approx(6 * slope, abs=0.1)
