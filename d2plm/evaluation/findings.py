"""The findings of an evaluation: reading its document, and the verdict on the model.

The model card, the report, the registry, the run's description and the terminal render the verdict
formulated here. This module does not need torch, which the image that prepares data lacks.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from d2plm.core.errors import DataError
from d2plm.core.files import read_json
from d2plm.core.number_text import difference_text, interval_text
from d2plm.evaluation.terms import REFERENCE, terms_of

EVALUATION = "evaluation.json"
SEQUENCE_SCORES = "sequence_scores.npz"  # beside it
FORMAT_VERSION = 3
MODEL = "this model"
PROFILE, ALIGNED = "profile HMMs", "HMM of their alignment"  # baselines that are given relatives
LITTLE = 0.05  # nats per residue below composition; a smaller gain is called little

Outcome = Literal["better", "worse", "undecided"]


@dataclass(frozen=True)
class Finding:
    """The verdict on a model.

    Attributes:
        baseline: the best baseline, with the lowest perplexity on the same residues.
        difference: model − baseline, nats per residue; negative if the model is better.
        interval: 95 % interval of the difference; None for a single homology cluster.
        outcome: result of the comparison with the best baseline, by the interval.
        headline: the outcome and its figures, after the perplexities given relatives, if any.
        details: further sentences with the consequences.
        tone: good, mixed or bad, for the page's colours.
    """

    baseline: str
    difference: float
    interval: list[float] | None
    outcome: Outcome
    headline: str
    details: tuple[str, ...]
    tone: Literal["good", "mixed", "bad"]


def judge(evaluation: dict[str, Any]) -> Finding:
    """Compare the model with the best of all baselines.

    Composition determines whether the model has learnt anything about the order of residues; the
    best baseline, for one protein family often an n-gram, whether the model is worth using.

    Args:
        evaluation: as `summarise` returned it.
    """
    baselines, terms = evaluation["baselines"], terms_of(evaluation)
    paired = [name for name in baselines if name in evaluation["paired"]]
    best = min(paired, key=lambda name: float(baselines[name]["perplexity"]))
    difference, interval, outcome = against(evaluation, best)
    ours, theirs = evaluation["model"]["perplexity"], baselines[best]["perplexity"]
    standing = {"better": "Better", "worse": "Worse", "undecided": "Not shown to be better"}
    if evaluation["given_relatives"] is not None:
        standing = {name: f"Alone: {text.lower()}" for name, text in standing.items()}
    gain, _, over_reference = against(evaluation, terms.reference)
    of_each = f" in a {terms.sequence}" if terms.reference == REFERENCE else ""
    details = []
    if interval is None:
        details.append(
            f"All held-out {terms.sequence}s are in one {terms.cluster}, so there is no interval "
            "and no conclusion."
        )
    elif over_reference == "better":
        little = gain > -LITTLE
        percent = f"{100 * (1 - math.exp(gain)):.{1 if little else 0}f}"
        details.append(
            f"The model has learnt {'little' if little else 'something'} of the order of "
            f"{terms.token}s: its perplexity is {percent} % below that of the {terms.reference} "
            f"baseline, which knows how often each {terms.letter} occurs{of_each} and nothing of "
            "their order."
        )
    else:
        verdict = "worse" if over_reference == "worse" else "not shown to be better"
        details.append(
            f"It is {verdict} than the {terms.reference} baseline, which knows nothing of the "
            f"order of {terms.token}s: treat its {terms.sequence}s as random sequences."
        )
    if interval is not None and best != terms.reference and outcome != "better":
        details.append(
            f"The {best} baseline, counted in the training {terms.sequence}s, describes the "
            "held-out ones at least as well: longer training, more data or another learning rate "
            "comes first."
        )
    tone: Literal["good", "mixed", "bad"] = "good" if outcome == "better" else "bad"
    if interval is None or (outcome == "better" and gain > -LITTLE):
        tone = "mixed"
    return Finding(
        baseline=best,
        difference=difference,
        interval=interval,
        outcome=outcome,
        headline=given_relatives_sentence(evaluation)
        + (
            f"{standing[outcome]} than the best baseline, {best}: perplexity {ours:.2f} against "
            f"{theirs:.2f}, {difference_text(evaluation['paired'][best], terms.token)}, paired."
        ),
        details=tuple(details),
        tone=tone,
    )


def next_steps(evaluation: dict[str, Any], model_dir: object) -> dict[str, str]:
    """Suggested next steps → the command or settings, the most important first."""
    terms = terms_of(evaluation)
    things = f"{terms.sequence}s"
    family = {"a family of your own": f"d2plm adapt family.fasta init_from={model_dir}"}
    file = "proteins.fasta" if terms.unit is None else "FILE"
    steps = {
        f"more {things}": f"d2plm generate {model_dir} number=100",
        **(family if terms.unit is None else {}),
        f"likelihoods of {things}": f"d2plm score {file} model_dir={model_dir}",
    }
    if judge(evaluation).outcome == "better":
        return steps
    more = f"a larger trainer.max_steps, or more {things} in data.input"
    return {"a better model": more, **steps}


def given_relatives_sentence(evaluation: dict[str, Any]) -> str:
    """The perplexities given relatives and of the better HMM, with a blank at the end, or ""."""
    given = evaluation["given_relatives"]
    if given is None:
        return ""
    pairs = [
        f"perplexity {row['model']['perplexity']:.2f} below {row['identity']:.0%} identity (best "
        f"profile HMM: {row[best_profile(row)]['perplexity']:.2f})"
        for row in given["below"]
    ]
    most, proteins = given["choice"]["most"], given["choice"]["proteins"]
    of_each = f"relatives of each of {proteins:,} held-out proteins"
    return f"Given up to {most} {of_each}: {', '.join(pairs)}. "


def best_profile(row: dict[str, Any]) -> str:
    """The baseline with the lower perplexity, of a row of `given_relatives`."""
    return min(PROFILE, ALIGNED, key=lambda name: float(row[name]["perplexity"]))


def against(evaluation: dict[str, Any], name: str) -> tuple[float, list[float] | None, Outcome]:
    """(difference, interval, outcome) of the model against the baseline or other model `name`."""
    paired = evaluation["paired"][name]
    interval = paired["interval"]
    outcome: Outcome = "undecided"
    if interval is not None and max(interval) < 0:
        outcome = "better"
    elif interval is not None and min(interval) > 0:
        outcome = "worse"
    return paired["nelbo_difference"], interval, outcome


def read_evaluation(folder: Path) -> dict[str, Any] | None:
    """The evaluation in a folder, or None where there is none.

    Raises:
        DataError: if it is damaged or of another version.
    """
    evaluation = read_json(folder / EVALUATION)
    if evaluation is not None and evaluation.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{folder / EVALUATION}: was written by another version of D2PLM; run d2plm evaluate "
            "again"
        )
    return evaluation


def likelihoods(evaluation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The likelihoods by name: baselines, other models and the model, the best last."""
    rows = {**evaluation["baselines"], **evaluation["others"], MODEL: evaluation["model"]}
    return dict(sorted(rows.items(), key=lambda row: -row[1]["perplexity"]))


