"""From any input to training, validation and test stores that share no similar sequences.

The steps: ingest (every distinct sequence once, in the order of content digests), cluster, hold out
whole clusters, drop the training sequences that a search finds similar to held-out ones, verify,
write. `data.similarity` defines similarity: homologs of MMseqs2, or overlapping texts. The result
depends on the sequences, the settings and the seed, never on the order or form of the input.
Results of clustering and of each search are cached: a killed preparation resumes after the last of
them, and another seed needs no new clustering.
"""

import ctypes
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, SplitError, require, require_number
from d2plm.core.files import write_text
from d2plm.core.locks import locked
from d2plm.core.vocabulary import PROTEIN, Vocabulary
from d2plm.data.cache import ArrayCache, digest_of
from d2plm.data.homology import mmseqs_in, writing
from d2plm.data.ingest import check_bounds, describe, ingest, source_digest
from d2plm.data.joined_clusters import records_of, window_of, with_equal
from d2plm.data.leakage import find_leaking
from d2plm.data.manifest import MANIFEST, RAW, TRAIN_RELATIVES, open_prepared, read_manifest
from d2plm.data.retrieval import find_relatives
from d2plm.data.similarity import Finder, similarity_search
from d2plm.data.split import Mask, cluster_count, hold_out
from d2plm.data.split import describe as describe_split
from d2plm.data.store import BLOCK_SEQUENCES, MAX_RESIDUES, SequenceStore, array_digest, clusters_of
from d2plm.data.store_writer import SequenceStoreWriter
from d2plm.settings.data import (
    ClusterSettings,
    Reading,
    Resources,
    SearchSettings,
    SplitSettings,
    TextSettings,
)

FORMAT_VERSION = 3
MOST_RELATIVES = 16  # per training sequence between successive `IDENTITIES`

