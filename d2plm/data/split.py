"""Choice of the held-out sequences: listed ones, or whole clusters.

Clusters are taken in the order of a seeded hash of their content, so the choice depends only on the
sequences and the seed. `leakage` finds the other sequences that are too similar to be trained on.
"""

import hashlib
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, SplitError
from d2plm.data.ingest import source_digest
from d2plm.data.records import ALIAS_SEPARATOR, PIECE_SEPARATOR, identifiers, readable
from d2plm.data.store import SequenceStore
from d2plm.settings.data import SplitSettings

_PART = 1 << 16

Mask = NDArray[np.bool_]


def describe(settings: SplitSettings) -> dict[str, Any]:
    """The settings as JSON, with files represented by the digests of their content."""
    described = asdict(settings)
    for key in ("validation_ids", "test_ids"):
        if described[key] is not None:
            described[key] = source_digest(Path(described[key]))
    described["exclude_homologs_of"] = [
        SequenceStore(Path(path)).digest if Path(path).is_dir() else source_digest(Path(path))
        for path in settings.exclude_homologs_of
    ]
    return described


def hold_out(
    raw: SequenceStore,
    selected: Mask,
    clusters: NDArray[np.int32],
    split: SplitSettings,
    threshold: str,
    records: NDArray[np.int32] | None = None,
) -> dict[str, Mask]:
    """The requested held-out sets, by name: bool [N] each, true for its sequences.

    Raises `SplitError` if there are too few clusters.

    Args:
        threshold: name of the setting to raise for more clusters.
        records: int32 [N], from `records_of`; None if no record was cut.
    """
    listed = {
        name: find_ids(raw, Path(ids), selected)
        for name, ids in (("validation", split.validation_ids), ("test", split.test_ids))
        if ids is not None
    }
    if records is not None:  # records that share a piece with a listed one are held out, too
        for name, own in listed.items():
            listed[name] = np.isin(records, records[own]) & selected
    if len(listed) == 2 and (both := np.logical_and(*listed.values())).any():
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
    chosen = choose_clusters(raw, clusters, list(wanted.values()), taken, split.split_seed)
    sets = {**listed, **dict(zip(wanted, chosen, strict=True))}
    rest = selected & ~np.logical_or.reduce(list(sets.values()))
    for name, mask in sets.items():
        if not mask.any() or not rest.any():
            if raw.manifest["provenance"].get("records") == 1:
                remedy = "give more records"
                if raw.vocabulary.is_text:
                    remedy += (
                        ", or set format=paragraphs or lines to read a text as several records"
                    )
                raise SplitError(
                    f"{total:,} distinct sequences are all pieces of one record, which is never "
                    f"split; {remedy}"
                )
            raise SplitError(
                f"{total:,} distinct sequences in {cluster_count(clusters):,} clusters are too "
                f"few to hold out {wanted.get(name, int(mask.sum())):,} for {name} by whole "
                f"clusters; give more sequences, change {name}_fraction={fractions[name]} or "
                f"raise {threshold}"
            )
    return {name: sets[name] for name in fractions if name in sets}


def choose_clusters(
    store: SequenceStore, clusters: NDArray[np.int32], wanted: list[int], taken: Mask, seed: int
) -> list[Mask]:
    """Choose whole clusters for several held-out sets, one after another; bool [N] for each set.

    Clusters are taken in the order of a seeded hash of their first member until a set is full; a
    cluster larger than the number still needed is skipped, so a set is never too large.

    Args:
        clusters: int32 [N], the first member of each sequence's cluster; -1 for a sequence that is
            left out.
        wanted: number of sequences in each set.
        taken: bool [N], sequences already in use, whose clusters are excluded.
    """
    sizes = np.zeros(len(clusters), dtype=np.int32)
    used = []
    for part in _parts(len(clusters)):
        labels, kept = clusters[part], clusters[part] >= 0
        np.add.at(sizes, labels[kept], 1)
        used.append(np.unique(labels[kept & taken[part]]))
    sizes[np.concatenate(used)] = 0
    share = 4 * sum(wanted) / max(int((sizes > 0).sum()), 1)
    while True:
        # Usually few of many clusters are needed: only the first ones are examined.
        order = _first_in_line(store, sizes, seed, min(share, 1.0))
        sets = _fill(order.tolist(), sizes[order].tolist(), wanted)
        if share >= 1 or all(left == 0 for _, left in sets):
            break
        share *= 4
    masks = []
    for chosen, _ in sets:
        is_chosen = np.zeros(len(clusters), dtype=np.bool_)
        is_chosen[chosen] = True
        mask = np.empty(len(clusters), dtype=np.bool_)
        for part in _parts(len(clusters)):
            mask[part] = is_chosen[clusters[part]] & (clusters[part] >= 0)
        masks.append(mask)
    return masks


