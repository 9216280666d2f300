"""The report: JSON that says what was measured, and tables that say the same."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from d2plm.core.errors import ConfigError
from d2plm.core.estimate import Verdict
from d2plm.evaluation import result
from d2plm.evaluation.comparison import Run, compare, comparison_table, plot_comparison
from d2plm.evaluation.likelihood import FRACTION_BINS, SequenceScores, corpus_estimate
from d2plm.evaluation.plots import plot
from d2plm.evaluation.result import MODEL, Evaluation, read_evaluation
from d2plm.evaluation.summary import HeldOut
from d2plm.evaluation.tables import as_text
from tests.evaluations import invented_baselines, invented_scores, summary

N = 60
RANDOM = np.random.default_rng(0)
RESIDUES = RANDOM.integers(50, 300, N)
CLUSTERS = RANDOM.integers(0, 20, N)
IDENTITIES = np.arange(N) / N  # both edges of the bins included


def scores(per_residue: float, seed: int = 0, masked: bool = True) -> SequenceScores:
    return invented_scores(RESIDUES, per_residue, seed, masked=masked)


def held_out(clusters: NDArray[Any] = CLUSTERS) -> HeldOut:
    return HeldOut(RESIDUES + 5, clusters, invented_baselines(RESIDUES), IDENTITIES)


def evaluated(ours: SequenceScores, proteins: HeldOut | None = None, **others: Any) -> Evaluation:
    return summary(ours, proteins or held_out(), others, digests={"train": "t", "validation": "v"})


def test_the_figures_are_those_of_the_nats(tmp_path: Path) -> None:
    ours = scores(2.85)
    found = evaluated(ours)
    nats = ours.draws.mean(axis=1)
    assert found.model.nelbo == corpus_estimate(nats, RESIDUES, CLUSTERS)
    assert found.model.perplexity.value == pytest.approx(math.exp(nats.sum() / RESIDUES.sum()))
    difference = (nats.sum() - 2.89 * RESIDUES.sum()) / RESIDUES.sum()
    assert found.baselines["composition"].difference.value == pytest.approx(difference)
    esm = evaluated(ours, esm=scores(2.80, seed=1)).others["esm"]
    assert esm.difference.value == pytest.approx(0.05, abs=0.01)
    rows = found.calibration[MODEL]
    assert len(rows) == FRACTION_BINS
    assert all(row.cross_entropy.value == pytest.approx(2.9) for row in rows)
    result.write_evaluation(tmp_path, found)
    assert read_evaluation(tmp_path) == found


def test_each_identity_bin_has_the_figures_of_its_own_proteins() -> None:
    ours = scores(2.85)
    found, chosen = evaluated(ours).by_identity or {}, IDENTITIES > 0.5
    assert [row.sequences for row in found.values()] == [
        int((IDENTITIES < 0.3).sum()),
        int(((IDENTITIES >= 0.3) & (IDENTITIES <= 0.5)).sum()),
        int(chosen.sum()),
    ]
    last, residues = found["> 50 %"], RESIDUES[chosen].sum()
    assert last.residues == residues and last.model is not None
    assert last.model.nelbo.value == pytest.approx(ours.nats[chosen].sum() / residues)
    assert last.clusters == len(set(CLUSTERS[chosen].tolist()))
    proteins = HeldOut(RESIDUES, CLUSTERS, held_out().baselines, np.zeros(N))
    none = evaluated(ours, proteins=proteins).by_identity or {}
    assert none["> 50 %"] == result.IdentityBin(0, 0, 0, None, None)


def test_a_model_without_masks_on_one_cluster_has_fewer_figures(tmp_path: Path) -> None:
    found = evaluated(scores(2.85, masked=False), proteins=held_out(np.zeros(N, dtype=int)))
    assert found.model.perplexity_mlm15 is None
    assert found.model.perplexity.interval is None
    assert found.baselines["composition"].difference.interval is None
    json.dumps(asdict(found), allow_nan=False)
    assert "MLM-15" not in as_text(found)
    assert found.estimator.startswith("time-reversal bound")
    plot(found, [], tmp_path / "plot.png", "t")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def run(per_residue: float, seed: int, validation: str = "v") -> Run:
    found = evaluated(scores(per_residue, seed))
    found = replace(found, digests={**found.digests, "validation": validation})
    return Run(found, scores(per_residue, seed).nats, RESIDUES, CLUSTERS)


def arms(**per_residue: float) -> dict[str, dict[int, Run]]:
    return {
        arm: {seed: run(nats, seed + 10 * place) for seed in range(3)}
        for place, (arm, nats) in enumerate(per_residue.items())
    }


def test_a_comparison_averages_the_seeds_nats(tmp_path: Path) -> None:
    runs = arms(diffusion=2.85, flow=2.80)
    found = compare(runs)
    mean = np.mean([r.nats for r in runs["flow"].values()], axis=0)
    base = np.mean([r.nats for r in runs["diffusion"].values()], axis=0)
    flow = found.arms["flow"]
    assert flow.perplexity.value == pytest.approx(math.exp(mean.sum() / RESIDUES.sum()))
    assert flow.difference == corpus_estimate(mean - base, RESIDUES, CLUSTERS)
    assert (flow.verdict, flow.better_than_baseline) == (Verdict.BETTER, 3)
    seeds = [*flow.seed_differences.values()]
    interval = stats.t.interval(0.95, 2, loc=np.mean(seeds), scale=stats.sem(seeds, ddof=1))
    assert flow.seed_interval == pytest.approx([*interval])
    assert "better than diffusion" in comparison_table(found).markdown()
    plot_comparison(found, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 5_000


def test_seeds_that_disagree_show_nothing() -> None:
    runs = arms(diffusion=2.85, flow=2.85)
    runs["flow"] = {0: run(2.80, 1), 1: run(2.80, 2), 2: run(2.86, 3)}
    found = compare(runs).arms["flow"]
    assert found.difference is not None and found.difference.verdict is Verdict.BETTER
    assert found.verdict is Verdict.UNDECIDED
    alone = compare({arm: {0: runs[arm][0]} for arm in runs}).arms["flow"]
    assert alone.difference is not None and alone.difference.verdict is Verdict.BETTER
    assert (alone.seed_interval, alone.verdict) == (None, Verdict.UNDECIDED)


def test_arms_on_other_proteins_or_lengths_are_rejected() -> None:
    cut = run(2.8, 1)
    shorter = Run(cut.evaluation, cut.nats, np.minimum(cut.residues, 60), cut.clusters)
    for other in (shorter, run(2.8, 1, validation="w")):
        runs = arms(diffusion=2.85, flow=2.80)
        runs["flow"][2] = other
        with pytest.raises(ConfigError, match="arm flow, seed 2"):
            compare(runs)
