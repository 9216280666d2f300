"""Which generated proteins are members of a family, beside natural ones and samples."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.vocabulary import decode
from d2plm.data.family import Family, read_family
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.evaluation import membership, new_members
from d2plm.evaluation.membership import CROSSOVERS, MOSAICS, SHARPENED, Judge
from d2plm.evaluation.new_members import NATURAL, read_members, worse_than_natural
from d2plm.evaluation.plots import plot_new_members
from d2plm.evaluation.result import GENERATED
from d2plm.families.alignment import GAP, aligned_columns, columns_hmm, family_hmm, sequence_weights
from d2plm.families.profile_hmm import domain_hits
from tests.conftest import Tokens
from tests.unit.families.known_sites import aligned_rows

FAMILY = Path(__file__).parents[3] / "examples" / "data" / "family_abc_importers.fasta.gz"


@pytest.fixture(scope="module")
def family() -> Family:
    whole = read_family(FAMILY, most=8)
    return Family(whole.members[:20], 8, whole.names[:20])


@pytest.fixture(scope="module", autouse=True)
def _few_simulations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "REFERENCES", 12)
        patch.setattr(membership, "SIMULATED", 40)
        yield


@pytest.fixture(scope="module")
def generated(family: Family) -> list[Tokens]:
    """A copy, one with a third of its residues replaced, half of one, an unrelated protein."""
    random, copy = np.random.default_rng(0), family.members[3]
    replaced = np.where(random.random(len(copy)) < 0.33, random.permutation(copy), copy)
    unrelated = next(read_fasta(FAMILY.with_name("osteocalcin.fasta"))).tokens
    return [copy, replaced, copy[: len(copy) // 2], unrelated]


@pytest.fixture(scope="module")
def described(family: Family, generated: list[Tokens]) -> dict[str, Any]:
    held_out = Family(family.members[15:], 8, family.names[15:])
    given = Family(family.members[:15], 8, family.names[:15])
    return Judge(given, held_out, seed=3).describe(generated, ["copy", "third", "half", "other"])


def test_members_are_told_from_other_proteins(described: dict[str, Any], family: Family) -> None:
    found = described["sets"]
    assert [one["member"] for one in found[GENERATED]["proteins"]] == [True, True, True, False]
    assert (found[NATURAL]["figures"]["members"], len(found[NATURAL]["proteins"])) == (1, 5)
    assert {*found} == {GENERATED, NATURAL, CROSSOVERS, MOSAICS, SHARPENED}
    copy, third, half, other = found[GENERATED]["proteins"]
    assert copy["nearest"] == third["nearest"] == half["nearest"] == family.names[3]
    assert copy["identity"] == half["identity"] == 1
    assert 0.6 < third["identity"] < 0.75
    assert half["coverage"] < 0.6 * copy["coverage"]
    assert copy["ends"] and not half["ends"]
    assert other["identity"] < 0.5
    assert copy["bits"] > third["bits"] > other["bits"]
    assert "NOT like natural members" in new_members.headline(described)
    unlike = new_members.unlike_natural(described)
    assert unlike[::2] + unlike[3:] == [False, True, True]
    assert [row[0] for row in new_members.members_table(described).rows] == [*found]


def test_natural_members_are_judged_without_themselves(family: Family) -> None:
    """Against an HMM of the same columns that is built of the others here."""
    given = Family(family.members[:4], 1, family.names[:4])
    described = Judge(given).describe(family.members[:1], ["x"])
    hmm = family_hmm(given.members, effective_number="entropy")
    aligned = aligned_columns(hmm, given.members)
    weights = sequence_weights(aligned)
    natural = described["sets"][NATURAL]["proteins"]
    assert {one["name"] for one in natural} == {*given.names}
    for one in natural:
        place = given.names.index(one["name"])
        others = [i for i in range(4) if i != place]
        judge = columns_hmm(aligned[others], weights[others], "entropy")
        hit = domain_hits(judge, [given.members[place]])[0]
        assert one["bits"] == pytest.approx(hit.score, abs=0.5)
        assert one["nearest"] != one["name"]


def test_the_threshold_in_bits_is_the_e_value_s(described: dict[str, Any]) -> None:
    """The line of the picture, which is computed from the HMM's fit, against HMMER's E-values."""
    slope = []
    for one in (one for own in described["sets"].values() for one in own["proteins"]):
        assert one["member"] == (one["bits"] >= described["threshold_bits"])
        if one["e_value"]:
            above = one["bits"] - described["threshold_bits"]
            slope.append(np.log(membership.MAX_E_VALUE / one["e_value"]) / above)
    assert slope == pytest.approx([np.log(2)] * len(slope), rel=0.05)


def test_conserved_columns_are_those_that_nearly_all_share() -> None:
    rows = aligned_rows(*["ACD-"] * 19, "ACE-")
    assert membership.conserved_columns(rows).tolist()[:3] == aligned_rows("ACD-")[0].tolist()[:3]
    assert membership.conserved_columns(aligned_rows("ACD-", "ACE-")).tolist()[2:] == [GAP, GAP]


def test_references_are_made_of_members(described: dict[str, Any], family: Family) -> None:
    sets, longest = described["sets"], max(map(len, family.members))
    assert all(len(sets[one]["proteins"]) == 12 for one in (CROSSOVERS, MOSAICS, SHARPENED))
    assert all(one["length"] <= 1.5 * longest for one in sets[CROSSOVERS]["proteins"])
    nearest = [sets[one]["figures"]["identity"] for one in (CROSSOVERS, MOSAICS, SHARPENED)]
    assert nearest[0] > nearest[1] > 0.3
    assert sets[SHARPENED]["figures"]["among"] > sets[MOSAICS]["figures"]["among"]


NATURAL_FIGURES = {"bits": 200.0, "keeps_all": 0.8, "coverage": 0.9, "coverage_error": 0.01}
NATURAL_FIGURES |= {"low_complexity": 0.01, "identity": 0.75, "among": 0.4}


@pytest.mark.parametrize(
    ("changed", "worse"),
    [
        ({"bits": 191.0, "keeps_all": 0.65, "identity": 0.755, "among": 0.49}, False),
        ({"bits": 189.0}, True),
        ({"keeps_all": 0.6}, True),
        ({"keeps_all": None}, False),
        ({"coverage": 0.84}, True),
        ({"coverage": 0.84, "coverage_error": 0.04}, False),
        ({"low_complexity": 0.02}, True),
        ({"identity": 0.77}, True),
        ({"among": 0.51}, True),
    ],
)
def test_each_figure_has_its_limit(changed: dict[str, Any], worse: bool) -> None:
    found = worse_than_natural({**NATURAL_FIGURES, **changed}, NATURAL_FIGURES)
    assert len(found) == worse
    asked = worse_than_natural({**NATURAL_FIGURES, **changed}, NATURAL_FIGURES, changed)
    assert not {"identity", "among"} & {*changed} or not asked


def test_families_of_two_and_of_one_are_judged(family: Family, generated: list[Tokens]) -> None:
    given = Family(family.members[2:4], 8, family.names[2:4])
    described = Judge(given).describe(generated[:1], ["copy"])
    assert [row["set"] for row in described["alignment"]] == [GENERATED, NATURAL, NATURAL]
    alone = Judge(Family(family.members[3:4], 1, ["one"])).describe(generated[:1], ["copy"])
    assert "100 % identical to it" in new_members.headline(alone)
    assert membership.figures([], [])["bits"] is None


def test_the_account_is_of_its_own_proteins(
    described: dict[str, Any], generated: list[Tokens], tmp_path: Path
) -> None:
    fasta = tmp_path / "new.fasta"
    write_fasta(fasta, (("x", decode(one)) for one in generated))
    file = new_members.write_members(described, fasta)
    assert file.name == "new.members.json"
    kept = read_members(fasta)
    assert kept is not None and kept["sets"] == described["sets"]
    plot_new_members(kept, file.with_suffix(".png"))
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    write_fasta(fasta, [("x", "MKV")])
    assert read_members(fasta) is None
    assert read_members(tmp_path / "other.fasta") is None
