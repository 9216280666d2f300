"""The plan of a training: copies, shards, recomputation, and which process computes which bins.

Impossible plans are rejected before anything is built. `accelerate launch` fills the same plan.
"""

import os
from dataclasses import dataclass, replace

from torch.distributed.fsdp import CPUOffloadPolicy

from d2plm.core.errors import ConfigError, require, require_choice, require_number


@dataclass(frozen=True)
class Plan:
    """How training is spread over processes.

    Attributes:
        replicate: copies of the model's shards; more than 1 is hybrid sharding (HSDP).
        shard: processes that share one copy; `auto` is all of them, divided by `replicate`.
        reshard_after_forward: free a block's gathered parameters between its forward and backward:
            less memory, one more gathering.
        reshard_between_micro_batches: free them after each micro-batch's backward, and not only
            after the step's last.
        cpu_offload: keep shards, moments and average in host memory (CUDA).
        activation_checkpointing: recompute the activations of every n-th block in the backward;
            1 is every block, 0 none.
        tensor, context: parallel dimensions that do not exist yet; only 1 is accepted.
    """

    replicate: int = 1
    shard: int | str = "auto"
    reshard_after_forward: bool = True
    reshard_between_micro_batches: bool = False
    cpu_offload: bool = False
    activation_checkpointing: int = 0
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        require_number("replicate", self.replicate, integer=True, low=1)
        if self.shard != "auto":
            require_number("shard", self.shard, integer=True, low=1)
        for key in ("reshard_after_forward", "reshard_between_micro_batches", "cpu_offload"):
            value = getattr(self, key)
            require(isinstance(value, bool), key, value, "true or false")
        number = self.activation_checkpointing
        require_number("activation_checkpointing", number, integer=True, low=0)
        for key in ("tensor", "context"):
            wanted = f"1: there is no {key} parallelism yet; shard over more processes instead"
            require(getattr(self, key) == 1, key, getattr(self, key), wanted)

    def resolved(self, world_size: int) -> "Plan":
        """The plan with the number of shards filled in.

        Raises:
            ConfigError: where replicas × shards is not the number of processes.
        """
        shard = self.shard
        if isinstance(shard, str):
            if world_size % self.replicate:
                raise ConfigError(
                    f"replicate={self.replicate}: does not divide the "
                    f"{world_size} processes; use one of {_divisors(world_size)}"
                )
            shard = world_size // self.replicate
        if self.replicate * shard != world_size:
            raise ConfigError(
                f"replicate={self.replicate}, shard={shard}: their product "
                f"is not the {world_size} processes there are; set one of them to "
                f"{world_size // self.replicate or 1}, or shard=auto"
            )
        return replace(self, shard=shard)


def plan_of_accelerate() -> dict[str, object]:
    """The FSDP settings of `accelerate launch` as fields of a `Plan`; empty without it.

    Raises:
        ConfigError: if it asks for FSDP1.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false") != "true":
        return {}
    from accelerate import FullyShardedDataParallelPlugin

    # Settings of how a model is loaded do not apply: every rank makes or reads its own shard.
    plugin = FullyShardedDataParallelPlugin(
        cpu_ram_efficient_loading=False, sync_module_states=False
    )
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "accelerate's fsdp_version=1: training shards by FSDP2; set fsdp_version: 2 in its "
            "configuration, as configs/accelerate/fsdp2.yaml does"
        )
    offload = plugin.cpu_offload
    settings: dict[str, object] = {
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "cpu_offload": offload is True or isinstance(offload, CPUOffloadPolicy),
    }
    if plugin.activation_checkpointing:
        settings["activation_checkpointing"] = 1
    if "PARALLELISM_CONFIG_DP_REPLICATE_SIZE" in os.environ:
        settings["replicate"] = int(os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"])
    return settings


def precision_of_accelerate() -> str:
    """The precision given to `accelerate launch`; `auto` without it.

    Raises:
        ConfigError: for an unknown one.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    known = {"no": "auto", "bf16": "bf16", "fp16": "fp16"}
    require_choice("accelerate's mixed_precision", precision, tuple(known))
    return known[precision]


def batch_partition(
    ranks: int, token_budget: int, global_batch_tokens: int | None, accumulation: int | str
) -> dict[str, int]:
    """The bins of a global batch by process and micro-batch, as arguments of `PackedLoader`.

    Args:
        ranks: processes.
        token_budget: tokens of a bin.
        global_batch_tokens: of a step over all processes; None is a bin for each micro-batch.
        accumulation: micro-batches of a process; `auto` makes one of every bin.

    Raises:
        ConfigError: where they cannot be shared evenly, with the numbers that can.
    """
    if accumulation != "auto":
        require_number("gradient_accumulation_steps", accumulation, integer=True, low=1)
    if global_batch_tokens is None:
        bins = ranks * (1 if accumulation == "auto" else int(accumulation))
    else:
        require_number("global_batch_tokens", global_batch_tokens, integer=True, low=1)
        bins, rest = divmod(global_batch_tokens, token_budget)
        if rest or not bins:
            raise ConfigError(
                f"global_batch_tokens={global_batch_tokens}: must be a multiple of "
                f"token_budget={token_budget}, such as {max(bins, 1) * token_budget}"
            )
    if bins % ranks:
        raise ConfigError(
            f"global_batch_tokens={global_batch_tokens}: its {bins} bins of "
            f"token_budget={token_budget} tokens cannot be shared by {ranks} processes; use "
            f"{_divisors(bins)} processes, or another of the two"
        )
    own = bins // ranks
    micro_batches = own if accumulation == "auto" else int(accumulation)
    if own % micro_batches:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation}: each process has {own} bins of "
            f"a step; use auto or one of {_divisors(own)}"
        )
    return {"micro_batches": micro_batches, "bins_per_micro_batch": own // micro_batches}


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
