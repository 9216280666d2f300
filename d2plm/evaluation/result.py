"""The result of an evaluation: one typed document, and its JSON form.

Tables, model card, run description, report and figures are made from it. Does not import torch or
scipy, which the image that prepares data lacks.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from d2plm.core.errors import DataError
from d2plm.core.estimate import Estimate
from d2plm.core.files import read_json, write_text
from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.terms import PROTEINS, Terms

EVALUATION = "evaluation.json"
SEQUENCE_SCORES = "sequence_scores.npz"  # in the same folder
MODEL = "this model"
PROFILE, ALIGNED = "profile HMMs", "HMM of their alignment"  # baselines given relatives
Kind = TypeVar("Kind")
GENERATED, NATURAL = "generated", "natural, held out"  # names of sets of sequences
REPEATED_TOKENS = 8  # length of a run that counts as repeated if it occurred before


@dataclass(frozen=True)
class Bound:
    """The likelihood bound of a model or baseline on the held-out sequences.

    Attributes:
        nelbo: nats per token.
        bits: bits per `Terms.unit`; None for proteins.
        estimator: name of the estimator; None for a baseline.
        perplexity_mlm15: with 15 % of the tokens masked; None for a model without masks.
    """

    nelbo: Estimate
    perplexity: Estimate
    bits: Estimate | None = None
    estimator: str | None = None
    perplexity_mlm15: float | None = None


@dataclass(frozen=True, kw_only=True)
class Compared(Bound):
    """The bound of another model or a baseline.

    Attributes:
        difference: the evaluated model's bound minus this one, nats per token, paired by sequence.
    """

    difference: Estimate


Bounds = Mapping[str, Bound]


@dataclass(frozen=True)
class IdentityBin:
    """Proteins by identity to the nearest training protein; an empty bin has no bounds."""

    sequences: int
    residues: int
    clusters: int
    model: Bound | None
    reference: Compared | None


@dataclass(frozen=True)
class FractionBin:
    """Cross-entropy of the predicted tokens at a corrupted fraction from `low` to `high`."""

    low: float
    high: float
    predicted: int
    cross_entropy: Estimate


@dataclass(frozen=True)
class RelativesBelow:
    """Bounds given relatives below an identity, and the number of proteins that have any."""

    identity: float
    with_relatives: int
    model: Bound
    baselines: dict[str, Compared]

    @property
    def best(self) -> Compared:
        return min(self.baselines.values(), key=lambda bound: bound.perplexity.value)


@dataclass(frozen=True)
class GivenRelatives:
    """The bound of held-out proteins given their relatives.

    Attributes:
        most: maximum number of relatives per protein.
        proteins: number of proteins.
        unrelated: given unrelated proteins of the same lengths, and the difference from `alone`.
        order_difference: largest change from reordering the relatives, nats per residue.
        by_depth: maximum number of relatives → bound, below the first of the identities.
    """

    most: int
    proteins: int
    alone: Bound
    below: list[RelativesBelow]
    unrelated: Compared
    order_difference: float | None
    by_depth: dict[int, Bound] = field(default_factory=dict)


def shown(label: str, form: str, **default: Any) -> Any:
    """A field with its row's label and format; `{}` in the label is the key of a dictionary."""
    return field(metadata={"label": label, "form": form}, **default)


