"""Which sequences are held out, and which others are too similar to them to be trained on.

Whole homology clusters are held out, in the order of a seeded hash of their content, so the choice
depends on the sequences and the seed alone. Clustering alone leaks: the held-out sequences are then
searched against the others and what is found is dropped, again and again until nothing is found.
MMseqs2 does not find the same pairs in both directions, so both are searched unless time forbids.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import decode
from d2plm.core.errors import DataError, require_choice, require_number
from d2plm.data.ingest import source_digest
from d2plm.data.records import ALIAS_SEPARATOR
from d2plm.data.store import SequenceStore

SEARCH_DIRECTIONS = ("both", "from_held_out", "from_training")
SEARCH_ROUNDS = 20

_PART = 1 << 16

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """What is held out, and how its homologs are kept out of training.

    Attributes:
        validation_fraction, test_fraction: share of the distinct sequences to hold out, rounded up
            to a whole one; where whole clusters do not add up to it, fewer are held out.
        validation_ids, test_ids: files of identifiers, one a line, to hold out instead of a share.
        exclude_homologs_of: stores or FASTA files whose homologs are dropped from training, too.
        search_directions: one of SEARCH_DIRECTIONS.
        seed: chooses the clusters that are held out.

    Raises:
        ConfigError: a setting is impossible; the message names its key.
    """

    validation_fraction: float = 0.005
    test_fraction: float = 0.0
    validation_ids: Path | None = None
    test_ids: Path | None = None
    exclude_homologs_of: tuple[Path, ...] = ()
    search_directions: str = "both"
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = {"low": 0, "high": 1, "high_open": True}
        validation_wanted = self.validation_ids is None
        require_number(
            "data.validation_fraction",
            self.validation_fraction,
            low_open=validation_wanted,
            **bounds,  # type: ignore[arg-type]  # numbers and flags by name
        )
        require_number("data.test_fraction", self.test_fraction, **bounds)  # type: ignore[arg-type]  # likewise
        require_choice("data.search_directions", self.search_directions, SEARCH_DIRECTIONS)
        require_number("data.split_seed", self.seed, integer=True)

    def describe(self) -> dict[str, Any]:
        """The settings as JSON, files by the digests of their content."""
        settings = asdict(self)
        for key in ("validation_ids", "test_ids"):
            if settings[key] is not None:
                settings[key] = source_digest(settings[key])
        settings["exclude_homologs_of"] = [
            SequenceStore(Path(path)).digest if Path(path).is_dir() else source_digest(path)
            for path in self.exclude_homologs_of
        ]
        return settings


def choose_clusters(
    store: SequenceStore,
    clusters: NDArray[np.int32],
    wanted: list[int],
    taken: Mask,
    seed: int,
) -> list[Mask]:
    """Choose whole clusters for several held-out sets, one after another.

    Clusters are taken in the order of a seeded hash of their first member until a set is full; one
    that is larger than what is still wanted is passed over, so a set is never too large.

    Args:
        store: the sequences.
        clusters: int32 [N], the first member of each sequence's cluster; -1 where the sequence is
            left out of everything.
        wanted: sequences of each set.
        taken: bool [N], sequences in use already, whose clusters are not to be chosen.
        seed: of the order.

    Returns:
        For each set bool [N], true for its sequences.
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
        # Few clusters are wanted of many: only those that are first in line are looked at.
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
    """The sequences that a list of identifiers names, one a line: bool [N].

    An identifier is the first word of a FASTA header, or the accession in one of UniProt's form
    (`P12345` names `sp|P12345|NAME_SPECIES`). A duplicate's names the sequence that it equals.

    Raises:
        DataError: the list cannot be read or is empty, or names a sequence that is not `among` the
            store's.
    """
    try:
        wanted = set(file.read_bytes().split())
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); check the path") from None
    if not wanted:
        raise DataError(f"{file}: is empty; give one identifier a line")
    found: set[bytes] = set()
    chosen = np.zeros(len(store), dtype=np.bool_)
    index = 0
    for names in store.name_blocks():
        for name in names:
            hit = wanted.intersection(_identifiers(name))
            if hit and among[index]:
                chosen[index] = True
                found |= hit
            index += 1
    missing = sorted(wanted - found)
    if missing:
        shown = ", ".join(name.decode("utf-8", "replace") for name in missing[:3])
        raise DataError(
            f"{file}: {len(missing):,} of {len(wanted):,} identifiers name no sequence that was "
            f"kept ({shown}{', …' if len(missing) > 3 else ''}); take them off the list, or check "
            "the first words of the headers and the length bounds"
        )
    return chosen


