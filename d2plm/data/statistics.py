"""Statistics of a sequence store: lengths, composition, clusters; as table and picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from d2plm.core.alphabet import CANONICAL, CANONICAL_START, NON_CANONICAL, RESIDUES
from d2plm.core.errors import DataError
from d2plm.core.palette import SERIES, new_figure, save_figure
from d2plm.data.store import MAX_RESIDUES, SequenceStore

PICTURES = (".png", ".svg", ".pdf")

_PART = 1 << 20  # residues counted at once
_SHOWN = 0.99  # of the sequences are inside the picture's range of lengths
_MOST_BARS = 50


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of a store.

    Attributes:
        residue_counts: int64 [25], how often each letter of RESIDUES occurs.
        clusters: the `number` of homology clusters, sequences of the `largest`, and how many are
            `singletons`; None if the store does not know them.
    """

    store: SequenceStore
    residue_counts: NDArray[np.int64]
    clusters: dict[str, int] | None
    bytes_on_disk: int

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Residues of each sequence, int32 [N]."""
        return self.store.lengths

    @property
    def composition(self) -> NDArray[np.float64]:
        """Per cent of the residues that are each letter of RESIDUES, float64 [25]."""
        return 100 * self.residue_counts / self.store.residues

    @property
    def non_canonical(self) -> float:
        """Per cent of the residues that are none of the twenty canonical ones."""
        return float(100 * self.residue_counts[len(CANONICAL) :].sum() / self.store.residues)

    def length_summary(self) -> dict[str, float]:
        """Extremes, quartiles and mean of the lengths, by name."""
        lower, median, upper = np.quantile(self.lengths, [0.25, 0.5, 0.75]).tolist()
        return {
            "shortest": int(self.lengths.min()),
            "lower_quartile": lower,
            "median": median,
            "mean": self.store.residues / len(self.lengths),
            "upper_quartile": upper,
            "longest": int(self.lengths.max()),
        }

    def summary(self) -> dict[str, Any]:
        """The figures as JSON content."""
        return {
            "path": str(self.store.path),
            "kind": self.store.manifest["kind"],
            "sequences": len(self.lengths),
            "residues": self.store.residues,
            "lengths": self.length_summary(),
            "residue_counts": dict(zip(RESIDUES, self.residue_counts.tolist(), strict=True)),
            "composition_percent": dict(zip(RESIDUES, self.composition.tolist(), strict=True)),
            "non_canonical_percent": self.non_canonical,
            "clusters": self.clusters,
            "bytes_on_disk": self.bytes_on_disk,
            "bytes_per_residue": self.bytes_on_disk / self.store.residues,
            "digests": self.store.manifest["digests"],
            "provenance": self.store.manifest["provenance"],
        }


def store_statistics(
    store: SequenceStore, progress: Callable[[int], None] = lambda done: None
) -> StoreStatistics:
    """Statistics of a store, in one pass over it.

    Args:
        progress: called with the number of sequences read so far.

    Raises:
        DataError: the store is damaged.
    """
    token_counts = np.zeros(256, dtype=np.int64)
    for block in store.blocks():
        for first in range(0, len(block.tokens), _PART):
            token_counts += np.bincount(block.tokens[first : first + _PART], minlength=256)
        progress(block.first + len(block))
    residue_counts = token_counts[CANONICAL_START:][: len(RESIDUES)]
    in_range = store.lengths.min() >= 1 and store.lengths.max() <= MAX_RESIDUES
    if not in_range or residue_counts.sum() != token_counts.sum():
        raise DataError(
            f"{store.path}: holds content that is no sequence of residues; see d2plm data verify, "
            "and prepare the data again"
        )
    clusters = None
    if store.clusters is not None:
        sizes = np.unique(store.clusters, return_counts=True)[1]
        clusters = {
            "number": len(sizes),
            "largest": int(sizes.max()),
            "singletons": int((sizes == 1).sum()),
        }
    bytes_on_disk = sum(file.stat().st_size for file in store.path.iterdir())
    return StoreStatistics(store, residue_counts, clusters, bytes_on_disk)


def table(stores: Mapping[str, StoreStatistics]) -> str:
    """The figures of stores, by name, as text: a column for each, then their compositions."""
    import pandas

    composition = pandas.DataFrame({name: one.composition for name, one in stores.items()}).T
    composition.columns = list(RESIDUES)
    composition["together"] = [one.non_canonical for one in stores.values()]
    rare = [*NON_CANONICAL, "together"]
    lines = [
        pandas.DataFrame({name: _figures(one) for name, one in stores.items()}).to_string(),
        "",
        "composition, % of the residues",
        *(
            composition[list(letters)].to_string(float_format="{:.2f}".format, col_space=6)
            for letters in (CANONICAL[:10], CANONICAL[10:])
        ),
        composition[rare].to_string(float_format=lambda p: f"{p:.5f}" if p else "0", col_space=9),
    ]
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def plot(stores: Mapping[str, StoreStatistics], file: Path, title: str) -> None:
    """Draw the lengths of stores, by name, one under another, and beside them the compositions.

    Args:
        stores: at least one, at most four.
        file: its ending is one of PICTURES; its folder is made where it is missing.

    Raises:
        DataError: the file cannot be written.
    """
    figure = new_figure(11.5, 3.6 + 0.8 * len(stores))
    axes = figure.subplot_mosaic([[place, "composition"] for place in range(len(stores))])
    figure.suptitle(title)
    _plot_lengths([axes[place] for place in range(len(stores))], stores)
    _plot_composition(axes["composition"], stores)
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
    save_figure(figure, file, dpi=150)


def _figures(statistics: StoreStatistics) -> dict[str, str]:
    """The cells of a store's column, by the labels of their rows."""
    clusters = statistics.clusters
    return {
        "sequences": f"{len(statistics.lengths):,}",
        "residues": f"{statistics.store.residues:,}",
        "length in residues": "",
        **{
            f"  {name.replace('_', ' ')}": _number(value)
            for name, value in statistics.length_summary().items()
        },
        "clusters": "not known" if clusters is None else f"{clusters['number']:,}",
        "  sequences of the largest": "" if clusters is None else f"{clusters['largest']:,}",
        "  of a single sequence": "" if clusters is None else f"{clusters['singletons']:,}",
        "size on disk": decimal(statistics.bytes_on_disk),
        "  bytes per residue": f"{statistics.bytes_on_disk / statistics.store.residues:.2f}",
    }


