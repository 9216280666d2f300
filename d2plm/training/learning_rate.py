"""Learning-rate schedules as plain functions of the step, so that resuming needs no state.

All begin with a linear warm-up. `cosine` is the usual choice if the length of the run is known.
`wsd` stays at the peak until shortly before the end, so that one long run can be ended or continued
at any length for the cost of its decay.
"""

import math
from collections.abc import Callable

from d2plm.core.errors import ConfigError
from d2plm.settings.training import ConstantSettings, CosineSettings, ScheduleSettings, WsdSettings

Schedule = Callable[[int], float]

# Fraction of the decay done → fraction of the factor left.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "1-sqrt": lambda done: 1 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


def cosine(max_steps: int, settings: CosineSettings | None = None) -> Schedule:
    """Linear warm-up from 0 to 1, then half a cosine down to the floor at `max_steps`.

    Loshchilov & Hutter, arXiv:1608.03983, equation 5, without restarts.

    Returns:
        0-based step → factor of the peak learning rate.

    Raises:
        ConfigError: if the warm-up fills the whole run.
    """
    settings = settings or CosineSettings()
    warmup = _warmup(max_steps, settings)
    return _declining(max_steps, warmup, max_steps - warmup, settings.floor_ratio, "cosine")


def linear(max_steps: int, settings: CosineSettings | None = None) -> Schedule:
    """Linear warm-up from 0 to 1, then linearly down to the floor; otherwise as `cosine`."""
    settings = settings or CosineSettings()
    warmup = _warmup(max_steps, settings)
    return _declining(max_steps, warmup, max_steps - warmup, settings.floor_ratio, "linear")


def constant(max_steps: int, settings: ConstantSettings | None = None) -> Schedule:
    """Linear warm-up from 0 to 1, then 1 to the end; otherwise as `cosine`."""
    return _declining(
        max_steps, _warmup(max_steps, settings or ConstantSettings()), 0, 0.0, "linear"
    )


def wsd(max_steps: int, settings: WsdSettings | None = None) -> Schedule:
    """Warm-up, stable, decay: 1 after the warm-up, and at the end down to the floor.

    MiniCPM (arXiv:2404.06395), section 4.2. The decay shapes are those that Hägele et al.
    (arXiv:2405.18392) compare. Otherwise as `cosine`.

    Raises:
        ConfigError: if warm-up and decay do not both fit.
    """
    settings = settings or WsdSettings()
    warmup = _warmup(max_steps, settings)
    decay = _steps("decay", max_steps, settings.decay_ratio, settings.decay_steps)
    if warmup + decay > max_steps:
        raise ConfigError(
            f"with a warm-up of {warmup} steps it is longer than max_steps={max_steps}; shorten "
            "one of them",
            {"decay_steps": decay},
        )
    return _declining(max_steps, warmup, decay, settings.floor_ratio, settings.decay_shape)


def _declining(
    max_steps: int, warmup: int, decline: int, floor_ratio: float, shape: str
) -> Schedule:
    """Up over `warmup` steps, 1, and down by `shape` (1 → 0) over the last `decline` steps."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        declined = step - (max_steps - decline)
        if not decline or declined <= 0:
            return 1.0
        return floor_ratio + (1 - floor_ratio) * DECAY_SHAPES[shape](min(declined / decline, 1.0))

    return factor


def _warmup(max_steps: int, settings: ScheduleSettings) -> int:
    return _steps("warmup", max_steps, settings.warmup_ratio, settings.warmup_steps)


def _steps(phase: str, max_steps: int, ratio: float, steps: int | None) -> int:
    """The length of the phase `warmup` or `decay`, which must not fill the whole run."""
    length = round(ratio * max_steps) if steps is None else steps
    if length and length >= max_steps:
        raise ConfigError(
            f"the {phase} fills all of max_steps={max_steps}; shorten it",
            {f"{phase}_steps": length},
        )
    return length
