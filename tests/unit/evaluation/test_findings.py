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
    nats = {name.replace("gram", "-gram"): RESIDUES * value for name, value in baselines.items()}
    return summarise(
        invented_scores(RESIDUES, model, noise=noise),
        {},
        HeldOut(RESIDUES, np.arange(N) % clusters, nats),
        LengthHistogram.of(RESIDUES, 400),
        quality=None,
        settings={},
        digests={},
    )


def _5gram(value: float) -> dict[str, float]:
    return {"5gram": value}


def test_a_family_model_that_beats_composition_and_loses_to_the_5_gram_is_called_worse() -> None:
    found = evaluation(2.5, uniform=3.0, composition=2.85, **_5gram(2.3))
    finding = judge(found)
    assert (finding.difference.verdict, finding.baseline, finding.tone) == (
        Verdict.WORSE,
        "5-gram",
        "bad",
    )
    assert finding.headline.startswith("Worse than the best baseline, 5-gram: perplexity 12.")
    assert "has learnt something of the order of residues" in finding.details[0]
    assert "The 5-gram baseline" in finding.details[1]


def test_a_model_below_the_best_baseline_is_better() -> None:
    finding = judge(evaluation(2.5, uniform=3.0, composition=2.85, **_5gram(2.9)))
    assert (finding.difference.verdict, finding.baseline, finding.tone) == (
        Verdict.BETTER,
        "composition",
        "good",
    )
    assert "30 % below that of the composition baseline" in finding.details[0]
    beats_both = judge(evaluation(2.2, uniform=3.0, composition=2.85, **_5gram(2.3)))
    assert (beats_both.difference.verdict, beats_both.baseline) == (Verdict.BETTER, "5-gram")


def test_a_small_gain_over_composition_is_called_little() -> None:
    finding = judge(evaluation(2.84, uniform=3.0, composition=2.85))
    assert (finding.difference.verdict, finding.tone) == (Verdict.BETTER, "mixed")
    assert "has learnt little" in finding.details[0] and "1.0 %" in finding.details[0]


def test_a_model_whose_interval_contains_zero_is_not_shown_to_be_better() -> None:
    finding = judge(evaluation(2.85, noise=0.05, uniform=3.0, composition=2.85))
    assert finding.difference.ends[0] < 0 < finding.difference.ends[1]
    assert (finding.difference.verdict, finding.tone) == (Verdict.UNDECIDED, "bad")
    assert finding.headline.startswith("Not shown to differ from the best baseline, composition")
    assert "treat its proteins as random sequences" in finding.details[0]


def test_a_model_above_composition_is_worse() -> None:
    finding = judge(evaluation(2.9, uniform=3.0, composition=2.85))
    assert (finding.difference.verdict, finding.tone) == (Verdict.WORSE, "bad")
    assert "worse than the composition baseline" in finding.details[0]


def test_one_cluster_decides_nothing() -> None:
    finding = judge(evaluation(2.5, clusters=1, uniform=3.0, composition=2.85))
    assert finding.difference.interval is None
    assert (finding.difference.verdict, finding.tone) == (Verdict.UNDECIDED, "mixed")
    assert "one homology cluster" in finding.details[0]


def test_an_evaluation_of_another_version_or_damaged_is_rejected(tmp_path: Path) -> None:
    assert read_evaluation(tmp_path) is None
    for content, words in (
        ('{"format_version": 3}', "run d2plm evaluate again"),
        ("{", "cannot be read"),
        ("[]", "no JSON object"),
    ):
        (tmp_path / "evaluation.json").write_text(content)
        with pytest.raises(DataError, match=words):
            read_evaluation(tmp_path)
