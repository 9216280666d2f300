"""d2plm scaling: train and evaluate every size with every budget, then fit a scaling law.

Every budget has its own run, whose learning-rate schedule ends with the budget: the intermediate
loss of a longer run is not the final loss of a shorter one.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.assembly.preparation import build_vocabulary, prepare_data
from d2plm.assembly.sweep import Sweep, one_run, run_sweep
from d2plm.assembly.training_run import model_config, trainer_keys, training_stores, with_vocab_size
from d2plm.config import changed
from d2plm.core.errors import ConfigError, require, within
from d2plm.evaluation.scaling import LEAST_VALUES, Point, analyse, plot_scaling, scaling_table
from d2plm.export.exported_model import read_provenance
from d2plm.export.model_evaluation import load_scores
from d2plm.model.flops import token_parameters, training_flops
from d2plm.settings.commands import ScalingSettings
from d2plm.training.trainer_settings import crop_length

BUDGETS = {"steps": "max_steps", "flops": "flops_budget"}  # → limit of a training run


def run(config: ScalingSettings) -> dict[str, Any]:
    """Prepare the data, run the whole grid, write and print the scaling law.

    A dry run only forecasts every run; it needs prepared data, or `data.residues=random`.
    """
    listed = sweep(config)
    if not config.dry_run:
        prepare_data(config, [one.output_dir for one in listed.runs.values()])
    found: dict[str, Any] = run_sweep(listed)
    return found


def sweep(config: ScalingSettings) -> Sweep:
    """List the runs: every size with every budget."""
    with within("data"):
        config = with_vocab_size(config, build_vocabulary(config.data))
    runs = plan(config)
    return Sweep(
        config,
        dict(reversed(runs.items())),  # the longest first, so that no core idles at the end
        ("train", "evaluate"),
        varied={"sizes": config.sizes, "budgets": config.steps or config.flops or ()},
        results=Path(config.work_dir) / config.name,
        reduce=lambda: _law(runs),
        table=scaling_table,
        plot=plot_scaling,
    )


def plan(config: ScalingSettings) -> dict[str, ScalingSettings]:
    """Configure the runs by size and budget; `ConfigError` if they cannot determine a law."""
    both = {name: getattr(config, name) for name in BUDGETS}
    if [*both.values()].count(None) != 1:
        raise ConfigError("set exactly one of the two", both)
    ((kind, budgets),) = ((name, given) for name, given in both.items() if given is not None)
    fits = len({*budgets}) == len(budgets) >= LEAST_VALUES
    require(fits, kind, budgets, f"a list of at least {LEAST_VALUES} different budgets")
    sizes = config.sizes
    require(len(sizes) >= LEAST_VALUES, "sizes", list(sizes), f"at least {LEAST_VALUES}")
    sized = {size: changed(config, sizes[size], f"sizes.{size}") for size in sizes}
    parameters = {size: token_parameters(model_config(own)) for size, own in sized.items()}
    wanted = "of different numbers of parameters"
    require(len(set(parameters.values())) == len(sizes), "sizes", parameters, wanted)
    runs = {}
    for size, own in sized.items():
        for budget in budgets:
            limits = {**dict.fromkeys((*BUDGETS.values(), "max_epochs")), BUDGETS[kind]: budget}
            trainer = replace(own.trainer, **limits)
            text = f"{budget:.12g}"
            name, folder = f"{size}, {text} {kind}", f"{config.work_dir}/{size}/{kind}{text}"
            runs[name] = one_run(replace(own, name=size, trainer=trainer), name, Path(folder))
    return runs


def _law(runs: Mapping[str, ScalingSettings]) -> dict[str, Any]:
    """Fit the law; the FLOPs of attention depend on the lengths of the training proteins."""
    points, scored_on = [], set()
    for config in runs.values():
        folder, model = Path(config.model_dir), model_config(config)
        (evaluation, _), provenance = load_scores(folder), read_provenance(folder) or {}
        scored_on.add((evaluation.digests["validation"], evaluation.digests["masks"]))
        with trainer_keys():
            longest = crop_length(config.data.max_length, model.max_position_embeddings)
        lengths = training_stores(config)["train"].lengths
        segments = np.minimum(lengths.astype(np.int64) + 2, longest)
        tokens = provenance["step"] * (
            config.trainer.global_batch_tokens or config.data.token_budget
        )
        flops = tokens * (training_flops(model, segments) / int(segments.sum()))
        loss, size = evaluation.model.nelbo, token_parameters(model)
        points.append(Point(config.name, size, tokens, flops, loss.value, loss.interval))
    if len(scored_on) > 1:
        raise ConfigError(
            "sizes: the runs were evaluated on different residues or masks; use the same paradigm, "
            "split and maximum length for all sizes"
        )
    return {**analyse(points), "terms": asdict(evaluation.terms)}
