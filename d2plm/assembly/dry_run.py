"""Trying out a training run: a dry run that only estimates, and a short real run.

`d2plm train --dry-run` checks all settings and estimates the cost; it needs no device and writes
nothing. `trainer.fast_dev_run=N` trains N steps, validates, saves and exports in a temporary
folder.
"""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from d2plm.assembly import training_run
from d2plm.core.errors import ConfigError
from d2plm.core.precision import resolve_device, resolve_precision
from d2plm.data.loader import PackedLoader
from d2plm.model.dit import dit_without_memory
from d2plm.model.dit_config import DiTConfig
from d2plm.settings.commands import PipelineSettings
from d2plm.training import checkpoint
from d2plm.training.callbacks.callback import RunContext
from d2plm.training.forecast import memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.parallelise import is_to_compile
from d2plm.training.plan import Plan, packed_loader
from d2plm.training.trainer_settings import crop_length, names_to_freeze
from d2plm.training.training_length import flops_per_step, number_of_steps, tokens_per_step

Kind = TypeVar("Kind", bound=PipelineSettings)

log = logging.getLogger(__name__)


@training_run.trainer_keys()
def forecast(config: PipelineSettings) -> dict[str, str]:
    """Check every setting of a training run and describe the run in words."""
    stores = training_run.training_stores(config)
    vocabulary = stores["train"].vocabulary
    config, start = training_run.load_start(config, vocabulary)
    trainer, data = config.trainer, config.data
    model_config = training_run.model_config(config)
    paradigm = training_run.build_paradigm(config, vocabulary)
    ranks = int(os.environ.get("WORLD_SIZE", config.distributed.processes))
    plan = training_run.fitting_plan(config, model_config, ranks)
    device = torch.device(resolve_device("auto") if trainer.device == "auto" else trainer.device)
    dtype = resolve_precision(training_run.precision_of(config), device)
    collections = training_run.training_collections(config, stores)
    longest = crop_length(data.max_length, model_config.max_position_embeddings)
    with_rows = plan.replicate * int(plan.shard)
    training_run.trainer_class(config)
    loader = packed_loader(collections, trainer, data, longest, rank=0, ranks=with_rows)
    plan.require_micro_batches(loader.micro_batches)
    steps = number_of_steps(loader, model_config, trainer)
    model = dit_without_memory(model_config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    frozen = sum(sizes[name] for name in names_to_freeze(trainer.freeze, list(sizes)))
    training_run.build_optimizer(config)(model, dict(model.named_parameters()))
    training_run.build_schedule(config)(steps)
    longest_input = model_config.max_position_embeddings
    context = RunContext(stores["validation"], longest_input, Path(config.model_dir))
    training_run.build_callbacks(config, context)
    flops = steps * flops_per_step(loader, model_config)
    compiled = is_to_compile(trainer.compile, device, flops) and plan.expert == 1
    copies = "" if plan.replicate == 1 else f"{plan.replicate} copies × "
    shared = {name: getattr(plan, name) for name in ("context", "tensor", "pipeline")}
    rows = "".join(f" × {name} {size}" for name, size in shared.items() if size > 1)
    rows += f", experts over {plan.expert}" if plan.expert > 1 else ""
    sharding = "" if ranks == 1 else f" = {copies}{plan.shard} shards{rows}"
    return {
        "model": f"{sum(sizes.values()):,} parameters, {sum(sizes.values()) - frozen:,} of them "
        f"trained, {str(dtype).removeprefix('torch.')}"
        + ("" if start is None else f", from {config.init_from}"),
        "paradigm": paradigm.name,
        "processes": f"{ranks}{sharding}",
        **_amounts(loader, model_config, plan, dtype, steps, compiled),
        "start": _starting_point(config),
        "writes": f"{config.output_dir}, {config.model_dir}",
    }


def _amounts(
    loader: PackedLoader,
    model: DiTConfig,
    plan: Plan,
    dtype: torch.dtype,
    steps: int,
    compiled: bool,
) -> dict[str, str]:
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


def shortened(config: Kind, folder: Path) -> Kind:
    """Configure a run of `trainer.fast_dev_run` steps that writes only to `folder`."""
    steps = config.trainer.fast_dev_run
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "trainer.fast_dev_run: cannot run under torchrun, whose processes share no temporary "
            "folder; use d2plm train distributed.processes=N"
        )
    trainer = replace(
        config.trainer,
        max_steps=steps,
        max_epochs=None,
        flops_budget=None,
        fast_dev_run=None,
        checkpoints=None,
        resume="none",
    )
    callbacks = dict(config.callbacks)
    for name in ("evaluation", "checkpoint", "metrics"):
        if (settings := callbacks.get(name)) is not None:
            callbacks[name] = replace(settings, every=steps)  # type: ignore[call-arg]  # they have it
    # Absolute numbers of steps fit the full run only; ratios are kept.
    absolute: Any = dict.fromkeys({"warmup_steps", "decay_steps"} & {*vars(config.schedule)})
    return replace(
        config,
        trainer=trainer,
        callbacks=callbacks,
        schedule=replace(config.schedule, **absolute),
        tracking=replace(config.tracking, trackers=[]),
        output_dir=str(folder),
        model_dir=str(folder / "model"),
    )


def _starting_point(config: PipelineSettings) -> str:
    trainer = config.trainer
    root = checkpoint.Root(trainer.checkpoints or str(Path(config.output_dir, "checkpoints")))
    if trainer.resume not in ("auto", "none"):
        return f"from {trainer.resume}"
    names = root.names() if trainer.resume == "auto" else []
    return f"from {root.of(names[-1])}, if it is complete" if names else "from the beginning"
