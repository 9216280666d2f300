"""A family given as relatives: to generate, fill in and score, in Python and by commands."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm import load_model
from d2plm.api import SequenceModel
from d2plm.cli import main
from d2plm.core.batch import Relatives
from d2plm.core.errors import ConfigError, DataError, ModelError
from d2plm.core.vocabulary import decode, encode
from d2plm.data.family import Family, RelativesCheck, read_families, read_family
from d2plm.data.fasta import read_fasta
from d2plm.evaluation.new_members import read_members
from d2plm.evaluation.scoring import bound_draws, mutational_effects
from d2plm.families.variants import Variant, place_variants
from d2plm.paradigms.masked import MaskedParadigm
from tests.conftest import Captured, Exports, Logged

MEMBERS = ["MKTAYIAKQRLL", "MKSAYLAKQRL", "MRTAFIAKHRLLGG", "MKTGYIAQRL", "MHTAYIARQRLV"]


@pytest.fixture(scope="module")
def model(exports: Exports) -> SequenceModel:
    return load_model(exports.related, device="cpu", precision="fp32")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    file = tmp_path / "family.fasta"
    file.write_text("".join(f">m{i}\n{text}\n" for i, text in enumerate(MEMBERS)))
    return file


def test_members_are_distinct_and_drawn_by_key(fasta: Path) -> None:
    with fasta.open("a") as file:
        file.write(f">again\n{MEMBERS[0]}\n>none\nXXX\n")
    family = read_family(fasta, most=2)
    assert [decode(one) for one in family.members] == MEMBERS
    itself = encode(MEMBERS[3])

    once, again = (
        [tuple(map(decode, family.draw(0, key, protein=itself))) for key in range(30)]
        for _ in range(2)
    )
    assert {len(one) for one in once} == {2}
    assert len({*once}) > 5
    assert once == again
    assert len(Family(family.members, most=9).draw(0, protein=itself)) == 5


@pytest.mark.parametrize(
    ("protein", "given", "away"),
    [
        ("KTAY", "w", "m"),
        ("AMKTAYIAA", "w", "m"),
        ("MKTAYIA", "w", ""),  # the protein itself needs no word
        ("MKTAYI" + "CC", "mw", ""),
        ("W", "m", "w"),
        ("MKTAYIAWWWW", "", "mw"),
    ],
)
def test_a_protein_is_not_given_what_contains_it_or_is_a_part_of_it(
    protein: str, given: str, away: str
) -> None:
    family = Family.of([encode("MKTAYIA"), encode("WWWW")], 3, ["m", "w"])
    found = RelativesCheck("family.fasta", "in.fasta").add("p", family, encode(protein))
    assert [*found.names] == [*given] == [*family.given_to(encode(protein)).names]
    assert [*family.giving_away(encode(protein))] == [*away]


WILD_TYPE = "MKTLAVGSEWQDRNHFPYICKLM"
RELATIVES = ["PKTLTVGSSWQDWNGSDYICKLM", "MSCLAVWSNWQDRNHFPHIFKLM", "MSTLAVLSEWDDRQDFPDICQSM"]
AWAY = [WILD_TYPE[4:18], 3000 * "A" + WILD_TYPE + 200 * "G"]  # a domain, and far inside a long one


def test_what_gives_a_protein_away_changes_no_score(
    model: SequenceModel, exports: Exports, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "in.fasta").write_text(f">wt\n{WILD_TYPE}\n>other\nMKTAYIAKQRLL\n")
    (tmp_path / "scan.csv").write_text("mutant,name\nK2A,wt\nV6K,wt\n")
    words = [f"model_dir={exports.related}", f"input={tmp_path / 'in.fasta'}", "device=cpu"]
    words += ["precision=fp32", "evaluation.masks_per_sequence=2", "max_relatives=2"]
    plain, with_away = tmp_path / "plain.fasta", tmp_path / "away.fasta"
    plain.write_text("".join(f">r{i}\n{text}\n" for i, text in enumerate(RELATIVES)))
    with_away.write_text(f">domain\n{AWAY[0]}\n>long\n{AWAY[1]}\n{plain.read_text()}")
    outputs = []
    for number, file in enumerate((plain, with_away)):
        for more in ([], [f"mutations={tmp_path / 'scan.csv'}"]):
            out = tmp_path / f"{number}{len(more)}.csv"
            assert main(["score", *words, *more, f"relatives={file}", f"output={out}"]) == 0
            said = capsys.readouterr().err
            assert ("domain (of wt)" in said) == ("long (of wt)" in said) == bool(number)
            rows = [*csv.DictReader(out.open(newline=""))]
            outputs.append([row for row in rows if row.get("name") != "other"])
    assert outputs[:2] == outputs[2:]
    for score in (
        lambda given: model.score(WILD_TYPE, relatives=given, masks_per_sequence=2)[0].nats,
        lambda given: model.score_mutations(WILD_TYPE, "V6K", relatives=given)[0],
    ):
        assert score([*RELATIVES, *AWAY]) == score(RELATIVES)
        for away in AWAY:
            with pytest.raises(DataError, match="relatives: contains no relatives of any protein"):
                score([away])


def test_a_table_of_relatives_is_joined_by_names_in_headers(tmp_path: Path, caplog: Logged) -> None:
    names, table = ["sp|P02185|MYG_PHYMC", "plain", "lonely"], tmp_path / "t.csv"
    table.write_text(
        "# found elsewhere\r\n"
        "Protein;identity;Sequence\r\nP02185;0,5;MKT\r\nMYG_PHYMC;0,5;MKV\r\n"
        "sp|P02185|MYG_PHYMC;0,5;MKV\r\nplain;;WWW\r\nplain;0,1;NA\r\nabsent;1;MK\r\n;;\r\n"
    )
    caplog.set_level("INFO")
    found = read_families(table, 8, names, "in.fasta")
    assert [[decode(one) for one in own.members] for own in found] == [["MKT", "MKV"], ["WWW"], []]
    assert "1 of its 5 proteins not in in.fasta, left out: absent" in caplog.text
    assert "1 row without a sequence left out (lines 7)" in caplog.text
    with pytest.raises(DataError, match="'P02185' names record 1 and record 2"):
        read_families(table, 8, [*names[:1], "tr|P02185|P02185_CATMA"], "in.fasta")
    with pytest.raises(DataError, match="'plain' names record 2 and record 3 and is"):
        read_families(table, 8, [*names[:2], "plain"], "in.fasta")


def generated(tmp_path: Path, *words: str) -> tuple[int, Path]:
    """Exit status and file of d2plm generate without a model, of a family of ten, in a table."""
    table, out = tmp_path / "family.csv", tmp_path / "made.fasta"
    rows = (f"m{i};MK{c}AYIAKQRLLG{c}E\n" for i, c in enumerate("ACDEFGHIKL"))
    table.write_text("id;sequence\n" + "".join(rows))
    command = ["generate", f"relatives={table}", f"output={out}", "number=3"]
    return main([*command, *words]), out


def test_new_members_are_judged_beside_natural_ones(tmp_path: Path) -> None:
    status, out = generated(tmp_path, "generation.filter=true")
    assert status == 0
    described = read_members(out)
    assert described is not None
    natural = described["sets"]["natural members"]["proteins"]
    assert len(natural) == described["given"] == 10
    assert all(one["nearest"] != one["name"] for one in natural)
    headers = [line for line in out.read_text().splitlines() if line.startswith(">")]
    rows = csv.DictReader((tmp_path / "made.members.csv").open(newline=""))
    proteins = described["sets"]["generated"]["proteins"]
    for header, one, row in zip(headers, proteins, rows, strict=True):
        assert f" nearest={one['nearest']} identity=" in header
        assert header.split()[0] == f">{one['name']}"
        assert [row[key] for key in ("name", "parent")] == [one["name"], one["parent"]]
        assert int(row["length"]) == one["length"]
    assert (tmp_path / "made.members.png").is_file()
    assert main(["report", f"output_dir={tmp_path}"]) != 0  # a folder of designs is no run


def test_new_members_keep_avoid_and_stay_near_what_is_said(tmp_path: Path) -> None:
    words = ["generation.keep=['m1:C3,L11-L12']", "generation.avoid=DE", "number=5"]
    status, out = generated(tmp_path, *words)
    assert status == 0
    made = [decode(record.tokens) for record in read_fasta(out)]
    assert all((one[2], one[10:12]) == ("C", "LL") for one in made)
    assert not {*"DE"} & {*"".join(made)}
    status, out = generated(tmp_path, "generation.near=m4:2")
    assert status == 0
    parent = "MKFAYIAKQRLLGFE"
    for record in read_fasta(out):
        pairs = zip(decode(record.tokens), parent, strict=True)
        assert sum(one != other for one, other in pairs) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("keep=['m1:K3']", "keep='m1:K3'"),
        ("keep=['m1:99']", "the member has 15 residues"),
        ("avoid=J", "avoid='J'"),
        ("near=m1:²", "near='m1:²'"),
        ("near=m1:2 generation.length=9", "length=9"),
        ("keep=['m1:C3'] generation.avoid=C", "avoid='C'"),
    ],
)
def test_what_no_new_member_can_be_is_one_error(
    words: str, said: str, tmp_path: Path, capsys: Captured
) -> None:
    status, out = generated(tmp_path, *f"generation.{words}".split())
    assert status == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_relatives_of_some_segments_are_renumbered() -> None:
    given = [[encode("AC"), encode("D")], [], [encode("EFG")], [encode("H")]]
    kept = Relatives.pack(given).of_segments(np.array([True, False, False, True]))
    np.testing.assert_equal(vars(kept), vars(Relatives.pack([given[0], given[3]])))


def test_new_members_have_members_lengths_and_do_not_depend_on_their_number(
    model: SequenceModel, fasta: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"relatives": MEMBERS, "seed": 4, "steps": 9}
    made = model.generate(12, **settings)
    assert {len(text) for text in made} <= {len(text) for text in MEMBERS}
    assert made != model.generate(12, **{**settings, "relatives": MEMBERS[:2]})
    assert model.generate(3, **settings) == made[:3]
    out = tmp_path / "made.fasta"
    command = ["generate", f"output={out}", "number=12", f"relatives={fasta}"]
    assert main([*command, "seed=4", "steps=9"]) == 0
    assert [decode(record.tokens) for record in read_fasta(out)] == made


def test_a_protein_is_scored_given_the_others_and_never_given_itself(
    model: SequenceModel, exports: Exports, fasta: Path, tmp_path: Path
) -> None:
    given = model.score(MEMBERS, relatives=MEMBERS, masks_per_sequence=4)
    alone = model.score(MEMBERS, masks_per_sequence=4)
    assert all(one.nats != other.nats for one, other in zip(given, alone, strict=True))
    others = model.score(MEMBERS, relatives=MEMBERS[1:], masks_per_sequence=4)
    assert others[0].nats == pytest.approx(given[0].nats, rel=1e-5)
    out = tmp_path / "scores.csv"
    command = ["score", f"model_dir={exports.related}", f"input={fasta}", f"relatives={fasta}"]
    command += [f"output={out}", "evaluation.masks_per_sequence=4", "device=cpu", "precision=fp32"]
    assert main(command) == 0
    rows = list(csv.DictReader(out.open(newline="")))
    expected = [one.nats for one in given]
    assert [float(row["nats"]) for row in rows] == pytest.approx(expected, rel=1e-4)
    for row, one in zip(rows, model.pseudo_log_likelihood(MEMBERS), strict=True):
        assert float(row["pseudo_log_likelihood"]) != pytest.approx(one, rel=1e-3)
    for relatives, error in ((["XX"], "no relatives"), (["M1"], "relative 0")):
        with pytest.raises(DataError, match=error):
            model.generate(relatives=relatives)
    with pytest.raises(ConfigError, match="max_relatives"):
        model.score(MEMBERS, relatives=MEMBERS, max_relatives=0)
    with pytest.raises(ModelError, match="trained without relatives"):
        load_model(exports.masked).score("MKT", relatives=MEMBERS)


def test_each_draw_of_masks_draws_other_relatives(model: SequenceModel) -> None:
    family = Family.of([encode(text) for text in MEMBERS], 1)
    exported = model.exported
    scored = [encode("MKTAYIAKQRLA")]
    words = (exported.denoiser("fp32"), exported.paradigm, scored)
    draws = bound_draws(*words, masks_per_sequence=6, families=[family])
    for draw in range(6):
        one = Family(family.draw(0, 0, draw, protein=scored[0]), 1)
        again = bound_draws(*words, masks_per_sequence=6, families=[one])
        assert again[0, draw] == pytest.approx(draws[0, draw], rel=1e-5)


def test_the_model_s_effects_are_the_mean_over_draws_of_relatives(model: SequenceModel) -> None:
    exported, wild_type = model.exported, encode("MKTAYIAKQR")
    placed, _ = place_variants(["A4G", "K8R:R10L", "WT"], wild_type)
    variants = [one for one in placed if isinstance(one, Variant)]
    denoiser, paradigm = exported.denoiser("fp32"), exported.paradigm
    assert isinstance(paradigm, MaskedParadigm)

    def effects(family: Family | None) -> list[float]:
        found = mutational_effects(denoiser, paradigm, wild_type, variants, family=family)
        return found.tolist()

    family = Family.of([encode(text) for text in MEMBERS], 2).given_to(wild_type)
    given, plain = effects(family), effects(None)
    each = [effects(Family.of(family.draw(d, protein=wild_type), 2)) for d in range(4)]
    assert given == pytest.approx(np.mean(each, axis=0), rel=1e-4, abs=1e-6)
    assert given[0] != pytest.approx(plain[0], rel=1e-3)
    assert given[2] == plain[2] == 0
    # The wild type among its relatives would reveal every masked residue.
    two = Family.of([encode(text) for text in MEMBERS[:2]], 2)
    assert effects(Family.of([*two.members, wild_type], 2)) == effects(two)
