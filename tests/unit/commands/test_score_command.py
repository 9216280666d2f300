"""`d2plm score`: tables in and out, and one-line errors for input that cannot be scored."""

import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from d2plm import load_model
from d2plm.cli import main
from d2plm.commands import score
from d2plm.core.vocabulary import decode, encode
from d2plm.data.tables import open_table
from d2plm.evaluation import scoring
from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.families.mutation_effects import FamilyEffects
from d2plm.families.variants import parse_variant, place
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import Captured, DiTFactory, Exports, MonkeyPatch
from tests.unit.families.known_sites import likeliest, measured_effects, members, singles

PROTEINS = {"P1": "MKTAYIAKQR", "P2": "GSHMXLVAGGNP", "none": "XXBX", "P3": "WWW"}
SCORED = ["name", "residues", "nats", "nats_low", "nats_high", "perplexity"]


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    file = tmp_path / "proteins.fasta"
    file.write_text("".join(f">{name} words\n{text}\n" for name, text in PROTEINS.items()))
    return file


def written(file: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(file.read_text(), newline=""))]


def refusal(capsys: Captured, *words: str) -> str:
    assert main(["score", *words]) != 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("d2plm: error: ")
    return lines[0]


def test_proteins_are_rows(exports: Exports, fasta: Path, tmp_path: Path, capsys: Captured) -> None:
    output = tmp_path / "new" / "scores.csv"
    words = [f"model_dir={exports.masked}", f"input={fasta}", "precision=fp64"]
    assert main(["score", *words, f"output={output}"]) == 0
    assert capsys.readouterr().out == f"wrote {output} (4 proteins)\n"
    rows = written(output)
    assert [row["name"] for row in rows] == [*PROTEINS]
    assert [*rows[0]] == [*SCORED, "pseudo_log_likelihood"]
    assert [row["residues"] for row in rows] == ["10", "11", "0", "3"]
    model, sequences = load_export(exports.masked), [encode(s) for s in PROTEINS.values()]
    assert isinstance(model.paradigm, MaskedParadigm)
    draws = scoring.bound_draws(model.denoiser("fp64"), model.paradigm, sequences)
    for column, values in {
        "nats": draws.mean(axis=1),
        "nats_low": scoring.bound_interval(draws)[0],
        "nats_high": scoring.bound_interval(draws)[1],
        "pseudo_log_likelihood": scoring.pseudo_log_likelihoods(
            model.denoiser("fp64"), model.paradigm, sequences
        ),
    }.items():
        np.testing.assert_allclose([float(row[column]) for row in rows], values, atol=6e-5)
    assert rows[2]["perplexity"] == ""
    assert float(rows[0]["perplexity"]) == pytest.approx(np.exp(draws[0].mean() / 10), abs=1e-3)
    assert main(["score", *words]) == 0
    assert capsys.readouterr().out == output.read_text()
    table = tmp_path / "names.csv"
    table.write_text("name,sequence\nfirst\x01second,MKT\nbell\x07,MKT\ntwo\x02\x7f,MKT\n")
    assert main(["score", words[0], f"input={table}"]) == 0
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", capsys.readouterr().out)


def test_a_file_in_parts_compressed_or_from_standard_input_is_scored_as_a_whole(
    exports: Exports, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "proteins.fasta.gz").write_bytes(gzip.compress(fasta.read_bytes()))
    stream: Any = io.BufferedReader(io.BytesIO(fasta.read_bytes()))  # type: ignore[arg-type]  # as good as raw
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
    output = tmp_path / "scores.csv"

    def scored(source: object, *more: str) -> str:
        words = [f"model_dir={exports.masked}", "precision=fp64", f"output={output}"]
        assert main(["score", *words, f"input={source}", *more]) == 0
        return output.read_text()

    whole = scored(fasta)
    assert scored(tmp_path / "proteins.fasta.gz") == whole
    monkeypatch.setattr(score, "_CHUNK_TOKENS", 20)
    assert scored("-", "evaluation.token_budget=30") == whole


