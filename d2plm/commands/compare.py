"""d2plm compare: train and evaluate every arm with every seed, then compare the arms.

Each run trains and evaluates in its own processes and folder. Finished runs are reused, so the same
command continues where it was stopped.
"""

from pathlib import Path
from typing import Any

from d2plm.assembly.many_runs import check_runs, merged, run_all, write_results
from d2plm.assembly.preparation import prepare_data
from d2plm.config import Config
from d2plm.core.errors import require, require_number
from d2plm.core.terminal import result
from d2plm.evaluation.comparison import Run, compare, comparison_table, plot_comparison
from d2plm.export.model_evaluation import load_scores

OWN_KEYS = ("arms", "seeds", "parallel")


def run(config: Config) -> dict[str, Any]:
    """Prepare the data, run all arms, write and print the comparison."""
    arms, seeds = config["arms"], config["seeds"]
    fits = isinstance(arms, dict) and all(isinstance(changes, dict) for changes in arms.values())
    wanted = "at least two, as {name: {section: {key: value}}}"
    require(fits and len(arms) >= 2, "arms", list(arms), wanted)
    fits = isinstance(seeds, list) and len(set(seeds)) == len(seeds) > 0
    require(fits, "seeds", seeds, "a list of different seeds, at least one")
    require_number("parallel", config["parallel"], integer=True, low=1)
    prepare_data(config)
    settings = {(arm, seed): run_settings(config, arm, seed) for seed in seeds for arm in arms}
    runs = {f"{arm}, seed {seed}": run for (arm, seed), run in settings.items()}
    check_runs(runs, config["parallel"])
    run_all(runs, ("train", "evaluate"), config["parallel"])
    comparison = compare(
        {arm: {seed: _read(settings[arm, seed]) for seed in seeds} for arm in arms}
    )
    table = comparison_table(comparison)
    plot_comparison(comparison, write_results(config, comparison, table))
    result(table)
    return comparison


def run_settings(config: Config, arm: str, seed: int) -> Config:
    """Complete configuration of the run of one arm with one seed."""
    values = merged(config.values, config["arms"][arm], f"arms.{arm}")
    folder = Path(config["work_dir"]) / arm / f"seed{seed}"
    values["trainer"]["seed"] = seed
    # The run is named after the arm alone, so that experiments in one folder share runs.
    values |= {"name": arm, "output_dir": str(folder), "model_dir": str(folder / "model")}
    values["tracking"]["run_name"] = f"{arm}, seed {seed}"
    return Config({key: value for key, value in values.items() if key not in OWN_KEYS})


def _read(config: Config) -> Run:
    evaluation, scores = load_scores(Path(config["model_dir"]))
    return Run(evaluation, scores["nats"], scores["residues"], scores["clusters"])
