"""Learning-rate schedules as plain functions of the step, so that resuming needs no state.

All begin with a linear warm-up and differ in the decline after it. `cosine` is the usual choice
where the length of the run is known. `wsd` stays at the peak until shortly before the end, so that
one long run can be ended or continued at any length for the cost of its decay alone.
"""

import math
from collections.abc import Callable

from d2plm.core.errors import ConfigError, require_choice, require_number

Schedule = Callable[[int], float]

# Share of the decline done → share of the factor left.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def cosine(
    max_steps: int,
    *,
    warmup_ratio: float = 0.1,
    warmup_steps: int | None = None,
    floor_ratio: float = 0.0,
) -> Schedule:
    """Linear warm-up from 0 to 1, then half a cosine down to `floor_ratio` at `max_steps`.

    Loshchilov & Hutter, arXiv:1608.03983, equation 5, without restarts.

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
    warmup = _steps("warmup", max_steps, warmup_ratio, warmup_steps)
    return _declining(max_steps, warmup, max_steps - warmup, floor_ratio, "cosine")


def linear(
    max_steps: int,
    *,
    warmup_ratio: float = 0.1,
    warmup_steps: int | None = None,
    floor_ratio: float = 0.0,
) -> Schedule:
    """Linear warm-up from 0 to 1, then a straight line down to `floor_ratio` at `max_steps`.

    Arguments, result and errors are those of `cosine`.
    """
    warmup = _steps("warmup", max_steps, warmup_ratio, warmup_steps)
    return _declining(max_steps, warmup, max_steps - warmup, floor_ratio, "linear")


def constant(
    max_steps: int, *, warmup_ratio: float = 0.1, warmup_steps: int | None = None
) -> Schedule:
    """Linear warm-up from 0 to 1, then 1 to the end.

    Arguments, result and errors are those of `cosine`; there is no floor to decline to.
    """
    warmup = _steps("warmup", max_steps, warmup_ratio, warmup_steps)
    return _declining(max_steps, warmup, 0, 0.0, "linear")


def wsd(
    max_steps: int,
    *,
    warmup_ratio: float = 0.1,
    warmup_steps: int | None = None,
    decay_ratio: float = 0.1,
    decay_steps: int | None = None,
    decay_shape: str = "linear",
    floor_ratio: float = 0.0,
) -> Schedule:
    """Warm-up, stable, decay: 1 after the warm-up, and only at the end down to `floor_ratio`.

    MiniCPM (arXiv:2404.06395), section 4.2. Shapes of the decay are those that Hägele et al.
    (arXiv:2405.18392) compare: with p, 0 … 1, of the decay done, `linear` is 1 - p, `1-sqrt` 1 - √p
    and `cosine` (1 + cos πp)/2. The other arguments and the result are those of `cosine`.

    Args:
        decay_ratio: share of `max_steps` spent decaying, at the end.
        decay_steps: the same as a number of steps; wins over the ratio.
        decay_shape: `linear`, `1-sqrt` or `cosine`.

    Raises:
        ConfigError: on a value out of range, or a warm-up and a decay that do not both fit.
    """
    require_choice("decay_shape", decay_shape, DECAY_SHAPES)
    warmup = _steps("warmup", max_steps, warmup_ratio, warmup_steps)
    decay = _steps("decay", max_steps, decay_ratio, decay_steps)
    if warmup + decay > max_steps:
        raise ConfigError(
            f"decay_steps={decay}: with a warm-up of {warmup} steps it is longer than "
            f"max_steps={max_steps}; shorten one of them"
        )
    return _declining(max_steps, warmup, decay, floor_ratio, decay_shape)


def _declining(
    max_steps: int, warmup: int, decline: int, floor_ratio: float, shape: str
) -> Schedule:
    """Up over `warmup` steps, 1, and by `shape` (1 → 0) down over the last `decline` steps."""
    require_number("floor_ratio", floor_ratio, low=0, high=1)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        declined = step - (max_steps - decline)
        if not decline or declined <= 0:
            return 1.0
        return floor_ratio + (1 - floor_ratio) * DECAY_SHAPES[shape](min(declined / decline, 1.0))

    return factor


def _steps(phase: str, max_steps: int, ratio: float, steps: int | None) -> int:
    """The length of the phase `warmup` or `decay`; it may not fill the whole run."""
    require_number(f"{phase}_ratio", ratio, low=0, high=1, high_open=True)
    length = round(ratio * max_steps) if steps is None else steps
    require_number(f"{phase}_steps", length, integer=True, low=0)
    if length and length >= max_steps:
        raise ConfigError(
            f"{phase}_steps={length}: the {phase} fills all of max_steps={max_steps}; shorten it"
        )
    return length
