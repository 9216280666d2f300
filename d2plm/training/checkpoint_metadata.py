"""Checking a checkpoint's metadata before PyTorch unpickles them.

`torch.distributed.checkpoint` stores the locations of tensors in a pickle, which may name any
function of any package, so anyone who can write a checkpoint could run code where it is resumed.
Only the types that describe tensors are accepted. Entries that are not tensors are rejected,
because PyTorch would unpickle their content without a check.
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
    """Raise `pickle.UnpicklingError` if metadata contain more than the locations of tensors."""
    _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in TYPES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata name {module}.{name}, which is refused")
