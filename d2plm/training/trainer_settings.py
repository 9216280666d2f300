"""Checks of a trainer's settings against its model, and the identity of a run."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from d2plm.core.errors import ConfigError, require
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.paradigm import Paradigm


def require_relatives(max_relatives: int | None, config: DiTConfig, paradigm: Paradigm) -> None:
    """Raise ConfigError unless relatives are drawn if and only if the model takes them.

    They are aligned to visible residues at their own positions: a uniform source shows wrong
    residues, and a shift predicts another position.
    """
    takes = config.relatives_dim is not None
    if takes:
        fits = paradigm.source == "mask" and not getattr(paradigm, "shift", False)
        wanted = "null with the uniform source, and with shift=true"
        require(fits, "model.relatives_dim", config.relatives_dim, wanted)
    if max_relatives is not None:
        wanted = "null for a model without relatives_dim"
    else:
        wanted = f"a number for a model with relatives_dim={config.relatives_dim}"
    require(takes == (max_relatives is not None), "max_relatives", max_relatives, wanted)


def names_to_freeze(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The parameter `names` that match one of the case-sensitive `patterns`.

    Raises:
        ConfigError: if a pattern matches no parameter, or the patterns match all.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"matches no parameter; there are {_summary(names)}", {"freeze": pattern}
            )
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    require(len(found) < len(names), "freeze", list(patterns), "less than every parameter")
    return found


def _summary(names: Sequence[str]) -> str:
    """Parameter names in one line, with all blocks merged: `blocks.{0-5}.modulation.bias`."""
    numbers = [int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))]
    every = f"blocks.{{0-{max(numbers, default=0)}}}."
    return ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", every, name) for name in names))


def difference(before: Any, now: Any, key: str = "") -> str | None:
    """The first setting that differs, as `key: before → now`, or None."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            found = difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return difference(dict(enumerate(before)), dict(enumerate(now)), key)
    return None if before == now else f"{key}: {before} → {now}"


def crop_length(max_length: int | None, limit: int) -> int:
    """Maximum number of tokens per sequence; raises ConfigError if it exceeds the model's limit."""
    if max_length is None:
        return limit
    wanted = f"at most the model's max_position_embeddings ({limit})"
    require(max_length <= limit, "max_length", max_length, wanted)
    return max_length
