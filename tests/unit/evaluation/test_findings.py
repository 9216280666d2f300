"""The verdict: the best of all baselines decides; what changes changes in every output."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.estimate import Estimate, Verdict, verdict
from d2plm.evaluation import tables
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation, read_evaluation, write_evaluation
from d2plm.evaluation.summary import HeldOut
from d2plm.export.model_card import model_card
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.tracking.description import description
from tests.conftest import MonkeyPatch
from tests.evaluations import invented_evaluation, invented_scores, summary

N = 40
RESIDUES = np.full(N, 100)


def of(model: float, clusters: int = 20, noise: float = 0.01, **baselines: float) -> Evaluation:
    """The result of a model and baselines with these nats per residue."""
    baselines = {"uniform": 3.0, **baselines}
    nats = {name: RESIDUES * value for name, value in baselines.items()}
    proteins = HeldOut(RESIDUES, np.arange(N) % clusters, nats)
    return summary(invented_scores(RESIDUES, model, noise=noise), proteins)


@pytest.mark.parametrize(
    ("found", "verdict", "baseline", "tone"),
    [
        (of(2.5, composition=2.85, bigram=2.3), Verdict.WORSE, "bigram", "bad"),
        (of(2.5, composition=2.85, bigram=2.9), Verdict.BETTER, "composition", "good"),
        (of(2.2, composition=2.85, bigram=2.3), Verdict.BETTER, "bigram", "good"),
        (of(2.84, composition=2.85), Verdict.BETTER, "composition", "mixed"),
        (of(2.85, noise=0.05, composition=2.85), Verdict.UNDECIDED, "composition", "bad"),
        (of(2.9, composition=2.85), Verdict.WORSE, "composition", "bad"),
        (of(2.5, 1, composition=2.85), Verdict.UNDECIDED, "composition", "mixed"),
    ],
    ids=["family", "better", "better than both", "little", "unshown", "worse", "one cluster"],
)
def test_the_best_baseline_decides(
    found: Evaluation, verdict: Verdict, baseline: str, tone: str
) -> None:
    finding = judge(found)
    assert (finding.difference.verdict, finding.baseline, finding.tone) == (verdict, baseline, tone)
    assert finding.headline.lower().startswith(f"{verdict} the best baseline, {baseline}: ")
    said = finding.details[0]
    assert ("learnt something" in said) == (tone == "good" or baseline == "bigram")
    assert ("as random sequences" in said) == (tone == "bad" and baseline == "composition")


def test_an_evaluation_of_another_version_or_damaged_is_rejected(tmp_path: Path) -> None:
    assert read_evaluation(tmp_path) is None
    for content in ('{"format_version": 3}', "{", "[]"):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(DataError, match="evaluation"):
            read_evaluation(tmp_path)


def outputs(evaluation: Evaluation, folder: Path) -> dict[str, str]:
    """What the terminal, the model card, the run's description and the report say."""
    write_evaluation(folder, evaluation)
    sizes = {"parameters": 1, "max_residues": 9}
    card = model_card(AbsorbingDiffusion(), {}, name="x", **sizes, evaluation=evaluation)
    (folder / "README.md").write_text(card)
    described = description(name="x", paradigm="diffusion", output_dir=folder, model_dir=folder)
    report = write_report(Sources(folder, folder / "model", folder / "data")).read_text()
    shown = {"terminal": tables.as_text(evaluation), "card": card}
    return {**shown, "description": described, "report": report}


def test_a_figure_changes_in_every_output(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("d2plm.export.report_page.draw", lambda *_: defaultdict(str))  # takes long
    evaluation = invented_evaluation(9, {"uniform": 20, "unigram": 18, "composition": 17})
    perplexity, difference = Estimate(7.654, (7.123, 7.987)), Estimate(0.4321, (0.1234, 0.5678))
    composition = replace(evaluation.baselines["composition"], difference=difference)
    changed = replace(
        evaluation,
        model=replace(evaluation.model, perplexity=perplexity),
        baselines={**evaluation.baselines, "composition": composition},
    )
    before, after = outputs(evaluation, tmp_path), outputs(changed, tmp_path)
    for name, text in after.items():
        for figure in ("7.654", "7.987", "+0.4321", "Worse than the best baseline, composition"):
            assert figure in text, name
            assert figure not in before[name], name


def test_a_verdict_needs_every_interval() -> None:
    below, above = (-0.2, -0.1), (0.1, 0.2)
    assert verdict(below) is verdict(below, below) is Verdict.BETTER
    assert verdict(above) is Verdict.WORSE
    for intervals in ([(-0.1, 0.1)], [(-0.1, 0.0)], [None], [below, above], [below, None]):
        assert verdict(*intervals) is Verdict.UNDECIDED
