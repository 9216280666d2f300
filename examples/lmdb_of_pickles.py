"""Converts an LMDB whose values are pickles (TAPE and others) to JSON lines for d2plm ingest.

    python examples/lmdb_of_pickles.py old_lmdb proteins.jsonl.gz
    d2plm ingest input=proteins.jsonl.gz output=raw_lmdb

A pickle can name any function to be called. Here none is: only dictionaries, lists, text, bytes
and numbers are made, and a pickle that names anything else, such as a numpy array, ends the
conversion. It may still take much memory, so convert only files whose origin you know.
"""

import argparse
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import lmdb

METADATA = (b"num_examples", b"num_samples", b"length", b"__len__", b"keys", b"__keys__")


class PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}, which is not plain data")


def text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def row(key: bytes, value: bytes) -> dict[str, Any]:
    content = PlainData(io.BytesIO(value)).load()
    if not isinstance(content, dict):
        return {"id": text(key), "sequence": text(content)}
    return {str(text(field)): text(one) for field, one in content.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the LMDB, a folder or a file")
    parser.add_argument("output", type=Path, help="JSON lines: .jsonl or .jsonl.gz")
    arguments = parser.parse_args()
    opened: Any = gzip.open if arguments.output.suffix == ".gz" else open
    source = lmdb.open(
        str(arguments.source), subdir=arguments.source.is_dir(), readonly=True, lock=False
    )
    count = 0
    with source.begin() as transaction, opened(arguments.output, "wt", encoding="utf-8") as output:
        for key, value in transaction.cursor():
            if key in METADATA:
                continue
            try:
                line = json.dumps(row(key, value))
            except Exception as error:  # a damaged pickle may raise anything
                raise SystemExit(f"{arguments.source}, key {key!r}: {error}") from None
            output.write(line + "\n")
            count += 1
    print(f"wrote {count:,} records to {arguments.output}")


if __name__ == "__main__":
    main()
