"""Finding the sequences that are too similar to held-out ones to be trained on.

Clustering alone leaks. Therefore the held-out sequences are searched against the others and hits
are dropped, repeatedly until nothing is found. MMseqs2 does not find the same pairs in both
directions, so both are searched unless that takes too long; for text, one search finds all
overlaps.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError, SplitError
from d2plm.core.number_text import counted
from d2plm.data.cache import ArrayCache
from d2plm.data.similarity import Finder, SimilaritySearch
from d2plm.data.split import Mask
from d2plm.data.store import SequenceStore

SEARCH_ROUNDS = 20


def find_leaking(
    store: SequenceStore,
    selected: Mask,
    held_out: Mapping[str, Mask],
    exclude: Sequence[str | Path],
    *,
    similarity: SimilaritySearch,
    finder: Finder,
    cache: ArrayCache,
    key: str,
) -> tuple[Mask, list[dict[str, Any]]]:
    """The sequences of a store to drop, bool [N], and the result of each search.

    Validation sequences similar to test sequences are dropped first, then training sequences
    similar to either or to those of the stores and files `exclude`.

    Args:
        selected, held_out: bool [N].
        cache: keeps the pairs of each search, under `key` and the sequences searched; its report
            receives one line before and after each search.
    """
    leaking = np.zeros_like(selected)
    searches: list[dict[str, Any]] = []

    def drop(what: str, queries: Mask, pool: Mask, more: Sequence[str | Path]) -> None:
        def search(direction: str, left: Mask) -> NDArray[np.int64]:
            where = direction.replace("_", " ")
            cache.report(f"searching {what} for {similarity.hits} held-out ones, {where}")
            found = cache.array(
                f"search_{what}",
                [key, direction, _digest(queries), _digest(left)],
                lambda: finder.pairs(store, direction, queries, left, more),
            )
            cache.report(f"{counted(len(found), 'pair')} found")
            return found

        found, made = drop_homologs(pool, search, similarity.directions, similarity.thresholds[1])
        np.logical_or(leaking, found, out=leaking)
        searches.extend({"dropped_from": what, **one} for one in made)

    if len(held_out) == 2:
        drop("validation", held_out["test"], held_out["validation"], [])
    queries = np.logical_or.reduce(list(held_out.values())) & ~leaking
    drop("train", queries, selected & ~queries & ~leaking, exclude)
    partial = sum(one["partial"] for one in searches)
    fragments = f" ({partial:,} contain the other sequence or lie in it)" if partial else ""
    dropped = counted(int(leaking.sum()), "leaking sequence")
    cache.report(f"{dropped} dropped{fragments}, no more found")
    return leaking, searches


def drop_homologs(
    pool: Mask,
    search: Callable[[str, Mask], NDArray[np.int64]],
    directions: str = "both",
    threshold: str = "search.min_seq_id",
) -> tuple[Mask, list[dict[str, Any]]]:
    """Find the sequences of a pool that hit a held-out one, searching until nothing is found.

    The cost of a search is proportional to its queries. From the held-out side they are few, but a
    query reports a bounded number of hits, so the search is repeated on the remaining pool; from
    the pool's side no hit can be crowded out. The directions alternate. The process ends when each
    has been searched on the remaining pool without a hit: these last searches are the verification.
    Raises `DataError` if nothing is left of the pool, or the searches do not converge.

    Args:
        pool: bool [N], the sequences that may be dropped.
        search: (direction, remaining pool, bool [N]) → int64 [pairs, 2], for each pair the index of
            its sequence in the remaining pool, and whether the alignment covers enough of both
            sequences, 0 or 1.
        directions: `both`, `from_held_out` or `from_training`.
        threshold: name of the setting to raise if everything is a hit.

    Returns:
        bool [N], true for a sequence to drop; and for each search its `direction` and the numbers
        of `pairs`, of `sequences` in them, and of `partial` sequences, for which no alignment
        covers both.
    """
    wanted = ("from_held_out", "from_training") if directions == "both" else (directions,)
    left, searches = pool.copy(), list[dict[str, Any]]()
    silent: list[str] = []  # directions that found nothing since something was dropped
    turns = cycle(wanted)
    while len(silent) < len(wanted):
        direction = next(one for one in turns if one not in silent)
        if not left.any():
            raise SplitError(
                "every remaining sequence is similar to a held-out one; give more sequences, or "
                f"raise {threshold}"
            )
        if len(searches) == SEARCH_ROUNDS:
            raise DataError(
                f"MMseqs2 still finds homologs of held-out sequences after {SEARCH_ROUNDS} "
                f"searches ({[made['pairs'] for made in searches]} pairs): a held-out protein "
                "has more homologs than one search considers; raise search.max_seqs"
            )
        places, of_both = search(direction, left).T
        found = np.unique(places)
        partial = np.setdiff1d(found, places[of_both == 1])
        counts = {"pairs": len(places), "sequences": len(found), "partial": len(partial)}
        searches.append({"direction": direction, **counts})
        if len(found):
            left[np.flatnonzero(left)[found]] = False
            silent = []
        else:
            silent.append(direction)
    return pool & ~left, searches


def _digest(mask: Mask) -> str:
    return hashlib.sha256(np.packbits(mask).data).hexdigest()
