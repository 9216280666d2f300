"""The plan of a training: its parallel dimensions, and which process computes which bins.

Impossible plans are rejected before anything is built. `accelerate launch` fills the same plan.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from torch.distributed.fsdp import CPUOffloadPolicy

from d2plm.core.errors import ConfigError, require, require_choice
from d2plm.data.loader import Collection, PackedLoader
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import Parallelism, Precision, TrainerSettings

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
ACCELERATES_TRUE = ("y", "yes", "t", "true", "on", "1")


@dataclass(frozen=True, kw_only=True)
class Plan(Parallelism):
    """How training is spread over processes: `Parallelism`, and what follows from it."""

    @property
    def row_ranks(self) -> int:
        """The processes that share one row."""
        return self.context * self.tensor

    def resolved(self, world_size: int) -> "Plan":
        """The plan with the number of shards filled in.

        Raises:
            ConfigError: if the product of the dimensions is not the number of processes.
        """
        keys = ("pipeline", "replicate", "context", "tensor")
        named = self._named(*keys) or {"replicate": 1}
        others = prod(getattr(self, key) for key in keys)
        shard = self.shard
        if isinstance(shard, str):
            if world_size % others:
                product = f" (their product is {others})" if len(named) > 1 else ""
                raise ConfigError(
                    f"does not divide the {world_size} processes{product}; use one of "
                    f"{_divisors(world_size)}, or a multiple of {others} processes",
                    named,
                )
            shard = world_size // others
        if others * shard != world_size:
            raise ConfigError(
                f"their product is not the {world_size} processes there are; set one of them to "
                f"{world_size // others or 1}, or shard=auto",
                {**named, "shard": shard},
            )
        if shard * self.context % self.expert:
            raise ConfigError(
                f"does not divide the {shard * self.context} processes of shard={shard} × "
                f"context={self.context}, which the experts are spread over; use "
                f"{_divisors(shard * self.context)}",
                {"expert": self.expert},
            )
        return replace(self, shard=shard)

    def require_fits(self, config: DiTConfig) -> None:
        """Raise `ConfigError` unless a model of this `config` can be spread as planned."""
        heads, ranks, layers = config.num_attention_heads, self.row_ranks, config.num_hidden_layers
        staged = self._named("pipeline")
        named = self._named("context", "tensor")
        if self.pipeline > layers:
            raise ConfigError(
                f"the model's num_hidden_layers={layers} cannot be divided into {self.pipeline} "
                f"stages; use at most {layers}",
                staged,
            )
        if staged and config.num_experts is not None:
            raise ConfigError(
                f"a model with num_experts={config.num_experts} cannot be divided into stages; "
                "spread its experts over processes instead",
                staged,
            )
        if (staged or named) and config.relatives_dim is not None:
            raise ConfigError(
                f"a model with relatives_dim={config.relatives_dim} aligns whole rows and cannot "
                "be divided; shard over these processes instead, or set relatives_dim=null",
                named or staged,
            )
        if self.expert > 1 and (config.num_experts is None or config.num_experts % self.expert):
            raise ConfigError(
                f"the model's num_experts={config.num_experts} cannot be shared by {self.expert} "
                f"processes; use {_divisors(config.num_experts or 1)}",
                {"expert": self.expert},
            )
        if heads % ranks:
            raise ConfigError(
                f"the model's num_attention_heads={heads} cannot be shared by {ranks} processes; "
                f"use a product of {_divisors(heads)}",
                named,
            )
        if self.tensor > 1 and config.linear_bias:
            raise ConfigError(
                "a model with linear_bias=True cannot be split; use context instead", named
            )
        if config.num_experts is None and config.intermediate_size % self.tensor:
            raise ConfigError(
                "tensor does not divide the model's "
                f"intermediate_size={config.intermediate_size}; use "
                f"{_divisors(gcd(heads, config.intermediate_size))}",
                named,
            )

    def require_adapters(self, rank: int | None) -> None:
        """Raise `ConfigError` unless changes of low rank, None for none, can be spread."""
        wanted = f"null with tensor={self.tensor}, as adapters are not split; use context or shard"
        require(rank is None or self.tensor == 1, "lora_rank", rank, wanted)

    def _named(self, *keys: str) -> dict[str, int]:
        """Those of the dimensions `keys` that are more than 1, with their sizes."""
        sizes = {key: getattr(self, key) for key in keys}
        return {key: size for key, size in sizes.items() if size > 1}

    def require_micro_batches(self, number: int) -> None:
        """Raise `ConfigError` unless this number of micro-batches of a step fills the pipeline."""
        if number < self.pipeline:
            raise ConfigError(
                f"a step has {number} micro-batches, and needs at least {self.pipeline}; change "
                "global_batch_tokens or gradient_accumulation_steps",
                {"pipeline": self.pipeline},
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
                f"must be {wanted}: training shards by FSDP2, as configs/accelerate/fsdp2.yaml "
                "asks for it, and compiles by trainer.compile",
                {f"accelerate's {variable}": value},
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
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in ACCELERATES_TRUE:
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


def precision_of_accelerate() -> Precision:
    """The precision given to `accelerate launch`; `auto` without it.

    Raises:
        ConfigError: for an unknown one.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    known: dict[str, Precision] = {"no": "auto", "bf16": "bf16", "fp16": "fp16"}
    require_choice("accelerate's mixed_precision", precision, tuple(known))
    return known[precision]


