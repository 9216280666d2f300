"""Scores of single proteins against brute force, closed forms and simulation."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import ttest_1samp
from torch import Tensor

from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.shards import interleaved
from d2plm.core.vocabulary import CANONICAL, CLS, EOS, MASK, decode, encode
from d2plm.evaluation import scoring
from d2plm.evaluation.likelihood import score_sequences
from d2plm.evaluation.scoring import bound_draws, mutational_effects, pseudo_log_likelihoods
from d2plm.families.variants import Variant, parse_variant, place
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.paradigm import Denoiser
from tests.conftest import Tokens
from tests.evaluations import context_model, uniform_model

DIFFUSION = AbsorbingDiffusion()
SEQUENCES = [encode(text) for text in ("MKTAYIAKQR", "W", "GSXHMBLVAGUGNPLKWE", "AAOZ", "XX")]
# κ = 1 − cos(πt/2) of the flow's default schedule leaves the fraction cos(πt/2) masked.
TIME_OF_FRACTION: list[tuple[MaskedParadigm, Callable[[float], float]]] = [
    (DIFFUSION, lambda fraction: fraction),
    (MaskFlowMatching(), lambda fraction: 2 / math.pi * math.acos(fraction)),
]
EITHER = pytest.mark.parametrize(
    ("paradigm", "time"), TIME_OF_FRACTION, ids=["diffusion", "flow_matching"]
)


def canonical_positions(sequence: Tokens) -> list[int]:
    return [i for i, token in enumerate(sequence.tolist()) if 4 <= token < 24]


@torch.no_grad()
def alone(
    model: Denoiser, time: Callable[[float], float], sequence: Tokens, masked: list[int]
) -> NDArray[np.float64]:
    """log p [K, 20] of the masked residues: one call of the model on one unpacked sequence."""
    row = [CLS, *sequence.tolist(), EOS]
    for position in masked:
        row[position + 1] = MASK
    fraction = len(masked) / len(canonical_positions(sequence))
    logits = model(
        torch.tensor(row, dtype=torch.uint8),
        torch.tensor([0, len(row)], dtype=torch.int32),
        len(row),
        torch.tensor([time(fraction)], dtype=torch.float64).float(),
    )
    chosen = logits[[position + 1 for position in masked], 4:24].double().numpy()
    log_p: NDArray[np.float64] = chosen - np.log(np.exp(chosen).sum(axis=1, keepdims=True))
    return log_p


@EITHER
def test_the_pseudo_log_likelihood_is_that_of_masking_one_residue_after_another(
    paradigm: MaskedParadigm, time: Callable[[float], float], tiny_dit: Callable[..., Any]
) -> None:
    model = tiny_dit().double()
    expected = []
    for sequence in SEQUENCES:
        each = [(i, int(sequence[i]) - 4) for i in canonical_positions(sequence)]
        expected.append(sum(alone(model, time, sequence, [i])[0, own] for i, own in each))
    found = pseudo_log_likelihoods(model, paradigm, SEQUENCES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert found[-1] == 0  # nothing in it is canonical


@pytest.mark.parametrize("budget", [{"token_budget": 1}, {"token_budget": 40}], ids=str)
def test_packing_changes_no_score(budget: dict[str, Any], tiny_dit: Callable[..., Any]) -> None:
    given = tiny_dit().double(), DIFFUSION
    settings: dict[str, Any] = {"masks_per_sequence": 3, "seed": 5}
    found = pseudo_log_likelihoods(*given, SEQUENCES[::-1], **budget)
    whole = pseudo_log_likelihoods(*given, SEQUENCES)
    np.testing.assert_allclose(found, whole[::-1], atol=1e-10)
    found = bound_draws(*given, SEQUENCES, **settings, **budget)
    np.testing.assert_allclose(found, bound_draws(*given, SEQUENCES, **settings), atol=1e-10)
    variants = [Variant((1, 4), (5, 6)), Variant((4,), (6,)), Variant()]
    found = mutational_effects(*given, SEQUENCES[0], variants, **budget)
    whole = mutational_effects(*given, SEQUENCES[0], variants)
    np.testing.assert_allclose(found, whole, atol=1e-10)


WILD_TYPE = encode("MKXTAYIAKQRW")
MUTANTS = ["M1A", "K2G:T4L", "T4C,K2D", "WT", "A5A", "W12Y;A8A", "M1C Q10N W12F"]


@EITHER
def test_effects_are_those_of_masking_the_changed_positions_at_once(
    paradigm: MaskedParadigm, time: Callable[[float], float], tiny_dit: Callable[..., Any]
) -> None:
    model = tiny_dit().double()

    def effect(*changes: tuple[int, str]) -> float:
        positions = [position - 1 for position, _ in changes]
        log_p = alone(model, time, WILD_TYPE, positions)
        return sum(
            log_p[k, CANONICAL.index(mutant)] - log_p[k, int(WILD_TYPE[position - 1]) - 4]
            for k, (position, mutant) in enumerate(changes)
        )

    expected = [
        effect((1, "A")),
        effect((2, "G"), (4, "L")),
        effect((2, "D"), (4, "C")),
        0.0,
        0.0,
        effect((12, "Y")),  # what stays as it is, is not masked
        effect((1, "C"), (10, "N"), (12, "F")),
    ]
    variants = [place(parse_variant(text), decode(WILD_TYPE)) for text in MUTANTS]
    found = mutational_effects(model, paradigm, WILD_TYPE, variants)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


def test_a_full_scan_takes_as_many_rows_as_residues() -> None:
    sequence = encode("MKTAYIAKQR")
    scan = [Variant((i,), (t,)) for i in range(10) for t in range(4, 24) if t != sequence[i]]
    pairs = [Variant((2, 7), (a, b)) for a in (5, 6, 7) for b in (5, 6, 7)]
    calls = list[list[float]]()

    def model(tokens: Tensor, cu_seqlens: Tensor, longest: int, times: Tensor) -> Tensor:
        calls.append(times.tolist())
        assert cu_seqlens[-1] == len(tokens)
        assert (tokens != 1).all()  # no padding
        return context_model(tokens, cu_seqlens, longest, times)

    variants = [*scan, *pairs, Variant()]
    effects = mutational_effects(model, DIFFUSION, sequence, variants, token_budget=60)
    assert len(effects) == 190 + 9 + 1
    assert len(calls) == 3  # five rows of twelve tokens fit
    assert np.concatenate(calls) == pytest.approx([0.1] * 10 + [0.2])


@pytest.mark.parametrize("paradigm", [DIFFUSION, UniformFlowMatching()])
def test_the_draws_mean_is_the_evaluation_s_in_parts(paradigm: Any, proteins: list[Tokens]) -> None:
    sequences = [tokens[:60] for tokens in proteins[:7]]
    settings: dict[str, Any] = {"masks_per_sequence": 3, "seed": 4}
    expected = score_sequences(context_model, paradigm, sequences, max_length=100, **settings).nats
    whole = bound_draws(context_model, paradigm, sequences, **settings)
    assert whole.shape == (7, 3)
    np.testing.assert_allclose(whole.mean(axis=1), expected, rtol=1e-12)
    parts = [
        bound_draws(context_model, paradigm, sequences[i::3], ids=range(i, 7, 3), **settings)
        for i in range(3)
    ]
    np.testing.assert_allclose([*interleaved(parts)], whole, rtol=1e-12)


def test_no_protein_is_cut() -> None:
    draws = bound_draws(uniform_model, DIFFUSION, [encode("W" * 3000)], token_budget=100)
    np.testing.assert_allclose(draws, 3000 * math.log(20), rtol=1e-9)


def test_the_interval_is_student_s() -> None:
    draws = np.random.default_rng(0).normal(50, 5, (4, 6))
    low, high = scoring.bound_interval(draws)
    for row in range(4):
        expected = ttest_1samp(draws[row], 0).confidence_interval(0.95)
        assert (low[row], high[row]) == pytest.approx((expected.low, expected.high))
    assert np.isnan(scoring.bound_interval(np.ones((3, 1)))).all()


def test_the_interval_covers_the_exact_bound_as_often_as_it_says() -> None:
    """The exact NELBO by enumerating all masks; the interval in 1,500 independent runs."""
    sequence = encode("MKVLAWG")
    exact = 0.0
    for code in range(1, 2**7):
        masked = [i for i in range(7) if code >> i & 1]
        log_p = alone(context_model, lambda fraction: fraction, sequence, masked)
        nats = -sum(log_p[k, int(sequence[i]) - 4] for k, i in enumerate(masked))
        exact += nats / len(masked) / math.comb(7, len(masked))
    draws = bound_draws(context_model, DIFFUSION, [sequence] * 1500, masks_per_sequence=3)
    assert draws.mean() == pytest.approx(exact, abs=4 * draws.std() / math.sqrt(draws.size))
    low, high = scoring.bound_interval(draws)
    covered = ((low <= exact) & (exact <= high)).mean()
    assert covered > 0.95 - 2 * math.sqrt(0.95 * 0.05 / 1500)


def test_a_diverged_model_is_named_with_the_sequence_and_the_quantity() -> None:
    def diverged(tokens: Tensor, cu_seqlens: Tensor, longest: int, times: Tensor) -> Tensor:
        logits = context_model(tokens, cu_seqlens, longest, times)
        return torch.where((tokens == 24)[:, None], float("nan"), logits).cumsum(0)

    sequences = [encode("MK"), encode("MXK")]
    options: dict[str, Any] = {"names": ["good", "P1"], "token_budget": 1}
    for scored in (pseudo_log_likelihoods, bound_draws):
        with pytest.raises(ModelError, match="'P1' is nan"):
            scored(diverged, DIFFUSION, sequences, **options)
    with pytest.raises(ModelError, match="'P1' is nan"):
        mutational_effects(diverged, DIFFUSION, sequences[1], [Variant((2,), (4,))], name="P1")


@pytest.mark.parametrize("settings", [{"masks_per_sequence": 0}, {"token_budget": 0}])
def test_an_impossible_setting_is_rejected_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}=0"):
        bound_draws(context_model, DIFFUSION, [encode("MK")], **settings)
