"""From proteins to training, validation and test stores between which MMseqs2 finds no homologs.

The way: ingest (every distinct sequence once, in the order of content digests), cluster, hold out
whole clusters, drop the training sequences that a search finds similar to held-out ones, verify,
write. The result depends on the sequences, the settings and the seed, never on the order or form of
the input. What takes long, clustering and searching, is kept as soon as it is done: a preparation
that was killed goes on from there, and another seed needs no new clustering.
"""

import ctypes
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, require_number
from d2plm.core.files import write_text
from d2plm.core.machine import usable_cores
from d2plm.data.fasta import read_fasta
from d2plm.data.homology import (
    ClusterSettings,
    MMseqs,
    SearchSettings,
    find_mmseqs,
    mmseqs_version,
)
from d2plm.data.ingest import check_bounds, describe, ingest, source_digest
from d2plm.data.prepared import MANIFEST
from d2plm.data.sources import Reading
from d2plm.data.split import (
    Mask,
    SplitSettings,
    choose_clusters,
    drop_homologs,
    find_ids,
    write_indexed_fasta,
)
from d2plm.data.store import BLOCK_SEQUENCES, MAX_RESIDUES, SequenceStore, SequenceStoreWriter

FORMAT_VERSION = 2

_LOG, _LOCK = "mmseqs.log", ".lock"
_RAW, _STAGES = "raw_lmdb", "stages"

Report = Callable[[str], None]
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Resources:
    """What MMseqs2 may use.

    Attributes:
        threads: CPU threads; None takes all that this process may use.
        memory_limit: such as "48G"; None takes all that the machine has.
        temporary_dir: where temporary files go, several times the input's size; None takes the
            output folder.
    """

    threads: int | None = None
    memory_limit: str | None = None
    temporary_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.threads is not None:
            require_number("data.threads", self.threads, integer=True, low=1)


