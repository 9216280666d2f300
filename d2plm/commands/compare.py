"""d2plm compare: train and evaluate every arm with every seed, then compare the arms.

Each run trains and evaluates in its own processes and folder. Finished runs are reused, so the same
command continues where it was stopped.
"""

from dataclasses import asdict, replace
from pathlib import Path

from d2plm.assembly.many_runs import check_runs, run_all, write_results
from d2plm.assembly.preparation import prepare_data
from d2plm.config import changed
from d2plm.core.errors import require
from d2plm.core.terminal import result
from d2plm.evaluation.comparison import (
    Comparison,
    Run,
    compare,
    comparison_table,
    plot_comparison,
)
from d2plm.export.model_evaluation import load_scores
from d2plm.settings.commands import CompareSettings


def run(config: CompareSettings) -> Comparison:
    """Prepare the data, run all arms, write and print the comparison."""
    arms, seeds = config.arms, config.seeds
    wanted = "at least two, as {name: {section: {key: value}}}"
    fits = len(arms) >= 2 and all(isinstance(changes, dict) for changes in arms.values())
    require(fits, "arms", list(arms), wanted)
    fits = len({*seeds}) == len(seeds) > 0
    require(fits, "seeds", seeds, "a list of different seeds, at least one")
    prepare_data(config)
    settings = {(arm, seed): run_settings(config, arm, seed) for seed in seeds for arm in arms}
    runs = {f"{arm}, seed {seed}": run for (arm, seed), run in settings.items()}
    check_runs(runs)
    run_all(runs, ("train", "evaluate"), config.parallel)
    comparison = compare(
        {arm: {seed: _read(settings[arm, seed]) for seed in seeds} for arm in arms}
    )
    table = comparison_table(comparison).markdown()
    plot_comparison(comparison, write_results(config, asdict(comparison), table))
    result(table)
    return comparison


def run_settings(config: CompareSettings, arm: str, seed: int) -> CompareSettings:
    """Complete configuration of the run of one arm with one seed."""
    folder = Path(config.work_dir) / arm / f"seed{seed}"
    own = changed(config, config.arms[arm], f"arms.{arm}")
    return replace(
        own,
        trainer=replace(own.trainer, seed=seed),
        # Named after the arm alone, so that experiments in one folder share runs.
        name=arm,
        output_dir=str(folder),
        model_dir=str(folder / "model"),
        tracking=replace(own.tracking, run_name=f"{arm}, seed {seed}"),
    )


def _read(config: CompareSettings) -> Run:
    evaluation, scores = load_scores(Path(config.model_dir))
    return Run(evaluation, **scores)
