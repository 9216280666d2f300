"""Which generated proteins are members of a family, beside natural ones and samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.vocabulary import decode
from d2plm.data.family import Family, read_family
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.evaluation.membership import (
    MAX_E_VALUE,
    describe_members,
    identities,
    identities_to,
)
from d2plm.evaluation.new_members import (
    header,
    headline,
    members_table,
    read_members,
    write_members,
)
from d2plm.evaluation.plots import plot_new_members
from d2plm.evaluation.quality import GENERATED, NATURAL
from d2plm.evaluation.terms import REFERENCE
from d2plm.families.alignment import aligned_columns, family_hmm, text_of
from tests.conftest import Tokens
from tests.unit.families.known_sites import aligned_rows

FAMILY = Path(__file__).parents[3] / "examples" / "data" / "family_abc_importers.fasta.gz"


@pytest.fixture(scope="module")
def family() -> Family:
    whole = read_family(FAMILY, most=8)
    return Family(whole.members[:30], 8, whole.names[:30])


@pytest.fixture(scope="module")
def generated(family: Family) -> list[Tokens]:
    """A copy, one with a third of its residues replaced, half of one, an unrelated protein."""
    random, copy = np.random.default_rng(0), family.members[3]
    replaced = np.where(random.random(len(copy)) < 0.33, random.permutation(copy), copy)
    unrelated = next(read_fasta(FAMILY.with_name("osteocalcin.fasta"))).tokens
    return [copy, replaced, copy[: len(copy) // 2], unrelated]


@pytest.fixture(scope="module")
def described(family: Family, generated: list[Tokens]) -> dict[str, Any]:
    held_out = Family(family.members[24:], 8, family.names[24:])
    given = Family(family.members[:24], 8, family.names[:24])
    return describe_members(generated, ["copy", "third", "half", "other"], given, held_out, seed=3)


def test_members_are_distinguished_from_other_proteins(
    described: dict[str, Any], family: Family
) -> None:
    found = described["sets"]
    assert [one["member"] for one in found[GENERATED]["proteins"]] == [True, True, True, False]
    assert found[NATURAL]["members"] == len(found[NATURAL]["proteins"]) == 6
    assert found[REFERENCE]["members"] == 0
    lengths = [one["length"] for one in found[REFERENCE]["proteins"]]
    assert lengths == [one["length"] for one in found[GENERATED]["proteins"]]
    copy, third, half, other = found[GENERATED]["proteins"]
    assert copy["nearest"] == third["nearest"] == half["nearest"] == family.names[3]
    assert copy["identity"] == 1
    assert 0.6 < third["identity"] < 0.75
    assert half["coverage"] < 0.6 * copy["coverage"]
    assert other["identity"] < 0.2


def test_the_threshold_in_bits_is_the_e_value_s(described: dict[str, Any]) -> None:
    """The line of the picture, which is computed from the HMM's fit, against HMMER's E-values."""
    slope = []
    for one in (one for own in described["sets"].values() for one in own["proteins"]):
        assert one["member"] == (one["bits"] >= described["threshold_bits"])
        if one["e_value"]:
            above = one["bits"] - described["threshold_bits"]
            slope.append(np.log(MAX_E_VALUE / one["e_value"]) / above)
    assert slope == pytest.approx([np.log(2)] * len(slope), rel=0.05)


def test_identity_to_a_member_is_that_of_the_pair(family: Family) -> None:
    """Replaced residues in known places, others lost and added: the count is known."""
    random, member = np.random.default_rng(0), family.members[5]
    protein = member.copy()
    places = random.choice(np.arange(30, 270), 60, replace=False)
    protein[places] = (protein[places] - 4 + random.integers(1, 20, 60)) % 20 + 4
    protein = np.concatenate([protein[:150], protein[155:]])
    kept = 1 - sum(place < 150 or place >= 155 for place in places) / len(protein)
    found = identities_to([family.members[0], member], protein)
    assert found[1] == pytest.approx(kept, abs=0.01)
    assert found[0] < 0.6
    assert identities_to([member], member[:90]).tolist() == [1]


def test_identity_is_over_the_columns_that_either_protein_fills() -> None:
    found = identities(aligned_rows("ACD-X", "-----"), aligned_rows("ACE--", "A-DFX", "-----"))
    # ACD-X and A-DFX: A and D of the columns that a residue fills, without X.
    assert found == pytest.approx(np.array([[2 / 3, 2 / 4, 0], [0, 0, 0]]))


def test_a_protein_fills_the_columns_of_its_own_hmm(family: Family) -> None:
    one = family.members[0]
    assert text_of(aligned_columns(family_hmm([one]), [one])[0]) == decode(one)
    rows = aligned_columns(family_hmm(family.members[:8]), family.members[:3])
    for row, member in zip(rows, family.members[:3], strict=True):
        letters = iter(decode(member))
        assert all(letter in letters for letter in text_of(row).replace("-", ""))  # in their order


def test_the_sentence_says_what_was_found(described: dict[str, Any]) -> None:
    text = headline(described)
    assert text.startswith("of 4 generated proteins 3 are members by the family's profile HMM")
    assert "(natural members not given: 6 of 6; composition samples: 0 of 4)" in text
    assert text.endswith("–100 % identity to the nearest known member")
    table = members_table(described)
    assert [row[0] for row in table.rows] == [GENERATED, NATURAL, REFERENCE]
    assert table.rows[1][1] == "6 of 6"
    copy, *_, other = header(described)
    assert "identity=1.000 hmm_bits=" in copy
    assert other.endswith("member=no")


def test_a_family_of_two_is_said_to_be_small(family: Family, generated: list[Tokens]) -> None:
    given, held_out = Family(family.members[2:4], 8, family.names[2:4]).hold_out(0.5, 0)
    described = describe_members(generated[:1], ["copy"], given, held_out)
    text = headline(described)
    assert text.startswith("of 1 generated proteins 1 is a member")
    assert "none of the 2 known members is held out" in text
    assert "an HMM of 2 knows little" in text
    assert [row["set"] for row in described["alignment"]] == [GENERATED, NATURAL, NATURAL]


def test_the_account_is_of_its_own_proteins_alone(
    described: dict[str, Any], generated: list[Tokens], tmp_path: Path
) -> None:
    fasta = tmp_path / "new.fasta"
    write_fasta(fasta, (("x", decode(one)) for one in generated))
    file = write_members(described, fasta)
    assert file.name == "new.members.json"
    kept = read_members(fasta)
    assert kept is not None
    assert kept["sets"] == described["sets"]
    plot_new_members(kept, file.with_suffix(".png"))
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    write_fasta(fasta, [("x", "MKV")])
    assert read_members(fasta) is None
    assert read_members(tmp_path / "other.fasta") is None
