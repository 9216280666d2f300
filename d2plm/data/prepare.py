"""From proteins to a training and a validation store between which MMseqs2 finds no homologs.

Whole clusters are held out. Clustering alone leaks, so the held-out sequences are then searched
against the training ones, and what they hit is dropped, again and again until nothing is found.
That last search is what is verified, and no more: a search the other way round, or a more sensitive
one, might still find something. The split depends on the sequences, the settings and the seed,
never on the order of the input; the price is one pass in the order of content digests, which reads
the raw store at random.
"""

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import decode, encode
from d2plm.data.fasta import ON_ILLEGAL, read_fasta, write_fasta
from d2plm.data.homology import MMseqs, find_mmseqs, mmseqs_version
from d2plm.data.store import SequenceStore, SequenceStoreWriter
from d2plm.errors import DataError, require_choice, require_number

FORMAT_VERSION = 1
SEARCH_ROUNDS = 20

_MANIFEST, _LOG, _LOCK = "manifest.json", "mmseqs.log", ".lock"
_RAW, _TRAIN, _VALIDATION = "raw_lmdb", "train_lmdb", "validation_lmdb"
_DIGEST_BYTES = 16


def ingest(
    fasta: Path,
    output: Path,
    *,
    min_length: int = 1,
    max_length: int | None = None,
    on_illegal: str = "error",
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Write the records of a FASTA file into a raw store.

    Args:
        fasta: the file, plain or gzipped.
        output: folder of the store.
        min_length, max_length: bounds, in residues, of the records kept; None is no bound.
        on_illegal: "error" refuses a record with an illegal letter or without sequence, "drop"
            leaves it out.
        report: called with one line per stage.

    Returns:
        The store's manifest; its provenance counts the records dropped, by reason.

    Raises:
        DataError: the FASTA file is bad, nothing is left of it, or the store cannot be written.
        ConfigError: the lengths or `on_illegal` are impossible.
    """
    _check_lengths(min_length, max_length)
    dropped: Counter[str] = Counter()
    report(f"reading {fasta}")
    with SequenceStoreWriter(output, kind="raw") as writer:
        for record in read_fasta(fasta, on_illegal=on_illegal, dropped=dropped):
            reason = _length_objection(len(record.sequence), min_length, max_length)
            if reason is None:
                writer.append(record.name, encode(record.sequence))
            else:
                dropped[reason] += 1
        writer.provenance.update(source=Path(fasta).name, dropped=dict(dropped))
    manifest = SequenceStore(output).manifest
    report(
        f"{manifest['sequences']:,} sequences, {manifest['residues']:,} residues"
        + "".join(f", {count:,} dropped ({reason})" for reason, count in dropped.items())
    )
    return manifest


def prepare(
    input: Path,
    output_dir: Path,
    *,
    validation_fraction: float = 0.005,
    cluster_min_seq_id: float = 0.3,
    cluster_coverage: float = 0.8,
    search_min_seq_id: float = 0.5,
    search_coverage: float = 0.8,
    search_sensitivity: float = 7.0,
    search_max_seqs: int = 300,
    min_length: int = 1,
    max_length: int | None = None,
    on_illegal: str = "error",
    seed: int = 0,
    threads: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Split proteins into training and validation stores between which a search finds no homologs.

    Writes `train_lmdb`, `validation_lmdb`, `mmseqs.log`, for a FASTA input also `raw_lmdb`, and
    last `manifest.json` into `output_dir`. Data already prepared there from the same input, with
    the same settings and the same MMseqs2, are kept and nothing is done.

    Args:
        input: a FASTA file (plain or gzipped) or the folder of a raw store.
        output_dir: folder of the results.
        validation_fraction: share of the distinct sequences to hold out, 0 < f < 1, rounded up to
            a whole one; where whole clusters do not add up to it, fewer are held out, never more.
        cluster_min_seq_id, cluster_coverage: identity and coverage of the clusters, 0 … 1.
        search_min_seq_id, search_coverage: what makes a training sequence a leak, 0 … 1.
        search_sensitivity: MMseqs2's -s, 1 … 7.5.
        search_max_seqs: hits considered for each held-out sequence in one search.
        min_length, max_length: bounds, in residues, of the sequences kept; None is no bound.
        on_illegal: "error" or "drop", for records of a FASTA input that are no proteins.
        seed: chooses the clusters that are held out.
        threads: CPU threads for MMseqs2; None takes all that this process may use.
        report: called with one line per stage.

    Returns:
        The manifest: key, input, settings, counts, digests of the stores, seconds per stage.

    Raises:
        ConfigError: a setting is out of range; the message names it.
        DataError: the input is bad or too small to split, `output_dir` cannot be written or is
            being written by another preparation, or MMseqs2 is missing or fails.
    """
    input, output_dir = Path(input), Path(output_dir)
    settings = {
        "validation_fraction": validation_fraction,
        "cluster_min_seq_id": cluster_min_seq_id,
        "cluster_coverage": cluster_coverage,
        "search_min_seq_id": search_min_seq_id,
        "search_coverage": search_coverage,
        "search_sensitivity": search_sensitivity,
        "search_max_seqs": search_max_seqs,
        "min_length": min_length,
        "max_length": max_length,
        "on_illegal": on_illegal,
    }
    _check_settings(settings, seed, threads)
    binary = find_mmseqs()
    origin = {
        "format_version": FORMAT_VERSION,
        "input_digest": content_digest(input),
        "settings": settings,
        "seed": seed,
        "mmseqs_version": mmseqs_version(binary),
    }
    key = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()
    prepared = _prepared(output_dir, key, report)
    if prepared is not None:
        report(f"reusing prepared data in {output_dir} (same input, settings and MMseqs2)")
        return prepared

    seconds: dict[str, float] = {}
    with _locked(output_dir, report), _scratch_folder(output_dir) as scratch:
        mmseqs = MMseqs(
            binary=binary,
            threads=threads or _available_cpus(),
            log=output_dir / _LOG,
            temporary_folder=scratch,
        )
        with _timed(seconds, "read"):
            raw = _raw_store(input, output_dir, on_illegal, report)
        with _timed(seconds, "deduplicate"):
            distinct = _distinct(raw, min_length, max_length)
            report(f"{len(distinct.indices):,} distinct sequences of {len(raw):,}")
        with _timed(seconds, "cluster"):
            fasta = _write_indexed(scratch / "distinct.fasta", raw, distinct.indices)
            report("clustering with MMseqs2")
            clusters = mmseqs.cluster(fasta, cluster_min_seq_id, cluster_coverage)
        held_out = _hold_out(clusters, distinct.digests, validation_fraction, seed)
        report(f"{clusters.max() + 1:,} clusters, {held_out.sum():,} sequences held out")
        leaking, pairs_found = _find_leaking(
            mmseqs,
            raw,
            distinct.indices,
            held_out,
            seconds,
            report,
            min_seq_id=search_min_seq_id,
            coverage=search_coverage,
            sensitivity=search_sensitivity,
            max_seqs=search_max_seqs,
        )
        report(f"{leaking.sum():,} leaking training sequences dropped, no more found")
        with _timed(seconds, "write"):
            # Stores of a new split never stand beside the manifest of an old one.
            with _writing(output_dir / _MANIFEST):
                (output_dir / _MANIFEST).unlink(missing_ok=True)
            provenance = {"key": key, "input": input.name}
            stores = {
                kind: _write_split(
                    output_dir / folder, kind, raw, distinct.indices, clusters, kept, provenance
                )
                for kind, folder, kept in (
                    ("train", _TRAIN, ~held_out & ~leaking),
                    ("validation", _VALIDATION, held_out),
                )
            }
        manifest = {
            "format": "d2plm.prepared",
            "key": key,
            "input": input.name,
            **origin,
            "counts": _counts(raw, distinct, clusters, leaking, stores),
            "leaking_pairs_found": pairs_found,
            "leaking_pairs_after": pairs_found[-1],
            "digests": {kind: store.digest for kind, store in stores.items()},
            "seconds": {stage: round(duration, 3) for stage, duration in seconds.items()},
        }
        _write_manifest(output_dir / _MANIFEST, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class _Distinct:
    """The sequences to split, one of each, in the order of their content digests.

    Attributes:
        indices: int64 [N], position in the raw store (the first of each set of duplicates).
        digests: bytes, 16 for each of the N.
        dropped: sequences of the raw store outside the length bounds, by reason.
        duplicates: sequences left out because an equal one is kept.
    """

    indices: NDArray[np.int64]
    digests: list[bytes]
    dropped: Counter[str]
    duplicates: int


def _raw_store(
    input: Path, output_dir: Path, on_illegal: str, report: Callable[[str], None]
) -> SequenceStore:
    if os.path.isdir(input):
        raw = SequenceStore(input)
        report(f"checking {input}")
        raw.verify()
        return raw
    ingest(input, output_dir / _RAW, on_illegal=on_illegal, report=report)
    return SequenceStore(output_dir / _RAW)


def _distinct(raw: SequenceStore, min_length: int, max_length: int | None) -> _Distinct:
    dropped: Counter[str] = Counter()
    kept, digests = [], bytearray()
    for index, length in enumerate(raw.lengths.tolist()):
        reason = _length_objection(length, min_length, max_length)
        if reason is None:
            kept.append(index)
            digests += hashlib.sha256(raw[index].tobytes()).digest()[:_DIGEST_BYTES]
        else:
            dropped[reason] += 1
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
    # lexsort is stable: the first of equal digests is the first of the input.
    order = np.lexsort((words[:, 1], words[:, 0]))
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    first = order[is_new]
    if len(first) < 2:
        raise DataError(
            f"{raw.path}: {len(first)} distinct sequences within the length bounds are too few to "
            "split; give at least two"
        )
    return _Distinct(
        indices=np.array(kept, dtype=np.int64)[first],
        digests=[row.tobytes() for row in words[first]],
        dropped=dropped,
        duplicates=len(order) - len(first),
    )


def _hold_out(
    clusters: NDArray[np.int32], digests: list[bytes], fraction: float, seed: int
) -> NDArray[np.bool_]:
    """Choose whole clusters for validation: bool [N], true for a held-out sequence.

    A cluster is known by the smallest digest of its members, and clusters are taken in the order
    of a seeded hash of it until the fraction is reached. One that is larger than what is still
    wanted is passed over, so that never more than the fraction, rounded up, is held out.
    """
    wanted = int(np.ceil(fraction * len(clusters)))
    # Sequences stand in the order of their digests, so a cluster's first member has its smallest.
    _, first, sizes = np.unique(clusters, return_index=True, return_counts=True)
    ranks = [hashlib.sha256(b"%d:%b" % (seed, digests[index])).digest() for index in first]
    chosen, taken = [], 0
    for cluster in sorted(range(len(first)), key=ranks.__getitem__):
        if taken >= wanted:
            break
        if sizes[cluster] <= wanted - taken:
            chosen.append(cluster)
            taken += sizes[cluster]
    held_out = np.isin(clusters, chosen)
    if not chosen or held_out.all():
        raise DataError(
            f"{len(clusters)} distinct sequences in {len(first)} clusters (the smallest of "
            f"{sizes.min()}) are too few to hold out {wanted} by whole clusters; give more "
            f"sequences, change validation_fraction={fraction} or raise cluster_min_seq_id"
        )
    return held_out


def _find_leaking(
    mmseqs: MMseqs,
    raw: SequenceStore,
    indices: NDArray[np.int64],
    held_out: NDArray[np.bool_],
    seconds: dict[str, float],
    report: Callable[[str], None],
    **search_settings: Any,
) -> tuple[NDArray[np.bool_], list[int]]:
    """Find the training sequences that hit a held-out one, searching until nothing is found.

    Only the held-out sequences are queries: the cost of a search goes with its queries, and they
    are the few. A query reports at most `max_seqs` hits, so one search may not name every homolog;
    hence the repetition. The last search, which found nothing, is the verification, and all of it:
    what the opposite direction or a more sensitive search would find is not known.

    Returns bool [N], true for a sequence to drop, and the pairs found by each search, the last
    of which is 0.
    """
    leaking = np.zeros_like(held_out)
    validation = mmseqs.temporary_folder / "validation.fasta"
    train = mmseqs.temporary_folder / "train.fasta"
    _write_indexed(validation, raw, indices[held_out])
    pairs_found: list[int] = []
    while len(pairs_found) < SEARCH_ROUNDS:
        training = np.flatnonzero(~held_out & ~leaking)
        if not len(training):
            raise DataError(
                "every training sequence is a homolog of a held-out one; give more sequences or "
                "raise search_min_seq_id"
            )
        _write_indexed(train, raw, indices[training])
        report("searching the training sequences for homologs of held-out ones")
        with _timed(seconds, "verify" if pairs_found else "search"):
            hits = mmseqs.search(validation, train, **search_settings)
        pairs_found.append(len(hits))
        report(f"{len(hits):,} pairs between training and validation")
        if not len(hits):
            return leaking, pairs_found
        leaking[training[hits.targets]] = True
    raise DataError(
        f"MMseqs2 still finds homologs of held-out sequences after {SEARCH_ROUNDS} searches "
        f"({pairs_found} pairs): a held-out protein has more homologs than the search_max_seqs="
        f"{search_settings['max_seqs']} that one search considers; raise search_max_seqs"
    )


def _write_indexed(path: Path, store: SequenceStore, indices: NDArray[np.int64]) -> Path:
    """Write the sequences at `indices` as FASTA under the names 0 … N - 1."""
    write_fasta(path, ((str(i), decode(store[index])) for i, index in enumerate(indices)))
    return path


def _write_split(
    path: Path,
    kind: str,
    raw: SequenceStore,
    indices: NDArray[np.int64],
    clusters: NDArray[np.int32],
    kept: NDArray[np.bool_],
    provenance: Mapping[str, Any],
) -> SequenceStore:
    chosen = np.flatnonzero(kept)
    chosen = chosen[np.argsort(indices[chosen])]
    with SequenceStoreWriter(path, kind=kind, provenance=provenance) as writer:
        for index in indices[chosen].tolist():
            writer.append(raw.name(index), raw[index])
        writer.set_clusters(clusters[chosen])
    return SequenceStore(path)


def _counts(
    raw: SequenceStore,
    distinct: _Distinct,
    clusters: NDArray[np.int32],
    leaking: NDArray[np.bool_],
    stores: Mapping[str, SequenceStore],
) -> dict[str, Any]:
    """What became of the input's records."""
    dropped_before = Counter(raw.manifest["provenance"].get("dropped", {}))
    counts: dict[str, Any] = {
        "input": len(raw) + dropped_before.total(),
        "dropped": dict(dropped_before + distinct.dropped),
        "duplicates": distinct.duplicates,
        "distinct": len(distinct.indices),
        "clusters": int(clusters.max()) + 1,
        "leaking_dropped": int(leaking.sum()),
    }
    for kind, store in stores.items():
        counts[f"{kind}_sequences"] = len(store)
        counts[f"{kind}_residues"] = store.residues
        counts[f"{kind}_clusters"] = _cluster_count(store)
    return counts


def _cluster_count(store: SequenceStore) -> int:
    return 0 if store.clusters is None else len(np.unique(store.clusters))


def _prepared(output_dir: Path, key: str, report: Callable[[str], None]) -> dict[str, Any] | None:
    """The manifest of what `output_dir` holds already, if it is whole and has this key."""
    path = output_dir / _MANIFEST
    try:
        if not path.is_file():
            return None
        manifest = json.loads(path.read_text())
        if manifest["key"] != key:
            report(f"preparing {output_dir} again: the input, the settings or MMseqs2 changed")
            return None
        for kind, folder in (("train", _TRAIN), ("validation", _VALIDATION)):
            if SequenceStore(output_dir / folder).digest != manifest["digests"][kind]:
                raise DataError(f"{output_dir / folder}: is not the store that {path} names")
    except (DataError, OSError, ValueError, KeyError, TypeError) as error:
        report(f"preparing {output_dir} again: it is damaged ({error})")
        return None
    return manifest


def content_digest(input: Path) -> str:
    """SHA-256 in hex: of the bytes of a file, or the digest of a store."""
    if os.path.isdir(input):
        return SequenceStore(input).digest
    try:
        with open(input, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"{input}: cannot be read ({error.strerror}); give a FASTA file or a raw store"
        ) from None


@contextmanager
def _locked(output_dir: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Make `output_dir` and keep other preparations out of it; an empty lock file stays behind."""
    import fcntl  # exists on POSIX only, and `content_digest` is wanted elsewhere, too

    with _writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(output_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"another preparation is writing to {output_dir}; wait for it or choose another "
                "folder"
            ) from None
        except OSError as error:
            report(
                f"{output_dir} is on a file system without locks ({error.strerror}): start no "
                "second preparation there"
            )
        yield
    finally:
        # Not removed: one preparation could then lock the old file while another locks a new one.
        os.close(lock)


@contextmanager
def _scratch_folder(output_dir: Path) -> Iterator[Path]:
    """A folder for temporary files; takes away what an earlier run that was killed left there."""
    scratch = output_dir / ".scratch"
    with _writing(output_dir):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        (output_dir / _LOG).unlink(missing_ok=True)
    try:
        yield scratch.resolve()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with _writing(path):
        partial.write_text(json.dumps(manifest, indent=2) + "\n")
        os.replace(partial, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); free space, change its permissions or "
            "choose another output folder"
        ) from None


def _available_cpus() -> int:
    """CPUs that this process may use, where the system tells; else those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start


def _length_objection(length: int, min_length: int, max_length: int | None) -> str | None:
    if length < min_length:
        return f"shorter than {min_length}"
    if max_length is not None and length > max_length:
        return f"longer than {max_length}"
    return None


def _check_lengths(
    min_length: int, max_length: int | None, min_length_key: str = "min_length"
) -> None:
    require_number(min_length_key, min_length, integer=True, low=1)
    if max_length is not None:
        require_number("max_length", max_length, integer=True, low=min_length)


def _check_settings(settings: Mapping[str, Any], seed: int, threads: int | None) -> None:
    """Check the settings, named by their keys in the configuration."""
    # The configuration's data.max_length is another thing: the tokens of a training sequence.
    _check_lengths(settings["min_length"], settings["max_length"], "data.min_length")
    require_number(
        "data.validation_fraction",
        settings["validation_fraction"],
        low=0,
        high=1,
        low_open=True,
        high_open=True,
    )
    for key in (
        *("cluster_min_seq_id", "cluster_coverage"),
        *("search_min_seq_id", "search_coverage"),
    ):
        require_number(f"data.{key}", settings[key], low=0, high=1)
    require_number("data.search_sensitivity", settings["search_sensitivity"], low=1, high=7.5)
    require_number("data.search_max_seqs", settings["search_max_seqs"], integer=True, low=1)
    require_choice("data.on_illegal", settings["on_illegal"], ON_ILLEGAL)
    require_number("data.split_seed", seed, integer=True)
    if threads is not None:
        require_number("data.threads", threads, integer=True, low=1)
