"""One result, one renderer, one verdict: what changes in one place changes in every output."""

from dataclasses import replace
from pathlib import Path

import pytest

from d2plm.core.estimate import Estimate, Verdict, verdict
from d2plm.evaluation import tables
from d2plm.evaluation.result import Evaluation, read_evaluation, write_evaluation
from d2plm.export.model_card import model_card
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.tracking.description import description
from tests.evaluations import invented_evaluation


def outputs(evaluation: Evaluation, folder: Path) -> dict[str, str]:
    """What the terminal, the model card, the run's description and the report say."""
    write_evaluation(folder, evaluation)
    read = read_evaluation(folder)
    assert read == evaluation
    card = model_card(
        AbsorbingDiffusion(), {}, name="x", parameters=1, max_residues=9, evaluation=read
    )
    (folder / "README.md").write_text(card)
    described = description(name="x", paradigm="diffusion", output_dir=folder, model_dir=folder)
    report = write_report(Sources(folder, folder / "model", folder / "data")).read_text()
    return {
        "terminal": tables.as_text(read),
        "card": card,
        "description": described,
        "report": report,
    }


@pytest.fixture
def evaluation() -> Evaluation:
    return invented_evaluation(9, {"uniform": 20, "unigram": 18, "composition": 17})


def test_a_figure_changes_in_every_output(evaluation: Evaluation, tmp_path: Path) -> None:
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
