"""Load balancing of experts: their loads in each step, and the updates of the routers' biases.

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
    """Sums the loads of a step and updates the routers' biases; does nothing for a dense model.

    The biases of routers with frozen weights do not change.

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
        # (layer, this rank's shard of its bias), and indices of the experts in the shards.
        self._biases: list[tuple[int, Tensor]] = []
        for layer, (name, router) in enumerate(routers.items()):
            bias = router.bias
            if bias is not None and router.weight.requires_grad:
                self._biases.append((layer, parameters[f"{name}.bias"]))
                self._own = own_shard(torch.arange(len(bias), device=bias.device), bias)

    def begin_step(self) -> None:
        """Call before the forwards of a step."""
        self._seen: list[tuple[Tensor, Tensor]] = []

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
        """Move the biases towards equal loads.

        A bias moves by `balance_rate`, up if its expert's load is below the mean and down if above
        (Wang et al., arXiv:2408.15664, algorithm 1). Only differences matter, so the mean over the
        experts is subtracted: small biases stay precise if parameters are cast to bf16.
        """
        if not self._biases:
            return
        load = self.load.to(self._own.device)  # parameters may be offloaded
        total = load.sum(-1, keepdim=True)
        steps = self.config.balance_rate * (total - load.shape[-1] * load).sign().double()
        steps = (steps - steps.mean(-1, keepdim=True))[:, self._own]
        for layer, bias in self._biases:
            bias.add_(steps[layer])