def drop_homologs(
    pool: Mask, search: Callable[[str, Mask], NDArray[np.int64]], directions: str = "both"
) -> tuple[Mask, list[dict[str, object]]]:
    """Find the sequences of a pool that hit a held-out one, searching until nothing is found.

    The cost of a search goes with its queries. From the held-out side they are few, but a query
    reports a bounded number of hits, so the search is repeated on what is left; from the pool's
    side no hit can be crowded out. The end is reached when every wanted direction has been searched
    on what is left and found nothing: these last searches are the verification.

    Args:
        pool: bool [N], the sequences that may be dropped.
        search: (direction, those of the pool that are left, bool [N]) → for each pair found, the
            place of its sequence among those that are left, integer [pairs].
        directions: one of SEARCH_DIRECTIONS.

    Returns:
        bool [N], true for a sequence to drop; and of each search its direction and pairs found.

    Raises:
        DataError: nothing is left of the pool, or there is no end of pairs.
    """
    wanted = SEARCH_DIRECTIONS[1:] if directions == "both" else (directions,)
    left, searches = pool.copy(), list[dict[str, object]]()
    silent: list[str] = []  # directions that found nothing since something was dropped
    while len(silent) < len(wanted):
        direction = next(one for one in wanted if one not in silent)
        if not left.any():
            raise DataError(
                "every sequence that might be kept is a homolog of a held-out one; give more "
                "sequences or raise search_min_seq_id"
            )
        if len(searches) == SEARCH_ROUNDS:
            raise DataError(
                f"MMseqs2 still finds homologs of held-out sequences after {SEARCH_ROUNDS} "
                f"searches ({[found['pairs'] for found in searches]} pairs): a held-out protein "
                "has more homologs than one search considers; raise search_max_seqs"
            )
        places = search(direction, left)
        searches.append({"direction": direction, "pairs": len(places)})
        if len(places):
            left[np.flatnonzero(left)[places]] = False
            silent = []
        else:
            silent.append(direction)
    return pool & ~left, searches


def write_indexed_fasta(
    path: Path, store: SequenceStore, chosen: Mask, more: Iterable[NDArray[np.uint8]] = ()
) -> int:
    """Write the chosen sequences (bool [N]) and then `more`, under the names 0, 1, …

    Returns the number of sequences.
    """
    count = 0
    with open(path, "wb") as file:
        for block in store.blocks():
            kept = np.flatnonzero(chosen[block.first : block.first + len(block)]).tolist()
            if not kept:
                continue
            letters, bounds = decode(block.tokens), block.bounds.tolist()
            file.write(
                "".join(
                    f">{number}\n{letters[bounds[i] : bounds[i + 1]]}\n"
                    for number, i in enumerate(kept, count)
                ).encode()
            )
            count += len(kept)
        for tokens in more:
            file.write(f">{count}\n{decode(tokens)}\n".encode())
            count += 1
    return count


def _parts(count: int) -> list[slice]:
    """Slices of 0 … count, as indexing by a whole array would copy it in a wider type."""
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
    """Clusters chosen for each set, and how many sequences it still lacks."""
    waiting = list(zip(order, sizes, strict=True))
    sets = []
    for count in wanted:
        chosen, left, passed = [], count, []
        for place, (cluster, size) in enumerate(waiting):
            if left <= 0:
                passed += waiting[place:]
                break
            if size <= left:
                chosen.append(cluster)
                left -= size
            else:
                passed.append((cluster, size))
        waiting = passed
        sets.append((chosen, left))
    return sets


def _identifiers(name: bytes) -> list[bytes]:
    aliases = name.split(ALIAS_SEPARATOR)
    return aliases + [alias.split(b"|")[1] for alias in aliases if alias.count(b"|") == 2]
