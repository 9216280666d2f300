"""Conversion of complete checkpoints of `torch.distributed.checkpoint` to safetensors.

Weights, EMA and optimizer state of all ranks become whole tensors in a few safetensors files, with
the manifest's run state. The tensors of one file are in memory at a time.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from d2plm.core.batch import under_budget
from d2plm.core.errors import CheckpointError, DataError, require_number
from d2plm.core.files import written_beside
from d2plm.training import checkpoint

INDEX = "tensors.index.json"
SEPARATOR = "/"  # in a tensor's path: optimizer/blocks.0.norm.weight/exp_avg


def to_safetensors(location: str, output: Path, max_shard_bytes: int = 5_000_000_000) -> int:
    """Write a checkpoint's tensors and run state to a new folder; returns the number of tensors.

    Raises:
        CheckpointError: if it is incomplete, or the folder exists or cannot be written.
    """
    require_number("max_shard_bytes", max_shard_bytes, integer=True, low=1)
    root, name = checkpoint.split_location(location)
    run_state = checkpoint.verify(root, name)
    groups = list(under_budget(checkpoint.layout(root, name), _bytes_of, max_shard_bytes))
    if output.exists():
        raise CheckpointError(f"output={output}: already exists; choose a new folder")
    files: dict[str, str] = {}
    try:
        with written_beside(output) as partial:
            partial.mkdir()
            for number, group in enumerate(groups, 1):
                tree: dict[str, Any] = {}
                named: dict[str, Tensor] = {}
                for path, entry in group:
                    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
                    _put(tree, path, tensor)
                    named[SEPARATOR.join(path)] = tensor
                checkpoint.load(root, name, tree)
                file = f"tensors-{number:05d}-of-{len(groups):05d}.safetensors"
                save_file(named, partial / file)
                files |= dict.fromkeys(named, file)
            content = {"run_state": run_state, "tensors": files}
            (partial / INDEX).write_text(json.dumps(content, indent=2))
    except (DataError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {output}: {error}") from error
    return len(files)


def _bytes_of(placed: tuple[tuple[str, ...], TensorStorageMetadata]) -> int:
    _, entry = placed
    return int(entry.size.numel() * entry.properties.dtype.itemsize)


def _put(tree: dict[str, Any], path: Sequence[str], tensor: Tensor) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = tensor
