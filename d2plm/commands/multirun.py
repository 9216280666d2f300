"""d2plm train --multirun: one training run per combination of values, and a table of the results.

Hydra's parser expands the values (`a,b`, `choice`, `range`, `glob`). Its sweepers and launchers are
not used: they run jobs inside their own process, where training can neither start under torchrun
nor resume. The folder of a sweep is named after the keys that vary and that of a run after their
values, so finished runs are reused when values are added.
"""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from d2plm.assembly.sweep import Sweep, for_all, one_run, run_sweep
from d2plm.config import Arguments, as_yaml, hydra_over, parse_overrides, plain
from d2plm.core.errors import ConfigError
from d2plm.core.files import config_dir
from d2plm.core.table import Number, Table
from d2plm.core.terminal import result
from d2plm.settings.callbacks import CallbackSettings
from d2plm.settings.commands import TrainSettings
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics

OWN_KEYS = ("parallel", "multirun_dir")  # settings of the sweep, not of its runs
FOLDERS = ("output_dir", "model_dir")  # separate for each run, inside the sweep's folder
FIGURE = "validation_nelbo"
LONGEST_NAME = 200  # characters of a folder's name; file systems allow 255 bytes

Combination = tuple[dict[str, str], list[str]]  # (swept key → value, all overrides)


def run(arguments: Arguments) -> dict[str, Any]:
    """Train every combination and report a table of the results; see `run_sweep`."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "--multirun: cannot run under torchrun; start d2plm train without torchrun and set "
            "distributed.processes"
        )
    if arguments.show_only:
        _, configs = composed(arguments)
        shown = (f"# {name}\n{as_yaml(config)}" for name, config in configs.items())
        result("---\n".join(shown))
        return {name: plain(config) for name, config in configs.items()}
    found: dict[str, Any] = run_sweep(sweep(arguments))
    return found


def composed(arguments: Arguments) -> tuple[dict[str, Combination], dict[str, TrainSettings]]:
    """Expand the arguments, and compose the configuration of every combination."""
    combinations = expand(arguments)
    return combinations, for_all(
        {name: partial(arguments.compose, words) for name, (_, words) in combinations.items()}
    )


def sweep(arguments: Arguments) -> Sweep:
    """List the runs: every combination of values."""
    combinations, configs = composed(arguments)
    settings = {name: varied for name, (varied, _) in combinations.items()}
    first, keys = next(iter(configs.values())), list(next(iter(settings.values())))
    folder = Path(first.multirun_dir) / folder_name(",".join(keys))
    runs = {name: one_run(one, name, folder / folder_name(name)) for name, one in configs.items()}
    return Sweep(
        first,
        runs,
        ["train"],
        varied={key: dict.fromkeys(one[key] for one in settings.values()) for key in keys},
        results=folder / "sweep",
        reduce=lambda: collect(settings, runs),
        table=sweep_table,
    )


def expand(arguments: Arguments) -> dict[str, Combination]:
    """Map names `key=value,…` to the combinations of the values; the last key varies fastest.

    Raises:
        ConfigError: if nothing varies, a combination occurs twice, or values cannot be listed.
    """
    with hydra_over((arguments.folder or config_dir()).resolve()) as loader:
        overrides = parse_overrides(arguments.overrides, loader)
        varying = {
            place: [f"{override.get_key_element()}={value}" for value in _values(override)]
            for place, override in enumerate(overrides)
            if override.is_sweep_override()
        }
    keys = [overrides[place].get_key_element() for place in varying]
    for override in overrides:
        key, reason = override.key_or_group, None
        if key in FOLDERS:
            reason = "each run has its own folder; set multirun_dir instead"
        elif key in keys and (key in OWN_KEYS or keys.count(key) > 1):
            reason = "cannot vary between runs" if key in OWN_KEYS else "is set twice"
        if reason is not None:
            raise ConfigError(f"--multirun: {override.input_line}: {reason}")
    if not varying:
        raise ConfigError(
            "--multirun: no key has several values; give some, such as "
            "optimizer.learning_rate=1e-3,4e-4"
        )
    combinations: dict[str, Combination] = {}
    for changed in itertools.product(*varying.values()):
        name = ",".join(changed)
        if name in combinations:
            raise ConfigError(f"--multirun: {name} occurs twice; give each value once")
        words = dict(enumerate(arguments.overrides)) | dict(zip(varying, changed, strict=True))
        settings = dict(word.split("=", 1) for word in changed)
        combinations[name] = settings, list(words.values())
    return combinations


def _values(override: Override) -> list[str]:
    values: list[str] = []
    reason = "has no list of values; use a,b or range(a,b,step)"
    if override.is_discrete_sweep():
        values, reason = list(override.sweep_string_iterator()), "matches nothing"
    if not values:
        raise ConfigError(f"--multirun: {override.input_line}: {reason}")
    return values


def folder_name(name: str) -> str:
    """Make `name` a safe folder name; a digest is added if it is long or has special characters."""
    safe = re.sub(r"[^A-Za-z0-9._=,+@-]", "_", name)
    if safe == name and len(safe) <= LONGEST_NAME:
        return safe
    return f"{safe[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def collect(
    settings: Mapping[str, Mapping[str, str]], runs: Mapping[str, TrainSettings]
) -> dict[str, Any]:
    """Collect the last validation figures of the runs, best first, with the swept values.

    Returns:
        JSON content: `runs`; `best`, the name of the best run, or None without figures;
        `same_residues`, whether all figures were computed on the same proteins.
    """
    rows: list[dict[str, Any]] = []
    for name, config in runs.items():
        folder = Path(config.output_dir)
        logged = [row for row in read_metrics(folder / METRICS_FILE) if FIGURE in row]
        last = logged[-1] if logged else {}
        figures = {key: last.get(key) for key in ("step", FIGURE, "validation_perplexity")}
        rows.append({"name": name, "settings": settings[name], "folder": str(folder), **figures})
    rows.sort(key=lambda row: math.inf if row[FIGURE] is None else row[FIGURE])
    return {
        "keys": list(rows[0]["settings"]),
        "same_residues": len({_scored_on(config) for config in runs.values()}) == 1,
        "best": None if rows[0][FIGURE] is None else rows[0]["name"],
        "runs": rows,
    }


def _scored_on(config: TrainSettings) -> str:
    """Key of the settings that determine the residues of the validation."""
    evaluation = config.callbacks.get("evaluation")
    chosen = {k: v for k, v in vars(evaluation or CallbackSettings()).items() if k != "every"}
    longest = config.model.max_position_embeddings
    return json.dumps([config.data.prepared_dir, chosen, longest], sort_keys=True)


def sweep_table(results: dict[str, Any]) -> str:
    """Markdown table of the results of `collect`, followed by the best run."""
    forms = {FIGURE: ".4f", "validation_perplexity": ".3f", "step": "d"}
    rows = [
        [*row["settings"].values(), *(Number(row[key], form) for key, form in forms.items())]
        for row in results["runs"]
    ]
    notes = [f"Best: {results['best'] or 'none, because no run was validated'}."]
    if not results["same_residues"]:
        notes.append("The runs were validated on different residues; the figures do not compare.")
    heads = [*results["keys"], "validation NELBO, nats/residue", "perplexity", "step"]
    return Table(heads, rows, notes=notes).markdown()