Report = Callable[[str], None]
Progress = Callable[[float, str], None]


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output_dir: Path,
    *,
    vocabulary: Vocabulary = PROTEIN,
    reading: Reading = Reading(),
    min_residues: int = 1,
    max_residues: int | None = None,
    window: int | None = None,
    split: SplitSettings = SplitSettings(),
    clustering: ClusterSettings = ClusterSettings(),
    search: SearchSettings = SearchSettings(),
    text: TextSettings = TextSettings(),
    relatives_sensitivity: float | None = None,
    resources: Resources = Resources(),
    keep: bool = False,
    report: Report = lambda line: None,
    progress: Progress = lambda done, note: None,
    replacing: Report = lambda changed: None,
) -> dict[str, Any]:
    """Split sequences into stores between which a search finds no similar sequences.

    Writes `train_lmdb`, `validation_lmdb`, `test_lmdb` (if requested), `mmseqs.log` (if it is
    used), `cache/` (the clusters), unless the input is a raw store also `raw_lmdb`, and last
    `manifest.json` into `output_dir`. Data already prepared there from the same sequences, with the
    same settings and the same MMseqs2, are kept and nothing is done.

    Args:
        inputs: the folder of a raw store, or the inputs of `ingest`.
        min_residues, max_residues: bounds of the sequences kept; None is no bound.
        window: tokens of the pieces into which longer records are cut; the pieces of a record are
            never split between the stores; None cuts none.
        clustering, search: MMseqs2's settings, for proteins and nucleotides.
        text: the settings for documents.
        relatives_sensitivity: sensitivity of a search for relatives of the training proteins among
            themselves, 1 (fast) … 7.5 (sensitive); None for none.
        resources: limits of MMseqs2. Threads do not change the result; a memory limit that makes it
            work in parts may, as it then keeps other prefilter results.
        keep: use the data prepared there already, from any input; for several pods that start
            together.
        report: called with one line per stage.
        progress: called with the fraction of the input read, 0 … 1, and a note.
        replacing: called with what has changed before prepared data in `output_dir` are replaced;
            an error that it raises keeps them.

    Returns:
        The manifest: key, inputs, settings, counts, searches, digests of the stores, seconds.

    Raises:
        ConfigError: a setting is out of range; the message names it.
        DataError: the input is bad or too small to split, `output_dir` cannot be written, or
            MMseqs2 is missing or fails.
    """
    output_dir = Path(output_dir)
    check_bounds(min_residues, max_residues)
    require_number("relatives_sensitivity", relatives_sensitivity, optional=True, low=1, high=7.5)
    no_relatives = relatives_sensitivity is None or vocabulary == PROTEIN
    require(no_relatives, "relatives_sensitivity", relatives_sensitivity, "null but for proteins")
    similarity = similarity_search(
        vocabulary, clustering, search, split.search_directions, resources, text
    )
    seconds: dict[str, float] = {}
    busy, wait = f"another preparation is writing to {output_dir}", resources.max_wait_seconds
    lock, limit_key = output_dir / ".lock", "data.max_wait_seconds"
    with writing(output_dir), locked(lock, busy, max_wait_seconds=wait, limit_key=limit_key):
        if keep and (output_dir / MANIFEST).is_file():
            report(f"keeping the prepared data in {output_dir}")
            return open_prepared(output_dir).manifest
        with _timed(seconds, "ingest"):
            raw = _raw_store(
                inputs, output_dir, vocabulary, window, reading, report, progress, replacing
            )
        records = records_of(raw)
        settings = {
            "min_residues": min_residues,
            "max_residues": max_residues,
            "split": describe_split(split),
            "clustering": similarity.clustering,
            "search": similarity.search,
        }
        if relatives_sensitivity is not None:
            of_relatives = {"sensitivity": relatives_sensitivity, "most": MOST_RELATIVES}
            settings["relatives"] = of_relatives
        origin = {
            "format_version": FORMAT_VERSION,
            **_content(raw, records, vocabulary),
            "settings": settings,
            f"{similarity.program}_version": similarity.version,
        }
        key = digest_of(origin)
        prepared = _prepared(output_dir, key, report, replacing)
        if prepared is not None:
            return prepared
        with similarity.open(output_dir, key, report) as finder:
            selected = _within_bounds(raw, min_residues, max_residues)
            cache = ArrayCache(output_dir / "cache", report)
            with _timed(seconds, "cluster"):
                made_of = [FORMAT_VERSION, origin["raw_digests"], min_residues, max_residues]
                made_of += [similarity.version, similarity.clustering]
                made_of += [origin["alphabet"], origin["window"]]
                clusters = cache.array(
                    "clusters", made_of, lambda: _cluster(finder, raw, selected, records)
                )
            held_out = hold_out(raw, selected, clusters, split, similarity.thresholds[0], records)
            with _timed(seconds, "search"):
                leaking, searches = find_leaking(
                    raw,
                    selected,
                    held_out,
                    split.exclude_homologs_of,
                    similarity=similarity,
                    finder=finder,
                    cache=cache,
                    key=key,
                )
            masks = {"train": selected & ~np.logical_or.reduce([leaking, *held_out.values()])}
            masks |= {name: mask & ~leaking for name, mask in held_out.items()}
            with _timed(seconds, "write"):
                stores = _write_splits(output_dir, raw, clusters, masks, key)
        relatives = None
        if relatives_sensitivity is not None:
            with _timed(seconds, "relatives"), mmseqs_in(output_dir, resources) as mmseqs:
                relatives = find_relatives(
                    stores["train"], mmseqs, relatives_sensitivity, MOST_RELATIVES, report
                )
                relatives.save(output_dir / TRAIN_RELATIVES)
        last = {(one["dropped_from"], one["direction"]): one["pairs"] for one in searches}
        manifest = {
            "format": "d2plm.prepared",
            "key": key,
            "input": _input_name(raw),
            **origin,
            "counts": _counts(
                raw, (min_residues, max_residues), selected, clusters, searches, stores
            ),
            "searches": searches,
            "leaking_pairs_after": sum(last.values()),
            "digests": {name: store.digest for name, store in stores.items()},
            **({} if relatives is None else {"relatives": relatives.digest}),
            "seconds": seconds,
        }
        write_text(output_dir / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        cache.keep_only("clusters")
    return manifest


def _raw_store(
    inputs: str | Path | Sequence[str | Path],
    output_dir: Path,
    vocabulary: Vocabulary,
    window: int | None,
    reading: Reading,
    report: Report,
    progress: Progress,
    replacing: Report,
) -> SequenceStore:
    """Open the given raw store, or ingest the inputs into one unless that has been done before."""
    if isinstance(inputs, str | Path) and os.path.isfile(Path(inputs) / MANIFEST):
        raw = SequenceStore(Path(inputs))
        if raw.manifest["kind"] != "raw":
            raise DataError(
                f"{inputs}: a {raw.manifest['kind']} store; give the raw one, or the input itself"
            )
        raw.require_vocabulary(vocabulary)
        if window is not None and window != window_of(raw):
            raise DataError(
                f"{inputs}: its records were not cut at a window of {window}; give the input "
                "itself, or ingest it again with this window"
            )
        report(f"checking {inputs}")
        raw.verify()
        return raw
    digest = source_digest(inputs)
    source: dict[str, Any] | None = None
    if digest is not None:
        source = {"source": digest, "reading": asdict(reading)}
        source |= {"alphabet": vocabulary.describe(), "window": window}
    path = output_dir / RAW
    before: dict[str, Any] | None = None
    with suppress(DataError):  # missing or incomplete
        raw = SequenceStore(path)
        before = raw.manifest["provenance"].get("from")
        if source is not None and before == source:
            report(f"reusing {path}: {describe(raw)}")
            return raw
    prepared: dict[str, Any] = {}
    with suppress(DataError):
        prepared = read_manifest(output_dir) or {}
    # Another file or setting may still give the same sequences.
    fresh = output_dir / f"new_{RAW}" if prepared else path
    ingest(
        inputs,
        fresh,
        vocabulary=vocabulary,
        reading=reading,
        window=window,
        provenance={"from": source},
        report=report,
        progress=progress,
    )
    # Return memory that glibc has kept after the ingest, so that MMseqs2 can use it.
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    if prepared:
        try:
            content = _content(raw := SequenceStore(fresh), records_of(raw), vocabulary)
            of_prepared = {name: prepared.get(name) for name in content}
            if digest_of(content) != digest_of(of_prepared):
                is_same = source and before and before["source"] == source["source"]
                replacing("a setting of the data" if is_same else "the input")
            shutil.rmtree(path, ignore_errors=True)
            fresh.rename(path)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return SequenceStore(path)


def _content(
    raw: SequenceStore, records: NDArray[np.int32] | None, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Determinants of the prepared data other than the settings, as in their manifest."""
    digests = dict(raw.manifest["digests"])
    if records is not None:
        # Record numbers depend on the order of the input; these labels do not.
        digests["pieces"] = array_digest(records)
    alphabet = vocabulary.describe()
    return {"raw_digests": digests, "alphabet": alphabet, "window": window_of(raw)}


def _within_bounds(raw: SequenceStore, min_residues: int, max_residues: int | None) -> Mask:
    selected = raw.lengths >= min_residues
    if max_residues is not None:
        selected &= raw.lengths <= max_residues
    count = int(selected.sum())
    if count < 2:
        raise SplitError(
            f"{raw.path}: {count} distinct sequences within the length bounds are too few to "
            "split; give at least two"
        )
    return selected


def _cluster(
    finder: Finder, raw: SequenceStore, selected: Mask, records: NDArray[np.int32] | None
) -> NDArray[np.int32]:
    """int32 [N]: the first member of each sequence's cluster; -1 for those left out."""
    indices = np.flatnonzero(selected).astype(np.int32)
    clusters = np.full(len(selected), -1, dtype=np.int32)
    clusters[indices] = indices[finder.clusters(raw, selected)]
    return clusters if records is None else with_equal(clusters, records)


def _write_splits(
    output_dir: Path,
    raw: SequenceStore,
    clusters: NDArray[np.int32],
    masks: Mapping[str, Mask],
    key: str,
) -> dict[str, SequenceStore]:
    # Stores of a new split must never be next to the manifest of an old one.
    (output_dir / MANIFEST).unlink(missing_ok=True)
    for folder in ("test_lmdb", TRAIN_RELATIVES):
        shutil.rmtree(output_dir / folder, ignore_errors=True)
    provenance = {"key": key, "input": raw.manifest["provenance"].get("input")}
    return {
        name: _write_split(output_dir / f"{name}_lmdb", name, raw, clusters, mask, provenance)
        for name, mask in masks.items()
    }


def _write_split(
    path: Path,
    kind: str,
    raw: SequenceStore,
    clusters: NDArray[np.int32],
    chosen: Mask,
    provenance: Mapping[str, Any],
) -> SequenceStore:
    with SequenceStoreWriter(
        path, kind=kind, provenance=provenance, vocabulary=raw.vocabulary
    ) as writer:
        for block, names in zip(raw.blocks(), raw.name_blocks(), strict=True):
            kept = np.flatnonzero(chosen[block.first : block.first + BLOCK_SEQUENCES]).tolist()
            tokens, bounds = block.tokens.data, block.bounds.tolist()
            # Copies: a view of one sequence would keep all of the block in memory.
            writer.extend(
                [names[i] for i in kept], [bytes(tokens[bounds[i] : bounds[i + 1]]) for i in kept]
            )
        writer.set_clusters(clusters[chosen])
    return SequenceStore(path)


def _counts(
    raw: SequenceStore,
    bounds: tuple[int, int | None],
    selected: Mask,
    clusters: NDArray[np.int32],
    searches: Sequence[Mapping[str, Any]],
    stores: Mapping[str, SequenceStore],
) -> dict[str, Any]:
    account = raw.manifest["provenance"]
    dropped = Counter(account["dropped"])
    dropped[f"shorter than {bounds[0]}"] += int((raw.lengths < bounds[0]).sum())
    dropped[f"longer than {bounds[1]}"] += int((raw.lengths > (bounds[1] or MAX_RESIDUES)).sum())
    counts: dict[str, Any] = {
        "input": account["records"],
        **({"pieces": account["pieces"]} if "pieces" in account else {}),
        "dropped": dict(+dropped),
        "duplicates": account["duplicates"],
        "distinct": int(selected.sum()),
        "clusters": cluster_count(clusters),
        "leaking_dropped": sum(one["sequences"] for one in searches),
        "leaking_dropped_partial": sum(one["partial"] for one in searches),
    }
    for kind, store in stores.items():
        counts[f"{kind}_sequences"] = len(store)
        counts[f"{kind}_residues"] = store.residues
        counts[f"{kind}_clusters"] = len(np.unique(clusters_of(store)))
    return counts


def _input_name(raw: SequenceStore) -> str:
    names = raw.manifest["provenance"].get("input") or [raw.path.name]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _prepared(
    output_dir: Path, key: str, report: Report, replacing: Report
) -> dict[str, Any] | None:
    """The manifest of the data in `output_dir`, if they are complete and have this key."""
    if not (output_dir / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(output_dir) or {}
        is_same = manifest.get("key") == key
        if is_same:
            open_prepared(output_dir)
    except DataError as error:
        report(f"preparing again: {error}")
        return None
    if not is_same:
        changed = "the sequences, the settings or the search program"
        replacing(changed)
        report(f"preparing {output_dir} again: {changed} changed")
        return None
    report(f"reusing prepared data in {output_dir} (same sequences, settings and MMseqs2)")
    return manifest


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = round(time.perf_counter() - start, 3)
