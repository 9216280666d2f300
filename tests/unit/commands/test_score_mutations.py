"""`d2plm score` of a mutational scan given relatives: three predictors, each with its interval."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d2plm.evaluation.site_independent import site_independent_effects

from d2plm import load_model
from d2plm.cli import main
from d2plm.core.vocabulary import decode
from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.flow_matching import MaskFlowMatching
from tests.unit.families.known_sites import likeliest, measured_effects, members, singles

COLUMNS = ["d2plm_score", "d2plm_score_alone", "d2plm_profile_score"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    """An export of random weights that takes relatives."""
    path, lengths = (
        tmp_path_factory.mktemp("scan") / "model",
        LengthHistogram.of(np.array([9]), 126),
    )
    return save_export(path, tiny_dit(relatives_dim=8), MaskFlowMatching(), lengths, {})


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """The folder of wt.fasta, family.fasta and scan.csv, which is in ProteinGym's format."""
    wild_type = decode(likeliest())
    (tmp_path / "wt.fasta").write_text(f">WT\n{wild_type}\n")
    records = (f">m{i}\n{decode(one)}\n" for i, one in enumerate(members(60)))
    (tmp_path / "family.fasta").write_text("".join([*records, f">itself\n{wild_type}\n"]))
    measured = measured_effects()
    with (tmp_path / "scan.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"])
        for variant, effect in zip(singles(), measured, strict=True):
            changed, (place,) = likeliest().copy(), variant.positions
            changed[place] = variant.mutants[0]
            text = decode(changed)
            mutant = f"{wild_type[place]}{place + 1}{text[place]}"
            writer.writerow([mutant, text, f"{effect:.6f}", int(effect > np.median(measured))])
    return tmp_path


def words(folder: Path, scan: Path, *more: str) -> list[str]:
    paths = [f"input={scan / 'wt.fasta'}", f"mutations={scan / 'scan.csv'}"]
    return ["score", f"model_dir={folder}", "precision=fp32", "device=cpu", *paths, *more]


def test_profile_model_and_model_given_relatives_are_each_correlated_with_the_scan(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = scan / "effects.csv"
    more = (f"relatives={scan / 'family.fasta'}", "max_relatives=2", f"output={output}")
    assert main(words(folder, scan, *more)) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    before = ["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"]
    assert [*rows[0]] == [*before, *COLUMNS]
    scores = {name: np.array([float(row[name]) for row in rows]) for name in COLUMNS}
    family, mutants = [decode(one) for one in members(60)], [row["mutant"] for row in rows]
    model, wild_type = load_model(folder, device="cpu", precision="fp32"), decode(likeliest())
    given = model.score_mutations(wild_type, mutants, relatives=family, max_relatives=2)
    np.testing.assert_allclose(scores["d2plm_score"], given, atol=1e-5)
    alone = model.score_mutations(wild_type, mutants)
    np.testing.assert_allclose(scores["d2plm_score_alone"], alone, atol=1e-5)
    assert not np.allclose(given, alone, atol=1e-3)
    profile = site_independent_effects(likeliest(), singles(), members(60))
    np.testing.assert_allclose(scores["d2plm_profile_score"], profile, atol=1e-5)

    measured = np.array([float(row["DMS_score"]) for row in rows])
    found = {name: rank_correlation(scores[name], measured, singles()) for name in COLUMNS}
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("1,140 variants in column 'mutant', measured in 'DMS_score', offset 0")
    assert said[1:] == [f"WT, {name}: {found[name]}" for name in COLUMNS]
    assert found["d2plm_profile_score"].low > 0.6
    assert found["d2plm_score_alone"].low < 0 < found["d2plm_score_alone"].high  # random weights


def test_the_correlations_are_numbers_for_another_program(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(folder, scan), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (correlation,) = document["correlations"]
    assert {*correlation} == {"name", "score", "changes", "variants", "rho", "low", "high"}
    assert (correlation["name"], correlation["score"]) == ("WT", "d2plm_score")
    assert correlation["variants"] == len(singles())
    assert correlation["low"] < correlation["rho"] < correlation["high"]
    assert "d2plm_score_alone" not in document


def test_columns_that_would_be_written_twice_are_rejected(
    folder: Path, scan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scan / "scan.csv").write_text("mutant,d2plm_profile_score\nM1A,1\n")
    assert main(words(folder, scan, f"output={scan / 'out.csv'}")) == 1
    assert "has a column d2plm_profile_score already" in capsys.readouterr().err
