"""The plan of a training: its parallel dimensions, and which process computes which bins.

Impossible plans are rejected before anything is built. `accelerate launch` fills the same plan.
"""

import os
from dataclasses import dataclass, replace
from math import gcd, prod

from torch.distributed.fsdp import CPUOffloadPolicy

from d2plm.core.errors import ConfigError, require, require_choice, require_number
from d2plm.model.dit_config import DiTConfig

# What `accelerate launch` may ask for beside sizes, where it is not all: nothing, no and these.
ACCEPTED_OF_ACCELERATE: dict[str, tuple[str, ...]] = {
    "ACCELERATE_USE_DEEPSPEED": (),
    "ACCELERATE_USE_MEGATRON_LM": (),
    "ACCELERATE_DYNAMO_BACKEND": (),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP",),
    "FSDP_IGNORED_MODULES": (),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (),
    "PARALLELISM_CONFIG_CP_BACKEND": ("TORCH",),
}


# Of a plan: each can be more than one process, or more than one part on a process.
DIMENSIONS = ("replicate", "tensor", "context", "expert", "pipeline", "pipeline_stages_per_rank")


@dataclass(frozen=True)
class Plan:
    """How training is spread over processes.

    Attributes:
        replicate: copies of the model's shards; more than 1 is hybrid sharding (HSDP).
        shard: processes that share one copy and have rows of their own; `auto` is all of them,
            divided by the other dimensions.
        tensor: processes that share the heads and the feed-forward's width of every block, and the
            tokens of a row between them.
        context: processes that share the tokens of a row; within attention, its heads.
        expert: of those that shard a copy, the number that share the experts of each layer.
        pipeline: processes that share the blocks and pass the hidden states of micro-batches on.
        pipeline_stages_per_rank: stages of blocks on each of them. 1 is the schedule 1F1B; with
            more, interleaved 1F1B, processes wait less and send more.
        reshard_after_forward: free a block's gathered parameters between its forward and backward:
            less memory, one more gathering.
        reshard_between_micro_batches: free them after each micro-batch's backward, and not only
            after the step's last.
        cpu_offload: keep shards, moments and average in host memory (CUDA).
        activation_checkpointing: recompute the activations of every n-th block in the backward;
            1 is every block, 0 none.
        timeout_seconds: how long a rank may keep the others waiting before training fails.
    """

    replicate: int = 1
    shard: int | str = "auto"
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    pipeline_stages_per_rank: int = 1
    reshard_after_forward: bool = True
    reshard_between_micro_batches: bool = False
    cpu_offload: bool = False
    activation_checkpointing: int = 0
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for key in DIMENSIONS:
            require_number(key, getattr(self, key), integer=True, low=1)
        require_number("timeout_seconds", self.timeout_seconds, low=0, low_open=True)
        if self.shard != "auto":
            require_number("shard", self.shard, integer=True, low=1)
        for key in ("reshard_after_forward", "reshard_between_micro_batches", "cpu_offload"):
            value = getattr(self, key)
            require(isinstance(value, bool), key, value, "true or false")
        number = self.activation_checkpointing
        require_number("activation_checkpointing", number, integer=True, low=0)
        if self.pipeline_stages_per_rank > 1 and self.pipeline == 1:
            raise ConfigError(
                f"pipeline_stages_per_rank={self.pipeline_stages_per_rank}: there is no pipeline; "
                "set pipeline above 1, or this to 1"
            )
        if self.pipeline > 1 and self.reshard_between_micro_batches:
            raise ConfigError(
                f"reshard_between_micro_batches=True: pipeline={self.pipeline} computes several "
                "micro-batches at once and keeps parameters gathered; set it to false"
            )

    @property
    def row_ranks(self) -> int:
        """The processes that share one row."""
        return self.context * self.tensor

    @property
    def stages(self) -> int:
        """The parts into which the blocks are divided."""
        return self.pipeline * self.pipeline_stages_per_rank

    def resolved(self, world_size: int) -> "Plan":
        """The plan with the number of shards filled in.

        Raises:
            ConfigError: where the product of the dimensions is not the number of processes.
        """
        keys = ("pipeline", "replicate", "context", "tensor")
        dimensions = {key: getattr(self, key) for key in keys}
        named, others = self._named(*keys) or "replicate=1", prod(dimensions.values())
        shard = self.shard
        if isinstance(shard, str):
            if world_size % others:
                product = f" (product {others})" if ", " in named else ""
                raise ConfigError(
                    f"{named}{product}: does not divide the "
                    f"{world_size} processes; use one of {_divisors(world_size)}, or a multiple of "
                    f"{others} processes"
                )
            shard = world_size // others
        if others * shard != world_size:
            raise ConfigError(
                f"{named}, shard={shard}: their product "
                f"is not the {world_size} processes there are; set one of them to "
                f"{world_size // others or 1}, or shard=auto"
            )
        if shard * self.context % self.expert:
            raise ConfigError(
                f"expert={self.expert}: does not divide the {shard * self.context} processes of "
                f"shard={shard} × context={self.context}, which the experts are spread over; use "
                f"{_divisors(shard * self.context)}"
            )
        return replace(self, shard=shard)

    def require_fits(self, config: DiTConfig) -> None:
        """Raise `ConfigError` unless a model of this `config` can be spread as planned."""
        heads, ranks, layers = config.num_attention_heads, self.row_ranks, config.num_hidden_layers
        staged = self._named("pipeline", "pipeline_stages_per_rank")
        named = self._named("context", "tensor")
        if self.stages > layers:
            raise ConfigError(
                f"{staged}: the model's num_hidden_layers={layers} cannot be divided into "
                f"{self.stages} stages; use a product of at most {layers}"
            )
        if staged and config.num_experts is not None:
            raise ConfigError(
                f"{staged}: a model with num_experts={config.num_experts} cannot be divided into "
                "stages; spread its experts over processes instead"
            )
        if (staged or named) and config.relatives_dim is not None:
            raise ConfigError(
                f"{named or staged}: a model with relatives_dim={config.relatives_dim} aligns "
                "whole rows and cannot be divided; shard over these processes instead, or set "
                "relatives_dim=null"
            )
        if self.expert > 1 and (config.num_experts is None or config.num_experts % self.expert):
            raise ConfigError(
                f"expert={self.expert}: the model's num_experts={config.num_experts} cannot be "
                f"shared by {self.expert} processes; use {_divisors(config.num_experts or 1)}"
            )
        if heads % ranks:
            raise ConfigError(
                f"{named}: the model's num_attention_heads={heads} cannot be shared by {ranks} "
                f"processes; use a product of {_divisors(heads)}"
            )
        if self.tensor > 1 and config.linear_bias:
            raise ConfigError(
                f"{named}: a model with linear_bias=True cannot be split; use context instead"
            )
        if config.num_experts is None and config.intermediate_size % self.tensor:
            raise ConfigError(
                f"{named}: tensor does not divide the model's intermediate_size="
                f"{config.intermediate_size}; use {_divisors(gcd(heads, config.intermediate_size))}"
            )

    def require_adapters(self, rank: int | None) -> None:
        """Raise `ConfigError` unless changes of low rank, None for none, can be spread."""
        wanted = f"null with tensor={self.tensor}, as adapters are not split; use context or shard"
        require(rank is None or self.tensor == 1, "lora_rank", rank, wanted)

    def _named(self, *keys: str) -> str:
        """Those of the dimensions `keys` that are more than 1, with their sizes."""
        sizes = ((key, getattr(self, key)) for key in keys)
        return ", ".join(f"{key}={size}" for key, size in sizes if size > 1)

    def require_micro_batches(self, number: int) -> None:
        """Raise `ConfigError` unless this number of micro-batches of a step fills the pipeline."""
        if number < self.pipeline or (self.stages > self.pipeline and number % self.pipeline):
            few = "at least" if self.stages == self.pipeline else "a multiple of"
            raise ConfigError(
                f"pipeline={self.pipeline}: a step has {number} micro-batches, and needs {few} "
                f"{self.pipeline}; change global_batch_tokens or gradient_accumulation_steps"
            )


