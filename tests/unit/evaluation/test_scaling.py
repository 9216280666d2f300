"""The scaling law: known constants are recovered, and undetermined ones are reported."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from d2plm.core.errors import ConfigError
from d2plm.evaluation import scaling
from d2plm.evaluation.scaling import Law, Point, Power, analyse, fit_law, optimum

CHINCHILLA = Law(1.69, 406.4, 0.34, 410.7, 0.28)  # arXiv:2203.15556, table of approach 3
TOY = Law(2.7, 1.2, 0.3, 30.0, 0.4)
SIZES, BUDGETS = (1e5, 4e5, 1.6e6), (6e5, 1.8e6, 5.4e6)
N, D = (grid.ravel() for grid in np.meshgrid(SIZES, BUDGETS, indexing="ij"))


def noisy(law: Law, noise: float, seed: int = 0) -> Any:
    return law.loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, N.shape))


def points(losses: Any, flops_per_token: float = 6.0) -> list[Point]:
    return [
        Point(f"{n / 1e6:g}M", int(n), int(d), float(flops_per_token * n * d), float(loss))
        for n, d, loss in zip(N, D, losses, strict=True)
    ]


@pytest.mark.parametrize(
    ("law", "sizes", "budgets"),
    [
        (CHINCHILLA, [7e7, 4e8, 2.5e9, 1.6e10], [1e9, 1e10, 1e11, 5e11]),
        (Law(2.0, 5.0, 0.25, 200.0, 0.6), SIZES, BUDGETS),
    ],
)
def test_the_constants_of_a_known_law_come_back(law: Law, sizes: Any, budgets: Any) -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(sizes, budgets))
    assert astuple(fit_law(n, d, law.loss(n, d))) == pytest.approx(astuple(law), rel=1e-3)


def test_one_run_that_went_wrong_hardly_moves_the_law() -> None:
    losses = TOY.loss(N, D)
    losses[4] *= 1.05
    law = fit_law(N, D, losses)
    assert np.delete(law.loss(N, D), 4) == pytest.approx(np.delete(TOY.loss(N, D), 4), rel=1e-3)


LOSSES = TOY.loss(N, D)


@pytest.mark.parametrize(
    ("n", "d", "losses"),
    [
        (N[:5], D[:5], LOSSES[:5]),
        (N[:6], D[:6], LOSSES[:6]),
        (D[:6], N[:6], LOSSES[:6]),
        (N, D, np.full(9, 2.9)),
        (N, D, [*LOSSES[:8], np.nan]),
        (N, [*D[:8], 0.0], LOSSES),
        (N, D, LOSSES[:8]),
    ],
)
def test_runs_that_determine_no_law_are_rejected(n: Any, d: Any, losses: Any) -> None:
    with pytest.raises(ConfigError):
        fit_law(n, d, losses)


@pytest.mark.parametrize(("cost", "flops"), [(Power(6.0, 1.0), 1e12), (Power(40.0, 0.85), 1e15)])
def test_the_optimal_size_is_the_least_loss_of_the_compute(cost: Power, flops: float) -> None:
    def loss(log_n: float) -> float:
        n = np.exp(log_n)
        return float(TOY.loss(n, flops / (cost.coefficient * n**cost.exponent)))

    found = minimize_scalar(loss, bounds=(np.log(1e2), np.log(1e10)), method="bounded")
    size, tokens = optimum(TOY, cost, flops)
    assert size == pytest.approx(np.exp(found.x), rel=1e-2)
    assert cost.coefficient * size**cost.exponent * tokens == pytest.approx(flops)


def test_a_law_that_the_runs_determine_leaves_nothing_open(tmp_path: Path) -> None:
    results = analyse(points(noisy(TOY, 1e-5)), resamples=15)
    assert results["undetermined"] == []
    assert results["relative_residual"] < 1e-4
    frontier = results["frontier"]
    assert frontier["exponent"] == pytest.approx(0.4 / 0.7, rel=0.02)
    low, high = frontier["exponent_interval"]
    assert low < 0.4 / 0.7 < high
    wide = analyse(points(noisy(TOY, 1e-4)), resamples=15)["frontier"]["exponent_interval"]
    assert high - low < (wide[1] - wide[0]) / 3
    lines = scaling.scaling_table(results).splitlines()
    assert sum(line.startswith(("| 0.", "| 1.6M")) for line in lines) == 9
    assert [*results["power_laws"]] == ["0.1M", "0.4M", "1.6M"]
    assert all(-0.2 < power["exponent"] < 0 for power in results["power_laws"].values())
    scaling.plot_scaling(results, tmp_path / "plots" / "scaling.png")
    assert (tmp_path / "plots" / "scaling.png").stat().st_size > 10_000


def test_what_noise_leaves_open_and_a_size_without_effect_are_said() -> None:
    results = analyse(points(noisy(TOY, 3e-3)), resamples=15)
    assert "α is not determined" in " ".join(results["undetermined"])
    no_effect = Law(2.7, 1e-9, 0.3, 30.0, 0.4)
    results = analyse(points(noisy(no_effect, 1e-3)), resamples=15)
    assert any("effect of the size is not shown" in line for line in results["undetermined"])
    assert not any("effect of the data" in line for line in results["undetermined"])
