"""The result of an evaluation as tables and text, the same for every output.

The terminal prints `as_text`; the model card and the run's description contain `as_markdown`; the
report renders the same tables as HTML.
"""

from d2plm.core.estimate import difference_text
from d2plm.core.table import Cell, Number, Table
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import MODEL, Bounds, Compared, Evaluation, GivenRelatives
from d2plm.evaluation.terms import PROTEINS, REFERENCE, Terms

PERPLEXITY = "perplexity [95 % interval]"


def bounds_table(bounds: Bounds, terms: Terms = PROTEINS, model: str = MODEL) -> Table:
    """One row per bound; that of `model` is bold."""
    heads = ["", PERPLEXITY, f"nats/{terms.token}"]
    heads += [] if terms.unit is None else [f"bits/{terms.unit}"]
    rows: list[list[Cell]] = []
    for name, bound in bounds.items():
        bits = [] if terms.unit is None else [Number(bound.bits, ".4f")]
        figures = Number(bound.perplexity, ".3f"), Number(bound.nelbo.value, ".4f"), *bits
        difference = bound.difference if isinstance(bound, Compared) else None
        rows.append([name, *figures, Number(difference, "+.4f")])
    return Table([*heads, f"{model} − it, nats/{terms.token}"], rows, marked=model)


def tables_of(evaluation: Evaluation) -> dict[str, Table]:
    """The tables of everything that was measured, by name."""
    given, quality = evaluation.given_relatives, evaluation.quality
    return {
        "likelihoods": bounds_table(evaluation.bounds, evaluation.terms),
        "calibrations": calibration_table(evaluation),
        **({} if evaluation.by_identity is None else {"identities": identity_table(evaluation)}),
        **({} if given is None else {"given": relatives_table(given)}),
        **({} if quality is None else {"statistics": quality.table()}),
    }


def relatives_table(given: GivenRelatives) -> Table:
    bounds = {}
    for row in given.below:
        below = f"below {row.identity:.0%}"
        bounds[f"{below} ({row.with_relatives:,} proteins have any): {MODEL}"] = row.model
        bounds |= {f"{below}: {name}": bound for name, bound in row.baselines.items()}
    for depth, bound in given.by_depth.items():
        bounds[f"at most {depth} below {given.below[0].identity:.0%}: {MODEL}"] = bound
    bounds[f"none: {MODEL}"] = given.alone
    table = bounds_table(bounds)
    note = (
        f"Controls: unrelated proteins of the same lengths have perplexity "
        f"{given.unrelated.perplexity.value:.3f}, {difference_text(given.unrelated.difference)} "
        "from none"
    )
    if given.order_difference is not None:
        note += f"; another order changes at most {given.order_difference:.0e} nats per residue"
    return Table(["relatives", *table.heads[1:]], table.rows, notes=[f"{note}."])


def identity_table(evaluation: Evaluation) -> Table:
    heads = ["nearest training protein", "proteins", "residues", "clusters", MODEL, REFERENCE]
    rows: list[list[Cell]] = []
    for name, one in (evaluation.by_identity or {}).items():
        bounds = [None if of is None else of.perplexity for of in (one.model, one.reference)]
        difference = None if one.reference is None else one.reference.difference
        counts = (Number(number, ",") for number in (one.sequences, one.residues, one.clusters))
        perplexities = (Number(bound, ".3f") for bound in bounds)
        rows.append([f"identity {name}", *counts, *perplexities, Number(difference, "+.4f")])
    return Table([*heads, f"{MODEL} − {REFERENCE}, nats/residue"], rows)


def calibration_table(evaluation: Evaluation) -> Table:
    token = evaluation.terms.token
    return Table(
        ["model", "masked fraction", f"predicted {token}s", f"nats/{token}"],
        [
            [
                name,
                f"{one.low:.1f}–{one.high:.1f}",
                Number(one.predicted, ","),
                Number(one.cross_entropy, ".4f"),
            ]
            for name, bins in evaluation.calibration.items()
            for one in bins
        ],
    )


def counts(evaluation: Evaluation) -> str:
    """The number of residues, sequences and clusters scored, as a sentence."""
    terms, mlm15 = evaluation.terms, evaluation.model.perplexity_mlm15
    return (
        f"{evaluation.residues:,} {terms.token}s of {evaluation.sequences:,} {terms.sequence}s in "
        f"{evaluation.clusters:,} clusters"
        + ("" if mlm15 is None else f"; MLM-15 perplexity {mlm15:.3f} (no bound)")
    )


def bounds_text(evaluation: Evaluation) -> str:
    """The likelihoods and the verdict as text."""
    finding, table = judge(evaluation), tables_of(evaluation)["likelihoods"]
    lines = [table.text(), finding.headline, *finding.details]
    return "\n".join([*lines, counts(evaluation)])


def as_text(evaluation: Evaluation) -> str:
    """The verdict and all tables except the calibration as text."""
    tables = tables_of(evaluation)
    others = [
        tables[name].text() for name in ("identities", "given", "statistics") if name in tables
    ]
    return "\n\n".join([bounds_text(evaluation), *others])


def as_markdown(evaluation: Evaluation) -> str:
    """The verdict, the number of residues scored and the likelihoods as Markdown."""
    finding = judge(evaluation)
    return "\n\n".join(
        [
            " ".join([f"**{finding.headline}**", *finding.details]),
            f"On {counts(evaluation)}; {evaluation.estimator}; intervals are "
            f"{evaluation.interval}.",
            tables_of(evaluation)["likelihoods"].markdown(),
        ]
    )
