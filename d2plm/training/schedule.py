"""Learning-rate schedules as plain functions of the step, so that resuming needs no state."""

import math
from collections.abc import Callable

from d2plm.errors import ConfigError, require_number

Schedule = Callable[[int], float]


def cosine(
    max_steps: int,
    *,
    warmup_ratio: float = 0.1,
    warmup_steps: int | None = None,
    floor_ratio: float = 0.0,
) -> Schedule:
    """Linear warm-up from 0 to 1, then half a cosine down to `floor_ratio` at `max_steps`.

    Args:
        max_steps: optimizer steps of the run.
        warmup_ratio: share of `max_steps` spent warming up.
        warmup_steps: the same as a number of steps; wins over the ratio.
        floor_ratio: the factor at the end.

    Returns:
        step (0-based) → factor of the peak learning rate.

    Raises:
        ConfigError: on a value out of range, or a warm-up that fills the whole run.
    """
    require_number("schedule.warmup_ratio", warmup_ratio, low=0, high=1, high_open=True)
    require_number("schedule.floor_ratio", floor_ratio, low=0, high=1)
    warmup = round(warmup_ratio * max_steps) if warmup_steps is None else warmup_steps
    require_number("schedule.warmup_steps", warmup, integer=True, low=0)
    if warmup and warmup >= max_steps:
        raise ConfigError(
            f"schedule.warmup_steps={warmup}: the warm-up fills all of trainer.max_steps="
            f"{max_steps}; shorten it"
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min((step - warmup) / max(max_steps - warmup, 1), 1.0)
        return floor_ratio + (1 - floor_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
