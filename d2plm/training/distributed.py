"""Where training runs: the processes, their mesh, and how the model is spread over it.

FSDP2 (`fully_shard`) per block over a mesh of replicas × shards, on CUDA with NCCL or on a CPU with
gloo; one process keeps the plain model. The model file knows nothing of it. The optimizer, clipping
and the moving average see each rank's own shards as plain tensors: on DTensors the fused kernels
leak or crawl.
"""

import logging
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recomputed

from d2plm.errors import ConfigError, require, require_choice, require_number
from d2plm.precision import resolve_device

T = TypeVar("T")

log = logging.getLogger(__name__)


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
        tensor, context: parallel dimensions that there are not yet; only 1 is accepted.
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
        require_number("distributed.replicate", self.replicate, integer=True, low=1)
        if self.shard != "auto":
            require_number("distributed.shard", self.shard, integer=True, low=1)
        for key in ("reshard_after_forward", "reshard_between_micro_batches", "cpu_offload"):
            value = getattr(self, key)
            require(isinstance(value, bool), f"distributed.{key}", value, "true or false")
        require_number(
            "distributed.activation_checkpointing",
            self.activation_checkpointing,
            integer=True,
            low=0,
        )
        for key in ("tensor", "context"):
            require(
                getattr(self, key) == 1,
                f"distributed.{key}",
                getattr(self, key),
                f"1: there is no {key} parallelism yet; shard over more processes instead",
            )

    def resolved(self, world_size: int) -> "Plan":
        """The plan with the number of shards filled in.

        Raises:
            ConfigError: where replicas × shards is not the number of processes.
        """
        shard = self.shard
        if isinstance(shard, str):
            if world_size % self.replicate:
                raise ConfigError(
                    f"distributed.replicate={self.replicate}: does not divide the "
                    f"{world_size} processes; use one of {_divisors(world_size)}"
                )
            shard = world_size // self.replicate
        if self.replicate * shard != world_size:
            raise ConfigError(
                f"distributed.replicate={self.replicate}, distributed.shard={shard}: their product "
                f"is not the {world_size} processes there are; set one of them to "
                f"{world_size // self.replicate or 1}, or distributed.shard=auto"
            )
        return replace(self, shard=shard)