def find_ids(store: SequenceStore, file: Path, among: Mask) -> Mask:
    """bool [N]: the sequences that a list of identifiers names, one per line.

    An identifier is the first word of a FASTA header, or one that `identifiers` finds in it
    (`P12345` in `sp|P12345|NAME_SPECIES`). A duplicate's identifier names the sequence that it
    equals, a cut record's all its pieces, and an identifier of several records all of them. Raises
    `DataError` if the list cannot be read or is empty, or one names no sequence `among` the
    store's.
    """
    try:
        wanted = set(file.read_bytes().split())
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check the path") from error
    if not wanted:
        raise DataError(f"{file}: is empty; give one identifier a line")
    found: set[bytes] = set()
    chosen = np.zeros(len(store), dtype=np.bool_)
    for index, name in enumerate(chain.from_iterable(store.name_blocks())):
        hit = wanted.intersection(_identifiers(name))
        if hit and among[index]:
            chosen[index] = True
            found |= hit
    missing = sorted(wanted - found)
    if missing:
        shown = ", ".join(name.decode("utf-8", "replace") for name in missing[:3])
        raise DataError(
            f"{file}: {len(missing):,} of {len(wanted):,} identifiers name no sequence that was "
            f"kept ({shown}{', …' if len(missing) > 3 else ''}); take them off the list, or check "
            "the first words of the headers and the length bounds"
        )
    return chosen


def cluster_count(clusters: NDArray[np.int32]) -> int:
    """Number of clusters: the first member of a cluster is its label and so labels itself."""
    return int((clusters == np.arange(len(clusters), dtype=np.int32)).sum())


def _parts(count: int) -> list[slice]:
    """Slices of 0 … count: indexing by a whole array would copy it in a wider type."""
    return [slice(first, first + _PART) for first in range(0, count, _PART)]


def _first_in_line(
    store: SequenceStore, sizes: NDArray[np.int32], seed: int, share: float
) -> NDArray[np.int64]:
    """The first `share` (0 … 1) of the clusters (sizes > 0) in the order of their seeded hash."""
    last = int(share * (2**64 - 1))
    ranked = []
    for block in store.blocks():
        bounds = block.bounds
        for i in np.flatnonzero(sizes[block.first : block.first + len(block)]).tolist():
            content = hashlib.sha256(block.tokens[bounds[i] : bounds[i + 1]].data).digest()[:16]
            rank = hashlib.sha256(b"%d:%b" % (seed, content)).digest()[:8]
            if int.from_bytes(rank, "big") <= last:
                ranked.append((rank, block.first + i))
    return np.array([index for _, index in sorted(ranked)], dtype=np.int64)


def _fill(order: list[int], sizes: list[int], wanted: list[int]) -> list[tuple[list[int], int]]:
    """Clusters chosen for each set, and the number of sequences that it still lacks."""
    waiting = list(zip(order, sizes, strict=True))
    sets = []
    for count in wanted:
        chosen, left, passed = [], count, []
        for cluster, size in waiting:
            if size <= left:
                chosen.append(cluster)
                left -= size
            else:
                passed.append((cluster, size))
        waiting = passed
        sets.append((chosen, left))
    return sets


def _identifiers(name: bytes) -> set[bytes]:
    aliases = [alias.partition(PIECE_SEPARATOR)[0] for alias in name.split(ALIAS_SEPARATOR)]
    aliases += readable(name).split(ALIAS_SEPARATOR)  # names of pieces as shown to users
    return {one for alias in aliases for one in identifiers(alias)}
