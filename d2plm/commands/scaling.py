"""d2plm scaling: train and evaluate every size with every budget, then fit a scaling law.

Every budget has its own run, whose learning-rate schedule ends with the budget: the intermediate
loss of a longer run is not the final loss of a shorter one.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.assembly.many_runs import check_runs, dry_run, run_all, write_results
from d2plm.assembly.preparation import build_vocabulary, prepare_data
from d2plm.assembly.training_run import (
    model_config,
    trainer_keys,
    training_stores,
    with_vocab_size,
)
from d2plm.config import changed
from d2plm.core.errors import ConfigError, require, within
from d2plm.core.terminal import result
from d2plm.evaluation.scaling import LEAST_VALUES, Point, analyse, plot_scaling, scaling_table
from d2plm.export.model_evaluation import load_scores
from d2plm.model.flops import token_parameters, training_flops
from d2plm.settings.commands import ScalingSettings
from d2plm.training.trainer_settings import crop_length


@dataclass(frozen=True)
class Planned:
    """A run of the grid: its complete configuration, and its point without the loss."""

    config: ScalingSettings
    point: Point


def run(config: ScalingSettings) -> dict[str, Any]:
    """Prepare the data, run the whole grid, write and print the scaling law.

    A dry run forecasts every run instead; it needs prepared data, or `data.residues=random`.
    """
    with within("data"):
        config = with_vocab_size(config, build_vocabulary(config.data))
    _check(config)
    if not config.dry_run:
        prepare_data(config)
    lengths = training_stores(config)["train"].lengths
    grid = plan(config, lengths)
    # Longest first, so that no core idles at the end.
    longest_first = sorted(grid, key=lambda planned: -planned.point.flops)
    runs = {str(one.config.tracking.run_name): one.config for one in longest_first}
    if config.dry_run:
        return dry_run(runs)
    check_runs(runs)
    run_all(runs, ("train", "evaluate"), config.parallel)
    evaluation, _ = load_scores(Path(grid[0].config.model_dir))
    results = {**analyse(_points(grid)), "terms": asdict(evaluation.terms)}
    table = scaling_table(results)
    plot_scaling(results, write_results(config, results, table))
    result(table)
    return results


def _check(config: ScalingSettings) -> None:
    """Reject settings that cannot determine a scaling law, before anything is computed."""
    sizes = config.sizes
    fits = all(isinstance(changes, dict) for changes in sizes.values())
    wanted = f"at least {LEAST_VALUES}, as {{name: {{section: {{key: value}}}}}}"
    require(fits and len(sizes) >= LEAST_VALUES, "sizes", sizes, wanted)
    models = {size: changed(config, sizes[size], f"sizes.{size}") for size in sizes}
    parameters = {size: token_parameters(model_config(own)) for size, own in models.items()}
    wanted = "of different numbers of parameters"
    require(len(set(parameters.values())) == len(sizes), "sizes", parameters, wanted)
    if (config.steps is None) == (config.flops is None):
        raise ConfigError(
            "set exactly one of the two", {"steps": config.steps, "flops": config.flops}
        )
    name = "flops" if config.steps is None else "steps"
    budgets = getattr(config, name)
    fits = len({*budgets}) == len(budgets) >= LEAST_VALUES
    require(fits, name, budgets, f"a list of at least {LEAST_VALUES} different budgets")


def plan(config: ScalingSettings, lengths: NDArray[np.integer]) -> list[Planned]:
    """Plan the runs, by size and then by budget.

    The FLOPs of attention depend on `lengths`, the residues of the training proteins.

    Raises:
        ConfigError: if a budget in FLOPs is less than one step.
    """
    grid = []
    for size, changes in config.sizes.items():
        sized = changed(config, changes, f"sizes.{size}")
        model = model_config(sized)
        with trainer_keys():
            longest = crop_length(sized.data.max_length, model.max_position_embeddings)
        segments = np.minimum(lengths.astype(np.int64) + 2, longest)
        per_token = training_flops(model, segments.tolist()) / int(segments.sum())
        tokens_of_step = sized.trainer.global_batch_tokens or sized.data.token_budget
        for budget in config.steps or config.flops or ():
            steps = int(budget) if config.steps else round(budget / (per_token * tokens_of_step))
            if steps < 1:
                raise ConfigError(f"less than one step of size {size}", {"flops": budget})
            tokens = steps * tokens_of_step
            point = Point(size, token_parameters(model), tokens, tokens * per_token, math.nan)
            grid.append(Planned(run_settings(sized, size, steps), point))
    return grid


def run_settings(config: ScalingSettings, size: str, steps: int) -> ScalingSettings:
    """Complete configuration of a run of `steps` steps, from that of its size."""
    folder = Path(config.work_dir) / size / f"steps{steps}"
    return replace(
        config,
        name=size,
        output_dir=str(folder),
        model_dir=str(folder / "model"),
        trainer=replace(config.trainer, max_steps=steps, max_epochs=None),
        tracking=replace(config.tracking, run_name=f"{size}, {steps} steps"),
        dry_run=False,
    )


def _points(grid: list[Planned]) -> list[Point]:
    points, scored_on = [], set()
    for planned in grid:
        evaluation, _ = load_scores(Path(planned.config.model_dir))
        scored_on.add((evaluation.digests["validation"], evaluation.digests["masks"]))
        nelbo = evaluation.model.nelbo
        points.append(replace(planned.point, loss=nelbo.value, interval=nelbo.interval))
    if len(scored_on) > 1:
        raise ConfigError(
            "sizes: the runs were evaluated on different residues or masks; use the same paradigm, "
            "split and maximum length for all sizes"
        )
    return points
