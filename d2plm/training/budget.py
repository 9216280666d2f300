"""How many optimizer steps a FLOP budget pays for.

An expectation: a step's FLOPs depend on the lengths of the sequences in it, through attention, and
are taken at their mean over the sequences that training draws. Their sum over a whole run comes out
within a few parts in a thousand of it.
"""

import math

import numpy as np
from numpy.typing import NDArray

from d2plm.errors import ConfigError, require_number
from d2plm.model.config import DiTConfig
from d2plm.model.flops import training_flops


def steps_for(
    flops_budget: float,
    config: DiTConfig,
    lengths: NDArray[np.integer],
    tokens_per_step: float,
    max_length: int,
) -> int:
    """The optimizer steps whose expected model FLOPs (see `model.flops`) the budget holds.

    Args:
        flops_budget: floating-point operations, such as 1e18.
        config: the model.
        lengths: integer [N], residues of the sequences that training draws, as often as it does.
        tokens_per_step: real tokens (no padding) of an optimizer step over all ranks.
        max_length: longest segment in tokens; longer sequences are cropped.

    Raises:
        ConfigError: if the budget is no positive number, or holds less than one step.
    """
    require_number(
        "trainer.flops_budget", flops_budget, low=0, high=math.inf, low_open=True, high_open=True
    )
    segments = np.minimum(lengths.astype(np.int64) + 2, max_length)
    per_token = training_flops(config, segments) / segments.sum()
    per_step = per_token * tokens_per_step
    steps = int(flops_budget / per_step)
    if steps < 1:
        raise ConfigError(
            f"trainer.flops_budget={flops_budget:g}: one step takes {per_step:.3g} FLOPs; raise "
            "the budget, or lower data.token_budget"
        )
    return steps
