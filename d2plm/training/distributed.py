"""The processes of a training: their ranks, devices and mesh, and how they agree.

The default group communicates by NCCL on CUDA and by gloo on a CPU; host objects use gloo in either
case.
"""

import atexit
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from d2plm.core.collective_messages import TIMED_OUT
from d2plm.core.errors import ConfigError, LaunchError
from d2plm.core.precision import resolve_device
from d2plm.core.processes import LOST
from d2plm.core.waiting import waiting
from d2plm.training.plan import Plan

REPORT_SECONDS = 5.0  # for every waiting rank to report its timeout

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """This process among those of the training.

    Attributes:
        mesh: replicas × shards of this process's stage, the latter also over the ranks of a
            context; None for a single process.
        host_mesh: the same over host memory, for checkpoints.
        row_mesh: the processes that share a row, context × tensor; None if rows are not shared.
        expert_ranks: the processes that share the experts of each layer; None if each has all.
        expert_mesh: replicas × shards of this process's experts.
        pipeline_group: the processes with the other stages of the same rows; None if there are
            none.
        row_ranks: number of processes that share a row of a stage.
        pipeline_ranks: number of processes in a pipeline.
        timeout_seconds: maximum time that ranks wait for each other.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    host_mesh: DeviceMesh | None = None
    row_mesh: DeviceMesh | None = None
    expert_ranks: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    pipeline_group: dist.ProcessGroup | None = None
    row_ranks: int = 1
    pipeline_ranks: int = 1
    timeout_seconds: float = 0.0

    @property
    def data_rank(self) -> int:
        """The number of this process's rows among those of a micro-batch."""
        return self.rank // self.row_ranks % self.data_ranks

    @property
    def data_ranks(self) -> int:
        """The number of rows that are computed at once."""
        return self.world_size // (self.row_ranks * self.pipeline_ranks)

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks over which gradients are averaged."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs."""
        return self.rank == 0

    def describe(self) -> str:
        """The device and the number of processes, in words."""
        return self.device.type + (f" × {self.world_size}" if self.world_size > 1 else "")

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all rows, of each once; in place if there are several."""
        if self.mesh is not None:
            dist.all_reduce(value)
            value /= self.row_ranks * self.pipeline_ranks
        return value

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Sum over all ranks a tensor computed from each rank's own tokens; in place."""
        if self.mesh is not None:
            dist.all_reduce(value)
        return value

    def sum_stages(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the stages of a pipeline, in place if there are several."""
        if self.pipeline_group is not None:
            dist.all_reduce(value, group=self.pipeline_group)
        return value

    def of_all_stages(self, names: Iterable[str]) -> list[str]:
        """The names that any stage has, in the same order on all ranks."""
        if self.pipeline_group is None:
            return list(names)
        own = list(names)
        return list(dict.fromkeys(name for each in self.on_all(lambda: own) for name in each))

    def new_host_group(self) -> dist.ProcessGroup | None:
        """An additional gloo group of all ranks for work beside the steps; None for one process."""
        if self.mesh is None:
            return None
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_seconds))

    def on_main(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """The result of `action` on rank 0, returned on every rank; so is a failure."""
        return cast(T, self.on_all(lambda: action() if self.is_main else None, group)[0])

    def on_all(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
        """The results of `action` (small objects) on all ranks; a failure of one is raised on all.

        `group` is a gloo group to use instead of the default one.
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
    timeout = timedelta(seconds=plan.timeout_seconds)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        device_id = here if kind == "cuda" else None
        with waiting(f"{world_size} processes to start, for {plan.timeout_seconds:g} s"):
            dist.init_process_group(backend, device_id=device_id, timeout=timeout)
    shards = int(plan.shard) * plan.context  # ranks of a context have tokens of their own
    stages = {"pipeline": plan.pipeline}
    spread = stages | {"replicate": plan.replicate, "shard": shards, "tensor": plan.tensor}
    mesh = _mesh(kind, spread, timeout)
    host_mesh = mesh if kind == "cpu" else _mesh("cpu", spread, timeout)
    copies = ("replicate", "shard") if plan.replicate > 1 else ("shard",)
    row_mesh = pipeline_group = None
    if plan.row_ranks * plan.pipeline > 1:
        rows = {"data": plan.replicate * int(plan.shard)}
        within = {"context": plan.context, "tensor": plan.tensor}
        by_row = _mesh(kind, stages | rows | within, timeout)
        row_mesh = by_row["context", "tensor"] if plan.row_ranks > 1 else None
        pipeline_group = by_row.get_group("pipeline") if plan.pipeline > 1 else None
    expert_ranks = expert_mesh = None
    if plan.expert > 1:
        spread["shard"] = shards // plan.expert
        tensor = {"expert": plan.expert, "tensor": spread.pop("tensor")}
        by_expert = _mesh(kind, spread | tensor, timeout)
        expert_ranks, expert_mesh = by_expert["expert"], by_expert[copies]
    return Process(
        dist.get_rank(),
        world_size,
        here,
        mesh[copies],
        host_mesh[copies],
        row_mesh,
        expert_ranks,
        expert_mesh,
        pipeline_group,
        plan.row_ranks,
        plan.pipeline,
        plan.timeout_seconds,
    )


def _mesh(kind: str, sizes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """A mesh with dimensions of these sizes, the last varying fastest."""
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)  # there is no public way for a mesh's groups
    return mesh


class Agreement:
    """A number that any rank may raise and that all ranks read identically one step later.

    Signals reach ranks at different times, and a rank that stopped immediately would leave the
    others waiting. The maximum is taken by a reduction on the host that overlaps with the step.
    """

    def __init__(self, process: Process) -> None:
        self._group = process.new_host_group()
        self._sent = torch.zeros((), dtype=torch.int64)
        self._work: dist.Work | None = None

    def exchange(self, value: int) -> int:
        """Send this rank's number; returns the maximum over the ranks of the previous exchange."""
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


@contextmanager
def silent_ranks_named(process: Process, progress: Callable[[], object]) -> Iterator[None]:
    """If a collective in the block times out, raise an error that names the missing ranks.

    Every rank whose collective fails reports this in the group's store; the others are missing.

    Args:
        progress: see `waiting`; without it, rank 0 logs a line every minute.

    Raises:
        LaunchError: in place of gloo's error. NCCL ends the process instead.
    """
    limit = f"timeout_seconds={process.timeout_seconds:g}"
    what = "the end of a step, a validation or a save"
    what += "" if process.mesh is None else f", or for other ranks, for {limit}"
    try:
        with waiting(what, progress) if process.is_main else nullcontext():
            yield
    except RuntimeError as error:
        if process.mesh is None:
            raise
        missing = _missing_ranks(process, wait=TIMED_OUT in str(error))
        if not missing:
            raise
        raise LaunchError(
            f"rank {', '.join(missing)} has kept the others waiting for {limit}: is its process or "
            "node frozen? The same command resumes from the last checkpoint",
            LOST,
        ) from error


def _missing_ranks(process: Process, wait: bool) -> list[str]:
    """Report this rank as present; after a `wait`, return the ranks that have not reported."""
    store, key, missing = _get_default_store(), "d2plm/waited/{}", ["0"]

    def ask() -> None:
        with suppress(RuntimeError):  # the store may have ended with its process
            store.set(key.format(process.rank), "")
            if wait:
                time.sleep(REPORT_SECONDS)
            there = [store.check([key.format(rank)]) for rank in range(process.world_size)]
            missing[:] = [str(rank) for rank, said in enumerate(there) if not said]

    # Without torchrun the store is in rank 0 and does not respond if that rank is frozen.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * REPORT_SECONDS)
    return missing if wait else []


def end_together(process: Process) -> None:
    """Wait for all ranks; each then leaves the process group when its interpreter exits.

    A rank that exits while another still sets up a group or waits in a collective would fail it.
    """
    if process.mesh is not None:
        with waiting(f"the other ranks to end, for {process.timeout_seconds:g} s"):
            dist.all_reduce(torch.zeros(()))  # on the host, whatever the device
        atexit.unregister(_leave)
        atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
