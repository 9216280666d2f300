"""The notations of variants, and the offset of their numbering."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core.errors import ConfigError
from d2plm.core.vocabulary import CANONICAL, encode
from d2plm.families import variants
from d2plm.families.variants import VariantError, label_of, parse_variant, place, place_variants

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLI"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A24G", ["A24G"]),
        (" a24g ", ["A24G"]),
        ("A-3G", ["A-3G"]),
        *((f"A24G{separator}L30P", ["A24G", "L30P"]) for separator in ":;,/_+- "),
        ("A-3G-L-1P", ["A-3G", "L-1P"]),
        ("p.Ala24Gly", ["A24G"]),
        ("p.(Ala24Gly)", ["A24G"]),
        ("p.[Ala24Gly;Leu30Pro]", ["A24G", "L30P"]),
        ("p.[(Ala24Gly);(Leu30Pro)]", ["A24G", "L30P"]),
        ("p.Ala24Gly;p.Leu30Pro", ["A24G", "L30P"]),
        ("NP_000240.1:p.Ala24Gly", ["A24G"]),
        ("ALA24GLY", ["A24G"]),
        ("p.A24G", ["A24G"]),
        ("p.Ala24=", ["A24A"]),
        ("A24=", ["A24A"]),
        *((f"A24{arrow}G", ["A24G"]) for arrow in (">", "→", "->")),
        ("p.Ala24>Gly", ["A24G"]),
        ("SA108D:SN144D", ["A108D", "N144D"]),  # of the protein S
        ("LA38G:KA40G", ["L38G", "K40G"]),  # of chain A
        *((text, []) for text in ("WT", "wt", "_wt", "p.=", "p.(=)", "=", "_sy", "wild-type")),
        *((text, []) for text in ("parent", "Parental", "wild type", "wild_type")),
    ],
)
def test_a_variant_is_read(text: str, expected: list[str]) -> None:
    assert [str(one) for one in parse_variant(text, label_of([text]))] == expected


REASONS = {
    variants.MALFORMED: " A24 AA24G A24G:: KRAS A24G:A24L c.76A>T A99999999999999999999G"
    " Y52AF S100aS",  # insertion codes
    variants.STOP: "A24* p.Ala24Ter p.Ala24* A2G:L30* A24>* A24stop A24Ter A24Stop",
    variants.INDEL: "A24- A24del p.Ala24del p.Lys23_Ala24insGly p.Ala24_Leu30del p.Arg97ProfsTer23"
    " p.Ala24fs A24Δ delA24 ΔA24 A24DEL",
    variants.UNSURE: "p.? p.Met1? p.0? p.0 p.(Met1?) M1?",
    variants.UNKNOWN: "B24A A24J A24X X24A p.Ala24Sec",
}


@pytest.mark.parametrize(
    ("text", "reason"),
    [(text, reason) for reason, texts in REASONS.items() for text in texts.split(" ")],
)
def test_what_cannot_be_scored_has_a_reason(text: str, reason: str) -> None:
    with pytest.raises(VariantError) as caught:
        parse_variant(text)
    assert caught.value.reason == reason
    assert repr(text) in str(caught.value)


@given(
    st.text(CANONICAL, min_size=1, max_size=30),
    st.sampled_from([":", ";", ",", " ", "/", "_", "+", "-"]),
    st.integers(-50, 500),
    st.data(),
)
def test_a_variant_is_placed(text: str, separator: str, offset: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, len(text) - 1), min_size=1, unique=True))
    mutants = [data.draw(st.sampled_from(CANONICAL)) for _ in positions]
    written = [
        f"{text[i]}{i + 1 + offset}{mutant}" for i, mutant in zip(positions, mutants, strict=True)
    ]
    changed = encode(text).copy()
    variant = place(parse_variant(separator.join(written)), text, offset=offset)
    changed[list(variant.positions)] = variant.mutants
    letters = list(text)
    for i, mutant in zip(positions, mutants, strict=True):
        letters[i] = mutant
    assert changed.tolist() == encode("".join(letters)).tolist()
    assert list(variant.positions) == [i for i in range(len(text)) if letters[i] != text[i]]


@pytest.mark.parametrize(
    ("text", "offset", "message", "reason"),
    [
        ("M0A", 0, "M0A: 'P1' has the positions 1 to 4", variants.BEYOND),
        ("M5A", 0, "positions 1 to 4", variants.BEYOND),
        ("M1A", 10, "positions 11 to 14", variants.BEYOND),
        ("M1A:K3L", 0, "K3L: 'P1' has X at position 3, not K", variants.DISAGREES),
    ],
)
def test_variants_of_others_are_rejected(text: str, offset: int, message: str, reason: str) -> None:
    with pytest.raises(VariantError) as caught:
        place(parse_variant(text), "MKXT", offset=offset, name="P1")
    assert message in str(caught.value)
    assert caught.value.reason == reason


def numbered(places: list[int], offset: int) -> list[str]:
    return [f"{SEQUENCE[i]}{i + 1 + offset}W" for i in places]


@pytest.mark.parametrize(
    ("texts", "name", "offset"),
    [
        (numbered([0, 3, 8, 17], 24), "P1", 24),
        (numbered([0, 3, 8, 17], -5), "P1", -5),
        (numbered([3, 8], 0), "P1", 0),  # as it is usual, however few
        ([*numbered([*range(29)], 24), "W26A"], "P1", 24),  # one is mistaken
        ([*numbered([*range(29)], 24), "A2000G", "A30*", "?"], "P1", 24),
        (numbered([3], 10), "P1/11-40", 10),
        (numbered([3], 0), "P1/11-90", 0),  # which is of another length
        (numbered([0, 3, 8, 17], 24), "P1/11-40", 24),  # the name is mistaken
        (["W1A", "W2A", "W3A", "W4A"], "P1", 0),  # of another protein
        (["WT"], "P1", 0),
    ],
)
def test_the_offset_at_which_most_agree_is_found(texts: list[str], name: str, offset: int) -> None:
    assert place_variants(texts, encode(SEQUENCE), name=name)[1] == offset


def test_an_unclear_numbering_is_refused() -> None:
    for texts, sequence, message in (
        (numbered([0, 3], 24), SEQUENCE, "2 at 24"),  # two may agree by chance
        (["A11G", "K12G", "L13G"], "MAKLMAKL", "3 at 5, 9"),
    ):
        with pytest.raises(ConfigError, match=f"mutation_offset.*{message}"):
            place_variants(texts, encode(sequence), name="P1")