def plan_of_accelerate() -> dict[str, object]:
    """The settings of `accelerate launch` as fields of a `Plan`; empty without it.

    How the tokens of a context are exchanged (`cp_comm_strategy`) changes no result: it is an
    all-to-all, whatever is set. Wrapping is by block, and checkpoints are sharded.

    Raises:
        ConfigError: if it asks for what training does not do: FSDP1, DeepSpeed, Megatron-LM,
            sequence parallelism, its own compilation, or modules that are left out of sharding.
    """
    for variable, accepted in ACCEPTED_OF_ACCELERATE.items():
        value = os.environ.get(variable, "")
        if value.upper() not in ("", "NO", "NONE", "FALSE", "0", *accepted):
            wanted = " or ".join(accepted) or "unset"
            raise ConfigError(
                f"accelerate's {variable}={value!r}: must be {wanted}: training shards by FSDP2, "
                "as configs/accelerate/fsdp2.yaml asks for it, and compiles by trainer.compile"
            )
    sizes = {
        key: int(os.environ.get(f"PARALLELISM_CONFIG_{key}_SIZE", 1))
        for key in ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
    }
    wanted = "1: there is no sequence parallelism; shard over more processes instead"
    require(sizes["SP"] == 1, "accelerate's parallelism_config_sp_size", sizes["SP"], wanted)
    fields = {"replicate": "DP_REPLICATE", "shard": "DP_SHARD", "tensor": "TP", "context": "CP"}
    # 1 is also what accelerate says where it was not asked.
    settings: dict[str, object] = {
        field: sizes[key] for field, key in fields.items() if sizes[key] > 1
    }
    if not _is_set("ACCELERATE_USE_FSDP"):
        return settings
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "accelerate's fsdp_version=1: training shards by FSDP2; set fsdp_version: 2 in its "
            "configuration, as configs/accelerate/fsdp2.yaml does"
        )
    from accelerate import FullyShardedDataParallelPlugin

    # A setting of how a model is loaded does not apply: every rank makes or reads its own shard.
    plugin = FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False)
    offload = plugin.cpu_offload
    settings["reshard_after_forward"] = bool(plugin.reshard_after_forward)
    settings["cpu_offload"] = offload is True or isinstance(offload, CPUOffloadPolicy)
    if plugin.activation_checkpointing:
        settings["activation_checkpointing"] = 1
    return settings


def _is_set(variable: str) -> bool:
    """Whether an environment variable is true, in any of accelerate's spellings."""
    return os.environ.get(variable, "").lower() in ("y", "yes", "t", "true", "on", "1")


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
            f"{_divisors(bins)} processes, or global_batch_tokens="
            f"{-(-bins // ranks) * ranks * token_budget}"
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