def packed_loader(
    collections: Sequence[Collection],
    settings: TrainerSettings,
    loading: LoaderSettings,
    max_length: int,
    *,
    rank: int,
    ranks: int,
    **more: Any,
) -> PackedLoader:
    """The training stream of one of the processes that have rows of their own.

    Args:
        max_length: tokens that longer sequences are cropped to.
        rank, ranks: its number, and how many these processes are.
        more: other arguments of `PackedLoader`.

    Raises:
        ConfigError: if the bins of a global batch cannot be shared evenly, with the numbers that
            can.
    """
    micro_batches, bins = partition(ranks, loading.token_budget, settings)
    return PackedLoader(
        collections,
        token_budget=loading.token_budget,
        max_length=max_length,
        max_relatives=loading.max_relatives or 0,
        rank=rank,
        world_size=ranks,
        seed=settings.seed,
        micro_batches=micro_batches,
        bins_per_micro_batch=bins,
        repeat_batches=settings.overfit_batches,
        num_workers=loading.num_workers,
        prefetch_factor=loading.prefetch_factor,
        **more,
    )


def partition(ranks: int, token_budget: int, settings: TrainerSettings) -> tuple[int, int]:
    """(micro-batches of a process in a step, bins of each of them).

    Raises:
        ConfigError: if the bins of a global batch cannot be shared evenly, with the numbers that
            can.
    """
    accumulation = settings.gradient_accumulation_steps
    global_batch_tokens = settings.global_batch_tokens
    if global_batch_tokens is None:
        bins = ranks * (1 if accumulation == "auto" else int(accumulation))
    else:
        bins, rest = divmod(global_batch_tokens, token_budget)
        if rest or not bins:
            raise ConfigError(
                f"must be a multiple of token_budget={token_budget}, such as "
                f"{max(bins, 1) * token_budget}",
                {"global_batch_tokens": global_batch_tokens},
            )
    if bins % ranks:
        raise ConfigError(
            f"its {bins} bins of token_budget={token_budget} tokens cannot be shared by {ranks} "
            f"processes; use {_divisors(bins)} processes, or global_batch_tokens="
            f"{-(-bins // ranks) * ranks * token_budget}",
            {"global_batch_tokens": global_batch_tokens},
        )
    own = bins // ranks
    micro_batches = own if accumulation == "auto" else int(accumulation)
    if own % micro_batches:
        raise ConfigError(
            f"each process has {own} bins of a step; use auto or one of {_divisors(own)}",
            {"gradient_accumulation_steps": accumulation},
        )
    return micro_batches, own // micro_batches


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
