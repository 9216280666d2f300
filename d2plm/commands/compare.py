"""d2plm compare: train and evaluate every arm with every seed, then compare the arms."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from d2plm.assembly.preparation import prepare_data
from d2plm.assembly.sweep import Sweep, one_run, run_sweep
from d2plm.config import changed
from d2plm.core.errors import require
from d2plm.evaluation.comparison import Comparison, Run, compare, comparison_table, plot_comparison
from d2plm.export.model_evaluation import load_scores
from d2plm.settings.commands import CompareSettings


def run(config: CompareSettings) -> Comparison | dict[str, Any]:
    """Prepare the data, run all arms, write and print the comparison."""
    listed = sweep(config)
    if not config.dry_run:
        prepare_data(config, [one.output_dir for one in listed.runs.values()])
    return run_sweep(listed)


def sweep(config: CompareSettings) -> Sweep:
    """List the runs: every arm with every seed."""
    arms, seeds = config.arms, config.seeds
    require(len(arms) >= 2, "arms", list(arms), "at least two")
    fits = len({*seeds}) == len(seeds) > 0
    require(fits, "seeds", seeds, "a list of different seeds, at least one")
    runs = {(arm, seed): run_settings(config, arm, seed) for seed in seeds for arm in arms}

    def reduce() -> Comparison:
        read = {key: _read(one) for key, one in runs.items()}
        return compare({arm: {seed: read[arm, seed] for seed in seeds} for arm in arms})

    return Sweep(
        config,
        {str(one.tracking.run_name): one for one in runs.values()},
        ("train", "evaluate"),
        varied={"arms": arms, "seeds": seeds},
        results=Path(config.work_dir) / config.name,
        reduce=reduce,
        table=lambda comparison: comparison_table(comparison).markdown(),
        document=asdict,
        plot=plot_comparison,
    )


def run_settings(config: CompareSettings, arm: str, seed: int) -> CompareSettings:
    """Configure the run of one arm with one seed."""
    own = changed(config, config.arms[arm], f"arms.{arm}")
    # Named after the arm alone, so that experiments in one folder share runs.
    own = replace(own, name=arm, trainer=replace(own.trainer, seed=seed))
    return one_run(own, f"{arm}, seed {seed}", Path(config.work_dir) / arm / f"seed{seed}")


def _read(config: CompareSettings) -> Run:
    evaluation, scores = load_scores(Path(config.model_dir))
    return Run(evaluation, **scores)
