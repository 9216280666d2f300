"""Statistics of a sequence store (lengths, composition, clusters), as table and picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from d2plm.core.errors import DataError
from d2plm.core.number_text import counted
from d2plm.core.palette import SERIES, new_figure, save_figure
from d2plm.core.vocabulary import FIRST, PROTEIN, Vocabulary
from d2plm.data.store import MAX_RESIDUES, SequenceStore

PICTURES = (".png", ".svg", ".pdf")

_PART = 1 << 20  # tokens counted at once
_MOST_SHOWN, _MOST_FREQUENT = 64, 20  # tokens: with more than 64, the 20 most frequent are shown
_COLUMNS = 10  # of the composition
_SHOWN = 0.99  # fraction of the sequences within the picture's range of lengths
_MOST_BARS = 50


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Statistics of a store.

    Attributes:
        counts: int64 [C], number of occurrences of each token, from FIRST on.
        clusters: `number` of homology clusters, sequences of the `largest`, and number of
            `singletons`; None if the store has no clusters.
    """

    store: SequenceStore
    counts: NDArray[np.int64]
    clusters: dict[str, int] | None
    bytes_on_disk: int

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.store.lengths

    @property
    def composition(self) -> NDArray[np.float64]:
        """float64 [C]: `counts` in per cent of all tokens."""
        return 100 * self.counts / self.store.residues

    @property
    def non_canonical(self) -> float:
        """Percentage of tokens that are read but never predicted."""
        return float(self.composition[self.store.vocabulary.predicted :].sum())

    def length_summary(self) -> dict[str, float]:
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
        vocabulary = self.store.vocabulary
        shown = [*_shown([self]), *_read_only(vocabulary)]
        labels = _labels(vocabulary, shown)
        return {
            "path": str(self.store.path),
            "kind": self.store.manifest["kind"],
            "sequences": len(self.lengths),
            "residues": self.store.residues,
            "lengths": self.length_summary(),
            "residue_counts": dict(zip(labels, self.counts[shown].tolist(), strict=True)),
            "composition_percent": dict(zip(labels, self.composition[shown].tolist(), strict=True)),
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
    """Statistics of a store, in one pass over it; `DataError` if it is damaged.

    `progress` is called with the number of sequences read so far.
    """
    vocabulary = store.vocabulary
    token_counts = np.zeros(vocabulary.size, dtype=np.int64)
    for block in store.blocks():
        for first in range(0, len(block.tokens), _PART):
            part = np.minimum(block.tokens[first : first + _PART], vocabulary.mask)
            token_counts += np.bincount(part, minlength=vocabulary.size)
        progress(block.first + len(block))
    counts = token_counts[FIRST : vocabulary.read_stop]
    in_range = store.lengths.min() >= 1 and store.lengths.max() <= MAX_RESIDUES
    if not in_range or counts.sum() != token_counts.sum():
        raise DataError(
            f"{store.path}: holds content that is no sequence of {vocabulary.nouns.token}s; see "
            "d2plm data verify, and prepare the data again"
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
    return StoreStatistics(store, counts, clusters, bytes_on_disk)


def table(stores: Mapping[str, StoreStatistics]) -> str:
    """The statistics of stores, by name, as text: a column for each, then their compositions."""
    import pandas

    one = next(iter(stores.values()))
    vocabulary, shown = one.store.vocabulary, _shown([*stores.values()])
    composition = pandas.DataFrame([one.composition for one in stores.values()], index=[*stores])
    frequent = composition[shown].set_axis(_labels(vocabulary, shown), axis=1)
    title = f"composition, % of the {vocabulary.nouns.token}s"
    if len(shown) < vocabulary.predicted:
        title += f", the {len(shown)} most frequent"
    lines = [
        pandas.DataFrame({name: _figures(one) for name, one in stores.items()}).to_string(),
        "",
        title,
        *(
            frequent.iloc[:, first : first + _COLUMNS].to_string(
                float_format="{:.2f}".format, col_space=6
            )
            for first in range(0, len(shown), _COLUMNS)
        ),
    ]
    if vocabulary.read_only:
        rare = composition[[*_read_only(vocabulary)]].rename(columns=_read_only(vocabulary))
        rare["together"] = [one.non_canonical for one in stores.values()]
        lines += ["", f"read but not predicted, % of the {vocabulary.nouns.token}s"]
        lines.append(rare.to_string(float_format=lambda p: f"{p:.5f}" if p else "0", col_space=9))
    return "\n".join(line.rstrip() for line in "\n".join(lines).splitlines())


def plot(stores: Mapping[str, StoreStatistics], file: Path, title: str) -> None:
    """Draw the lengths of one to four stores one below another, and next to them the compositions.

    The suffix of `file` is one of PICTURES. Raises `DataError` if it cannot be written.
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
    """The cells of a store's column, by row label."""
    clusters, vocabulary = statistics.clusters, statistics.store.vocabulary
    sequence, token = _sequence(vocabulary), vocabulary.nouns.token
    per_token = f"  bytes per {token}{' of text' if vocabulary.is_text else ''}"
    return {
        f"{sequence}s": f"{len(statistics.lengths):,}",
        f"{token}s": f"{statistics.store.residues:,}",
        f"length in {token}s": "",
        **{
            f"  {name.replace('_', ' ')}": _number(value)
            for name, value in statistics.length_summary().items()
        },
        "clusters": "not known" if clusters is None else f"{clusters['number']:,}",
        f"  {sequence}s of the largest": "–" if clusters is None else f"{clusters['largest']:,}",
        f"  of a single {sequence}": "–" if clusters is None else f"{clusters['singletons']:,}",
        "size on disk": decimal(statistics.bytes_on_disk),
        per_token: f"{statistics.bytes_on_disk / statistics.store.residues:.2f}",
    }


def _plot_lengths(axes: Sequence[Any], stores: Mapping[str, StoreStatistics]) -> None:
    from matplotlib.ticker import MaxNLocator

    together = np.concatenate([one.lengths for one in stores.values()])
    last = np.quantile(together, _SHOWN)
    edges = MaxNLocator(_MOST_BARS, integer=True).tick_values(together.min(), last + 1)
    shares = [
        100 * np.histogram(one.lengths, edges)[0] / len(one.lengths) for one in stores.values()
    ]
    vocabulary = next(iter(stores.values())).store.vocabulary
    sequence, token = _sequence(vocabulary), vocabulary.nouns.token
    highest = 1.08 * max(share.max() for share in shares)
    for (name, one), share, colour, axis in zip(stores.items(), shares, SERIES, axes, strict=False):
        median = one.length_summary()["median"]
        axis.stairs(share, edges, fill=True, color=colour)
        axis.axvline(median, color="black", linewidth=1, linestyle=":")
        number = counted(len(one.lengths), sequence)
        label = f"{name}: {number}, median length {_number(median)}"
        axis.set_title(label, loc="right", fontsize="medium")
        axis.set(xlim=(edges[0], edges[-1]), ylim=(0, highest), ylabel=f"% of {sequence}s")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(labelbottom=axis is axes[-1])
    axes[0].set_title("Lengths", loc="left")
    beyond = 100 * (together > edges[-1]).mean()
    note = f" ({beyond:.1f} % are longer, up to {together.max():,})" if beyond else ""
    axes[-1].set_xlabel(f"length in {token}s{note}")


def _plot_composition(axes: Any, stores: Mapping[str, StoreStatistics]) -> None:
    vocabulary = next(iter(stores.values())).store.vocabulary
    token, shown = vocabulary.nouns.token, _shown([*stores.values()])
    places = np.arange(len(shown) + 1, dtype=np.float64)
    places[-1] += 0.8  # "other" is wider than a letter
    width = 0.8 / len(stores)
    for number, (statistics, colour) in enumerate(zip(stores.values(), SERIES, strict=False)):
        shares = statistics.composition[shown].tolist()
        shares.append(max(100 - sum(shares), 0))
        axes.bar(places - 0.4 + (number + 0.5) * width, shares, width, color=colour)
    labels = [label.replace("$", r"\$") for label in _labels(vocabulary, shown)]
    axes.set_xticks(places, [*labels, "other"], rotation=90 if max(map(len, labels)) > 1 else 0)
    axes.tick_params(axis="x", length=0)
    if len(shown) == vocabulary.predicted and vocabulary.read_only:
        token += f" (other: {', '.join(_read_only(vocabulary).values())})"
    axes.set(xlabel=token, ylabel=f"% of {vocabulary.nouns.token}s")
    axes.set_title("Composition", loc="left")


def _shown(stores: Sequence[StoreStatistics]) -> list[int]:
    """The tokens to show, counted from FIRST: all predicted ones, or the most frequent."""
    predicted = stores[0].store.vocabulary.predicted
    if predicted <= _MOST_SHOWN:
        return list(range(predicted))
    together = np.sum([one.counts[:predicted] for one in stores], axis=0)
    return np.argsort(-together, kind="stable")[:_MOST_FREQUENT].tolist()


def _read_only(vocabulary: Vocabulary) -> dict[int, str]:
    """Labels of the tokens that are read but never predicted, counted from FIRST."""
    tokens = range(vocabulary.predicted, vocabulary.read_stop - FIRST)
    return dict(zip(tokens, _labels(vocabulary, tokens), strict=True))


def _labels(vocabulary: Vocabulary, tokens: Iterable[int]) -> list[str]:
    """The texts of tokens, counted from FIRST, quoted if they may contain blanks."""
    numbers = [FIRST + one for one in tokens]
    if not vocabulary.is_text:
        return [vocabulary.decode(np.array([one])) for one in numbers]
    texts = [vocabulary.restore(np.array([one])) for one in numbers]
    # A token may be only a part of a character.
    return [
        f"<{number}>" if "\ufffd" in text else repr(text)
        for number, text in zip(numbers, texts, strict=True)
    ]


def _sequence(vocabulary: Vocabulary) -> str:
    """The tables' name for a sequence, also for proteins."""
    return "sequence" if vocabulary == PROTEIN else vocabulary.nouns.sequence


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")
