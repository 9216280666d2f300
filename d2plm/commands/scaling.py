"""d2plm scaling: train and evaluate every size with every budget, then fit a scaling law.

Every budget has its own run, whose learning-rate schedule ends with the budget: the intermediate
loss of a longer run is not the final loss of a shorter one.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.assembly.preparation import build_vocabulary, prepare_data
from d2plm.assembly.sweep import one_run, run_sweep
from d2plm.assembly.training_run import model_config, trainer_keys, training_stores, with_vocab_size
from d2plm.config import changed
from d2plm.core.errors import ConfigError, require, within
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
    budgets = _budgets(config)
    _sizes(config)
    if not config.dry_run:
        prepare_data(config)
    grid = plan(config, training_stores(config)["train"].lengths)
    # Longest first, so that no core idles at the end.
    longest_first = sorted(grid, key=lambda planned: -planned.point.flops)
    return run_sweep(
        config,
        {str(one.config.tracking.run_name): one.config for one in longest_first},
        ("train", "evaluate"),
        varied={"sizes": config.sizes, **budgets},
        results=Path(config.work_dir) / config.name,
        reduce=lambda: _law(grid),
        table=scaling_table,
        plot=plot_scaling,
    )


def _budgets(config: ScalingSettings) -> dict[str, list[Any]]:
    """The setting that holds the budgets → the budgets."""
    both = {"steps": config.steps, "flops": config.flops}
    given = {name: budgets for name, budgets in both.items() if budgets is not None}
    if len(given) != 1:
        raise ConfigError("set exactly one of the two", both)
    for name, budgets in given.items():
        fits = len({*budgets}) == len(budgets) >= LEAST_VALUES
        require(fits, name, budgets, f"a list of at least {LEAST_VALUES} different budgets")
    return given


def _sizes(config: ScalingSettings) -> dict[str, ScalingSettings]:
    """The complete configuration of each size."""
    sizes = config.sizes
    fits = all(isinstance(changes, dict) for changes in sizes.values())
    wanted = f"at least {LEAST_VALUES}, as {{name: {{section: {{key: value}}}}}}"
    require(fits and len(sizes) >= LEAST_VALUES, "sizes", sizes, wanted)
    sized = {size: changed(config, sizes[size], f"sizes.{size}") for size in sizes}
    parameters = {size: token_parameters(model_config(own)) for size, own in sized.items()}
    wanted = "of different numbers of parameters"
    require(len(set(parameters.values())) == len(sizes), "sizes", parameters, wanted)
    return sized


def plan(config: ScalingSettings, lengths: NDArray[np.integer]) -> list[Planned]:
    """Plan the runs, by size and then by budget.

    The FLOPs of attention depend on `lengths`, the residues of the training proteins.

    Raises:
        ConfigError: if a setting cannot determine a law, or a budget is less than one step.
    """
    grid = []
    ((kind, budgets),) = _budgets(config).items()
    for size, sized in _sizes(config).items():
        model = model_config(sized)
        with trainer_keys():
            longest = crop_length(sized.data.max_length, model.max_position_embeddings)
        segments = np.minimum(lengths.astype(np.int64) + 2, longest)
        per_token = training_flops(model, segments.tolist()) / int(segments.sum())
        tokens_of_step = sized.trainer.global_batch_tokens or sized.data.token_budget
        for budget in budgets:
            steps = budget if kind == "steps" else round(budget / (per_token * tokens_of_step))
            if steps < 1:
                raise ConfigError(f"less than one step of size {size}", {kind: budget})
            tokens = steps * tokens_of_step
            point = Point(size, token_parameters(model), tokens, tokens * per_token, math.nan)
            trainer = replace(sized.trainer, max_steps=steps, max_epochs=None)
            own = replace(sized, name=size, trainer=trainer, dry_run=False)
            folder = Path(config.work_dir) / size / f"steps{steps}"
            grid.append(Planned(one_run(own, f"{size}, {steps} steps", folder), point))
    return grid


def _law(grid: list[Planned]) -> dict[str, Any]:
    """The law of the evaluated grid, as JSON content."""
    evaluations = [load_scores(Path(one.config.model_dir))[0] for one in grid]
    digests = [evaluation["digests"] for evaluation in evaluations]
    if len({(one["validation"], one["masks"]) for one in digests}) > 1:
        raise ConfigError(
            "sizes: the runs were evaluated on different residues or masks; use the same paradigm, "
            "split and maximum length for all sizes"
        )
    models = [evaluation["model"] for evaluation in evaluations]
    points = [
        replace(one.point, loss=model["nelbo"], interval=model["nelbo_interval"])
        for one, model in zip(grid, models, strict=True)
    ]
    return {**analyse(points), **{k: v for k, v in evaluations[0].items() if k == "terms"}}