def prepare(
    inputs: str | Path | Sequence[str | Path],
    output_dir: Path,
    *,
    reading: Reading = Reading(),
    min_residues: int = 1,
    max_residues: int | None = None,
    split: SplitSettings = SplitSettings(),
    clustering: ClusterSettings = ClusterSettings(),
    search: SearchSettings = SearchSettings(),
    resources: Resources = Resources(),
    keep: bool = False,
    report: Report = lambda line: None,
    progress: Progress = lambda done, note: None,
) -> dict[str, Any]:
    """Split proteins into stores between which a search finds no homologs.

    Writes `train_lmdb`, `validation_lmdb`, `test_lmdb` (if one is wanted), `mmseqs.log`, `stages/`
    (the clusters), unless the input is a raw store also `raw_lmdb`, and last `manifest.json` into
    `output_dir`. Data already prepared there from the same proteins, with the same settings and the
    same MMseqs2, are kept and nothing is done.

    Args:
        inputs: the folder of a raw store, or what `ingest` takes.
        output_dir: folder of the results.
        reading: how the inputs are read.
        min_residues, max_residues: bounds of the sequences kept; None is no bound.
        split: what is held out.
        clustering, search: MMseqs2's settings.
        resources: what MMseqs2 may use. Threads do not change the result; a memory limit that makes
            it work in parts may, as it then keeps other prefilter results.
        keep: take what is prepared there already, whatever it was made from, or is just being
            prepared there, as several pods that start together want.
        report: called with one line per stage.
        progress: called with the share of the reading done, 0 … 1, and a note.

    Returns:
        The manifest: key, inputs, settings, counts, searches, digests of the stores, seconds.

    Raises:
        ConfigError: a setting is out of range; the message names it.
        DataError: the input is bad or too small to split, `output_dir` cannot be written or is
            being written by another preparation, or MMseqs2 is missing or fails.
    """
    output_dir = Path(output_dir)
    check_bounds(min_residues, max_residues, "data.")
    binary = find_mmseqs()
    version = mmseqs_version(binary)
    seconds: dict[str, float] = {}
    with _locked(output_dir, report, wait=keep):
        if keep and (output_dir / MANIFEST).is_file():
            report(f"keeping the prepared data in {output_dir}")
            return _whole_manifest(output_dir)
        with _timed(seconds, "ingest"):
            raw = _raw_store(inputs, output_dir, reading, report, progress)
        origin = {
            "format_version": FORMAT_VERSION,
            "raw_digests": raw.manifest["digests"],
            "settings": {
                "min_residues": min_residues,
                "max_residues": max_residues,
                "split": split.describe(),
                "clustering": asdict(clustering),
                "search": asdict(search),
            },
            "mmseqs_version": version,
        }
        key = _key(origin)
        prepared = _prepared(output_dir, key, report)
        if prepared is not None:
            report(f"reusing prepared data in {output_dir} (same proteins, settings and MMseqs2)")
            return prepared
        with _scratch_folder(output_dir, resources.temporary_dir) as scratch:
            with _writing(output_dir / _LOG), open(output_dir / _LOG, "a") as log:
                log.write(f"# preparation {key}\n")
            mmseqs = MMseqs(
                binary=binary,
                threads=resources.threads or usable_cores(),
                log=output_dir / _LOG,
                temporary_folder=scratch,
                memory_limit=resources.memory_limit,
            )
            selected = _within_bounds(raw, min_residues, max_residues)
            stages = _Stages(output_dir / _STAGES, report)
            clustered_by = [
                *(FORMAT_VERSION, origin["raw_digests"], min_residues, max_residues, version)
            ]
            with _timed(seconds, "cluster"):
                clusters = stages.array(
                    "clusters",
                    [*clustered_by, asdict(clustering)],
                    lambda: _cluster(mmseqs, raw, selected, clustering, scratch, report),
                )
            held_out = _hold_out(raw, selected, clusters, split)
            with _timed(seconds, "search"):
                leaking, searches = _leaking(
                    mmseqs, raw, selected, held_out, split, search, scratch, stages, key, report
                )
            masks = {"train": selected & ~leaking}
            for name, mask in held_out.items():
                masks["train"] &= ~mask
                masks[name] = mask & ~leaking
            with _timed(seconds, "write"):
                # Stores of a new split never stand beside the manifest of an old one.
                with _writing(output_dir / MANIFEST):
                    (output_dir / MANIFEST).unlink(missing_ok=True)
                    shutil.rmtree(output_dir / "test_lmdb", ignore_errors=True)
                provenance = {"key": key, "input": raw.manifest["provenance"].get("input")}
                stores = {
                    name: _write_split(
                        output_dir / f"{name}_lmdb", name, raw, clusters, mask, provenance
                    )
                    for name, mask in masks.items()
                }
            manifest = {
                "format": "d2plm.prepared",
                "key": key,
                "input": _input_name(raw),
                **origin,
                "counts": _counts(
                    raw, (min_residues, max_residues), selected, clusters, leaking, stores
                ),
                "searches": searches,
                "leaking_pairs_after": sum(last["pairs"] for last in _last_of_each(searches)),
                "digests": {name: store.digest for name, store in stores.items()},
                "seconds": {stage: round(duration, 3) for stage, duration in seconds.items()},
            }
            write_text(output_dir / MANIFEST, json.dumps(manifest, indent=2) + "\n")
            stages.keep_only("clusters")
    return manifest


def _raw_store(
    inputs: str | Path | Sequence[str | Path],
    output_dir: Path,
    reading: Reading,
    report: Report,
    progress: Progress,
) -> SequenceStore:
    """The raw store given, or the inputs ingested into one, unless that has been done before."""
    if isinstance(inputs, str | Path) and os.path.isfile(Path(inputs) / MANIFEST):
        raw = SequenceStore(Path(inputs))
        if raw.manifest["kind"] != "raw":
            raise DataError(
                f"{inputs}: a {raw.manifest['kind']} store; give the raw one, or the proteins"
            )
        report(f"checking {inputs}")
        raw.verify()
        return raw
    digest = source_digest(inputs)
    source = None if digest is None else {"source": digest, "reading": asdict(reading)}
    path = output_dir / _RAW
    if source is not None:
        try:
            raw = SequenceStore(path)
            if raw.manifest["provenance"].get("from") == source:
                report(f"reusing {path}: {describe(raw.manifest)}")
                return raw
        except DataError:
            pass  # there is none that is whole
    ingest(
        inputs,
        path,
        reading=reading,
        provenance={"from": source},
        report=report,
        progress=progress,
    )
    _return_freed_memory()
    return SequenceStore(path)


