"""Export of a store to FASTA or JSON lines, block by block; ingesting these gives the same store.

The names of equal sequences share one header, joined by \\x01 as in NCBI's nr. Blanks in names,
which tables may contain, are written as `_`, because FASTA readers take only the first word of a
header. Texts are written as JSON lines, those cut by a window piece by piece; a tokenizer may
tokenise a piece differently than within its text.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import BinaryIO

from d2plm.core.errors import DataError, require
from d2plm.core.files import written_beside
from d2plm.core.vocabulary import FIRST, Vocabulary
from d2plm.data.fasta import fasta_text
from d2plm.data.records import ALIAS_SEPARATOR, readable
from d2plm.data.store import Block, SequenceStore

STDOUT = Path("-")

_GZIP_LEVEL = 6
_OTHER_COMPRESSIONS = (".xz", ".zst", ".bz2")
_NO_FASTA = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".idx", ".bin")
_BUFFER_BYTES = 1 << 20


def export_sequences(
    store: SequenceStore, output: Path, progress: Callable[[int], None] = lambda done: None
) -> int:
    """Write all sequences of a store, in their order: letters as FASTA, texts as JSON lines.

    Returns the number of sequences whose names contain blanks, which are replaced by `_`.

    Args:
        output: compressed if its name ends in `.gz`; `-` is standard output. Written atomically; a
            missing folder is created.
        progress: called with the number of sequences written so far.

    Raises:
        ConfigError: the suffix requests another format or compression.
        DataError: the store is damaged, or the file cannot be written.
    """
    plain_or_gz = output.suffix.lower() not in _OTHER_COMPRESSIONS
    require(plain_or_gz, "output", str(output), "a plain file, or one that ends in .gz")
    if output != STDOUT:
        require_form(output, store.vocabulary, (".jsonl", ".jsonl.gz"))
    changed = 0
    with _opened(output) as file:
        for block, names in zip(store.blocks(), store.name_blocks(), strict=True):
            file.write(b"".join(_records(store, block, names)))
            if not store.vocabulary.is_text:
                changed += sum(_one_word(name) != name for name in names)
            progress(block.first + len(block))
    return changed


def require_form(output: Path, vocabulary: Vocabulary, of_text: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless the suffix suits FASTA, or for texts is one of `of_text`."""
    name = output.name.lower()
    if vocabulary.is_text:
        require(name.endswith(of_text), "output", str(output), f"a {' or '.join(of_text)} file")
    else:
        fasta = not name.removesuffix(".gz").endswith(_NO_FASTA)
        require(fasta, "output", str(output), "a FASTA file, such as new.fasta")


def first_records(store: SequenceStore, number: int) -> Iterator[bytes]:
    """The first `number` sequences, formatted as by `export_sequences`.

    Raises `DataError` (when iterated) if the store is damaged.
    """
    blocks = zip(store.blocks(), store.name_blocks(), strict=True)
    return islice(chain.from_iterable(_records(store, *block) for block in blocks), number)


def _records(store: SequenceStore, block: Block, names: list[bytes]) -> Iterator[bytes]:
    vocabulary, token = store.vocabulary, store.vocabulary.nouns.token
    if not ((block.tokens >= FIRST) & (block.tokens < vocabulary.read_stop)).all():
        raise DataError(
            f"{store.path}: from sequence {block.first} on holds tokens that are not {token}s; see "
            "d2plm data verify, and prepare the data again"
        )
    if vocabulary.is_text:
        for name, tokens in zip(names, block, strict=True):
            aliases = readable(name).decode("utf-8", "replace").split(ALIAS_SEPARATOR.decode())
            fields = {
                "name": aliases if len(aliases) > 1 else aliases[0],
                "text": vocabulary.restore(tokens),
            }
            yield json.dumps(fields).encode() + b"\n"
    else:
        letters = vocabulary.decode(block.tokens).encode()
        bounds = block.bounds * (len(letters) // len(block.tokens))
        for name, (start, stop) in zip(names, pairwise(bounds.tolist()), strict=True):
            yield fasta_text(_one_word(readable(name)), letters[start:stop])


def _one_word(name: bytes) -> bytes:
    return b"_".join(name.split())


@contextmanager
def _opened(output: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    if output == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    if output.exists() and not output.is_file():
        raise DataError(f"{output}: exists and is no file; name another output")
    with written_beside(output) as partial, open(partial, "wb", buffering=_BUFFER_BYTES) as file:
        if output.suffix.lower() == ".gz":
            # With neither name nor time inside, equal stores give equal files.
            with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as compressed:
                yield compressed
        else:
            yield file
