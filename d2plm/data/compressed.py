"""Opening an input for reading, plain or compressed, told by its first bytes and not its name."""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.errors import DataError

STDIN = Path("-")

_BUFFER_BYTES = 1 << 20
_GZIP, _XZ, _ZSTD, _BZIP2 = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh"


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input that is being read.

    Attributes:
        path: its path; `-` is standard input.
        content: its bytes, decompressed.
    """

    path: Path
    content: "io.BufferedReader[Any]"
    raw: Any
    size: int

    def done(self) -> float:
        """Share of the file that has been read, 0 … 1; 0 where its size is not known."""
        return min(self.raw.tell() / self.size, 1.0) if self.size else 0.0


@contextmanager
def open_input(path: Path) -> Iterator[InputFile]:
    """Open a file, plain or compressed by gzip, xz, zstd or bzip2; `-` is standard input.

    Raises:
        DataError: the file is missing or unreadable, or, while it is read, turns out damaged.
    """
    try:
        if path == STDIN:
            yield InputFile(path, _decompressed(sys.stdin.buffer), sys.stdin.buffer, 0)
            return
        with open(path, "rb") as raw, _decompressed(raw) as content:
            yield InputFile(path, content, raw, path.stat().st_size)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder, not a file; name the file itself") from None
    except PermissionError:
        raise DataError(f"{path}: not readable by this user; change its permissions") from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.strerror is None:  # as the decompressors of bzip2 and zstd say it
            raise _damaged(path, error) from None
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the disk") from None


def _decompressed(raw: Any) -> Any:
    # Each stream is closed with the reader around it.
    start = raw.peek(6)[:6]
    if start.startswith(_GZIP):
        stream: Any = gzip.GzipFile(fileobj=raw)
    elif start.startswith(_XZ):
        stream = lzma.LZMAFile(raw)  # noqa: SIM115
    elif start.startswith(_BZIP2):
        stream = bz2.BZ2File(raw)  # closed with the reader around it
    elif start.startswith(_ZSTD):
        import pyarrow  # heavy, and wanted here alone

        stream = pyarrow.CompressedInputStream(raw, "zstd")
    else:
        return raw
    return io.BufferedReader(stream, _BUFFER_BYTES)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: truncated or corrupt compressed file ({error}); fetch or compress it again"
    )
