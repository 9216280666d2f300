"""Reading a checkpoint's metadata without running code that a pickle names.

`torch.distributed.checkpoint` stores the locations of tensors in a pickle, so anyone who can write
a checkpoint could run code when it is resumed. Only the types that describe tensors are accepted;
entries that are not tensors are rejected, because PyTorch would unpickle their content unchecked.
Python 3.11.0 to 3.11.3 pickle an Enum member as `getattr(its class, its name)`, later versions as
`its class(its value)`: both are read, the former by `_member` instead of `getattr`.
"""

import pickle
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

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


def read_metadata(stream: BinaryIO) -> Metadata:
    """The metadata in a stream.

    Raises:
        pickle.UnpicklingError: if they contain more than the locations of tensors.
    """
    metadata = _Unpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"its metadata are of the type {type(metadata).__name__}")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in TYPES.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata name {module}.{name}, which is refused")


def _member(owner: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Replaces `getattr`; raises KeyError if there is no such member."""
    if owner is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"its metadata name {name} of {owner!r}, which is refused")
    return _MEM_FORMAT_ENCODING[name]
