"""The processes of a training: their ranks, devices and mesh, and how they agree.

The default group communicates by NCCL on CUDA and by gloo on a CPU; host objects use gloo in either
case.
"""

import atexit
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from d2plm.core.errors import ConfigError
from d2plm.core.precision import resolve_device
from d2plm.training.plan import Plan

T = TypeVar("T")


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
        """The result of `action` on rank 0, returned on every rank; so is its failure."""
        return cast(T, self.on_all(lambda: action() if self.is_main else None, group)[0])

    def on_all(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
        """The results of `action` on all ranks; a failure of one is raised on every rank.

        Args:
            action: returns a small Python object.
            group: of gloo, to use instead of the default one.
        """
        if self.mesh is None:
            return [action()]
        own: tuple[T | None, Exception | None]
        try:
            own = action(), None
        except Exception as error:  # raised below on every rank
            own = None, portable(error)
        everyone: list[Any] = [own] * self.world_size
        dist.all_gather_object(everyone, own, group=group)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]


def portable(error: Exception) -> Exception:
    """An error that other ranks can unpickle: itself, or one with its message."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # its own
    except Exception:  # a library's error class may fail to pickle in any way
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
        raise ConfigError("cpu_offload=True: the model is in host memory already")
    if plan.cpu_offload and world_size == 1:
        raise ConfigError("cpu_offload=True: needs at least two processes")
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


class Agreement:
    """A number that any rank may raise and that all ranks read, the same, one step later.

    Signals reach ranks at different times; a rank that stopped at once would leave the others
    waiting. The largest number wins. The reduction runs beside the step, on the host.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._group = dist.new_group(backend="gloo") if process.mesh is not None else None
        self._sent = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, value: int) -> int:
        """Send this rank's number; returns the largest that any rank sent the last time."""
        if self._group is None:
            return value
        agreed = self.finish()
        self._sent = torch.tensor(value)
        self._work = dist.all_reduce(
            self._sent, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return agreed

    def finish(self) -> int:
        """Wait for the last exchange; returns its number."""
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        return int(self._sent)


def end_together(process: Process) -> None:
    """Wait for all ranks; each then leaves the process group when its interpreter exits.

    A rank that exits while another still sets up a group or waits in a collective would fail it.
    """
    if process.mesh is not None:
        dist.all_reduce(torch.zeros(()))  # on the host, whatever the device
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
