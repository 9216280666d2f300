"""Counting the operations that make the host wait for a CUDA device, on a machine without one.

Tensors without data (torch's meta device) stand for those on CUDA: Python code is told that they
are there, so that it takes its CUDA branches, and whatever would have to wait for the device is
written down and answered by zeros. What a kernel does inside cannot be seen.
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA, META = torch.device("cuda", 0), torch.device("meta")
ROOT = str(Path(__file__).parents[1])
# What copies a Python number or list to the device: from pageable memory, so the host waits.
FROM_PYTHON = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class UnknownShape(Exception):  # noqa: N818  # the wait is written down; this is why it ends there
    """An operator's output cannot be answered by zeros, as its shape depends on the data."""


class Waits(list[str]):
    """The waits so far, each as `operator at file:line`."""

    def add(self, what: str) -> None:
        """Write one down with the line of this project that led to it."""
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT)]
        own = [f for f in frames if f.filename != __file__ and "site-packages" not in f.filename]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "torch"
        self.append(f"{what} at {place}")


class _SaysCuda(TorchFunctionMode):
    """Shows the meta device as CUDA to Python, and takes CUDA for the meta device."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return CUDA if func(*args).type == "meta" else func(*args)
        if func == torch.Tensor.is_cuda.__get__:
            return bool(args[0].is_meta)
        if func is torch.device:
            return func(*args, **kwargs)
        if func in FROM_PYTHON:
            of = CUDA if isinstance(args[0], Tensor) and args[0].is_meta else None
            if _is_on(kwargs.get("device", of), "cuda"):
                self.waits.add(func.__name__)
        args, kwargs = tree_map(lambda x: META if _is_on(x, "cuda") else x, (args, kwargs))
        return func(*args, **kwargs)


class _Counts(TorchDispatchMode):
    """Sees each operator, and answers those that would wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.waits.add("item")
            return torch.zeros((), dtype=args[0].dtype).item()
        if (
            func is aten._to_copy.default
            and args[0].is_meta
            and _is_on(kwargs.get("device"), "cpu")
        ):
            self.waits.add("copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.waits.add("copy to the host")
            return args[0].zero_()
        if not any(x.is_meta for x in tensors) and not _is_on(kwargs.get("device"), "meta"):
            return func(*args, **kwargs)
        if func in COPIES:
            blocking = not (kwargs.get("non_blocking") or (args[2:] and args[2]))
            if blocking and not all(x.is_meta for x in tensors):
                self.waits.add("copy to the device")
        elif _is_data_dependent(func, args):
            self.waits.add(str(func))
            raise UnknownShape(f"{func}: only the device knows the shape of its output")
        elif any(not x.is_meta and not _by_value(func, x) for x in tensors):
            self.waits.add(f"{func} of a tensor on the host")
        body = torch._library.custom_ops.OPDEFS.get(func.name())
        if body is not None and func.namespace == "d2plm":
            return body._init_fn(*args, **kwargs)  # what it does on CUDA
        return func(*args, **kwargs)


@contextmanager
def counting() -> Iterator[Waits]:
    """Synchronisations of the block on a CUDA device, which `CUDA` represents inside it."""
    waits = Waits()
    says_cuda, run_backward = _SaysCuda(waits), torch.autograd._engine_run_backward

    def seeing_cuda(*arguments: Any, **settings: Any) -> Any:
        with says_cuda:  # which is off inside of any call: here for what Python does in a backward
            return run_backward(*arguments, **settings)

    def synchronize(device: object = None) -> None:
        waits.add("synchronize")

    def launch(values: Tensor, bounds: Tensor) -> Tensor:
        return values.new_empty(bounds.shape[0] - 1, values.shape[1])

    triton = {"d2plm.model.segment_sum_kernel": SimpleNamespace(segment_sums=launch)}
    with (
        mock.patch.dict(sys.modules, triton),  # Triton comes with CUDA builds of torch alone
        mock.patch.object(torch.autograd, "_engine_run_backward", seeing_cuda),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        torch.autograd.set_multithreading_enabled(False),
        says_cuda,
        _Counts(waits),
    ):
        yield waits


def _is_on(value: object, kind: str) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith(kind)


def _is_data_dependent(func: Any, args: Any) -> bool:
    if func in INDEXING:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    shaped = torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor
    return shaped or torch.Tag.data_dependent_output in func.tags


def _by_value(func: Any, tensor: Tensor) -> bool:
    """Whether a tensor on the host is passed to the kernel as a number."""
    return tensor.ndim == 0 and torch.Tag.pointwise in func.tags and func is not aten.where.self
