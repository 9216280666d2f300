"""The site-independent profile: frequencies of a known family, wherever its members have gaps."""

import numpy as np
import pytest

from d2plm.core.vocabulary import CANONICAL, encode
from d2plm.evaluation.mutations import Variant
from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.evaluation.site_independent import site_independent_effects, site_log_probabilities
from tests.unit.evaluation.known_sites import (
    likeliest,
    measured_effects,
    members,
    singles,
    site_frequencies,
)


def test_it_finds_the_effects_of_a_family_of_independent_sites() -> None:
    """As a mutational scan measures them, with noise; random scores find nothing."""
    variants, measured = singles(), measured_effects()
    nothing, few, many = (
        rank_correlation(site_independent_effects(likeliest(), variants, own), measured, variants)
        for own in ([], members(10), members(200))
    )
    assert nothing.rho < few.rho < many.rho
    assert many.rho > 0.7  # of 0.87 that the noise leaves
    assert many.low > 0.65
    random = np.random.default_rng(3).normal(size=len(variants))
    by_chance = rank_correlation(random, measured, variants)
    assert by_chance.low < 0 < by_chance.high


def test_frequencies_are_those_of_the_columns() -> None:
    found = np.exp(site_log_probabilities(likeliest(), members(800)))
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    # Elsewhere the alignment is less sure: near the ends, and where residues are lost or gained.
    difference = np.abs(found - site_frequencies())[8:25]
    assert difference.max() < 0.05
    assert difference.mean() < 0.008


def test_many_copies_of_one_relative_are_one_observation() -> None:
    wild_type = likeliest()
    relative = wild_type.copy()
    relative[10:40:2] = encode("W")[0]
    once = site_log_probabilities(wild_type, [relative])
    often = site_log_probabilities(wild_type, [relative] * 50)
    tryptophan = CANONICAL.index("W")
    shift = np.exp(often[10, tryptophan]) - np.exp(once[10, tryptophan])
    assert 0 < np.exp(once[10, tryptophan]) < 0.5
    assert shift < 0.5  # as counts, fifty to one, it would be above 0.9


def test_a_variant_s_changes_add_up_and_the_wild_type_among_the_relatives_counts_once() -> None:
    wild_type, family = likeliest(), members(20)
    first, second = Variant((3,), (5,)), Variant((30,), (7,))
    both = Variant((3, 30), (5, 7))
    found = site_independent_effects(wild_type, [first, second, both, Variant()], family)
    assert found[2] == pytest.approx(found[0] + found[1])
    assert found[3] == 0
    again = site_independent_effects(
        wild_type, [first, second, both, Variant()], [wild_type, *family]
    )
    assert again == pytest.approx(found)


@pytest.mark.parametrize("text", ["M", "MX", "X", "MKTAYIAKUQRBZO", "W" * 300])
def test_every_position_has_a_distribution_whatever_is_given(text: str) -> None:
    strange = [encode("G" * 40), encode("X" * 5), encode("M"), encode("MKTAUIAKQRXX")]
    found = np.exp(site_log_probabilities(encode(text), strange))
    assert found.shape == (len(text), 20)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    assert (found > 0).all()