def _return_freed_memory() -> None:
    """Give back what glibc keeps for itself: ingest frees much that later stages cannot use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _within_bounds(raw: SequenceStore, min_residues: int, max_residues: int | None) -> Mask:
    selected = raw.lengths >= min_residues
    if max_residues is not None:
        selected &= raw.lengths <= max_residues
    count = int(selected.sum())
    if count < 2:
        raise DataError(
            f"{raw.path}: {count} distinct sequences within the length bounds are too few to "
            "split; give at least two"
        )
    return selected


def _cluster(
    mmseqs: MMseqs,
    raw: SequenceStore,
    selected: Mask,
    settings: ClusterSettings,
    scratch: Path,
    report: Report,
) -> NDArray[np.int32]:
    """int32 [N]: the first member of each sequence's cluster; -1 for those left out."""
    indices = np.flatnonzero(selected).astype(np.int32)
    clusters = np.full(len(selected), -1, dtype=np.int32)
    if settings.method == "none":
        clusters[indices] = indices
        return clusters
    report(f"clustering {len(indices):,} sequences with MMseqs2; its log is {mmseqs.log}")
    fasta = scratch / "sequences.fasta"
    with _writing(fasta):
        write_indexed_fasta(fasta, raw, selected)
    clusters[indices] = indices[mmseqs.cluster(fasta, len(indices), settings)]
    fasta.unlink()
    return clusters


def _hold_out(
    raw: SequenceStore, selected: Mask, clusters: NDArray[np.int32], split: SplitSettings
) -> dict[str, Mask]:
    """The held-out sets that are wanted, by name: bool [N] each, true for its sequences."""
    listed = {
        name: find_ids(raw, Path(ids), selected)
        for name, ids in (("validation", split.validation_ids), ("test", split.test_ids))
        if ids is not None
    }
    both = np.logical_and.reduce(list(listed.values())) if len(listed) == 2 else np.zeros(1, bool)
    if both.any():
        name = raw.name(int(both.argmax()))
        raise DataError(f"{name} is on both lists of identifiers; take it off one")
    total = int(selected.sum())
    fractions = {"validation": split.validation_fraction, "test": split.test_fraction}
    wanted = {
        name: int(np.ceil(fraction * total))
        for name, fraction in fractions.items()
        if name not in listed and fraction > 0
    }
    taken = np.logical_or.reduce([np.zeros_like(selected), *listed.values()])
    chosen = choose_clusters(raw, clusters, list(wanted.values()), taken, split.seed)
    sets = {**listed, **dict(zip(wanted, chosen, strict=True))}
    rest = selected & ~np.logical_or.reduce(list(sets.values()))
    for name, mask in sets.items():
        if not mask.any() or not rest.any():
            raise DataError(
                f"{total:,} distinct sequences in {_cluster_count(clusters):,} clusters are too "
                f"few to hold out {wanted.get(name, int(mask.sum())):,} for {name} by whole "
                f"clusters; give more sequences, change {name}_fraction={fractions[name]} or "
                "raise cluster_min_seq_id"
            )
    return {name: sets[name] for name in fractions if name in sets}


