"""d2plm data: inspect a sequence store, or the stores of prepared data."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError, require
from d2plm.core.number_text import counted
from d2plm.core.progress import Progress
from d2plm.core.terminal import JSON, aligned, output_modes, result
from d2plm.data.fasta_export import export_sequences, first_records
from d2plm.data.manifest import TRAIN_RELATIVES, is_prepared, open_prepared
from d2plm.data.records import ALIAS_SEPARATOR
from d2plm.data.statistics import PICTURES, plot, store_statistics, table
from d2plm.data.store import SequenceStore
from d2plm.settings.commands import ExportDataSettings, HeadSettings, StatsSettings, StoreSettings

log = logging.getLogger(__name__)


def run_stats(config: StatsSettings) -> dict[str, Any]:
    """Print statistics of a store, or of each split of prepared data; plot them on request."""
    folder, picture = Path(config.store), config.output
    drawable = picture is None or Path(picture).suffix in PICTURES
    require(drawable, "output", picture, f"a file that ends in {', '.join(PICTURES)}")
    if is_prepared(folder):
        prepared = open_prepared(folder)
        stores, account = prepared.splits, prepared.account
    else:
        store = SequenceStore(folder)
        stores = {store.manifest["kind"]: store}
        account = {"digests": store.manifest["digests"], "origin": store.manifest["provenance"]}
    statistics = {}
    for name, store in stores.items():
        with Progress(f"reading {name}", len(store), unit="sequences") as progress:
            statistics[name] = store_statistics(store, progress.update)
    result(table(statistics))
    tokens = f"{next(iter(stores.values())).vocabulary.nouns.token}s"
    for title, values in account.items():
        rows = {label.replace("residues", tokens): text for label, text in _rows(values)}
        result(f"\n{title}\n{aligned(rows, '  ')}")
    if picture is not None:
        plot(statistics, Path(picture), folder.resolve().name)
        log.info("wrote %s", picture)
    return {"stores": {name: one.summary() for name, one in statistics.items()}, **account}


def run_verify(config: StoreSettings) -> list[dict[str, Any]]:
    """Compare a store, or all stores of prepared data, with the recorded digests."""
    folder = Path(config.store)
    prepared = open_prepared(folder) if is_prepared(folder) else None
    stores = [SequenceStore(folder)] if prepared is None else prepared.stores
    for store in stores:
        with Progress(f"verifying {store.path.name}", len(store), unit="sequences") as progress:
            store.verify(progress.update)
        result(f"{store.path}: whole, {counted(len(store), 'sequence')}, digest {store.digest}")
    if prepared is not None and prepared.relatives is not None:
        prepared.verify_relatives()
        result(f"{folder / TRAIN_RELATIVES}: whole, {len(prepared.relatives.targets):,} relatives")
    return [
        {"store": store.path, "sequences": len(store), "digest": store.digest} for store in stores
    ]


def run_head(config: HeadSettings) -> list[dict[str, Any]]:
    store = _one_store(Path(config.store))
    records = first_records(store, config.number)
    if JSON in output_modes() and store.vocabulary.is_text:
        return [json.loads(record) for record in records]
    if JSON in output_modes():
        lines = (_spaced(record).decode(errors="replace").splitlines() for record in records)
        return [{"name": name[1:], "sequence": "".join(rest)} for name, *rest in lines]
    for record in records:
        sys.stdout.buffer.write(_spaced(record) if sys.stdout.isatty() else record)
    sys.stdout.buffer.flush()
    return []


def run_export(config: ExportDataSettings) -> dict[str, Any]:
    store, output = _one_store(Path(config.store)), config.output
    with Progress("exporting", len(store), unit="sequences") as progress:
        changed = export_sequences(store, Path(output), progress.update)
    if changed:
        log.info("replaced blanks by _ in the names of %s sequences", f"{changed:,}")
    # Logged, not printed, because the sequences may go to standard output.
    log.info("wrote %s to %s", counted(len(store), "sequence"), output)
    return {"output": output, "sequences": len(store)}


def _spaced(record: bytes) -> bytes:
    """Separate the record's names by blanks, because terminals do not show the separator."""
    return record.replace(ALIAS_SEPARATOR, b" ")


def _one_store(folder: Path) -> SequenceStore:
    if is_prepared(folder):
        inside = ", ".join(str(store.path) for store in open_prepared(folder).stores)
        raise DataError(f"{folder}: contains several stores; give one of {inside}")
    return SequenceStore(folder)


def _rows(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        label = prefix + str(key).replace("_", " ")
        if isinstance(value, dict) and value:
            yield from _rows(value, f"{label}, ")
        elif value is not None:
            several = value if isinstance(value, list | dict) else [value]
            texts = (f"{one:,}" if isinstance(one, int) else str(one) for one in several)
            yield label, ", ".join(texts) or "none"