@dataclass(frozen=True, kw_only=True)
class SequenceSet:
    """Quality of one set of sequences; shares are 0 … 1, None means not defined.

    Attributes:
        valid_share: proteins of the twenty canonical residues only.
        token_kl: KL(set ‖ training) of the token frequencies, nats. The training counts have one
            pseudo-count per token, the set's have none.
        length_ks: Kolmogorov–Smirnov distance of the lengths.
        ngram_js: n → Jensen–Shannon divergence of the n-grams from those of sampled training
            sequences, 0 … ln 2 nats, not smoothed. It is biased upwards for a finite set, including
            natural sequences, more so for larger n and fewer n-grams.
        distinct: n → distinct n-grams ÷ all n-grams of the set; texts only.
        longest_run_mean, longest_run_max: length of the longest run of one predicted token.
        low_complexity_share: residues in a window of low complexity.
        repeated_share: runs of REPEATED_TOKENS tokens that occurred before in the same text.
        duplicate_share: copies of another sequence of the set, beyond the first.
        in_training_share: sequences equal to a training sequence.
        hit_share: proteins with a similar training protein.
        identity_mean, identity_median: identity to the nearest training protein, 0 without a hit.
        identity_above: percent → share of the proteins with a larger identity.
        clusters: number of clusters of similar proteins.
        diversity: clusters ÷ sequences.
    """

    sequences: int = shown("{sequence}s", ",")
    tokens: int = shown("{token}s", ",")
    valid_share: float | None = shown("of the 20 residues alone, %", "%", default=None)
    token_kl: float | None = shown("{token}s: KL to training, nats", ".4f")
    length_ks: float = shown("lengths: KS distance to training", ".3f")
    ngram_js: dict[str, float | None] = shown("{}-grams: JS to training, nats", ".4f")
    distinct: dict[str, float] | None = shown("{}-grams: distinct, %", "%", default=None)
    longest_run_mean: float = shown("longest run of a {token}, mean", ".2f")
    longest_run_max: int = shown("longest run of a {token}, largest", "")
    low_complexity_share: float | None = shown("residues of low complexity, %", "%", default=None)
    repeated_share: float | None = shown(
        f"repeated runs of {REPEATED_TOKENS} {{token}}s, %", "%", default=None
    )
    duplicate_share: float = shown("duplicates in the set, %", "%")
    in_training_share: float = shown("exact copies of training, %", "%")
    hit_share: float | None = shown("nearest in training: found, %", "%", default=None)
    identity_mean: float | None = shown("  identity (0: none found), mean %", "%", default=None)
    identity_median: float | None = shown("  identity (0: none found), median %", "%", default=None)
    identity_above: dict[str, float] | None = shown("  identity above {} %, %", "%", default=None)
    clusters: int | None = None
    diversity: float | None = shown("diversity: clusters ÷ sequences", ".3f", default=None)
    length_histogram: list[int]
    residue_frequencies: dict[str, float] = field(default_factory=dict)
    identity_histogram: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Quality:
    """Quality of sets of sequences; training lengths and frequencies are for the plots."""

    settings: dict[str, Any]
    sets: dict[str, SequenceSet]
    training_lengths: list[int]
    training_frequencies: dict[str, float]
    terms: Terms = PROTEINS

    def table(self) -> Table:
        """One row per figure, one column per set."""
        nouns = {"sequence": self.terms.sequence, "token": self.terms.token}
        rows: list[list[Cell]] = []
        for figure in fields(SequenceSet):
            values = [getattr(one, figure.name) for one in self.sets.values()]
            if not figure.metadata or (figure.default is None and values[0] is None):
                continue
            scale, form = {"%": (100, ".1f")}.get(
                figure.metadata["form"], (1, figure.metadata["form"])
            )
            for key in values[0] if isinstance(values[0], dict) else [None]:
                label = figure.metadata["label"].format(key, **nouns)
                numbers = values if key is None else [value[key] for value in values]
                scaled = (None if number is None else scale * number for number in numbers)
                rows.append([label, *(Number(number, form) for number in scaled)])
        differ = len({one.sequences for one in self.sets.values()}) > 1
        note = "The sets differ in number: n-gram divergence and diversity cannot be compared."
        return Table(["", *self.sets], rows, notes=[note] if differ else [])


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model, of baselines and of other models, all on the same residues.

    Attributes:
        estimator, interval: how the bounds and their intervals were computed.
        residues: number of tokens scored.
        length_nats: cost of the length, on which the bound is conditional, nats per sequence.
        by_identity: bins of identity to the nearest training protein; None if not requested.
        calibration: model → bins of the corrupted fraction.
        digests: digests of the model, the data and the masks.
    """

    estimator: str
    interval: str
    sequences: int
    residues: int
    clusters: int
    model: Bound
    length_nats: float
    baselines: dict[str, Compared]
    others: dict[str, Compared]
    by_identity: dict[str, IdentityBin] | None
    calibration: dict[str, list[FractionBin]]
    given_relatives: GivenRelatives | None
    quality: Quality | None
    settings: dict[str, Any]
    digests: dict[str, str]
    masking_version: int
    terms: Terms = PROTEINS
    format_version: Literal[4] = 4

    @property
    def bounds(self) -> Bounds:
        """All bounds by name, the best last."""
        rows: Bounds = {**self.baselines, **self.others, MODEL: self.model}
        return dict(sorted(rows.items(), key=lambda row: -row[1].perplexity.value))


def write_evaluation(folder: Path, evaluation: Evaluation) -> None:
    """Write the JSON form; raises DataError if the file cannot be written."""
    write_text(folder / EVALUATION, json.dumps(asdict(evaluation), indent=2))


def read_evaluation(folder: Path) -> Evaluation | None:
    """The evaluation in a folder, or None; raises DataError if damaged or of another version."""
    content = read_json(folder / EVALUATION)
    evaluation = typed(Evaluation, content)
    if content is not None and evaluation is None:
        raise DataError(
            f"{folder / EVALUATION}: was written by another version of D2PLM; run d2plm evaluate "
            "again"
        )
    return evaluation


def typed(kind: type[Kind], content: dict[str, Any] | None) -> Kind | None:
    """JSON content as a dataclass; None if it has other fields or versions."""
    from pydantic import TypeAdapter, ValidationError

    with suppress(ValidationError):
        return TypeAdapter(kind).validate_python(content)
    return None
