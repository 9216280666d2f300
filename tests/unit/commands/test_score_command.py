"""`d2plm score`: tables in and out, and one-line errors for input that cannot be scored."""

import csv
import gzip
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from d2plm.cli import main
from d2plm.commands import score
from d2plm.core.vocabulary import encode
from d2plm.evaluation.mutations import parse_variant, place
from d2plm.evaluation.scoring import (
    bound_draws,
    bound_interval,
    mutational_effects,
    pseudo_log_likelihoods,
)
from d2plm.export.exported_model import ExportedModel, load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.paradigm import Paradigm

PROTEINS = {"P1": "MKTAYIAKQR", "P2": "GSHMXLVAGGNP", "none": "XXBX", "P3": "WWW"}
SCORED = ["name", "residues", "nats", "nats_low", "nats_high", "perplexity"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    """Exports of a tiny model, which takes 126 residues: `masked` and `uniform`."""
    folder = tmp_path_factory.mktemp("models")
    paradigms: dict[str, Paradigm] = {
        "masked": AbsorbingDiffusion(),
        "uniform": UniformFlowMatching(),
    }
    for name, paradigm in paradigms.items():
        lengths = LengthHistogram.of(np.array([10, 9]), 126)
        save_export(folder / name, tiny_dit(), paradigm, lengths, {})
    return folder


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    file = tmp_path / "proteins.fasta"
    file.write_text("".join(f">{name} words\n{text}\n" for name, text in PROTEINS.items()))
    return file


@pytest.fixture
def wild_type(tmp_path: Path) -> Path:
    file = tmp_path / "wildtype.fasta"
    file.write_text(f">P1\n{PROTEINS['P1']}\n")
    return file


def written(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error line of a rejected command."""
    assert main(["score", *words]) != 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("d2plm: error: ")
    return lines[0]


# --- proteins --------------------------------------------------------------------------------


def test_each_protein_has_a_row_in_the_order_of_the_file(
    models: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "scores.csv"
    words = [f"model_dir={models / 'masked'}", f"input={fasta}", "precision=fp64"]
    assert main(["score", *words, f"output={output}"]) == 0
    assert capsys.readouterr().out == f"wrote {output} (4 proteins)\n"
    rows = written(output)
    assert [row["name"] for row in rows] == [*PROTEINS]
    assert [*rows[0]] == [*SCORED, "pseudo_log_likelihood"]
    assert [row["residues"] for row in rows] == ["10", "11", "0", "3"]

    model, sequences = load_export(models / "masked"), [encode(s) for s in PROTEINS.values()]
    assert isinstance(model.paradigm, MaskedParadigm)
    draws = bound_draws(model.denoiser("fp64"), model.paradigm, sequences)
    for column, values in {
        "nats": draws.mean(axis=1),
        "nats_low": bound_interval(draws)[0],
        "nats_high": bound_interval(draws)[1],
        "pseudo_log_likelihood": pseudo_log_likelihoods(
            model.denoiser("fp64"), model.paradigm, sequences
        ),
    }.items():
        np.testing.assert_allclose([float(row[column]) for row in rows], values, atol=6e-5)
    assert rows[2]["perplexity"] == ""
    assert float(rows[0]["perplexity"]) == pytest.approx(np.exp(draws[0].mean() / 10), abs=1e-3)

    assert main(["score", *words]) == 0
    assert capsys.readouterr().out == output.read_text()


def test_a_file_in_parts_is_scored_as_a_whole(
    models: Path, fasta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model_dir={models / 'masked'}", f"input={fasta}", "precision=fp64"]
    main(["score", *words, f"output={tmp_path / 'whole.csv'}"])
    monkeypatch.setattr(score, "_CHUNK_TOKENS", 20)
    main(["score", *words, f"output={tmp_path / 'parts.csv'}", "evaluation.token_budget=30"])
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_compressed_and_standard_input_are_read(
    models: Path,
    fasta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed = tmp_path / "proteins.fasta.gz"
    packed.write_bytes(gzip.compress(fasta.read_bytes()))
    model = f"model_dir={models / 'masked'}"
    assert main(["score", model, f"input={packed}"]) == 0
    from_file = capsys.readouterr().out
    stream: Any = io.BufferedReader(io.BytesIO(fasta.read_bytes()))  # type: ignore[arg-type]  # as good as raw
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stream))
    assert main(["score", model, "input=-"]) == 0
    assert capsys.readouterr().out == from_file


def test_the_bound_alone_of_any_paradigm(
    models: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model_dir={models / 'uniform'}", f"input={fasta}", "pseudo_log_likelihood=false"]
    assert main(["score", *words]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [*rows[0]] == SCORED
    assert float(rows[0]["nats_low"]) < float(rows[0]["nats"]) < float(rows[0]["nats_high"])


def test_one_draw_leaves_the_interval_empty(
    models: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model_dir={models / 'masked'}", f"input={fasta}", "pseudo_log_likelihood=false"]
    assert main(["score", *words, "evaluation.masks_per_sequence=1"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(row["nats_low"], row["nats_high"]) for row in rows} == {("", "")}


def test_a_protein_that_is_too_long_is_rejected_by_name_before_any_is_scored(
    models: Path,
    fasta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(score.scoring, "bound_draws", lambda *_, **__: pytest.fail("scored"))
    with fasta.open("a") as file:
        file.write(f">long\n{'A' * 127}\n")
    output = tmp_path / "scores.csv"
    line = refusal(capsys, f"model_dir={models / 'masked'}", f"input={fasta}", f"output={output}")
    assert "record 'long' has 127 residues, but the model supports at most 126" in line
    assert not output.exists()


def test_a_run_that_fails_leaves_what_was_there(
    models: Path,
    fasta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def diverged(tokens: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(tokens), 33), float("nan"))

    monkeypatch.setattr(ExportedModel, "denoiser", lambda *_: diverged)
    output = tmp_path / "scores.csv"
    output.write_text("older")
    line = refusal(capsys, f"model_dir={models / 'masked'}", f"input={fasta}", f"output={output}")
    assert "the bound of 'P2' is nan" in line  # the longest comes first
    assert output.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["proteins.fasta", "scores.csv"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pseudo_log_likelihood=maybe"],
            "pseudo_log_likelihood='maybe': must be true or false or null",
        ),
        (["mutation_offset=x"], "mutation_offset='x': must be an integer"),
        (["evaluation.masks_per_sequence=0"], "evaluation.masks_per_sequence=0"),
        (["evaluation.token_budget=0"], "evaluation.token_budget=0"),
        (["--mutationz", "v.csv"], "unknown option '--mutationz' (did you mean '--mutations'?)"),
        (["output=file/scores.csv"], "file/scores.csv: cannot be written"),
    ],
)
def test_a_wrong_setting_is_rejected(
    words: list[str],
    message: str,
    models: Path,
    fasta: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    line = refusal(capsys, f"model_dir={models / 'masked'}", f"input={fasta}", *words)
    assert message in line


def test_what_is_read_is_not_overwritten(
    models: Path, fasta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = fasta.read_text()
    line = refusal(capsys, f"model_dir={models / 'masked'}", f"input={fasta}", f"output={fasta}")
    assert "must be another file than those that are read" in line
    assert fasta.read_text() == before


def test_a_uniform_source_is_rejected_with_the_reason(
    models: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model_dir={models / 'uniform'}", f"input={fasta}"]
    line = refusal(capsys, *words)
    assert "no masked prediction" in line
    assert "set pseudo_log_likelihood=false" in line
    (tmp_path / "any.csv").write_text("mutant\nM1A\n")
    assert "no masked prediction" in refusal(capsys, *words, f"mutations={tmp_path}/any.csv")


def test_the_help_says_what_the_keys_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "--help"]) == 0
    assert "CSV or TSV with a column mutant" in capsys.readouterr().out


# --- mutations -------------------------------------------------------------------------------

MUTANTS = ["M1A", "K2G:T3L", "WT", "T3T", "M1C", "K2G,T3Y", "R10W"]
MEASURED = ["0.5", "-1.0", "1", "", "0.25", "NA", "-2e-1"]


def effects_of(models: Path, protein: str, mutants: list[str]) -> list[float]:
    """By the library, in fp64."""
    exported, tokens = load_export(models / "masked"), encode(PROTEINS[protein])
    assert isinstance(exported.paradigm, MaskedParadigm)
    variants = [place(parse_variant(mutant), tokens) for mutant in mutants]
    return mutational_effects(
        exported.denoiser("fp64"), exported.paradigm, tokens, variants
    ).tolist()


def words_for(models: Path, wild_type: Path, table: Path, output: Path) -> list[str]:
    return [
        *("score", f"model_dir={models / 'masked'}", "precision=fp64"),
        *("--input", str(wild_type), "--mutations", str(table), f"--output={output}"),
    ]


def test_a_table_of_variants_gets_a_column_of_scores(
    models: Path, wild_type: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = tmp_path / "variants.csv", tmp_path / "effects.csv"
    notes = ["plain", "a, b", 'say "x"', "", "Größe", "two\nlines", "0.10"]
    with table.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
        writer = csv.writer(file)
        writer.writerow(["note", "Mutant", "DMS_score"])
        writer.writerows(zip(notes, MUTANTS, MEASURED, strict=True))
    assert main(words_for(models, wild_type, table, output)) == 0
    captured = capsys.readouterr()
    assert captured.out == f"wrote {output} (7 variants)\n"

    rows = written(output)
    assert [*rows[0]] == ["note", "Mutant", "DMS_score", "d2plm_score"]
    assert [row["note"] for row in rows] == notes
    assert [row["Mutant"] for row in rows] == MUTANTS
    assert [row["DMS_score"] for row in rows] == MEASURED
    scores = [float(row["d2plm_score"]) for row in rows]
    expected = effects_of(models, "P1", MUTANTS)
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert scores[2] == scores[3] == 0

    known = [0, 1, 2, 4, 6]
    rho = spearmanr([expected[i] for i in known], [float(MEASURED[i]) for i in known]).statistic
    line = rf"P1: Spearman's rho with DMS_score {rho:.3f} \[-?\d\.\d+, -?\d\.\d+\] \(5 variants\)\n"
    assert re.fullmatch(line, captured.err)


def test_variants_of_several_proteins_keep_their_order(
    models: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, output = tmp_path / "variants.tsv", tmp_path / "effects.tsv"
    table.write_text(
        "name\tvariant\tDMS_score\nP3\tW1A\t1\nP1\tK2G:T3L\t1\nP3\tW3C\t2\nP1\tM1A\t1\n"
    )
    assert main(words_for(models, fasta, table, output)) == 0
    lines = [line.split("\t") for line in output.read_text().splitlines()]
    assert [line[:2] for line in lines] == [
        ["name", "variant"],
        *(["P3", "W1A"], ["P1", "K2G:T3L"], ["P3", "W3C"], ["P1", "M1A"]),
    ]
    (p3_first, p3_second), (p1_first, p1_second) = (
        effects_of(models, "P3", ["W1A", "W3C"]),
        effects_of(models, "P1", ["K2G:T3L", "M1A"]),
    )
    np.testing.assert_allclose(
        [float(line[-1]) for line in lines[1:]],
        [p3_first, p1_first, p3_second, p1_second],
        atol=1e-6,
    )
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("P3: Spearman's rho with DMS_score ")
    assert said[1] == "P1: no rank correlation with DMS_score: 2 variants, no spread"


def test_a_single_column_needs_no_quotes(models: Path, wild_type: Path, tmp_path: Path) -> None:
    table, output = tmp_path / "variants.csv", tmp_path / "effects.csv"
    table.write_text("mutation\nM1A,K2G\n\nM1A\n")
    assert main(words_for(models, wild_type, table, output)) == 0
    assert [row["mutation"] for row in written(output)] == ["M1A,K2G", "M1A"]


def test_an_offset_shifts_the_numbering(models: Path, wild_type: Path, tmp_path: Path) -> None:
    table, output = tmp_path / "variants.csv", tmp_path / "effects.csv"
    table.write_text("mutant\nM25A\nR34W\n")
    words = words_for(models, wild_type, table, output)
    assert main([*words, "--mutation_offset", "24"]) == 0
    scores = [float(row["d2plm_score"]) for row in written(output)]
    np.testing.assert_allclose(scores, effects_of(models, "P1", ["M1A", "R10W"]), atol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "variants.csv: no such file"),
        ("", "variants.csv: is empty; give another file"),
        ("mutant\n", "variants.csv: has no rows"),
        ("mutants,x\nM1A,1\n", "no column of variants; name it mutant or mutation or variant (did"),
        ("a,b\nM1A,1\n", "(it has: 'a', 'b')"),
        ("mutant,d2plm_score\nM1A,1\n", "has a column d2plm_score already; rename or remove it"),
        ("mutant,x\nM1A,1\nM1A,K2G,1\n", "(Expected 2 fields in line 3, saw 3); quote cells"),
        ("mutant,x\nM1A,1\nM1A\n", "row 2: has fewer cells than the header"),
        ('mutant,x\nM1A,"1"2\n', "not a readable CSV file"),
        ("mutant\nM1A\nM1\n", "row 2: 'M1' is not a variant; write"),
        ("mutant\nM1A\nM1B\n", "row 2: 'M1B' has 'B', which has no probability under the model"),
        ("mutant\nM1A\nM11A\n", "row 2: M11A: 'P1' has the positions 1 to 10; check the sequence"),
        ("mutant\nK1A\n", "row 1: K1A: 'P1' has M at position 1, not K; check the sequence and"),
        ("mutant\nM25A\nT27L\nR34W\n", "row 1: M25A: 'P1' has the positions 1 to 10; all its va"),
        ("mutant,DMS_score\nM1A,high\n", "row 1: DMS_score 'high' is not a number; leave it empty"),
    ],
)
def test_a_table_that_cannot_be_scored_is_rejected_with_file_and_row(
    content: str | None,
    message: str,
    models: Path,
    wild_type: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table, output = tmp_path / "variants.csv", tmp_path / "effects.csv"
    if content is not None:
        table.write_text(content)
    line = refusal(capsys, *words_for(models, wild_type, table, output)[1:])
    key = "" if content else "mutations="  # errors for a missing or empty file name its key
    assert line.startswith(f"d2plm: error: {key}{table}")
    assert message in line
    assert not output.exists()


@pytest.mark.parametrize(
    ("records", "content", "message"),
    [
        (">P1\nMK\n>P2\nMK\n", "mutant\nM1A\n", "has 2 proteins; add a column name"),
        (">P1\nMK\n>P1\nMK\n", "mutant,name\nM1A,P1\n", "'P1' names the record on line 1 and"),
        (">P1\nMK\n>Q9\nMK\n", "mutant,name\nM1A,P2\n", "row 1: "),
        (f">P1\n{'M' * 127}\n", "mutant\nM1A\n", "record 'P1' has 127 residues"),
        ("", "mutant\nM1A\n", "is empty"),
    ],
)
def test_invalid_wild_types_are_rejected(
    records: str,
    content: str,
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fasta, table = tmp_path / "wildtypes.fasta", tmp_path / "variants.csv"
    fasta.write_text(records)
    table.write_text(content)
    line = refusal(capsys, *words_for(models, fasta, table, tmp_path / "o.csv")[1:])
    assert message in line
