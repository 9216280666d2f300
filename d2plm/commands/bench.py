"""d2plm bench: measure this machine, and say whether the goals are met."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d2plm.bench.arms import Timings
from d2plm.bench.rows import Row, table
from d2plm.config import Config
from d2plm.core.errors import require, require_number
from d2plm.core.terminal import done, result

log = logging.getLogger(__name__)


def run_data(config: Config) -> dict[str, Any]:
    """The data engine."""
    from d2plm.bench.data import bench_data

    rows = bench_data(
        Path(config["proteins"]),
        sequences=config["sequences"],
        many_sequences=config["many_sequences"],
        planned=config["planned"],
        mmseqs_sizes=config["mmseqs_sizes"],
        temporary_dir=config["temporary_dir"],
        report=log.info,
    )
    return _show("data", config, rows, [])


def run_train(config: Config) -> dict[str, Any]:
    """The training step, with and without each of its parts."""
    from d2plm.bench.train import bench_train

    settings = _settings(config, "compile", "endurance_steps")
    return _show("train", config, *bench_train(_proteins(config), _model(config), **settings))


def run_attention(config: Config) -> dict[str, Any]:
    """The attention operator against other ways to compute the same."""
    from d2plm.bench.attention import bench_attention

    _require_positive(config, "heads", "head_size")
    settings = _settings(config, "heads", "head_size")
    return _show("attention", config, *bench_attention(_proteins(config), **settings))


def run_generate(config: Config) -> dict[str, Any]:
    """The samplers against a plain loop."""
    from d2plm.bench.generate import bench_generate

    _require_positive(config, "number", "token_budget", "turns", "threads")
    require(bool(config["cases"]), "cases", config["cases"], "at least one case")
    keys = ("cases", "number", "steps", "token_budget", "turns", "threads")
    folder = config["model_dir"]
    rows, timings = bench_generate(
        _proteins(config),
        _model(config),
        model_dir=None if folder is None else Path(folder),
        report=log.info,
        **{key: config[key] for key in keys},
    )
    return _show("generate", config, rows, timings)


def run_peers(config: Config) -> dict[str, Any]:
    """Training against other trainers of the same model."""
    from d2plm.bench.peers import bench_peers

    _require_positive(config, "longest_protein")
    settings = _settings(config, "longest_protein", "compile", "pinned", "esm")
    return _show("peers", config, *bench_peers(_proteins(config), _model(config), **settings))


def _settings(config: Config, *more: str) -> dict[str, Any]:
    """What every benchmark of arms takes, and what this one does."""
    _require_positive(config, "turns", "steps", "token_budget", "max_length", "threads")
    shared = ("token_budget", "max_length", "device", "precision", "turns", "steps", "threads")
    settings = {key: config[key] for key in (*shared, *more)}
    temporary = config["temporary_dir"]
    return {
        **settings,
        "temporary_dir": None if temporary is None else Path(temporary),
        "report": log.info,
    }


def _require_positive(config: Config, *keys: str) -> None:
    for key in keys:
        if config[key] is not None:
            require_number(key, config[key], integer=True, low=1)


def _proteins(config: Config) -> Path:
    return Path(config["proteins"])


def _model(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config["model"].items() if key != "_target_"}


def _show(
    benchmark: str, config: Config, rows: Sequence[Row], timings: Sequence[Timings]
) -> dict[str, Any]:
    """Print the table; write JSON and a picture, and log them, where that is wanted."""
    from d2plm.bench import report

    result(f"\n{table(rows)}")
    document = {"benchmark": benchmark, "rows": [row.as_json() for row in rows]}
    if config["output"] is None and config["tracking_uri"] is None:
        return document
    output = Path(config["output"] or f"bench_{benchmark}.json")
    report.write_json(output, benchmark, rows, timings, config.values)
    files = [output]
    if timings:
        files.append(output.with_suffix(".png"))
        report.plot(files[-1], benchmark, timings)
    done("\nwrote " + ", ".join(map(str, files)))
    if config["tracking_uri"] is not None:
        run = report.log_to_mlflow(config["tracking_uri"], benchmark, rows, config.flat(), files)
        done(f"logged as run {run} of experiment {report.EXPERIMENT}")
    return document