def test_a_uniform_source(exports: Exports, fasta: Path, tmp_path: Path, capsys: Captured) -> None:
    words = [f"model_dir={exports.uniform}", f"input={fasta}"]
    assert "set pseudo_log_likelihood=false" in refusal(capsys, *words)
    (tmp_path / "any.csv").write_text(f"name,mutant\n{next(iter(PROTEINS))},M1A\n")
    assert "no masked prediction" in refusal(capsys, *words, f"mutations={tmp_path}/any.csv")
    for masks in (4, 1):
        more = ("pseudo_log_likelihood=false", f"evaluation.masks_per_sequence={masks}")
        assert main(["score", *words, *more]) == 0
        row, *_ = csv.DictReader(io.StringIO(capsys.readouterr().out))
        assert [*row] == SCORED
        if masks > 1:
            assert float(row["nats_low"]) < float(row["nats"]) < float(row["nats_high"])
        else:
            assert row["nats_low"] == row["nats_high"] == ""


def test_proteins_that_are_too_long_are_all_named_before_any_is_scored_and_may_be_left_out(
    exports: Exports, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    known = len(fasta.read_text().split(">")) - 1
    with fasta.open("a") as file:
        file.write(f">long\n{'A' * 127}\n>longer\n{'L' * 1270}\n")
    output = tmp_path / "scores.csv"
    words = [f"model_dir={exports.masked}", f"input={fasta}", f"output={output}"]
    with monkeypatch.context() as patch:
        patch.setattr(score.scoring, "bound_draws", lambda *_, **__: pytest.fail("scored"))
        line = refusal(capsys, *words)
    assert "long (127), longer (1,270)" in line
    assert not output.exists()
    assert main(["score", *words, "max_residues=126"]) == 0
    assert "long, longer" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 1 + known


def test_a_run_that_fails_leaves_what_was_there(
    exports: Exports, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    words = (f"model_dir={exports.masked}", f"input={fasta}")
    assert "another file" in refusal(capsys, *words, f"output={fasta}")

    def diverged(tokens: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(tokens), 33), float("nan"))

    monkeypatch.setattr(ExportedModel, "denoiser", lambda *_: diverged)
    output = tmp_path / "scores.csv"
    output.write_text("older")
    # The longest comes first.
    assert "the bound of 'P2' is nan" in refusal(capsys, *words, f"output={output}")
    assert output.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["proteins.fasta", "scores.csv"]


MUTANTS = ["M1A", "K2G:T3L", "WT", "T3T", "M1C", "K2G,T3Y", "R10W"]
MEASURED = ["0.5", "-1.0", "1", "", "0.25", "NA", "-2e-1"]
BLOSUM62 = "d2plm_blosum62_score"


def effects_of(exports: Exports, protein: str, mutants: list[str]) -> list[float]:
    exported, tokens = load_export(exports.masked), encode(PROTEINS[protein])
    assert isinstance(exported.paradigm, MaskedParadigm)
    variants = [place(parse_variant(mutant), PROTEINS[protein]) for mutant in mutants]
    model = exported.denoiser("fp64")
    return scoring.mutational_effects(model, exported.paradigm, tokens, variants).tolist()


class Scan:
    """A table of variants, scored or refused by the command."""

    def __init__(self, exports: Exports, wild_type: Path, capsys: Captured) -> None:
        self.exports, self.fasta, self.capsys = exports, wild_type, capsys
        self.table = wild_type.with_name("variants.csv")
        self.output = wild_type.with_name("effects.csv")

    def words(self, content: str | None, more: tuple[str, ...]) -> list[str]:
        if content is not None:
            self.table.write_text(content)
        own = [f"model_dir={self.exports.masked}", "precision=fp64", "--input", str(self.fasta)]
        return [*own, "--mutations", str(self.table), f"--output={self.output}", *more]

    def scored(self, content: str | None, *more: str) -> tuple[list[dict[str, str]], str]:
        assert main(["score", *self.words(content, more)]) == 0
        with open_table(self.output) as found:
            rows = [dict(zip(found.columns, cells, strict=True)) for _, cells in found.rows()]
        return rows, self.capsys.readouterr().err

    def refused(self, content: str | None, *more: str) -> str:
        self.output.unlink(missing_ok=True)
        line = refusal(self.capsys, *self.words(content, more))
        assert not self.output.exists()
        return line


@pytest.fixture
def scan(exports: Exports, tmp_path: Path, capsys: Captured) -> Scan:
    file = tmp_path / "wildtype.fasta"
    file.write_text(f">P1\n{PROTEINS['P1']}\n")
    return Scan(exports, file, capsys)


def scores(rows: list[dict[str, str]]) -> list[float]:
    return [float(row["d2plm_score"]) for row in rows]


def test_a_table_of_variants_gets_a_column_of_scores(scan: Scan, exports: Exports) -> None:
    notes = ["plain", "a, b", 'say "x"', "", "Größe", "two\nlines", "0.10"]
    with scan.table.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        writer = csv.writer(file)
        writer.writerow(["note", "Mutant", "DMS_score"])
        writer.writerows(zip(notes, MUTANTS, MEASURED, strict=True))
    _, said = scan.scored(None)
    rows = written(scan.output)
    assert [*rows[0]] == ["note", "Mutant", "DMS_score", "d2plm_score", BLOSUM62]
    assert [row["note"] for row in rows] == notes
    assert [row["Mutant"] for row in rows] == MUTANTS
    assert [row["DMS_score"] for row in rows] == MEASURED
    expected = effects_of(exports, "P1", MUTANTS)
    np.testing.assert_allclose(scores(rows), expected, atol=1e-6)
    assert expected[2] == expected[3] == 0
    known = [0, 1, 2, 4, 6]
    rho = spearmanr([expected[i] for i in known], [float(MEASURED[i]) for i in known]).statistic
    assert "7 variants in column 'Mutant', measured in 'DMS_score', offset 0" in said
    assert f"P1, d2plm_score: Spearman's rho {rho:.3f} (5 measured variants)" in said


def test_variants_of_proteins_keep_their_order(scan: Scan, exports: Exports, fasta: Path) -> None:
    scan.fasta = fasta
    rows, _ = scan.scored("name\tvariant\nP3\tW1A\nP1\tK2G:T3L\nP3\tW3C\nP1\tM1A\n")
    assert [row["variant"] for row in rows] == ["W1A", "K2G:T3L", "W3C", "M1A"]
    third = effects_of(exports, "P3", ["W1A", "W3C"])
    first = effects_of(exports, "P1", ["K2G:T3L", "M1A"])
    expected = [third[0], first[0], third[1], first[1]]
    np.testing.assert_allclose(scores(rows), expected, atol=1e-6)


DIALECTS = {
    "other names, tabs": "id\tmutants\tlog_fitness\na\tM1A\t1\nb\tK2G\t2\nc\tR10W\t3\n",
    "letters apart": "site,wt,mutant,mutation,score\n1,M,A,M1A,1\n2,K,G,K2G,2\n10,R,W,R10W,3\n",
    "only letters apart": "wt,pos,mut,fitness\nM,1,A,1\nK,2,G,2\nR,10,W,3\n",
    "HGVS": "hgvs_nt,hgvs_pro,score\nc.1A>G,p.Met1Ala,1\nNA,p.Lys2Gly,2\nNA,p.(Arg10Trp),3\n",
    "decimal comma, unit": "mutant;Fitness (log2)\nM1A;0,1\nK2G;0,2\nR10W;0,3\n",
    "another numbering": "mutant,DMS-score\nM25A,1\nK26G,2\nR34W,3\n",
    "labelled": "mutant,score\nSM1A,1\nSK2G,2\nSR10W,3\n",
    "same lengths": "mutated_sequence,score\nAKTAYIAKQR,1\nMGTAYIAKQR,2\nMKTAYIAKQW,3\n",
    "sequence beside": "mutant,mut_seq,score\nM1A,AKTAYIAKQR,1\nK2G,MGTAYIAKQR,2\nR10W,,3\n",
    "names of variants": "name,mutant,score\nv1,M1A,1\nv2,K2G,2\nv3,R10W,3\n",
}  # fmt: skip


@pytest.mark.parametrize("content", DIALECTS.values(), ids=DIALECTS)
def test_any_dialect_gets_the_same_scores(content: str, scan: Scan, exports: Exports) -> None:
    rows, said = scan.scored(content)
    expected = effects_of(exports, "P1", ["M1A", "K2G", "R10W"])
    np.testing.assert_allclose(scores(rows), expected, atol=1e-6)
    assert "3 variants in column" in said and "measured in" in said
    assert "P1, d2plm_score: Spearman's rho " in said


def test_rows_that_cannot_be_scored_are_left_out_unless_strict(scan: Scan) -> None:
    lines = ["M1A,1", "T3*,2", "T300L,3", "W3A,4", "mean,5", *["K2A,6", "K2L,7"] * 30]
    content = "\n".join(["mutant,score", *lines])
    rows, said = scan.scored(content)
    reasons = ["with a stop", "beyond the end", "with another wild type", "not a variant"]
    for line, reason in enumerate(reasons, start=3):
        assert f"1 {reason} (line {line}: " in said
    left_out = [number for number, row in enumerate(rows) if row["d2plm_score"] == ""]
    assert left_out == [1, 2, 3, 4]
    assert f"{scan.table}, line 3: " in scan.refused(content, "strict=true")


def test_two_proteins_have_own_offsets_and_rows_of_others_are_left_out(scan: Scan) -> None:
    _, said = scan.scored("name,mutant\nP1,M1A\nother,M1A\nP1,K2A\nother,K2A\n")
    assert "2 of another protein (line 3: 'other', line 5: 'other')" in said
    assert "has no record 'other'" in scan.refused("name,mutant\nother,M1A\nother,K2A\n")
    scan.fasta.write_text(">sp|P00001|ONE_TEST\nMKTAYIAKQR\n>Q2/11-20\nGSHMALVAGG\n")
    lines = ["P00001,M25A", "P00001,K26A", "P00001,T27A", "Q2,M14A"]
    rows, said = scan.scored("\n".join(["name,mutant", *lines]))
    assert "offset of sp|P00001|ONE_TEST 24, offset of Q2/" in said
    assert all(row["d2plm_score"] for row in rows)
    assert "mutation_offset='auto'" in scan.refused("name,mutant\nP00001,M25A\nQ2,M14A\n")


def test_sequences_of_other_lengths_are_compared_by_bounds(scan: Scan, exports: Exports) -> None:
    sequences = ["MKTAYIAKQR", "MKTAYIAKQRW", "MKTAYIAKQRRRR", "TAYIAKQRKK"]
    rows, _ = scan.scored("\n".join(["mutant", *sequences]))
    exported = load_export(exports.masked)
    every = [encode(one) for one in sequences]  # the first is the wild type, scored once
    nats = scoring.bound_draws(exported.denoiser("fp64"), exported.paradigm, every).mean(axis=1)
    per_residue = nats * len(every[0]) / [len(one) for one in every]
    np.testing.assert_allclose(scores(rows), per_residue[0] - per_residue, atol=1e-6)


def test_columns_may_be_named(scan: Scan, exports: Exports) -> None:
    content = "mutant,other,note,score,x\nM1A,K2A,first,1,3\nK2A,T3A,second,2,4\n"
    for wrong, message in {
        "variant=note": "line 2: 'first'",
        "variant=mutants": "did you mean 'mutant'",
        "measured=note": "line 2: note 'first'",
        "name=note": "no record 'first'",
    }.items():
        assert message in scan.refused(content, wrong)
    rows, said = scan.scored(content, "variant=other", "measured=x")
    assert "2 variants in column 'other', measured in 'x'" in said
    np.testing.assert_allclose(scores(rows), effects_of(exports, "P1", ["K2A", "T3A"]), atol=1e-6)


BAD_TABLES = {
    "no rows": "mutant\n",
    "(it has: 'a', 'b')": "a,b\nx,1\n",
    "column d2plm_score": "mutant,d2plm_score\nM1A,1\n",
    "no variant to score": "mutant\nM1B\n",
    "line 2: K1A": "mutant\nK1A\nM1A\n",
    "line 3: 'K2G'": "mutant,mutated_sequence\nM1A,AKTAYIAKQR\nK2G,MKTAYIAKQR\n",
}


def test_bad_tables_and_wild_types_are_named_with_their_rows(scan: Scan) -> None:
    assert "no such file" in scan.refused(None)
    for message, content in BAD_TABLES.items():
        line = scan.refused(content)
        assert str(scan.table) in line and message in line
    for message, records in {
        "has 2 proteins": ">P1\nMK\n>P2\nMK\n",
        "record 'P1' has 127 residues": f">P1\n{'M' * 127}\n",
    }.items():
        scan.fasta.write_text(records)
        assert message in scan.refused("mutant\nM1A\n")


# A mutational scan given relatives: each predictor with its interval.
TERMS = ["d2plm_score", "d2plm_profile_score", "d2plm_pairs_score", "d2plm_blosum62_score"]
# Every third position's.
CHOSEN = [place for place, one in enumerate(singles()) if one.positions[0] % 3 == 0]
VARIANTS, EFFECTS = [singles()[place] for place in CHOSEN], measured_effects()[CHOSEN]
GIVEN = ["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"]
COLUMNS = [*TERMS, "d2plm_model_score", "d2plm_model_alone_score"]


@pytest.fixture
def proteingym(tmp_path: Path) -> Path:
    """The folder of wt.fasta, family.fasta and scan.csv, which is in ProteinGym's format."""
    wild_type = decode(likeliest())
    (tmp_path / "wt.fasta").write_text(f">WT\n{wild_type}\n")
    records = (f">m{i}\n{decode(one)}\n" for i, one in enumerate(members(30)))
    (tmp_path / "family.fasta").write_text("".join([*records, f">itself\n{wild_type}\n"]))
    rows = [",".join(GIVEN)]
    for variant, effect in zip(VARIANTS, EFFECTS, strict=True):
        changed, (place,) = likeliest().copy(), variant.positions
        changed[place] = variant.mutants[0]
        text = decode(changed)
        rows.append(f"{wild_type[place]}{place + 1}{text[place]},{text},{effect:.6f},0")
    (tmp_path / "scan.csv").write_text("\n".join(rows))
    return tmp_path


def words(folder: Path, proteingym: Path, *more: str) -> list[str]:
    paths = [f"input={proteingym / 'wt.fasta'}", f"mutations={proteingym / 'scan.csv'}"]
    return ["score", f"model_dir={folder}", "precision=fp32", "device=cpu", *paths, *more]


def test_each_predictor_is_correlated(exports: Exports, proteingym: Path, capsys: Captured) -> None:
    folder, output = exports.related, proteingym / "effects.csv"
    more = (f"relatives={proteingym / 'family.fasta'}", "max_relatives=2", f"output={output}")
    assert main(words(folder, proteingym, *more)) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == [*GIVEN, *COLUMNS]
    scores = {name: np.array([float(row[name]) for row in rows]) for name in COLUMNS}
    family, mutants = [decode(one) for one in members(30)], [row["mutant"] for row in rows]
    effects = FamilyEffects.of(likeliest(), members(30)).effects(VARIANTS)
    for name, term in zip(TERMS, effects.values(), strict=True):
        np.testing.assert_allclose(scores[name], term, atol=1e-5)
    model, wild_type = load_model(folder, device="cpu", precision="fp32"), decode(likeliest())
    given = model.score_mutations(wild_type, mutants, relatives=family)
    np.testing.assert_allclose(scores["d2plm_score"], given, atol=1e-5)
    alone = model.score_mutations(wild_type, mutants)
    np.testing.assert_allclose(scores["d2plm_model_alone_score"], alone, atol=1e-5)
    assert not np.allclose(scores["d2plm_model_score"], alone, atol=1e-3)
    measured = np.array([float(row["DMS_score"]) for row in rows])
    scores |= dict(zip(TERMS, effects.values(), strict=True))  # as they are, before rounding
    found = {name: rank_correlation(scores[name], measured, VARIANTS) for name in COLUMNS}
    said = [one for one in capsys.readouterr().err.splitlines() if one.startswith("WT, ")]
    assert said == [f"WT, {name}: {found[name]}" for name in COLUMNS]
    assert found["d2plm_score"].low > 0.4
    alone_rho = found["d2plm_model_alone_score"]
    assert alone_rho.low < 0 < alone_rho.high  # random weights


def test_json_has_the_correlations(exports: Exports, proteingym: Path, capsys: Captured) -> None:
    assert main([*words(exports.related, proteingym), "--json"]) == 0
    correlation, _ = json.loads(capsys.readouterr().out)["correlations"]
    expected = {"name": "WT", "score": "d2plm_score", "variants": len(VARIANTS)}
    assert correlation == {**correlation, **expected}
    assert correlation["low"] < correlation["rho"] < correlation["high"]


@pytest.mark.parametrize(
    ("paradigm", "longest"), [(UniformFlowMatching(), 128), (MaskFlowMatching(), 32)]
)
def test_relatives_score_what_the_model_cannot(
    paradigm: Paradigm, longest: int, proteingym: Path, tiny_dit: DiTFactory, capsys: Captured
) -> None:
    model: Any = tiny_dit(max_position_embeddings=longest)
    lengths = LengthHistogram.of(np.array([9]), longest - 2)
    export = save_export(proteingym / "plain", model, paradigm, lengths, {})
    capsys.readouterr()
    assert (
        main(words(export, proteingym, f"relatives={proteingym / 'family.fasta'}", "output=-")) == 0
    )
    said = capsys.readouterr()
    assert "WT: only its relatives score it (" in said.err
    assert said.out.splitlines()[0].endswith("DMS_score_bin," + ",".join(TERMS))
    assert not Path("-").exists()
