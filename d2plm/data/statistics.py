"""What a sequence store holds: lengths, composition and clusters, as figures, table and picture.

One pass over the store in bounded memory. Lengths are counted and not sorted, so that quartiles are
exact; cluster labels are counted a range at a time, at the price of a pass over them for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import CANONICAL, CANONICAL_START, NON_CANONICAL, RESIDUES
from d2plm.core.errors import DataError
from d2plm.data.store import MAX_RESIDUES, SequenceStore

PICTURES = (".png", ".svg", ".pdf")

_PART = 1 << 20  # values counted at once
_LABELS = 1 << 24  # cluster labels counted at once
_SHOWN = 0.99  # of the sequences are inside the picture's range of lengths
_MOST_BARS = 50
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of Okabe and Ito: colour-blind safe


@dataclass(frozen=True, slots=True)
class ClusterSizes:
    """Homology clusters: how many there are, sequences of the largest, and how many have one."""

    number: int
    largest: int
    singletons: int


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """What a store holds.

    Attributes:
        path, kind, digests, provenance: of the store, as its manifest has them.
        length_counts: int64 [longest + 1], sequences of each length in residues.
        residue_counts: int64 [25], how often each letter of RESIDUES occurs.
        clusters: None if the store does not know them.
        bytes_on_disk: size of its files.
    """

    path: Path
    kind: str
    digests: dict[str, str]
    provenance: dict[str, Any]
    length_counts: NDArray[np.int64]
    residue_counts: NDArray[np.int64]
    clusters: ClusterSizes | None
    bytes_on_disk: int

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return int(self.length_counts.sum())

    @property
    def residues(self) -> int:
        """Residues of all sequences together."""
        return int(self.residue_counts.sum())

    @property
    def composition(self) -> NDArray[np.float64]:
        """Per cent of the residues that are each letter of RESIDUES, float64 [25]."""
        return 100 * self.residue_counts / self.residues

    @property
    def non_canonical(self) -> float:
        """Per cent of the residues that are none of the twenty canonical ones."""
        return float(100 * self.residue_counts[len(CANONICAL) :].sum() / self.residues)

    def length_quantile(self, share: float) -> float:
        """The length that `share` (0 … 1) of the sequences do not exceed, as numpy.quantile."""
        return _quantile(self.length_counts, share)

    def lengths(self) -> dict[str, float]:
        """Extremes, quartiles and mean of the lengths, by name."""
        return {
            "shortest": int(np.flatnonzero(self.length_counts)[0]),
            "lower_quartile": self.length_quantile(0.25),
            "median": self.length_quantile(0.5),
            "mean": self.residues / self.sequences,
            "upper_quartile": self.length_quantile(0.75),
            "longest": len(self.length_counts) - 1,
        }

    def summary(self) -> dict[str, Any]:
        """The figures as JSON content."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "sequences": self.sequences,
            "residues": self.residues,
            "lengths": self.lengths(),
            "residue_counts": dict(zip(RESIDUES, self.residue_counts.tolist(), strict=True)),
            "composition_percent": dict(zip(RESIDUES, self.composition.tolist(), strict=True)),
            "non_canonical_percent": self.non_canonical,
            "clusters": None if self.clusters is None else asdict(self.clusters),
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_per_residue": self.bytes_on_disk / self.residues,
            "digests": self.digests,
            "provenance": self.provenance,
        }


