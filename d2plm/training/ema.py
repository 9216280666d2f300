"""The exponential moving average of the weights, with diffusers' `EMAModel`.

A shadow of this rank's shards, updated once per optimizer step with the warmed-up decay min(decay,
(1 + n)/(10 + n)). Evaluation and export use the shadow, training the raw weights. The update is one
grouped kernel of PyTorch; `EMAModel.step` takes over ten times as long.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from d2plm.core.errors import require_number


class EMA:
    """Moving average of this rank's shards, with a maximum decay in [0, 1)."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        # Imported here as it takes a second.
        from diffusers.training_utils import EMAModel

        require_number("ema_decay", decay, low=0, high=1, high_open=True)
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._average = EMAModel(self._parameters, decay=decay)

    def update(self) -> None:
        """Move the shadow towards the weights; call once after each optimizer step."""
        average = self._average
        average.optimization_step += 1
        decay = average.get_decay(average.optimization_step)
        get_ema_multi_avg_fn(decay)(average.shadow_params, self._parameters, None)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager: the model has the averaged weights inside the block."""
        self._average.store(self._parameters)
        try:
            self._average.copy_to(self._parameters)
            yield
        finally:
            self._average.restore(self._parameters)

    @property
    def shadow(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._average.shadow_params, strict=True))

    @property
    def updates(self) -> int:
        return int(self._average.optimization_step)

    @updates.setter
    def updates(self, number: int) -> None:
        self._average.optimization_step = number
