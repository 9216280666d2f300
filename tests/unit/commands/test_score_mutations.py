"""`d2plm score` of a mutational scan given relatives: each predictor with its interval."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm import load_model
from d2plm.cli import main
from d2plm.core.vocabulary import decode
from d2plm.evaluation.rank_correlation import rank_correlation
from d2plm.export.exported_model import save_export
from d2plm.families.mutation_effects import FamilyEffects
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from tests.conftest import Captured, Exports
from tests.unit.families.known_sites import likeliest, measured_effects, members, singles

TERMS = ["d2plm_score", "d2plm_profile_score", "d2plm_pairs_score", "d2plm_blosum62_score"]
# Every third position's.
CHOSEN = [place for place, one in enumerate(singles()) if one.positions[0] % 3 == 0]
VARIANTS, MEASURED = [singles()[place] for place in CHOSEN], measured_effects()[CHOSEN]
COLUMNS = [*TERMS, "d2plm_model_score", "d2plm_model_alone_score"]


@pytest.fixture
def folder(exports: Exports) -> Path:
    return exports.related


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """The folder of wt.fasta, family.fasta and scan.csv, which is in ProteinGym's format."""
    wild_type = decode(likeliest())
    (tmp_path / "wt.fasta").write_text(f">WT\n{wild_type}\n")
    records = (f">m{i}\n{decode(one)}\n" for i, one in enumerate(members(30)))
    (tmp_path / "family.fasta").write_text("".join([*records, f">itself\n{wild_type}\n"]))
    with (tmp_path / "scan.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"])
        for variant, effect in zip(VARIANTS, MEASURED, strict=True):
            changed, (place,) = likeliest().copy(), variant.positions
            changed[place] = variant.mutants[0]
            text = decode(changed)
            mutant = f"{wild_type[place]}{place + 1}{text[place]}"
            writer.writerow([mutant, text, f"{effect:.6f}", int(effect > np.median(MEASURED))])
    return tmp_path


def words(folder: Path, scan: Path, *more: str) -> list[str]:
    paths = [f"input={scan / 'wt.fasta'}", f"mutations={scan / 'scan.csv'}"]
    return ["score", f"model_dir={folder}", "precision=fp32", "device=cpu", *paths, *more]


def test_each_predictor_is_correlated(folder: Path, scan: Path, capsys: Captured) -> None:
    output = scan / "effects.csv"
    more = (f"relatives={scan / 'family.fasta'}", "max_relatives=2", f"output={output}")
    assert main(words(folder, scan, *more)) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    before = ["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"]
    assert [*rows[0]] == [*before, *COLUMNS]
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


def test_the_correlations_are_numbers_in_json(folder: Path, scan: Path, capsys: Captured) -> None:
    assert main([*words(folder, scan), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    correlation, _ = document["correlations"]
    assert {*correlation} == {"name", "score", "changes", "variants", "rho", "low", "high"}
    assert (correlation["name"], correlation["score"]) == ("WT", "d2plm_score")
    assert correlation["variants"] == len(VARIANTS)
    assert correlation["low"] < correlation["rho"] < correlation["high"]
    assert "d2plm_model_alone_score" not in document


@pytest.mark.parametrize("kind", ["a uniform source", "too short"])
def test_relatives_score_what_the_model_cannot(
    kind: str, scan: Path, tmp_path: Path, tiny_dit: Callable[..., Any], capsys: Captured
) -> None:
    model = tiny_dit() if kind == "a uniform source" else tiny_dit(max_position_embeddings=32)
    paradigm = UniformFlowMatching() if kind == "a uniform source" else MaskFlowMatching()
    lengths = LengthHistogram.of(np.array([9]), model.config.max_position_embeddings - 2)
    export = save_export(tmp_path / "plain", model, paradigm, lengths, {})
    capsys.readouterr()
    assert main(words(export, scan, f"relatives={scan / 'family.fasta'}", "output=-")) == 0
    said = capsys.readouterr()
    assert "WT: only its relatives score it (" in said.err
    assert said.out.splitlines()[0].endswith("DMS_score_bin," + ",".join(TERMS))
    assert not Path("-").exists()