def plan_of_accelerate(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """What `accelerate launch` was told of FSDP, as fields of a `Plan`; empty without it.

    Raises:
        ConfigError: if it asks for FSDP1.
    """
    environment = os.environ if environment is None else environment
    if environment.get("ACCELERATE_USE_FSDP", "false") != "true":
        return {}
    from accelerate import FullyShardedDataParallelPlugin

    # How a model is loaded is not asked: every rank draws or reads its own shard.
    plugin = FullyShardedDataParallelPlugin(
        cpu_ram_efficient_loading=False, sync_module_states=False
    )
    if plugin.fsdp_version != 2:
        raise ConfigError(
            "accelerate's fsdp_version=1: training shards by FSDP2; set fsdp_version: 2 in its "
            "configuration, as configs/accelerate/fsdp2.yaml does"
        )
    offload = plugin.cpu_offload
    told: dict[str, object] = {
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "cpu_offload": offload is True or isinstance(offload, CPUOffloadPolicy),
    }
    if plugin.activation_checkpointing:
        told["activation_checkpointing"] = 1
    if "PARALLELISM_CONFIG_DP_REPLICATE_SIZE" in environment:
        told["replicate"] = int(environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"])
    return told


def precision_of_accelerate(environment: Mapping[str, str] | None = None) -> str:
    """The precision that `accelerate launch` was told; `auto` without it.

    Raises:
        ConfigError: for one that there is not.
    """
    environment = os.environ if environment is None else environment
    told = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    known = {"no": "auto", "bf16": "bf16", "fp16": "fp16"}
    require_choice("accelerate's mixed_precision", told, tuple(known))
    return known[told]


@dataclass(frozen=True)
class Process:
    """This process among the data-parallel ones.

    Attributes:
        device: where it computes.
        mesh: replicas × shards; None for a single process.
        host_mesh: the same over host memory, for checkpoints.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    host_mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs."""
        return self.rank == 0

    def describe(self) -> str:
        """The device and the number of processes, in words."""
        return self.device.type + (f" × {self.world_size}" if self.world_size > 1 else "")

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all ranks; in place where there are several."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def on_main(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """What `action` gives on rank 0, on every rank; its failure is everybody's.

        Args:
            action: gives a small Python object.
            group: of gloo, to talk over instead of the default one.
        """
        if self.mesh is None:
            return action()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = action()
            except Exception as error:
                box[1] = portable(error)
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        return cast(T, box[0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.mesh is not None:
            dist.all_reduce(torch.zeros(()))  # on the host, whatever the device


def portable(error: Exception) -> Exception:
    """An error that other ranks can unpickle: itself, or its words; they would wait for ever."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # its own
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def setup_process(device: str, plan: Plan) -> Process:
    """Join the processes that `torchrun` or `accelerate launch` started.

    Raises:
        ConfigError: on a device that this machine lacks, or a plan that does not fit.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan = plan.resolved(world_size)
    kind = resolve_device(device)
    if plan.cpu_offload and kind == "cpu":
        raise ConfigError("distributed.cpu_offload=true: the model is in host memory already")
    if plan.cpu_offload and world_size == 1:
        raise ConfigError("distributed.cpu_offload=true: needs at least two processes")
    here = torch.device("cpu")
    if kind == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(here)
    if world_size == 1:
        return Process(device=here)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, device_id=here if kind == "cuda" else None)
    shape, names = (plan.replicate, int(plan.shard)), ("replicate", "shard")
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    host_mesh = mesh if kind == "cpu" else init_device_mesh("cpu", shape, mesh_dim_names=names)
    if plan.replicate == 1:
        mesh, host_mesh = mesh["shard"], host_mesh["shard"]
    return Process(dist.get_rank(), world_size, here, mesh, host_mesh)


def shard_model(
    model: nn.Module, blocks: nn.ModuleList, process: Process, plan: Plan, dtype: torch.dtype
) -> None:
    """Spread the parameters over the mesh: each block is gathered as a whole, the next one ahead.

    The parameters stay fp32 masters, are gathered in `dtype`, and gradients are averaged over the
    ranks in fp32 (fp64 parameters stay fp64 throughout).
    """
    assert process.mesh is not None
    low = dtype in (torch.bfloat16, torch.float16)
    settings: dict[str, Any] = {
        "mesh": process.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if low else None,
            reduce_dtype=torch.float32 if low else None,
            cast_forward_inputs=False,  # a time keeps its fp32
        ),
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=plan.reshard_after_forward, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def synchronise_gradients(model: nn.Module, last: bool, plan: Plan) -> None:
    """Before a micro-batch: its gradients go to the other ranks with the step's `last` alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or plan.reshard_between_micro_batches)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered: the shards may change after it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_weights(model: nn.Module, process: Process) -> dict[str, Tensor] | None:
    """A copy of every parameter, whole, in the memory of rank 0's host; None on the other ranks.

    One parameter at a time is gathered, on all ranks.
    """
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if process.is_main:
            weights[name] = whole.to("cpu", copy=True)
    return weights if process.is_main else None


def checkpoint_activations(blocks: nn.ModuleList, every: int) -> None:
    """Recompute the activations of every n-th block in the backward instead of keeping them."""
    if every:
        for block in list(blocks)[::every]:
            block.forward = partial(recomputed, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def compile_blocks(blocks: nn.ModuleList, setting: bool | str, device: torch.device) -> bool:
    """Compile each block in place where it can be done; returns whether it was.

    `auto` compiles on CUDA alone: on a CPU it pays only in runs of minutes, and needs a compiler
    and Python's headers. Where these are missing, that is said once and the run goes on without.
    """
    require(setting in (True, False, "auto"), "trainer.compile", setting, "auto, true or false")
    if setting is False or (setting == "auto" and device.type == "cpu"):
        return False
    try:
        torch.compile(lambda x: x + 1)(torch.ones(8, device=device))
    except Exception as error:  # the compiler tool chain fails in as many ways as it has parts
        reason = str(error).strip().splitlines()[0]
        log.warning("trainer.compile: running uncompiled, as the compiler fails here: %s", reason)
        return False
    for block in blocks:
        # The forward alone, not the call: FSDP's hooks stand around it and stay outside.
        block.forward = torch.compile(block.forward, fullgraph=True)  # type: ignore[method-assign]
    return True


def in_precision(model: nn.Module, dtype: torch.dtype) -> Callable[..., Tensor]:
    """`model` as a function whose parameters are cast to `dtype` at each call.

    The single-process counterpart of FSDP2's `MixedPrecisionPolicy`: the parameters stay fp32
    masters and their gradients come out in fp32.
    """
    if isinstance(model, FSDPModule) or all(p.dtype == dtype for p in model.parameters()):
        return model

    def forward(*inputs: object) -> Tensor:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, cast, inputs)

    return forward


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, in the same memory; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(full: Tensor, like: Tensor) -> Tensor:
    """The part of a full tensor that this rank holds of `like`; nothing is sent."""
    if not isinstance(like, DTensor):
        return full
    mesh, placements = like.device_mesh, like.placements
    return cast(DTensor, distribute_tensor(full, mesh, placements, src_data_rank=None)).to_local()


def sharded_like(shard: Tensor, like: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
    """This rank's `shard` as the DTensor that `like` is; as it is where `like` is plain.

    Args:
        mesh: to put it on instead of `like`'s.
    """
    if not isinstance(like, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        mesh or like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),  # uneven shards would break its inference
    )


def shares(
    ranks: int, token_budget: int, global_batch_tokens: int | None, accumulation: int | str
) -> dict[str, int]:
    """How the bins of a global batch fall to processes and micro-batches, for `PackedLoader`.

    Args:
        ranks: processes.
        token_budget: tokens of a bin.
        global_batch_tokens: of a step over all processes; None is a bin for each micro-batch.
        accumulation: micro-batches of a process; `auto` makes one of every bin.

    Raises:
        ConfigError: where they cannot be shared evenly, with the numbers that can.
    """
    if accumulation != "auto":
        require_number("trainer.gradient_accumulation_steps", accumulation, integer=True, low=1)
    if global_batch_tokens is None:
        bins = ranks * (1 if accumulation == "auto" else int(accumulation))
    else:
        require_number("trainer.global_batch_tokens", global_batch_tokens, integer=True, low=1)
        bins, rest = divmod(global_batch_tokens, token_budget)
        if rest or not bins:
            raise ConfigError(
                f"trainer.global_batch_tokens={global_batch_tokens}: must be a multiple of "
                f"data.token_budget={token_budget}, such as {max(bins, 1) * token_budget}"
            )
    if bins % ranks:
        fitting = ", ".join(str(n) for n in range(1, bins + 1) if bins % n == 0)
        raise ConfigError(
            f"trainer.global_batch_tokens={global_batch_tokens}: its {bins} bins of "
            f"data.token_budget={token_budget} tokens cannot be shared by {ranks} processes; use "
            f"{fitting} processes, or another of the two"
        )
    own = bins // ranks
    micro_batches = own if accumulation == "auto" else int(accumulation)
    if own % micro_batches:
        fitting = ", ".join(str(n) for n in range(1, own + 1) if own % n == 0)
        raise ConfigError(
            f"trainer.gradient_accumulation_steps={accumulation}: each process has {own} bins of "
            f"a step; use auto or one of {fitting}"
        )
    return {"micro_batches": micro_batches, "bins_per_micro_batch": own // micro_batches}


class LocalParameters:
    """A model's parameters as this rank's shards: plain tensors in the same memory, by name.

    The optimizer, clipping and the moving average work on these.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sharded = dict(model.named_parameters())
        self.local: dict[str, nn.Parameter | Tensor] = {
            name: local(parameter.detach()).requires_grad_(parameter.requires_grad)
            if isinstance(parameter, DTensor)
            else parameter
            for name, parameter in self.sharded.items()
        }

    def take_gradients(self) -> list[Tensor]:
        """Hand each shard its gradient; gives them all."""
        for name, parameter in self.sharded.items():
            if isinstance(parameter, DTensor):
                grad = parameter.grad
                self.local[name].grad = None if grad is None else local(grad)
        return [tensor.grad for tensor in self.local.values() if tensor.grad is not None]

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for tensors in (self.sharded, self.local):
            for tensor in tensors.values():
                tensor.grad = None

    def norm(self, gradients: list[Tensor], process: Process) -> Tensor:
        """2-norm of all gradients over all shards: one reduction of a number; 0-d, on the device.

        Source: each shard's squared norms are summed over the ranks that share one copy.
        """
        norms = torch._foreach_norm(gradients) if gradients else []
        squares = [norm.to(process.device, non_blocking=True) ** 2 for norm in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=process.device)
        if process.mesh is not None:
            dist.all_reduce(total, group=process.mesh.get_group("shard"))
        return total.sqrt()


class Agreement:
    """Numbers that any rank may raise and that all read alike, one step later.

    Signals reach ranks at different times; a rank that stopped at once would leave the others
    waiting. The largest number wins. The reduction runs beside the step, on the host.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._group = dist.new_group(backend="gloo") if process.mesh is not None else None
        self._sent = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, value: int) -> int:
        """Put in this rank's number; gives the largest that any put in the last time."""
        if self._group is None:
            return value
        agreed = self.finish()
        self._sent = torch.tensor(value)
        self._work = dist.all_reduce(
            self._sent, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def finish(self) -> int:
        """Wait for the last exchange; gives its number."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._sent)


def leave(process: Process) -> None:
    """Leave the process group when all ranks have come to the same end."""
    if process.mesh is not None and dist.is_initialized():
        process.barrier()
        dist.destroy_process_group()


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
