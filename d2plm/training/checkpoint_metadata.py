"""Checking a checkpoint's metadata before PyTorch unpickles them.

`torch.distributed.checkpoint` keeps the places of tensors in a pickle, which may name any function
of any package. Whoever can write to a checkpoint could so run code where it is resumed. Only the
types that describe tensors are let through, and entries that are not tensors are not among them:
PyTorch would unpickle their content without any check.
"""

import pickle
from typing import Any, BinaryIO

import torch

TYPES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def require_plain(stream: BinaryIO) -> None:
    """Raise `pickle.UnpicklingError` if a checkpoint's metadata hold more than tensors' places."""
    _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in TYPES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata name {module}.{name}, which is refused")