def known_interval(evaluation: dict[str, Any], name: str, key: str, form: str) -> str:
    """The interval of a figure of a model or baseline, as text; "" where it cannot have one."""
    if terms_of(evaluation).unit is not None and name not in (MODEL, *evaluation["paired"]):
        return ""
    return interval_text(likelihoods(evaluation)[name][f"{key}_interval"], form)


def likelihood_table(evaluation: dict[str, Any]) -> str:
    """`likelihoods` as a Markdown table, the model's row in bold."""
    unit, token = terms_of(evaluation).unit, terms_of(evaluation).token
    heading, rule = f"| | perplexity | 95 % interval | nats/{token} |", "|:---|---:|:---:|---:|"
    if unit is not None:
        heading, rule = f"{heading} bits/{unit} | 95 % interval |", f"{rule}---:|:---:|"
    lines = [heading, rule]
    for name, values in likelihoods(evaluation).items():
        interval = known_interval(evaluation, name, "perplexity", ".3f")
        cells = [name, f"{values['perplexity']:.3f}", interval, f"{values['nelbo']:.4f}"]
        if unit is not None:
            key = f"bits_per_{unit}"
            cells += [f"{values[key]:.4f}", known_interval(evaluation, name, key, ".4f")]
        shown = [f"**{cell}**" for cell in cells] if name == MODEL else cells
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)
