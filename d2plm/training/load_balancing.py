"""Load balancing of experts: their loads in each step, and the updates of the routers' states.

Loads are integers summed over the micro-batches and ranks of the global batch, so the biases are
bitwise identical however the batch is distributed. Loads from evaluations and recomputed forwards
are overwritten.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from d2plm.model.dit import DiT
from d2plm.model.experts import Router
from d2plm.training.distributed import Process
from d2plm.training.shards import own_shard


class LoadBalancer:
    """Sums the loads of a step and updates the routers' states; does nothing for a dense model.

    The states of routers with frozen weights do not change.

    Args:
        parameters: this rank's shards by name.

    Attributes:
        layers: names of the blocks with experts.
        load: int64 [layers, E], tokens per expert in the last step's global batch.
        z: [layers], Σ logsumexp(router's logits)² over this rank's tokens of that step.
    """

    def __init__(self, model: DiT, parameters: Mapping[str, Tensor], process: Process) -> None:
        self.config, self.process = model.config, process
        routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
        self._routers = list(routers.values())
        self.layers = [name.removesuffix(".feed_forward.router") for name in routers]
        self.load = self.z = torch.zeros(())
        # (layer, this rank's shard of the state), and indices of the experts in the shards.
        self._states: dict[str, list[tuple[int, Tensor]]] = {"bias": [], "past_load": []}
        for layer, (name, router) in enumerate(routers.items()):
            for kind, state in router.states().items() if router.weight.requires_grad else ():
                self._states[kind].append((layer, parameters[f"{name}.{kind}"]))
                self._own = own_shard(torch.arange(len(state), device=state.device), state)

    def begin_step(self, factor: Tensor) -> None:
        """Call before the forwards of a step, with the backward's factor of the summed loss."""
        self._seen: list[tuple[Tensor, Tensor]] = []
        if self.config.auxiliary_loss:
            for router in self._routers:
                router.auxiliary_factor = self.config.auxiliary_loss * factor

    def see(self) -> None:
        """Call after the forward of each micro-batch."""
        if self._routers:
            loads, zs = zip(*((router.load, router.z) for router in self._routers), strict=True)
            self._seen.append((torch.stack(loads), torch.stack(zs)))

    def end_step(self) -> None:
        if self._routers:
            loads, zs = zip(*self._seen, strict=True)
            self.load = self.process.sum_over_ranks(torch.stack(loads).sum(0))
            self.z = torch.stack(zs).sum(0)

    def move(self) -> None:
        """Move the biases towards equal loads, and store the loads for the auxiliary loss.

        A bias moves by `balance_rate`, up if its expert's load is below the mean and down if above
        (Wang et al., arXiv:2408.15664, algorithm 1). Only differences matter, so the mean over the
        experts is subtracted: small biases stay precise if parameters are cast to bf16.
        """
        if not any(self._states.values()):
            return
        load = self.load.to(self._own.device)  # parameters may be offloaded
        total = load.sum(-1, keepdim=True)
        steps = self.config.balance_rate * (total - load.shape[-1] * load).sign().double()
        steps = (steps - steps.mean(-1, keepdim=True))[:, self._own]
        for layer, bias in self._states["bias"]:
            bias.add_(steps[layer])
        shares = (load.double() / total.clamp(min=1))[:, self._own]
        for layer, past_load in self._states["past_load"]:
            past_load.copy_(shares[layer])
