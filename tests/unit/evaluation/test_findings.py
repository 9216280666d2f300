"""The verdict: the best of all baselines decides, and every renderer says the same."""

from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.estimate import Verdict
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation, read_evaluation
from d2plm.evaluation.summary import HeldOut, summarise
from d2plm.generation.lengths import LengthHistogram
from tests.evaluations import invented_scores

N = 40
RESIDUES = np.full(N, 100)


def evaluation(
    model: float, clusters: int = 20, noise: float = 0.01, **baselines: float
) -> Evaluation:
    """The result of a model and baselines with these nats per residue."""
    baselines = {"uniform": 3.0, **baselines}
    nats = {name: RESIDUES * value for name, value in baselines.items()}
    return summarise(
        invented_scores(RESIDUES, model, noise=noise),
        {},
        HeldOut(RESIDUES, np.arange(N) % clusters, nats),
        LengthHistogram.of(RESIDUES, 400),
        quality=None,
        settings={},
        digests={},
    )


@pytest.mark.parametrize(
    ("found", "verdict", "baseline", "tone"),
    [
        (evaluation(2.5, composition=2.85, bigram=2.3), Verdict.WORSE, "bigram", "bad"),
        (evaluation(2.5, composition=2.85, bigram=2.9), Verdict.BETTER, "composition", "good"),
        (evaluation(2.2, composition=2.85, bigram=2.3), Verdict.BETTER, "bigram", "good"),
        (evaluation(2.84, composition=2.85), Verdict.BETTER, "composition", "mixed"),
        (evaluation(2.85, noise=0.05, composition=2.85), Verdict.UNDECIDED, "composition", "bad"),
        (evaluation(2.9, composition=2.85), Verdict.WORSE, "composition", "bad"),
        (evaluation(2.5, 1, composition=2.85), Verdict.UNDECIDED, "composition", "mixed"),
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
