"""Figures are readable whatever the names and numbers: no text is cut or covers another."""

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from d2plm.evaluation.family_bound import plot_family
from d2plm.evaluation.plots import plot, plot_new_members
from d2plm.evaluation.result import GENERATED, NATURAL, Evaluation, Quality, SequenceSet
from d2plm.evaluation.summary import HeldOut, summarise
from d2plm.export.report_figures import DESCRIPTIONS, draw
from d2plm.generation.lengths import LengthHistogram
from tests.evaluations import invented_baselines, invented_given_relatives, invented_scores

N = 24
RESIDUES = np.random.default_rng(0).integers(50, 300, N)
LONG = "runs/a_folder_with_a_long_name/flow_matching_uniform/model"
HINTING = 0.1  # inches; text is measured as pixels of 1/72 inch
LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def sequence_set(random: np.random.Generator) -> SequenceSet:
    return SequenceSet(
        sequences=100,
        tokens=9_000,
        token_kl=0.1,
        length_ks=0.1,
        ngram_js={},
        longest_run_mean=2,
        longest_run_max=4,
        duplicate_share=0,
        in_training_share=0,
        hit_share=0.6,
        residue_frequencies=dict(zip(LETTERS, random.dirichlet(np.ones(20)), strict=True)),
        length_histogram=random.integers(1, 9, 20).tolist(),
        identity_histogram=[40, *[3] * 15, *[5] * 3, 0],
    )


@pytest.fixture
def quality() -> Quality:
    random = np.random.default_rng(0)
    sets = (GENERATED, NATURAL, "composition", "shuffled")
    frequencies = dict.fromkeys(LETTERS, 0.05)
    return Quality({}, {name: sequence_set(random) for name in sets}, [1, 4, 9], frequencies)


@pytest.fixture(params=[2.6, 3.3], ids=["below the baselines", "above them"])
def evaluation(request: pytest.FixtureRequest, quality: Quality) -> Evaluation:
    return summarise(
        invented_scores(RESIDUES, request.param),
        {LONG: invented_scores(RESIDUES, 2.8, 1)},
        HeldOut(RESIDUES, np.arange(N) % 8, invented_baselines(RESIDUES), np.linspace(0, 0.95, N)),
        LengthHistogram.of(RESIDUES, 400),
        given_relatives=invented_given_relatives(),
        quality=quality,
        settings={},
        digests={},
    )


@pytest.fixture
def metrics() -> list[dict[str, float]]:
    steps = 2_000_000 * np.arange(1, 41)
    rows = [
        {"step": step, "loss": 2.9 - place / 80, "learning_rate": 3e-6, "tokens_per_second": 2e6}
        for place, step in enumerate(steps)
    ]
    return [*rows, *({"step": step, "validation_perplexity": 17.5} for step in steps[::10])]


@pytest.fixture
def members() -> dict[str, Any]:
    random = np.random.default_rng(0)
    kinds = (GENERATED, "natural members", "crossovers of two", "mosaics of eight")

    def proteins() -> list[dict[str, Any]]:
        return [
            {"plane": random.normal(0, 5, 2).tolist(), "identity": 0.7, "bits": 400}
            for _ in range(10)
        ]

    sets = {name: {"proteins": proteins()} for name in (*kinds, "columns, sharpened")}
    rows = [{"name": LONG, "set": kinds[0], "columns": LETTERS * 5} for _ in range(4)]
    return {"sets": sets, "threshold_bits": 25.0, "alignment": rows}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, each of them readable."""
    figures, save = [], Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        figure.dpi = options.get("dpi", 72)  # as it was drawn; an SVG has points
        assert_readable(figure)  # now, since the number of ticks depends on the settings
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def assert_readable(figure: Figure) -> None:
    """Nothing leaves the figure; no label, legend or title covers another; the axes have room."""
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    beyond = (-drawn.x0, -drawn.y0, drawn.x1 - width, drawn.y1 - height)
    assert max(beyond) < HINTING, beyond
    labels: list[Any] = []
    for axes in figure.axes:
        assert axes.get_window_extent().width > 0.3 * axes.get_figure(False).bbox.width
        labels += [axes.xaxis.label, axes.yaxis.label, axes.title, axes.get_legend()]
        for axis in (axes.xaxis, axes.yaxis):
            shown = [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]
            for one, other in pairwise(shown if axis is axes.yaxis or not rotated(shown) else []):
                assert not overlap(one, other), (one, other)
    legible = [one for one in labels if one is not None and getattr(one, "get_text", str)() != ""]
    for one, other in combinations(legible, 2):
        assert not overlap(one, other), (one, other)


def rotated(labels: list[Any]) -> bool:
    return any(label.get_rotation() for label in labels)


def overlap(one: Any, other: Any) -> bool:
    first, second = one.get_window_extent().padded(-1), other.get_window_extent().padded(-1)
    return bool(first.overlaps(second))


def test_the_report_s_figures_are_readable(
    evaluation: Evaluation,
    metrics: list[dict[str, float]],
    members: dict[str, Any],
    saved: list[Figure],
) -> None:
    drawn = draw(evaluation, metrics, evaluation.quality, members)
    assert drawn.keys() == DESCRIPTIONS.keys()
    assert len(saved) == len(drawn)


def test_the_pictures_are_readable(
    evaluation: Evaluation,
    metrics: list[dict[str, float]],
    members: dict[str, Any],
    saved: list[Figure],
    tmp_path: Path,
) -> None:
    plot(evaluation, metrics, tmp_path / "evaluation.png", "demo: diffusion")
    plot_new_members(members, tmp_path / "members.png")
    plot_family({LONG: evaluation.model, "b": evaluation.model}, tmp_path / "family.png")
    assert len(saved) == 3


@pytest.mark.parametrize("held_out", [True, False])
def test_the_training_curve_is_drawn_however_far_it_is_from_the_held_out_one(
    held_out: bool, saved: list[Figure]
) -> None:
    rows = [{"step": step, "loss": 1.0} for step in range(1, 9)]
    rows += [{"step": 8, "validation_perplexity": 17.5}] * held_out
    draw(None, rows, None, None)
    *above, training = saved[0].axes
    assert training.lines[0].get_ydata() == pytest.approx(np.e)
    assert [axes.lines[0].get_ydata() for axes in above] == [[17.5]] * held_out
