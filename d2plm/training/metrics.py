"""The measurements of a `MetricLogger`: one small class per metric.

A metric sees every step and returns its values when a row is due. Seeing must not synchronise with
the device; reading may, and may be a collective, as all ranks read at the same step.
"""

import math
import resource
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from d2plm.training.shards import norms

if TYPE_CHECKING:
    from d2plm.training.trainer import Trainer

GIB = 2**30
STARVED = 0.1  # relative to the mean load; an expert with less hardly learns


class Metric:
    """Base class of a measurement; every method is empty by default."""

    def begin(self, trainer: "Trainer") -> None:
        """Before the first step."""

    def see_gradients(self, trainer: "Trainer") -> None:
        """Before the update of a step whose row is due, on every rank; gradients are clipped."""

    def see(self, trainer: "Trainer") -> None:
        """After every step; must not synchronise with the device."""

    def read(self, trainer: "Trainer") -> dict[str, float]:
        """Values since the last call, by name; called on every rank at the same step."""
        return {}


class MeanLoss(Metric):
    """`loss`: mean over the steps since the last row that were not skipped, nats."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def see(self, trainer: "Trainer") -> None:
        if not trainer.skip_update:
            self.losses.append(trainer.loss)

    def read(self, trainer: "Trainer") -> dict[str, float]:
        losses, self.losses = self.losses, []
        return {"loss": float(torch.stack(losses).mean())} if losses else {}


class StepState(Metric):
    """`learning_rate`; `grad_norm` before clipping and `parameter_norm`; fractional `epoch`."""

    @torch.no_grad()
    def read(self, trainer: "Trainer") -> dict[str, float]:
        norm = norms([trainer.parameters], trainer.process, trainer.splits)
        return {
            "learning_rate": trainer.optimizer.param_groups[0]["lr"],
            "grad_norm": float(trainer.grad_norm),
            "parameter_norm": float(norm),
            "epoch": trainer.loader.epochs_done(trainer.position),
        }


class LayerNorms(Metric):
    """`grad_norm/LAYER`, before clipping, and `optimizer_norm/KIND` for each kind of its state."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def see_gradients(self, trainer: "Trainer") -> None:
        self.gradients = gradient_norms(trainer, layer_of)

    def read(self, trainer: "Trainer") -> dict[str, float]:
        kinds: dict[str, dict[str, Tensor]] = {}
        for name, parameter in trainer.parameters.items():
            for kind, value in trainer.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    kinds.setdefault(kind, {})[name] = value
        found = {f"grad_norm/{layer}": float(norm) for layer, norm in self.gradients.items()}
        self.gradients = {}
        of_kinds = norms_by_name(trainer, kinds)
        return found | {f"optimizer_norm/{kind}": float(norm) for kind, norm in of_kinds.items()}


class ExpertLoads(Metric):
    """The distribution of tokens since the last row over experts; nothing for a dense model.

    `expert_load/LAYER.EXPERT`: an expert's load ÷ the mean of its layer; `expert_largest`: the
    largest of these; `expert_entropy`: entropy of the load in the layer where it is lowest, 1 if
    all are equal; `experts_starved`: number of experts with less than a tenth of the mean;
    `router_z`: mean of logsumexp(router's logits)² over tokens and layers, large before a router
    becomes unstable.
    """

    def __init__(self) -> None:
        self.load: Tensor | None = None
        self.z = torch.zeros(())

    def see(self, trainer: "Trainer") -> None:
        experts = trainer.experts
        if self.load is not None:
            self.load, self.z = self.load + experts.load, self.z + experts.z
        elif experts.layers:
            self.load, self.z = experts.load, experts.z.double()

    def read(self, trainer: "Trainer") -> dict[str, float]:
        if self.load is None:
            return {}
        z, config = trainer.process.sum_over_ranks(self.z), trainer.model.config
        both = torch.cat([self.load.double(), z[:, None]], dim=1).cpu()  # one synchronisation
        self.load, load = None, both[:, :-1]
        total = load.sum(-1, keepdim=True).clamp(min=1)
        share, relative = load / total, load / total * config.num_experts
        entropy = torch.special.entr(share).sum(-1) / math.log(config.num_experts)
        return {
            "expert_largest": float(relative.max()),
            "expert_entropy": float(entropy.min()),
            "experts_starved": float((relative < STARVED).sum()),
            "router_z": float((both[:, -1:] / total).mean()) * config.experts_per_token,
            **{
                f"expert_load/{layer}.{expert}": value
                for layer, values in zip(trainer.experts.layers, relative.tolist(), strict=True)
                for expert, value in enumerate(values)
            },
        }


class PeakMemory(Metric):
    """Peak memory of rank 0 since its start, in GiB.

    On CUDA `peak_memory_allocated_gib` (tensors) and `peak_memory_reserved_gib` (torch's cache);
    elsewhere `peak_memory_gib`, resident in the process.
    """

    def read(self, trainer: "Trainer") -> dict[str, float]:
        device = trainer.process.device
        if device.type != "cuda":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"peak_memory_gib": peak / (GIB if sys.platform == "darwin" else 2**20)}
        return {
            "peak_memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "peak_memory_reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }


def layer_of(parameter: str) -> str:
    """The layer of a parameter's name: `blocks.3`, `head`."""
    first, second, *_ = parameter.split(".")
    return f"{first}.{second}" if first == "blocks" else first


def gradient_norms(
    trainer: "Trainer", group_of: Callable[[str], str] = lambda name: name
) -> dict[str, Tensor]:
    """The norm of each group's gradient before clipping; a collective.

    If the total norm is not finite, gradients were not clipped, and norms are not rescaled.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trainer.parameters.items():
        if parameter.grad is not None:
            groups.setdefault(group_of(name), {})[name] = parameter.grad
    found = norms_by_name(trainer, groups)
    scale = trainer.grad_norm / torch.stack([*found.values()]).square().sum().sqrt()
    factor = torch.where(torch.isfinite(scale), scale, 1.0)
    return {name: norm * factor for name, norm in found.items()}


def norms_by_name(trainer: "Trainer", groups: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The norm of each group of shards over all ranks and stages; a collective."""
    names = trainer.process.of_all_stages(groups)
    if not names:
        return {}
    parts = [groups.get(name, {}) for name in names]
    return dict(zip(names, norms(parts, trainer.process, trainer.splits), strict=True))