def store_statistics(
    store: SequenceStore, progress: Callable[[int], None] = lambda done: None
) -> StoreStatistics:
    """Count what a store holds.

    Args:
        store: the sequences.
        progress: called with the number of sequences read so far.

    Raises:
        DataError: the store is damaged.
    """
    shortest, longest = int(store.lengths.min()), int(store.lengths.max())
    if shortest < 1 or longest > MAX_RESIDUES:
        raise _damaged(store)
    length_counts = np.zeros(longest + 1, dtype=np.int64)
    for lengths in _parts(store.lengths):
        np.add.at(length_counts, lengths, 1)
    token_counts = np.zeros(256, dtype=np.int64)
    for block in store.blocks():
        for tokens in _parts(block.tokens):
            token_counts += np.bincount(tokens, minlength=256)
        progress(block.first + len(block))
    residue_counts = token_counts[CANONICAL_START:][: len(RESIDUES)]
    if residue_counts.sum() != token_counts.sum():
        raise _damaged(store)
    return StoreStatistics(
        path=store.path,
        kind=store.manifest["kind"],
        digests=store.manifest["digests"],
        provenance=store.manifest["provenance"],
        length_counts=length_counts,
        residue_counts=residue_counts,
        clusters=None if store.clusters is None else cluster_sizes(store.clusters),
        bytes_on_disk=sum(file.stat().st_size for file in store.path.iterdir()),
    )


def cluster_sizes(labels: NDArray[np.integer]) -> ClusterSizes:
    """Count the clusters that labels, integer [N], stand for."""
    number = largest = singletons = 0
    end = int(labels.max()) + 1
    for first in range(int(labels.min()), end, _LABELS):
        sizes = np.zeros(min(_LABELS, end - first), dtype=np.int32)
        for part in _parts(labels):
            inside = part[(part >= first) & (part < first + len(sizes))]
            np.add.at(sizes, inside.astype(np.int64) - first, 1)
        number += int((sizes > 0).sum())
        largest = max(largest, int(sizes.max()))
        singletons += int((sizes == 1).sum())
    return ClusterSizes(number, largest, singletons)


def table(stores: Mapping[str, StoreStatistics]) -> str:
    """The figures of stores, by name, as text: a column for each, then their compositions."""
    columns = [_figures(statistics) for statistics in stores.values()]
    rows = [("", [*stores]), *((label, [c[label] for c in columns]) for label in columns[0])]
    label_width = max(len(label) for label, _ in rows) + 2
    width = max(len(cell) for _, cells in rows for cell in cells) + 2
    lines = [
        *(f"{label:{label_width}}" + "".join(f"{c:>{width}}" for c in cs) for label, cs in rows),
        "",
        "composition, % of the residues",
        *_composition_lines(stores),
    ]
    return "\n".join(line.rstrip() for line in lines)


def plot(stores: Mapping[str, StoreStatistics], file: Path, title: str) -> None:
    """Draw the lengths of stores, by name, one under another, and beside them the compositions.

    Args:
        stores: at least one, at most four.
        file: its ending is one of PICTURES; its folder is made where it is missing.
        title: above the picture.

    Raises:
        DataError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic(
        [[place, "composition"] for place in range(len(stores))],
        figsize=(11.5, 3.6 + 0.8 * len(stores)),
        layout="constrained",
    )
    figure.suptitle(title)
    _plot_lengths([axes[place] for place in range(len(stores))], stores)
    _plot_composition(axes["composition"], stores)
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be written ({error.strerror}); choose a folder that you may write to, "
            "with space left"
        ) from error
    finally:
        pyplot.close(figure)


def _figures(statistics: StoreStatistics) -> dict[str, str]:
    """The cells of a store's column, by the label of their rows."""
    clusters = statistics.clusters
    return {
        "sequences": f"{statistics.sequences:,}",
        "residues": f"{statistics.residues:,}",
        "length in residues": "",
        **{
            f"  {name.replace('_', ' ')}": _number(value)
            for name, value in statistics.lengths().items()
        },
        "clusters": "not known" if clusters is None else f"{clusters.number:,}",
        "  sequences of the largest": "" if clusters is None else f"{clusters.largest:,}",
        "  of a single sequence": "" if clusters is None else f"{clusters.singletons:,}",
        "size on disk": _bytes(statistics.bytes_on_disk),
        "  bytes per residue": f"{statistics.bytes_on_disk / statistics.residues:.2f}",
    }