def _leaking(
    mmseqs: MMseqs,
    raw: SequenceStore,
    selected: Mask,
    held_out: Mapping[str, Mask],
    split: SplitSettings,
    search: SearchSettings,
    scratch: Path,
    stages: "_Stages",
    key: str,
    report: Report,
) -> tuple[Mask, list[dict[str, Any]]]:
    """The sequences to drop, bool [N], and what each search found.

    Validation sequences that are homologs of test ones are dropped first, then training sequences
    that are homologs of either, or of `exclude_homologs_of`.
    """
    leaking = np.zeros_like(selected)
    searches: list[dict[str, Any]] = []

    def drop(what: str, queries: Mask, pool: Mask, more: Sequence[Path]) -> None:
        nonlocal leaking
        held_fasta, rest = scratch / f"held_out_of_{what}.fasta", scratch / "pool.fasta"

        def search_once(direction: str, left: Mask) -> NDArray[np.int64]:
            def places() -> NDArray[np.int64]:
                with _writing(scratch):
                    if not held_fasta.exists():
                        others = (tokens for path in more for tokens in _sequences(Path(path)))
                        write_indexed_fasta(held_fasta, raw, queries, others)
                    write_indexed_fasta(rest, raw, left)
                if direction == "from_held_out":
                    return mmseqs.search(held_fasta, rest, search).targets
                return mmseqs.search(rest, held_fasta, search).queries

            report(f"searching {what} for homologs of held-out ones, {direction.replace('_', ' ')}")
            origin = [key, direction, _mask_digest(queries), _mask_digest(left)]
            found = stages.array(f"search_{what}", origin, places)
            report(f"{len(found):,} pairs found")
            return found

        found, made = drop_homologs(pool, search_once, split.search_directions)
        leaking |= found
        searches.extend({"dropped_from": what, **one} for one in made)

    if len(held_out) == 2:
        drop("validation", held_out["test"], held_out["validation"], [])
    everything = np.logical_or.reduce(list(held_out.values())) & ~leaking
    drop("train", everything, selected & ~everything & ~leaking, split.exclude_homologs_of)
    report(f"{int(leaking.sum()):,} leaking sequences dropped, no more found")
    return leaking, searches


def _mask_digest(mask: Mask) -> str:
    return hashlib.sha256(np.packbits(mask).data).hexdigest()


