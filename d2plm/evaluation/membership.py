"""Comparison of new members of a family with natural ones, using only the given members.

Every protein is aligned to the HMM of the given members. Natural members are judged by an HMM that
excludes them. Three kinds of references need no model: crossovers of two members, mosaics of eight,
and columns sampled independently from sharpened frequencies.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyhmmer.plan7 import HMM

from d2plm.core.vocabulary import CANONICAL_START, Tokens, encode
from d2plm.data.family import Family
from d2plm.evaluation.new_members import NATURAL
from d2plm.evaluation.quality import LOW_COMPLEXITY, simple_windows
from d2plm.evaluation.result import GENERATED
from d2plm.families.alignment import (
    GAP,
    Letters,
    aligned_columns,
    aligned_rows,
    columns_hmm,
    family_hmm,
    in_threads,
    one_hot,
    sequence_weights,
    text_of,
)
from d2plm.families.profile_hmm import domain_hits

CROSSOVERS = "crossovers of two"
MOSAICS, SHARPENED = "mosaics of eight", "columns, sharpened"

MAX_E_VALUE = 1e-3  # maximum E-value of a member, in a search of DATABASE proteins
DATABASE = 1_000_000
SIMULATED = 200  # number of sequences that calibrate E-values, HMMER's default
COMPARED = 500  # number of proteins per set whose pairwise identity is computed
CONSERVED = 0.95  # minimum share of given members with the same residue in a conserved column
ENDS = 0.1  # share of the given members that miss the required start or end
REFERENCES = 30  # number of proteins per reference
LEFT_OUT = 60  # number of natural members left out in turn
MOST_MEMBERS = 1_000  # maximum number of members for the HMM
PARENTS, SWITCHES = 8, 1 / 20  # parents of a mosaic, switches per column
SHOWN = 10  # number of proteins per set in the alignment


class Judge:
    """The HMM, the alignment and the conserved columns of the given members.

    Args:
        given: members from which the new ones were drawn; the HMM uses at most MOST_MEMBERS.
        held_out: natural members that were not given; None leaves out given ones in turn.
        seed: determines the references and the members that are left out.
    """

    def __init__(self, given: Family, held_out: Family | None = None, *, seed: int = 0) -> None:
        self.seed, self.given, self.family = seed, len(given.members), given
        places = given.some(MOST_MEMBERS)
        self.place_of = {int(place): i for i, place in enumerate(places)}
        core = given.only(places)
        settings: dict[str, Any] = {"effective_number": "entropy", "simulated": SIMULATED}
        self.hmm = family_hmm(core.members, core.columns, **settings)
        self.threshold = _threshold_bits(self.hmm)
        self.rows = aligned_rows(self.hmm, core.members)
        every = aligned_columns(self.hmm, given.members)
        self.every, self.aligned_NL = one_hot(every), every[places]
        self.weights = sequence_weights(self.aligned_NL)
        self.conserved = conserved_columns(self.aligned_NL)
        self.hot, ends = one_hot(self.aligned_NL), np.array([_ends(x) for x in self.aligned_NL])
        self.first = int(np.quantile(ends[:, 0], 1 - ENDS, method="lower"))
        self.last = int(np.quantile(ends[:, 1], ENDS, method="higher"))
        self.centre = self.hot.mean(0)
        components = min(2, *self.hot.shape)
        self.axes = np.linalg.svd(self.hot - self.centre, full_matrices=False)[2][:components]
        random = np.random.default_rng(seed)
        self.held_out = held_out is not None and bool(held_out.members)
        if held_out is not None and held_out.members:
            natural = self.described(held_out.members, held_out.names)
        else:
            left_out = random.permutation(places)[:LEFT_OUT].tolist()
            members = [given.members[i] for i in left_out]
            names = [given.names[i] for i in left_out]
            natural = self.described(members, names, left_out, of_itself=True)
        self.others = {NATURAL: natural}
        for name, proteins in self.references(random).items():
            numbers = [str(i + 1) for i in range(len(proteins))]
            self.others[name] = self.described(proteins, numbers)

    def describe(
        self, generated: Sequence[Tokens], names: Sequence[str], parents: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Compare new members with the family, natural members and the references.

        Args:
            generated: uint8 residue tokens.
            parents: indices of the given members each design started from; its score is by the HMM
                without its parent.

        Returns:
            JSON content: the numbers of `given` members, HMM `columns` and `conserved` columns; the
            threshold; `sets`, each with `proteins` and `figures`; and the `alignment` of the first
            members of each set. A protein has name, length, bits under the HMM (0 if HMMER finds no
            domain), E-value (None if a member is left out), whether it is a member, whether it
            reaches both `ends`, `coverage` (share of columns filled), `conserved` (share of
            conserved columns with their residue; None if there are none), share of low-complexity
            windows, the nearest given member, identity to it, and its place in the `plane` of two
            principal components.
        """
        sets = {GENERATED: self.described(generated, names, parents), **self.others}
        rows = {
            name: [{key: one[key] for key in one if key != "columns"} for one in own["proteins"]]
            for name, own in sets.items()
        }
        return {
            "seed": self.seed,
            "given": self.given,
            "held_out": self.held_out,
            "columns": self.hmm.M,
            "conserved": int((self.conserved < GAP).sum()),
            "max_e_value": MAX_E_VALUE,
            "database": DATABASE,
            "threshold_bits": self.threshold,
            "alignment": [
                {"set": name, "name": one["name"], "columns": one["columns"]}
                for name in (GENERATED, NATURAL)
                for one in sets[name]["proteins"][:SHOWN]
            ],
            "sets": {name: {**own, "proteins": rows[name]} for name, own in sets.items()},
        }

    def described(
        self,
        proteins: Sequence[Tokens],
        names: Sequence[str],
        left_out: Sequence[int] = (),
        *,
        of_itself: bool = False,
    ) -> dict[str, Any]:
        """The proteins of a set, each judged by an HMM without the member `left_out` for it.

        With `of_itself` that member is the protein itself, which then is not its own nearest.
        """
        aligned = aligned_columns(self.hmm, proteins)
        hot = one_hot(aligned)
        same = hot @ self.every.T
        hits = domain_hits(self.hmm, proteins, Z=DATABASE)  # as with `hmmsearch --max`
        without = [
            (i, self.place_of[one]) for i, one in enumerate(left_out) if one in self.place_of
        ]
        found = in_threads(lambda pair: self._hit(proteins[pair[0]], pair[1]), without)
        hits |= {number: hit for (number, _), hit in zip(without, found, strict=True)}
        if of_itself:
            same[np.arange(len(proteins)), np.array(left_out, dtype=np.int64)] = -1
        plane = np.pad((hot - self.centre) @ self.axes.T, ((0, 0), (0, 2 - len(self.axes))))
        has, filled = self.conserved < GAP, np.maximum((aligned < GAP).sum(1), 1)
        described = []
        for number, (protein, row) in enumerate(zip(proteins, aligned, strict=True)):
            hit, (first, last) = hits.get(number), _ends(row)
            nearest = int(same[number].argmax())
            bits = 0.0 if hit is None else hit.score
            described.append(
                {
                    "name": names[number],
                    "length": len(protein),
                    "bits": bits,
                    "e_value": None if hit is None or left_out else hit.evalue,
                    "member": bits >= self.threshold,
                    "ends": first <= self.first and last >= self.last,
                    "coverage": float((row < GAP).mean()),
                    "conserved": float((row == self.conserved)[has].mean()) if has.any() else None,
                    "low_complexity": float(simple_windows(protein, *_WINDOW).mean()),
                    "nearest": self.family.names[nearest],
                    "identity": float(max(same[number, nearest], 0) / filled[number]),
                    "plane": plane[number].tolist(),
                    "columns": text_of(row),
                }
            )
        compared = hot[:COMPARED]
        among = (compared @ compared.T) / filled[:COMPARED, None]
        return {"proteins": described, "figures": figures(described, _off_diagonal(among))}

    def references(self, random: np.random.Generator) -> dict[str, list[Tokens]]:
        """Proteins made from the given members without a model."""
        rows = np.frombuffer("".join(self.rows).encode(), dtype=np.uint8)
        rows = rows.reshape(len(self.rows), -1)
        crossed, mosaics = [], []
        for _ in range(REFERENCES if len(rows) > 1 else 0):
            two = rows[random.choice(len(rows), 2, replace=False)]
            cut = random.integers(rows.shape[1] // 5, 4 * rows.shape[1] // 5 + 1)
            crossed.append(np.concatenate([two[0, :cut], two[1, cut:]]))
            parents = random.choice(len(rows), min(PARENTS, len(rows)), replace=False)
            drawn = random.choice(parents, rows.shape[1])
            switches = np.flatnonzero(np.append(True, random.random(rows.shape[1] - 1) < SWITCHES))
            stretch = np.searchsorted(switches, np.arange(rows.shape[1]), side="right") - 1
            mosaics.append(rows[drawn[switches[stretch]], np.arange(rows.shape[1])])
        letters = np.stack([(self.aligned_NL == a).T @ self.weights for a in range(GAP + 1)], 1)
        sharp = (letters**2).cumsum(1)
        draws = random.random((REFERENCES, len(sharp), 1)) * sharp[:, -1:]
        columns = (sharp <= draws).sum(2)
        sharpened = [row[row < GAP].astype(np.uint8) + CANONICAL_START for row in columns]
        texts = {CROSSOVERS: crossed, MOSAICS: mosaics}
        made = {name: [_tokens(row) for row in own] for name, own in texts.items()}
        made[SHARPENED] = sharpened
        return {name: [one for one in own if len(one)] for name, own in made.items() if own}

    def _hit(self, protein: Tokens, left_out: int) -> Any:
        """The hit of a protein by the HMM of the other members' columns; None without others."""
        if len(self.aligned_NL) == 1:
            return None
        others = np.arange(len(self.aligned_NL)) != left_out
        weights = self.weights[others]
        hmm = columns_hmm(self.aligned_NL[others], weights, "entropy")
        return domain_hits(hmm, [protein], Z=DATABASE).get(0)


_WINDOW = int(LOW_COMPLEXITY["low_complexity_window"]), LOW_COMPLEXITY["low_complexity_bits"]


def figures(
    proteins: Sequence[dict[str, Any]], among: NDArray[np.float64] | Sequence[float]
) -> dict[str, float | None]:
    """Medians of a set and shares of its proteins; `among` are identities of pairs of them."""

    def median(name: str) -> float | None:
        values = [one[name] for one in proteins if one[name] is not None]
        return float(np.median(values)) if values else None

    def error(name: str) -> float:
        """Standard error of the median: for normal values, √(π/2) times that of the mean."""
        values = [one[name] for one in proteins]
        return float(np.std(values) * np.sqrt(np.pi / 2 / len(values))) if values else 0.0

    def share(values: Sequence[bool]) -> float | None:
        return float(np.mean(values)) if len(values) else None

    known = [one for one in proteins if one["conserved"] is not None]
    return {
        "members": share([one["member"] for one in proteins]),
        "bits": median("bits"),
        "ends": share([one["ends"] for one in proteins]),
        "keeps_all": share([one["conserved"] == 1 for one in known]),
        "coverage": median("coverage"),
        "coverage_error": error("coverage"),
        "low_complexity": share([one["low_complexity"] for one in proteins]),
        "identity": median("identity"),
        "among": float(np.median(among)) if len(among) else None,
    }


def conserved_columns(rows: Letters) -> Letters:
    """int8 [L]: the residue that a share CONSERVED of the rows have in a column, or GAP."""
    counts = one_hot(rows).sum(0).reshape(-1, GAP)
    return np.where(counts.max(1) >= CONSERVED * len(rows), counts.argmax(1), GAP).astype(np.int8)


def _ends(row: Letters) -> tuple[int, int]:
    """The first and last filled column; an empty row has the ends furthest inside."""
    filled = np.flatnonzero(row < GAP)
    return (int(filled[0]), int(filled[-1])) if len(filled) else (len(row), -1)


def _off_diagonal(square: NDArray[np.floating]) -> NDArray[np.float64]:
    return square[~np.eye(len(square), dtype=np.bool_)].astype(np.float64)


def _tokens(symbols: NDArray[np.uint8]) -> Tokens:
    return encode(bytes(symbols).decode().translate(_UNGAPPED).upper())


_UNGAPPED = str.maketrans("", "", "-.")


def _threshold_bits(hmm: HMM) -> float:
    """The score at MAX_E_VALUE: P(score > s) = exp(−λ (s − τ)) (Eddy, 2008)."""
    fit = hmm.evalue_parameters
    return float(fit.f_tau - np.log(MAX_E_VALUE / DATABASE) / fit.f_lambda)
