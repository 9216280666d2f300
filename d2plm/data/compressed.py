"""Opening inputs; the compression is recognised by the first bytes."""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import nearest_path

STDIN = Path("-")

_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 64 << 10
_GZIP, _XZ, _ZSTD, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh"


@dataclass(frozen=True, slots=True)
class InputFile:
    """An open input; `content` is its decompressed byte stream."""

    path: Path
    content: "io.BufferedReader[Any]"
    raw: Any
    size: int

    def done(self) -> float:
        """Fraction of the file that has been read, 0 … 1; 0 if its size is unknown."""
        return min(self.raw.tell() / self.size, 1.0) if self.size else 0.0


@contextmanager
def open_input(path: Path) -> Iterator[InputFile]:
    """Open a file, plain or compressed by gzip, xz, zstd or bzip2; `-` is standard input.

    Raises `DataError` if it is missing or unreadable, or proves to be damaged during reading.
    """
    try:
        if path == STDIN:
            if sys.stdin is None:
                raise DataError("standard input: is closed; send FASTA or CSV there")
            yield InputFile(path, _decompressed(sys.stdin.buffer), sys.stdin.buffer, 0)
            return
        with open(path, "rb", _BUFFER_BYTES) as raw, _decompressed(raw) as content:
            yield InputFile(path, content, raw, path.stat().st_size)
    except ModuleNotFoundError as error:
        raise without_pyarrow(path, error) from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file{nearest_path(path)}; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder, not a file; name the file itself") from None
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        reason = getattr(error, "strerror", None)  # none where a decompressor raises an OSError
        fault = f"cannot be read ({reason}); check its permissions and the disk"
        if reason is None:
            fault = f"truncated or corrupt compressed file ({error}); fetch or compress it again"
        raise DataError(f"{path}: {fault}") from None


def without_pyarrow(path: Path, error: ModuleNotFoundError) -> Exception:
    """The error for a missing module: the image that prepares data has no pyarrow."""
    if error.name != "pyarrow":
        return error
    return DataError(
        f"{path}: reading it needs pyarrow, which is not installed; pip install pyarrow, or give "
        "FASTA, plain or compressed by gzip"
    )


def _decompressed(raw: Any) -> Any:
    start = raw.peek(6)[:6]
    if start.startswith(_GZIP):
        stream: Any = gzip.GzipFile(fileobj=raw)
    elif start.startswith(_XZ):
        stream = _Streams(raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))
    elif start.startswith(_BZIP2):
        stream = _Streams(raw, bz2.BZ2Decompressor)
    elif start.startswith(_ZSTD):
        import pyarrow  # heavy, and needed only here

        stream = pyarrow.CompressedInputStream(raw, "zstd")
    else:
        return raw
    return io.BufferedReader(stream, _BUFFER_BYTES)


class _Streams(io.RawIOBase):
    """The content of xz or bzip2 streams, one after another in a file.

    Unlike the standard library, this reports damage at the start of a later stream as an error
    instead of treating it as the end of the file.
    """

    def __init__(self, raw: Any, new_decompressor: Callable[[], Any]) -> None:
        self._raw, self._new_decompressor = raw, new_decompressor
        self._decompressor = new_decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = b""
        while not content:
            if self._decompressor.eof:
                following = self._decompressor.unused_data.lstrip(b"\0")  # xz may pad streams
                while not following and (piece := self._raw.read1(_PIECE_BYTES)):
                    following = piece.lstrip(b"\0")
                if not following:
                    return 0
                self._decompressor = self._new_decompressor()
            elif self._decompressor.needs_input:
                following = self._raw.read1(_PIECE_BYTES)
                if not following:
                    raise EOFError("it ends within a stream")
            else:
                following = b""
            content = self._decompressor.decompress(following, len(buffer))
        buffer[: len(content)] = content
        return len(content)