def _sequences(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The sequences of a store or a FASTA file."""
    if path.is_dir():
        yield from SequenceStore(path)
    else:
        yield from (record.tokens for record in read_fasta(path))


def _write_split(
    path: Path,
    kind: str,
    raw: SequenceStore,
    clusters: NDArray[np.int32],
    chosen: Mask,
    provenance: Mapping[str, Any],
) -> SequenceStore:
    with SequenceStoreWriter(path, kind=kind, provenance=provenance) as writer:
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
    leaking: Mask,
    stores: Mapping[str, SequenceStore],
) -> dict[str, Any]:
    """What became of the input's records."""
    account = raw.manifest["provenance"]
    dropped = Counter(account["dropped"])
    for reason, count in (
        (f"shorter than {bounds[0]}", int((raw.lengths < bounds[0]).sum())),
        (f"longer than {bounds[1]}", int((raw.lengths > (bounds[1] or MAX_RESIDUES)).sum())),
    ):
        if count:
            dropped[reason] += count
    counts: dict[str, Any] = {
        "input": account["records"],
        "dropped": dict(dropped),
        "duplicates": account["duplicates"],
        "distinct": int(selected.sum()),
        "clusters": _cluster_count(clusters),
        "leaking_dropped": int(leaking.sum()),
    }
    for kind, store in stores.items():
        counts[f"{kind}_sequences"] = len(store)
        counts[f"{kind}_residues"] = store.residues
        present = np.zeros(len(clusters), dtype=np.bool_)
        present[clusters_of(store)] = True
        counts[f"{kind}_clusters"] = int(present.sum())
    return counts


def require_no_homologs_of(held_out: SequenceStore, prepared_dir: Path) -> None:
    """Refuse prepared data whose training sequences were not searched for homologs of `held_out`.

    Raises:
        DataError: if they were not, or the data cannot be read.
    """
    file = prepared_dir / MANIFEST
    try:
        manifest = json.loads(file.read_text())
        own = [digest for name, digest in manifest["digests"].items() if name != "train"]
        excluded = manifest["settings"]["split"]["exclude_homologs_of"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: cannot be read ({error}); prepare the data") from None
    if held_out.digest not in (*own, *excluded):
        raise DataError(
            f"{prepared_dir}: its training sequences may be homologs of the held-out ones in "
            f"{held_out.path}; prepare it again with "
            f"'data.exclude_homologs_of=[{held_out.path}]'"
        )


def clusters_of(store: SequenceStore) -> NDArray[np.int32]:
    """The homology cluster of every sequence, int32 [N].

    Raises:
        DataError: the store does not know them.
    """
    if store.clusters is None:
        raise DataError(f"{store.path}: has no clusters; prepare the data with d2plm prepare")
    return store.clusters


def _cluster_count(clusters: NDArray[np.int32]) -> int:
    """A cluster is labelled by its first member, which therefore labels itself."""
    return int((clusters == np.arange(len(clusters), dtype=np.int32)).sum())


def _last_of_each(searches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last search of each direction: the verification."""
    return list({(one["dropped_from"], one["direction"]): one for one in searches}.values())


def _input_name(raw: SequenceStore) -> str:
    names = raw.manifest["provenance"].get("input") or [raw.path.name]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class _Stages:
    """Results that took long, kept on disk as soon as they are there, each under its origin."""

    def __init__(self, folder: Path, report: Report) -> None:
        self.folder, self.report = folder, report

    def array(self, name: str, origin: Any, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array `name` that was computed from `origin` (JSON), now or before."""
        path = self.folder / f"{name}-{_key(origin)[:16]}.npy"
        try:
            values = np.load(path, allow_pickle=False)
            self.report(f"reusing {path}")
            return values
        except FileNotFoundError:
            pass
        except (OSError, ValueError, EOFError) as error:
            self.report(f"{path} is damaged ({error}) and made again")
        values = compute()
        partial = path.with_suffix(".partial")
        with _writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        return values

    def keep_only(self, name: str) -> None:
        """Remove what is only of use until the preparation is done."""
        for path in self.folder.iterdir():
            if not path.name.startswith(f"{name}-"):
                path.unlink()


def _key(origin: Any) -> str:
    return hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()


def _prepared(output_dir: Path, key: str, report: Report) -> dict[str, Any] | None:
    """The manifest of what `output_dir` holds already, if it is whole and has this key."""
    if not (output_dir / MANIFEST).is_file():
        return None
    try:
        manifest = _whole_manifest(output_dir)
    except DataError as error:
        report(f"preparing again: {error}")
        return None
    if manifest["key"] != key:
        report(f"preparing {output_dir} again: the proteins, the settings or MMseqs2 changed")
        return None
    return manifest


def _whole_manifest(output_dir: Path) -> dict[str, Any]:
    """The manifest of prepared data, whose stores are those that it names.

    Raises:
        DataError: if they are not.
    """
    path = output_dir / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        for kind, digest in (manifest["key"] and manifest["digests"]).items():
            folder = output_dir / f"{kind}_lmdb"
            if SequenceStore(folder).digest != digest:
                raise DataError(f"{folder}: is not the store that {path} names")
    except (DataError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the prepared data in {output_dir} are damaged ({error})") from error
    return manifest


@contextmanager
def _locked(output_dir: Path, report: Report, *, wait: bool) -> Iterator[None]:
    """Make `output_dir` and keep other preparations out of it; an empty lock file stays behind.

    One that is there already is waited for, or else refused.
    """
    import fcntl  # exists on POSIX only, and `content_digest` is wanted elsewhere, too

    with _writing(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(output_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"another preparation is writing to {output_dir}"
            if not wait:
                raise DataError(f"{busy}; wait for it or choose another folder") from None
            report(f"{busy}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
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
def _scratch_folder(output_dir: Path, temporary_dir: Path | None) -> Iterator[Path]:
    """A folder for temporary files; takes away what an earlier run that was killed left there."""
    scratch = output_dir / ".scratch"
    if temporary_dir is not None:
        scratch = Path(temporary_dir) / f"d2plm-{_key(str(output_dir.resolve()))[:16]}"
    with _writing(scratch):
        shutil.rmtree(scratch, ignore_errors=True)
        # An MMseqs2 whose parent was killed may still be at work in there.
        scratch.mkdir(parents=True, exist_ok=True)
    try:
        yield scratch.resolve()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror}); free space, change its permissions or "
            "choose another output folder"
        ) from None


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - start
