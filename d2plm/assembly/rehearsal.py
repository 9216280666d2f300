"""Trying out a training run: a dry run that only estimates, and a short real run.

`d2plm train --dry-run` checks all settings and estimates the cost; it needs no device and writes
nothing. `trainer.fast_dev_run=N` trains N steps, validates, saves and exports in a temporary
folder.
"""

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from d2plm.assembly import training_run
from d2plm.config import Config
from d2plm.core.errors import ConfigError, require_choice, require_number
from d2plm.core.precision import DEVICES, DTYPES, resolve_device
from d2plm.data.loader import Collection, PackedLoader
from d2plm.model.dit import dit_without_memory
from d2plm.model.dit_config import DiTConfig
from d2plm.training import checkpoint
from d2plm.training.forecast import memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.parallelise import is_to_compile
from d2plm.training.plan import Plan, batch_partition
from d2plm.training.trainer_settings import check_settings, crop_length, names_to_freeze
from d2plm.training.training_length import flops_per_step, number_of_steps, tokens_per_step

log = logging.getLogger(__name__)


@training_run.trainer_keys()
def forecast(config: Config) -> dict[str, str]:
    """Check every setting of a training run and describe the run in words."""
    stores = training_run.training_stores(config)
    vocabulary = stores["train"].vocabulary
    config, start = training_run.load_start(config, vocabulary)
    trainer, data = config["trainer"], config["data"]
    check_settings(trainer)
    model_config = config.build("model")
    paradigm = training_run.build_paradigm(config, vocabulary)
    ranks = int(os.environ.get("WORLD_SIZE", config["distributed"]["processes"]))
    plan = training_run.fitting_plan(config, model_config, ranks)
    dtype = DTYPES.get(training_run.precision_of(config), torch.bfloat16)
    collections = training_run.training_collections(config, stores)
    longest = crop_length(data["max_length"], model_config.max_position_embeddings)
    loader = _loader(config, collections, longest, plan.replicate * int(plan.shard))
    plan.require_micro_batches(loader.micro_batches)
    limits = {key: trainer[key] for key in ("max_steps", "max_epochs", "flops_budget")}
    steps = number_of_steps(loader, model_config, **limits)
    model = dit_without_memory(model_config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    frozen = sum(sizes[name] for name in names_to_freeze(trainer["freeze"], list(sizes)))
    training_run.build_optimizer(config)(model)
    training_run.build_schedule(config)(steps)
    training_run.build_callbacks(
        config["callbacks"],
        run=None,
        validation_store=stores["validation"],
        max_length=model_config.max_position_embeddings,
        folder=Path(config["model_dir"]),
        provenance={},
    )
    require_choice("device", trainer["device"], DEVICES)
    device = resolve_device("auto") if trainer["device"] == "auto" else trainer["device"]
    flops = steps * flops_per_step(loader, model_config)
    compiled = is_to_compile(trainer["compile"], torch.device(device), flops) and plan.expert == 1
    copies = "" if plan.replicate == 1 else f"{plan.replicate} copies × "
    shared = {name: getattr(plan, name) for name in ("context", "tensor", "pipeline")}
    rows = "".join(f" × {name} {size}" for name, size in shared.items() if size > 1)
    rows += f", experts over {plan.expert}" if plan.expert > 1 else ""
    sharding = "" if ranks == 1 else f" = {copies}{plan.shard} shards{rows}"
    return {
        "model": f"{sum(sizes.values()):,} parameters, {sum(sizes.values()) - frozen:,} of them "
        f"trained, {str(dtype).removeprefix('torch.')}"
        + ("" if start is None else f", from {config['init_from']}"),
        "paradigm": paradigm.name,
        "processes": f"{ranks}{sharding}",
        **_amounts(loader, model_config, plan, dtype, steps, compiled),
        "start": _starting_point(config),
        "writes": f"{config['output_dir']}, {config['model_dir']}",
    }


def _loader(
    config: Config, collections: Sequence[Collection], longest: int, ranks: int
) -> PackedLoader:
    data, trainer = config["data"], config["trainer"]
    accumulation = trainer["gradient_accumulation_steps"]
    partition: dict[str, Any] = batch_partition(
        ranks, data["token_budget"], trainer["global_batch_tokens"], accumulation
    )
    return PackedLoader(
        collections,
        **{key: data[key] for key in ("token_budget", "num_workers", "prefetch_factor")},
        max_length=longest,
        max_relatives=data["max_relatives"] or 0,
        world_size=ranks,
        seed=trainer["seed"],
        repeat_batches=trainer["overfit_batches"],
        **partition,
    )


def _amounts(
    loader: PackedLoader,
    model: DiTConfig,
    plan: Plan,
    dtype: torch.dtype,
    steps: int,
    compiled: bool,
) -> dict[str, str]:
    """Amounts of data, tokens, FLOPs and memory, in words."""
    sampler, epoch = loader.sampler, loader.batches_in_epoch(0)
    tokens, flops = tokens_per_step(loader), flops_per_step(loader, model)
    row = loader.bins_per_micro_batch * sampler.token_budget
    slots = loader.bins_per_batch * sampler.token_budget
    segments = loader.bins_per_micro_batch * sampler.max_segments
    memory = memory_per_rank(
        model,
        plan,
        tokens=row,
        segments=segments,
        dtype=dtype,
        micro_batches=loader.micro_batches,
        compile=compiled and not plan.activation_checkpointing,  # not modelled in combination
    )
    return {
        "data": f"{len(sampler.lengths):,} sequences, {epoch:,} steps per epoch",
        "step": f"{slots:,} tokens, {1 - tokens / slots:.1%} of them padding, {flops:.3g} FLOPs; "
        f"micro-batches per process: {loader.micro_batches} of {row:,} tokens",
        "training": f"{steps:,} steps = {steps / epoch:.2f} epochs, {steps * tokens:.3g} tokens, "
        f"{steps * flops:.3g} FLOPs",
        "memory": f"{memory.total / GIB:.2f} GiB per process, excluding the framework: "
        + ", ".join(f"{name} {size / GIB:.2f}" for name, size in vars(memory).items()),
    }


def shortened(config: Config, folder: Path) -> Config:
    """Configuration that trains `trainer.fast_dev_run` steps and writes only to `folder`."""
    steps = config["trainer"]["fast_dev_run"]
    require_number("trainer.fast_dev_run", steps, integer=True, low=1)
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "trainer.fast_dev_run: cannot run under torchrun, whose processes share no temporary "
            "folder; use d2plm train distributed.processes=N"
        )
    values: dict[str, Any] = copy.deepcopy(config.values)
    unset = dict.fromkeys(("fast_dev_run", "max_epochs", "flops_budget", "checkpoints"))
    values["trainer"] |= {**unset, "max_steps": steps, "resume": "none"}
    for name, settings in values["callbacks"].items():
        if name in ("evaluation", "checkpoint", "metrics") and settings is not None:
            settings["every"] = steps
    for key in {"warmup_steps", "decay_steps"} & values["schedule"].keys():
        values["schedule"][key] = None  # absolute numbers fit the full run only; ratios are kept
    values["tracking"]["trackers"] = []
    values |= {"output_dir": str(folder), "model_dir": str(folder / "model")}
    return Config(values)


def _starting_point(config: Config) -> str:
    trainer = config["trainer"]
    root = checkpoint.Root(trainer["checkpoints"] or str(Path(config["output_dir"], "checkpoints")))
    if trainer["resume"] not in ("auto", "none"):
        return f"from {trainer['resume']}"
    names = root.names() if trainer["resume"] == "auto" else []
    return f"from {root.of(names[-1])}, if it is complete" if names else "from the beginning"
