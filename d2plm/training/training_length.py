"""The number of optimizer steps: given, from the epochs, or from a FLOP budget.

The FLOPs of a step depend on the lengths of its sequences through attention, so a budget is divided
by the mean over the sampled sequences; a run deviates from its budget by a few parts in a thousand.
"""

import numpy as np

from d2plm.core.errors import ConfigError
from d2plm.data.loader import PackedLoader
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.settings.training import TrainerSettings


def number_of_steps(loader: PackedLoader, config: DiTConfig, settings: TrainerSettings) -> int:
    """The number of optimizer steps.

    Raises:
        ConfigError: unless exactly one limit is set, or if the budget is less than a step.
    """
    limits = {key: getattr(settings, key) for key in ("max_steps", "max_epochs", "flops_budget")}
    if sum(value is not None for value in limits.values()) != 1:
        raise ConfigError("set exactly one of them, the others to null", limits)
    if settings.max_epochs is not None:
        return sum(loader.batches_in_epoch(epoch) for epoch in range(settings.max_epochs))
    if settings.flops_budget is not None:
        per_step = flops_per_step(loader, config)
        if settings.flops_budget < per_step:
            raise ConfigError(
                f"one step takes {per_step:.3g} FLOPs; raise the budget, or lower token_budget",
                {"flops_budget": settings.flops_budget},
            )
        return int(settings.flops_budget / per_step)
    assert settings.max_steps is not None
    return settings.max_steps


def tokens_per_step(loader: PackedLoader) -> float:
    """Mean number of real tokens (no padding) of an optimizer step over all ranks."""
    plan = loader.sampler.plan(0)
    return float(plan.tokens.sum(dtype=np.int64)) / len(plan) * loader.bins_per_batch


def flops_per_step(loader: PackedLoader, config: DiTConfig) -> float:
    """Expected model FLOPs of an optimizer step over all ranks."""
    plan = loader.sampler.plan(0)
    return training_flops(config, plan.tokens.astype(np.int64)) / len(plan) * loader.bins_per_batch
