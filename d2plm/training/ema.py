"""The exponential moving average of the weights, kept by diffusers' `EMAModel`.

A shadow of this rank's parameters, updated once per optimizer step with the warmed-up decay
min(decay, (1 + n)/(10 + n)). Evaluation and export take the shadow; training goes on from the raw
weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from d2plm.errors import require_number


class EMA:
    """Moving average of a model's parameters.

    Args:
        model: its parameters are shadowed in their present values.
        decay: the cap of the warmed-up decay, in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        require_number("trainer.ema_decay", decay, low=0, high=1, high_open=True)
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        # EMAModel's grouped kernels crash on frozen parameters.
        trainable = all(parameter.requires_grad for parameter in self._parameters)
        self._average = EMAModel(self._parameters, decay=decay, foreach=trainable)

    def update(self) -> None:
        """Move the shadow towards the weights; call once after each optimizer step."""
        self._average.step(self._parameters)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model holds the averaged weights inside the block and its own again after it."""
        self._average.store(self._parameters)
        try:
            self._average.copy_to(self._parameters)
            yield
        finally:
            self._average.restore(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """{"shadow": {parameter name: fp32 tensor}, "updates": number of updates}."""
        shadow: dict[str, Tensor] = dict(zip(self._names, self._average.shadow_params, strict=True))
        return {"shadow": shadow, "updates": self._average.optimization_step}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, shadow in zip(self._names, self._average.shadow_params, strict=True):
            shadow.copy_(state["shadow"][name])
        self._average.optimization_step = int(state["updates"])
