"""The number of optimizer steps: given, from the epochs, or from a FLOP budget.

The number of steps for a budget is an expectation: through attention, the FLOPs of a step depend on
the lengths of its sequences, so the mean over the sampled sequences is used. The sum over a run
deviates from the budget by a few parts in a thousand.
"""

import math

import numpy as np

from d2plm.core.errors import ConfigError, require_number
from d2plm.data.loader import PackedLoader
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops


def number_of_steps(
    loader: PackedLoader,
    config: DiTConfig,
    *,
    max_steps: int | None,
    max_epochs: int | None,
    flops_budget: float | None,
) -> int:
    """The number of optimizer steps; exactly one of the three limits must be given.

    Raises:
        ConfigError: if none or several are given, or the limit is out of range or less than a step.
    """
    limits = {"max_steps": max_steps, "max_epochs": max_epochs, "flops_budget": flops_budget}
    if sum(value is not None for value in limits.values()) != 1:
        given = ", ".join(f"{key}={value}" for key, value in limits.items())
        raise ConfigError(f"{given}: set exactly one of them, the others to null")
    if max_epochs is not None:
        require_number("max_epochs", max_epochs, integer=True, low=1)
        return sum(loader.batches_in_epoch(epoch) for epoch in range(max_epochs))
    if flops_budget is not None:
        require_number(
            "flops_budget", flops_budget, low=0, high=math.inf, low_open=True, high_open=True
        )
        per_step = flops_per_step(loader, config)
        if flops_budget < per_step:
            raise ConfigError(
                f"flops_budget={flops_budget:g}: one step takes {per_step:.3g} FLOPs; raise "
                "the budget, or lower token_budget"
            )
        return int(flops_budget / per_step)
    require_number("max_steps", max_steps, integer=True, low=1)
    assert max_steps is not None
    return max_steps


def tokens_per_step(loader: PackedLoader) -> float:
    """Mean number of real tokens (no padding) of an optimizer step over all ranks."""
    plan = loader.sampler.plan(0)
    return float(plan.tokens.sum(dtype=np.int64)) / len(plan) * loader.bins_per_batch


def flops_per_step(loader: PackedLoader, config: DiTConfig) -> float:
    """Expected model FLOPs of an optimizer step over all ranks."""
    plan = loader.sampler.plan(0)
    return training_flops(config, plan.tokens.astype(np.int64)) / len(plan) * loader.bins_per_batch
