"""`d2plm score` of a mutational scan given relatives: each predictor with its interval."""

import csv
import json
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
from d2plm.paradigms.paradigm import Paradigm
from tests.conftest import Captured, DiTFactory, Exports
from tests.unit.families.known_sites import likeliest, measured_effects, members, singles

TERMS = ["d2plm_score", "d2plm_profile_score", "d2plm_pairs_score", "d2plm_blosum62_score"]
# Every third position's.
CHOSEN = [place for place, one in enumerate(singles()) if one.positions[0] % 3 == 0]
VARIANTS, MEASURED = [singles()[place] for place in CHOSEN], measured_effects()[CHOSEN]
GIVEN = ["mutant", "mutated_sequence", "DMS_score", "DMS_score_bin"]
COLUMNS = [*TERMS, "d2plm_model_score", "d2plm_model_alone_score"]


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    """The folder of wt.fasta, family.fasta and scan.csv, which is in ProteinGym's format."""
    wild_type = decode(likeliest())
    (tmp_path / "wt.fasta").write_text(f">WT\n{wild_type}\n")
    records = (f">m{i}\n{decode(one)}\n" for i, one in enumerate(members(30)))
    (tmp_path / "family.fasta").write_text("".join([*records, f">itself\n{wild_type}\n"]))
    rows = [",".join(GIVEN)]
    for variant, effect in zip(VARIANTS, MEASURED, strict=True):
        changed, (place,) = likeliest().copy(), variant.positions
        changed[place] = variant.mutants[0]
        text = decode(changed)
        rows.append(f"{wild_type[place]}{place + 1}{text[place]},{text},{effect:.6f},0")
    (tmp_path / "scan.csv").write_text("\n".join(rows))
    return tmp_path


def words(folder: Path, scan: Path, *more: str) -> list[str]:
    paths = [f"input={scan / 'wt.fasta'}", f"mutations={scan / 'scan.csv'}"]
    return ["score", f"model_dir={folder}", "precision=fp32", "device=cpu", *paths, *more]


def test_each_predictor_is_correlated(exports: Exports, scan: Path, capsys: Captured) -> None:
    folder, output = exports.related, scan / "effects.csv"
    more = (f"relatives={scan / 'family.fasta'}", "max_relatives=2", f"output={output}")
    assert main(words(folder, scan, *more)) == 0
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


def test_json_has_the_correlations(exports: Exports, scan: Path, capsys: Captured) -> None:
    assert main([*words(exports.related, scan), "--json"]) == 0
    correlation, _ = json.loads(capsys.readouterr().out)["correlations"]
    expected = {"name": "WT", "score": "d2plm_score", "variants": len(VARIANTS)}
    assert correlation == {**correlation, **expected}
    assert correlation["low"] < correlation["rho"] < correlation["high"]


@pytest.mark.parametrize(
    ("paradigm", "longest"), [(UniformFlowMatching(), 128), (MaskFlowMatching(), 32)]
)
def test_relatives_score_what_the_model_cannot(
    paradigm: Paradigm, longest: int, scan: Path, tiny_dit: DiTFactory, capsys: Captured
) -> None:
    model: Any = tiny_dit(max_position_embeddings=longest)
    lengths = LengthHistogram.of(np.array([9]), longest - 2)
    export = save_export(scan / "plain", model, paradigm, lengths, {})
    capsys.readouterr()
    assert main(words(export, scan, f"relatives={scan / 'family.fasta'}", "output=-")) == 0
    said = capsys.readouterr()
    assert "WT: only its relatives score it (" in said.err
    assert said.out.splitlines()[0].endswith("DMS_score_bin," + ",".join(TERMS))
    assert not Path("-").exists()