def _plot_lengths(axes: Sequence[Any], stores: Mapping[str, StoreStatistics]) -> None:
    from matplotlib.ticker import MaxNLocator

    together = np.concatenate([one.lengths for one in stores.values()])
    last = np.quantile(together, _SHOWN)
    edges = MaxNLocator(_MOST_BARS, integer=True).tick_values(together.min(), last + 1)
    shares = [
        100 * np.histogram(one.lengths, edges)[0] / len(one.lengths) for one in stores.values()
    ]
    highest = 1.08 * max(share.max() for share in shares)
    for (name, one), share, colour, axis in zip(stores.items(), shares, SERIES, axes, strict=False):
        median = one.length_summary()["median"]
        axis.stairs(share, edges, fill=True, color=colour)
        axis.axvline(median, color="black", linewidth=1, linestyle=":")
        label = f"{name}: {len(one.lengths):,} sequences, median length {_number(median)}"
        axis.set_title(label, loc="right", fontsize="medium")
        axis.set(xlim=(edges[0], edges[-1]), ylim=(0, highest), ylabel="% of sequences")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(labelbottom=axis is axes[-1])
    axes[0].set_title("Lengths", loc="left")
    beyond = 100 * (together > edges[-1]).mean()
    note = f" ({beyond:.1f} % are longer, up to {together.max():,})" if beyond else ""
    axes[-1].set_xlabel(f"length in residues{note}")


def _plot_composition(axes: Any, stores: Mapping[str, StoreStatistics]) -> None:
    places = np.arange(len(CANONICAL) + 1, dtype=np.float64)
    places[-1] += 0.8  # "other" is wider than a letter
    width = 0.8 / len(stores)
    for number, (statistics, colour) in enumerate(zip(stores.values(), SERIES, strict=False)):
        shares = [*statistics.composition[: len(CANONICAL)], statistics.non_canonical]
        axes.bar(places - 0.4 + (number + 0.5) * width, shares, width, color=colour)
    axes.set_xticks(places, [*CANONICAL, "other"])
    axes.tick_params(axis="x", length=0)
    axes.set(xlabel=f"residue (other: {', '.join(NON_CANONICAL)})", ylabel="% of residues")
    axes.set_title("Composition", loc="left")


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
