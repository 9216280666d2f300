"""The scaling law: known constants are recovered, and undetermined ones are reported."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from d2plm.core.errors import ConfigError
from d2plm.evaluation.scaling import (
    Law,
    Point,
    Power,
    analyse,
    fit_law,
    fit_power,
    optimum,
    plot_scaling,
    resampled_laws,
    scaling_table,
)

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


def constants(law: Law) -> list[float]:
    return [law.irreducible, law.size_coefficient, law.alpha, law.data_coefficient, law.beta]


@pytest.mark.parametrize(
    ("law", "sizes", "budgets"),
    [
        (CHINCHILLA, [7e7, 4e8, 2.5e9, 1.6e10], [1e9, 1e10, 1e11, 5e11]),
        (TOY, SIZES, BUDGETS),
        (Law(2.0, 5.0, 0.25, 200.0, 0.6), SIZES, BUDGETS),
    ],
)
def test_the_constants_of_a_known_law_come_back(law: Law, sizes: Any, budgets: Any) -> None:
    n, d = (grid.ravel() for grid in np.meshgrid(sizes, budgets))
    assert constants(fit_law(n, d, law.loss(n, d))) == pytest.approx(constants(law), rel=1e-3)


def test_the_constants_come_back_from_losses_with_noise() -> None:
    law = fit_law(N, D, noisy(TOY, 1e-4))
    assert law.irreducible == pytest.approx(2.7, rel=0.01)
    assert law.alpha == pytest.approx(0.3, rel=0.15)
    assert law.beta == pytest.approx(0.4, rel=0.1)


def test_one_run_that_went_wrong_hardly_moves_the_law() -> None:
    losses = TOY.loss(N, D)
    losses[4] *= 1.05
    law = fit_law(N, D, losses)
    assert np.delete(law.loss(N, D), 4) == pytest.approx(np.delete(TOY.loss(N, D), 4), rel=1e-3)


def test_intervals_hold_the_truth_and_widen_with_the_noise() -> None:
    widths = []
    for noise in (1e-5, 1e-4):
        losses = noisy(TOY, noise, seed=3)
        laws = resampled_laws(fit_law(N, D, losses), N, D, losses, resamples=15)
        betas = [law.beta for law in laws]
        assert min(betas) < 0.4 < max(betas)
        widths.append(max(betas) - min(betas))
    assert widths[0] < widths[1] / 3


@pytest.mark.parametrize(
    ("n", "d", "losses", "message"),
    [
        (N[:5], D[:5], TOY.loss(N, D)[:5], "5 runs for 5 constants; at least 6"),
        (N[:6], D[:6], TOY.loss(N, D)[:6], "2 different sizes"),
        (D[:6], N[:6], TOY.loss(N, D)[:6], "2 different budgets"),
        (N, D, np.full(9, 2.9), "nothing scales"),
        (N, D, [*TOY.loss(N, D)[:8], np.nan], "loss is not a positive number"),
        (N, D, [*TOY.loss(N, D)[:8], -1.0], "loss is not a positive number"),
        (N, [*D[:8], 0.0], TOY.loss(N, D), "number of tokens is not a positive number"),
        (N, D, TOY.loss(N, D)[:8], "9,.*8,"),
    ],
)
def test_runs_that_determine_no_law_are_rejected(n: Any, d: Any, losses: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_law(n, d, losses)


@pytest.mark.parametrize("cost", [Power(6.0, 1.0), Power(40.0, 0.85)])
@pytest.mark.parametrize("flops", [1e12, 1e15])
def test_the_optimal_size_is_the_least_loss_that_the_compute_can_reach(
    cost: Power, flops: float
) -> None:
    def loss(log_n: float) -> float:
        n = np.exp(log_n)
        return float(TOY.loss(n, flops / (cost.coefficient * n**cost.exponent)))

    found = minimize_scalar(loss, bounds=(np.log(1e2), np.log(1e10)), method="bounded")
    size, tokens = optimum(TOY, cost, flops)
    assert size == pytest.approx(np.exp(found.x), rel=1e-2)
    assert cost.coefficient * size**cost.exponent * tokens == pytest.approx(flops)


def test_with_six_flops_a_parameter_the_frontier_is_equation_4() -> None:
    alpha, beta = CHINCHILLA.alpha, CHINCHILLA.beta
    ratio = alpha * CHINCHILLA.size_coefficient / (beta * CHINCHILLA.data_coefficient)
    expected = ratio ** (1 / (alpha + beta)) * (5.76e23 / 6) ** (beta / (alpha + beta))
    assert optimum(CHINCHILLA, Power(6.0, 1.0), 5.76e23)[0] == pytest.approx(expected)


def test_the_cost_of_a_token_is_a_power_of_the_size() -> None:
    sizes = np.array(SIZES)
    cost = fit_power(sizes, 40 * sizes**0.85)
    assert (cost.coefficient, cost.exponent) == pytest.approx((40, 0.85), rel=1e-3)


def test_a_law_that_the_runs_determine_leaves_nothing_open() -> None:
    results = analyse(points(noisy(TOY, 1e-5)), resamples=15)
    assert results["undetermined"] == []
    assert results["relative_residual"] < 1e-4
    frontier = results["frontier"]
    assert frontier["exponent"] == pytest.approx(0.4 / 0.7, rel=0.02)
    low, high = frontier["exponent_interval"]
    assert low < 0.4 / 0.7 < high


def test_what_noise_leaves_open_is_said() -> None:
    results = analyse(points(noisy(TOY, 3e-3)), resamples=15)
    said = " ".join(results["undetermined"])
    assert "α is not determined" in said
    assert said in " ".join(scaling_table(results).splitlines())


def test_a_size_without_effect_is_not_taken_for_one() -> None:
    no_effect = Law(2.7, 1e-9, 0.3, 30.0, 0.4)
    results = analyse(points(noisy(no_effect, 1e-3)), resamples=15)
    assert any("effect of the size is not shown" in line for line in results["undetermined"])
    assert not any("effect of the data" in line for line in results["undetermined"])


def test_each_size_has_its_power_of_the_compute() -> None:
    flops = 6 * N * D
    results = analyse(points(5.0 * flops**-0.02 * np.where(N > 2e5, 1.1, 1.0)), resamples=5)
    for size in ("0.1M", "0.4M", "1.6M"):
        assert results["power_laws"][size]["exponent"] == pytest.approx(-0.02)
    assert results["power_laws"]["0.1M"]["coefficient"] == pytest.approx(5.0)


def test_the_table_and_the_plot_show_runs_law_and_frontier(tmp_path: Path) -> None:
    runs = points(noisy(TOY, 1e-4))
    runs[0] = Point(**{**vars(runs[0]), "interval": (2.5, 3.5)})
    results = analyse(runs, resamples=5)
    lines = scaling_table(results).splitlines()
    assert lines[2].startswith(f"| 0.1M | 100,000 | 600,000 | 3.6e+11 | {runs[0].loss:.4f} [2.5000")
    assert sum(line.startswith(("| 0.", "| 1.6M")) for line in lines) == 9
    assert any(line.startswith("The best N grows as C^0.5") for line in lines)
    outside = [row for row in results["frontier"]["rows"] if row["extrapolated"]]
    assert len(outside) == sum("| below 100,000, the sizes" in line for line in lines) > 0
    plot_scaling(results, tmp_path / "plots" / "scaling.png")
    assert (tmp_path / "plots" / "scaling.png").stat().st_size > 10_000
