"""What a trainer's settings may be, what they freeze, and whether two runs share them."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from d2plm.core.errors import ConfigError, require, require_choice, require_number

AGGREGATIONS = ("token_weighted", "rank_average")


def check_settings(
    *,
    max_grad_norm: float | None,
    seed: int,
    loss_aggregation: str,
    on_save_error: str,
    ema_decay: float,
    deterministic: bool,
    compile: bool | str,
    save_total_limit: int,
    save_top_k: int,
) -> None:
    """Refuse settings of the trainer that are impossible whatever the model and the data.

    Raises:
        ConfigError: with the key's name.
    """
    if max_grad_norm is not None:
        require_number("max_grad_norm", max_grad_norm, low=0, low_open=True)
    require_number("seed", seed, integer=True, low=0)
    require_number("ema_decay", ema_decay, low=0, high=1, high_open=True)
    require_number("save_total_limit", save_total_limit, integer=True, low=1)
    require_number("save_top_k", save_top_k, integer=True, low=0)
    require_choice("loss_aggregation", loss_aggregation, AGGREGATIONS)
    require_choice("on_save_error", on_save_error, ("stop", "continue"))
    is_truth = isinstance(deterministic, bool)
    require(is_truth, "deterministic", deterministic, "true or false")
    require(compile in (True, False, "auto"), "compile", compile, "auto, true or false")


def names_to_freeze(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the parameters `names` that match one of `patterns`, case and all.

    Raises:
        ConfigError: for a pattern that matches none, and where they match all.
    """
    wanted = "a list of name patterns, such as [blocks.0.*, token_embedding.*]"
    known = isinstance(patterns, (list, tuple)) and all(isinstance(p, str) for p in patterns)
    require(known, "freeze", patterns, wanted)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"freeze: {pattern!r} matches no parameter; there are {_summary(names)}"
            )
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    require(len(found) < len(names), "freeze", list(patterns), "less than every parameter")
    return found


def _summary(names: Sequence[str]) -> str:
    """Parameter names in one line, those of all blocks as one: `blocks.{0-5}.modulation.bias`."""
    numbers = [int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))]
    every = f"blocks.{{0-{max(numbers, default=0)}}}."
    return ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", every, name) for name in names))


def difference(before: Any, now: Any, key: str = "") -> str | None:
    """The first setting that differs, as `key: before → now`; None where all agree."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            found = difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if before == now else f"{key}: {before} → {now}"
