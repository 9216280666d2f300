"""PackingSampler: plans an epoch's batches from the sequence lengths alone.

Sequences come in a seeded permutation and are laid into bins of a fixed token budget; when the next
one does not fit, the largest that fits is taken from a look-ahead window instead, which fills bins
to better than 99 % at the price of a slight reordering. The state is two integers, (epoch,
position): resuming reads no data and does not depend on workers or ranks.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2plm.errors import DataError, require_number

LOOK_AHEAD = 1024  # sequences in the window from which a bin is filled
MIN_TOKENS_PER_SEGMENT = 16  # bounds the number of segments, which pins the shape of cu_seqlens


@dataclass(frozen=True)
class Bin:
    """The sequences of one packed batch.

    Attributes:
        sequences: int64 [S], indices into the store.
        draw_ids: int64 [S], indices within the global batch.
        global_sequences: number of sequences in the global batch.
        epoch: keys the crops.
    """

    sequences: NDArray[np.int64]
    draw_ids: NDArray[np.int64]
    global_sequences: int
    epoch: int


class PackingSampler:
    """Bins of every global batch of every epoch.

    Args:
        lengths: integer [N], residues of each sequence.
        token_budget: tokens in a bin (one micro-batch of one rank).
        bins_per_batch: bins of a global batch, over all ranks and micro-batches.
        max_length: longest segment in tokens, `<cls>` and `<eos>` included; longer sequences are
            cropped by the loader.
        seed: of the permutations.

    Raises:
        ConfigError: where a single sequence could exceed the budget.
        DataError: where there are no sequences.
    """

    def __init__(
        self,
        lengths: NDArray[np.integer],
        *,
        token_budget: int,
        bins_per_batch: int = 1,
        max_length: int = 1024,
        seed: int = 0,
    ) -> None:
        require_number("data.max_length", max_length, integer=True, low=3)
        require_number("data.token_budget", token_budget, integer=True, low=max_length)
        require_number("trainer.gradient_accumulation_steps", bins_per_batch, integer=True, low=1)
        if len(lengths) == 0:
            raise DataError("the training store holds no sequences: prepare it from a larger file")
        self.segment_tokens = np.minimum(np.asarray(lengths, dtype=np.int64) + 2, max_length)
        self.token_budget = token_budget
        self.bins_per_batch = bins_per_batch
        self.max_segments = max(token_budget // MIN_TOKENS_PER_SEGMENT, 1) + 1
        self.seed = seed
        self._planned: tuple[int, list[list[Bin]]] | None = None

    def epoch(self, epoch: int) -> list[list[Bin]]:
        """The global batches of an epoch: every sequence exactly once, `bins_per_batch` bins each.

        The last batch may have empty bins, so that every rank always gets the same number.
        """
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._plan(epoch))
        return self._planned[1]

    def _plan(self, epoch: int) -> list[list[Bin]]:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.segment_tokens))
        packed = self._fill(order)
        batches = []
        for first in range(0, len(packed), self.bins_per_batch):
            bins = packed[first : first + self.bins_per_batch]
            bins += [[] for _ in range(self.bins_per_batch - len(bins))]
            bounds = np.cumsum([0] + [len(b) for b in bins])
            batches.append(
                [
                    Bin(
                        sequences=np.array(b, dtype=np.int64),
                        draw_ids=np.arange(start, start + len(b)),
                        global_sequences=int(bounds[-1]),
                        epoch=epoch,
                    )
                    for b, start in zip(bins, bounds, strict=False)
                ]
            )
        return batches

    def _fill(self, order: NDArray[np.int64]) -> list[list[int]]:
        """Lay the sequences of `order` into bins, longest first (see `packed_attention`)."""
        tokens = self.segment_tokens
        window: list[tuple[int, int, int]] = []  # (tokens, place in the order, sequence), sorted
        waiting = iter(enumerate(order.tolist()))
        oldest_first: dict[int, tuple[int, int, int]] = {}

        def top_up() -> None:
            while len(window) < LOOK_AHEAD:
                following = next(waiting, None)
                if following is None:
                    return
                place, sequence = following
                entry = (int(tokens[sequence]), place, sequence)
                insort(window, entry)
                oldest_first[place] = entry

        bins: list[list[int]] = []
        top_up()
        while window:
            room = self.token_budget
            chosen: list[tuple[int, int, int]] = []
            while window and len(chosen) < self.max_segments - 1:
                entry = next(iter(oldest_first.values()))
                if entry[0] > room:
                    fitting = bisect_right(window, (room, len(order), 0))
                    if fitting == 0:
                        break
                    entry = window[fitting - 1]
                del window[bisect_left(window, entry)]
                del oldest_first[entry[1]]
                room -= entry[0]
                chosen.append(entry)
                top_up()
            bins.append([sequence for _, _, sequence in sorted(chosen, reverse=True)])
        return bins