def _composition_lines(stores: Mapping[str, StoreStatistics]) -> Iterator[str]:
    width = max(map(len, stores))
    for part in (slice(0, 10), slice(10, 20)):
        yield " " * width + "".join(f"{letter:>7}" for letter in RESIDUES[part])
        for name, statistics in stores.items():
            yield f"{name:{width}}" + "".join(f"{p:7.2f}" for p in statistics.composition[part])
    yield " " * width + "".join(f"{column:>10}" for column in (*NON_CANONICAL, "together"))
    for name, statistics in stores.items():
        rare = [*statistics.composition[len(CANONICAL) :], statistics.non_canonical]
        yield f"{name:{width}}" + "".join(f"{p:10.5f}" if p else f"{0:>10}" for p in rare)


def _plot_lengths(axes: Sequence[Any], stores: Mapping[str, StoreStatistics]) -> None:
    together = np.zeros(max(len(s.length_counts) for s in stores.values()), dtype=np.int64)
    for statistics in stores.values():
        together[: len(statistics.length_counts)] += statistics.length_counts
    edges = _length_bins(together)
    shares = [_binned(statistics.length_counts, edges) for statistics in stores.values()]
    highest = 1.08 * max(share.max() for share in shares)
    for (name, statistics), share, colour, one in zip(
        stores.items(), shares, _COLOURS, axes, strict=False
    ):
        median = statistics.length_quantile(0.5)
        one.stairs(share, edges, fill=True, color=colour)
        one.axvline(median, color="black", linewidth=1, linestyle=":")
        label = f"{name}: {statistics.sequences:,} sequences, median length {_number(median)}"
        one.set_title(label, loc="right", fontsize="medium")
        one.set(xlim=(edges[0], edges[-1]), ylim=(0, highest), ylabel="% of sequences")
        one.xaxis.set_major_formatter("{x:,.0f}")
        one.tick_params(labelbottom=one is axes[-1])
    axes[0].set_title("Lengths", loc="left")
    beyond = 100 * together[edges[-1] :].sum() / together.sum()
    note = f" ({beyond:.1f} % are longer, up to {len(together) - 1:,})" if beyond else ""
    axes[-1].set_xlabel(f"length in residues{note}")


def _plot_composition(axes: Any, stores: Mapping[str, StoreStatistics]) -> None:
    places = np.arange(len(CANONICAL) + 1, dtype=np.float64)
    places[-1] += 0.8  # "other" is wider than a letter
    width = 0.8 / len(stores)
    for number, (statistics, colour) in enumerate(zip(stores.values(), _COLOURS, strict=False)):
        shares = [*statistics.composition[: len(CANONICAL)], statistics.non_canonical]
        axes.bar(places - 0.4 + (number + 0.5) * width, shares, width, color=colour)
    axes.set_xticks(places, [*CANONICAL, "other"])
    axes.tick_params(axis="x", length=0)
    axes.set(
        xlabel=f"residue (other: {', '.join(NON_CANONICAL)})",
        ylabel="% of residues",
    )
    axes.set_title("Composition", loc="left")


def _length_bins(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Edges of bins of one round width, which hold nearly all of the sequences."""
    low, high = int(np.flatnonzero(counts)[0]), int(_quantile(counts, _SHOWN))
    round_widths = (digit * 10**power for power in range(7) for digit in (1, 2, 5))
    width = next(w for w in round_widths if (high - low) // w < _MOST_BARS)
    return np.arange(low // width * width, high + width + 1, width)


def _binned(counts: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per cent of the values 0, 1, … that occur `counts` times in each bin."""
    ends = np.append(0, np.cumsum(counts))[np.minimum(edges, len(counts))]
    return 100 * np.diff(ends) / counts.sum()


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """numpy.quantile of values 0, 1, … that occur `counts` times."""
    ends = np.cumsum(counts)
    position = share * (int(ends[-1]) - 1)
    below, above = np.searchsorted(ends, [np.floor(position), np.ceil(position)], side="right")
    return float(below + (above - below) * (position % 1))


def _parts(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return (values[first : first + _PART] for first in range(0, len(values), _PART))


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _damaged(store: SequenceStore) -> DataError:
    return DataError(
        f"{store.path}: holds what is no sequence of residues; see d2plm data verify, and prepare "
        "the data again"
    )
