"""The sequences that an epoch draws, in order: each once, one of each cluster, or a mixture.

A draw depends only on (seed, epoch, place). If a collection has more members than draws in an
epoch, the next epoch continues after the last one drawn: no member is drawn twice before all have
been drawn once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import ConfigError, DataError, require_number


@dataclass(frozen=True)
class Part:
    """A collection of sequences that an epoch draws from.

    Attributes:
        clusters: integer [sequences]; if given, a draw selects a cluster, then a random member of
            it, independently each time.
        weight: its fraction of the draws, relative to the other parts'; None draws each member (or
            cluster) once per epoch. Set for all parts or for none.
    """

    sequences: int
    clusters: NDArray[np.int32] | None = None
    weight: float | None = None


class Draws:
    """The sequences of each epoch, with consecutive indices over all parts.

    Raises:
        ConfigError: weights are set for some parts only, are not positive, or give a part less than
            one draw per epoch.
        DataError: a part is empty.
    """

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        weights = [part.weight for part in parts]
        if any(weight is None for weight in weights) != all(weight is None for weight in weights):
            raise ConfigError("weight: must be given for all collections, or for none")
        for weight in weights:
            if weight is not None:
                require_number("weight", weight, low=0, high=np.inf, low_open=True, high_open=True)
        if not all(part.sequences for part in parts):
            raise DataError("the training store holds no sequences: prepare it from a larger file")
        self.seed = seed
        self._members = [_Members(part) for part in parts]
        self._firsts = np.cumsum([0, *(part.sequences for part in parts)])
        self.counts = [members.count for members in self._members]
        total = sum(self.counts)
        if weights[0] is not None:
            shares = np.array(weights, dtype=np.float64)
            edges = np.rint(np.cumsum([0.0, *(shares / shares.sum() * total)])).astype(int)
            self.counts = np.diff(edges).tolist()
            if not all(self.counts):
                raise ConfigError(
                    f"is less than one of the {total:,} draws of an epoch; raise it, or leave that "
                    "collection out",
                    {"weight": weights[self.counts.index(0)]},
                )

    def epoch(self, epoch: int) -> NDArray[np.integer]:
        """integer [D]: the sequences of an epoch in the order of the draws."""
        drawn = [
            members.draw(epoch * count, count, self.seed, part)
            for part, (members, count) in enumerate(zip(self._members, self.counts, strict=True))
        ]
        if len(drawn) == 1:
            return drawn[0]
        together = np.concatenate(
            [first + numbers for first, numbers in zip(self._firsts, drawn, strict=False)]
        )
        np.random.default_rng([self.seed, epoch, len(drawn)]).shuffle(together)
        return together


class _Members:
    """The members, or clusters, of a part, drawn in passes over all of them."""

    def __init__(self, part: Part) -> None:
        self.by_cluster: NDArray[np.int64] | None = None
        self.count = part.sequences
        if part.clusters is not None:
            self.by_cluster = np.argsort(part.clusters, kind="stable")
            labels = part.clusters[self.by_cluster]
            self.first = np.flatnonzero(np.append(True, labels[1:] != labels[:-1]))
            self.sizes = np.diff(self.first, append=len(labels))
            self.count = len(self.first)

    def draw(self, start: int, count: int, seed: int, part: int) -> NDArray[np.integer]:
        """The members at `start` … `start + count` of the endless sequence of passes."""
        pieces = []
        while count:
            number, place = divmod(start, self.count)
            taken = min(count, self.count - place)
            pieces.append(self._pass(number, seed, part)[place : place + taken])
            start, count = start + taken, count - taken
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pass(self, number: int, seed: int, part: int) -> NDArray[np.integer]:
        """Every member once, or one of every cluster, shuffled."""
        dtype = np.int32 if self.count < 2**31 else np.int64
        order: NDArray[np.integer] = np.arange(self.count, dtype=dtype)
        random = np.random.default_rng([seed, number] + [part] * (part > 0))
        random.shuffle(order)
        if self.by_cluster is None:
            return order
        places = self.first + random.integers(self.sizes)
        return self.by_cluster[places[order]]
