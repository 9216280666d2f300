"""The verdict of an evaluation, as sentences that every output contains.

Does not import torch, which the image that prepares data lacks.
"""

import math
from dataclasses import dataclass
from typing import Literal

from d2plm.core.estimate import Estimate, Verdict, difference_text
from d2plm.evaluation.result import MODEL, Evaluation, GivenRelatives
from d2plm.evaluation.terms import REFERENCE

LITTLE = 0.05  # nats per residue below composition; a smaller gain is called little


@dataclass(frozen=True)
class Finding:
    """The verdict on a model.

    Attributes:
        baseline: the baseline with the lowest perplexity on the same residues.
        difference: model − baseline, nats per residue; negative if the model is better.
        headline: the verdict and its figures, after the perplexities given relatives, if any.
        details: further sentences: the consequences, and the verdicts on other models.
        tone: selects the colour on the page.
    """

    baseline: str
    difference: Estimate
    headline: str
    details: tuple[str, ...]
    tone: Literal["good", "mixed", "bad"]


def judge(evaluation: Evaluation) -> Finding:
    """Compare the model with the best of all baselines, and with other models.

    The composition baseline shows whether the model has learnt anything of the order of residues;
    the best baseline, often an n-gram for a single protein family, whether it is worth using.
    """
    baselines, terms = evaluation.baselines, evaluation.terms
    best = min(baselines, key=lambda name: baselines[name].perplexity.value)
    difference, gain = (baselines[name].difference for name in (best, terms.reference))
    verdict, is_known = difference.verdict, difference.interval is not None
    compared = f"{verdict} the best baseline, {best}"
    if evaluation.given_relatives is not None:
        headline = f"{given_relatives_sentence(evaluation.given_relatives)} Alone: {compared}"
    else:
        headline = f"{compared[0].upper()}{compared[1:]}"
    of_each = f" in a {terms.sequence}" if terms.reference == REFERENCE else ""
    details = []
    little = gain.value > -LITTLE
    if not is_known:
        details.append(
            f"All held-out {terms.sequence}s are in one {terms.cluster}, so there is no interval "
            "and no conclusion."
        )
    elif gain.verdict is Verdict.BETTER:
        percent = f"{100 * (1 - math.exp(gain.value)):.{1 if little else 0}f}"
        details.append(
            f"The model has learnt {'little' if little else 'something'} of the order of "
            f"{terms.token}s: its perplexity is {percent} % below that of the {terms.reference} "
            f"baseline, which knows how often each {terms.letter} occurs{of_each} and nothing of "
            "their order."
        )
    else:
        details.append(
            f"It is {gain.verdict} the {terms.reference} baseline, which knows nothing of the "
            f"order of {terms.token}s: treat its {terms.sequence}s as random sequences."
        )
    if is_known and best != terms.reference and verdict is not Verdict.BETTER:
        details.append(
            f"The {best} baseline, counted in the training {terms.sequence}s, describes the "
            "held-out ones at least as well: longer training, more data or another learning rate "
            "comes first."
        )
    for name, other in evaluation.others.items():
        text = difference_text(other.difference, terms.token)
        details.append(f"{MODEL.capitalize()} is {other.difference.verdict} {name}: {text}.")
    tone: Literal["good", "mixed", "bad"] = "good" if verdict is Verdict.BETTER else "bad"
    if not is_known or (verdict is Verdict.BETTER and little):
        tone = "mixed"
    perplexities = (bound.perplexity.value for bound in (evaluation.model, baselines[best]))
    against = " against ".join(f"{perplexity:.2f}" for perplexity in perplexities)
    paired = f"perplexity {against}, {difference_text(difference, terms.token)}, paired."
    return Finding(best, difference, f"{headline}: {paired}", tuple(details), tone)


def plain_sentence(evaluation: Evaluation) -> str:
    """How good the model is, in words that need no statistics."""
    terms, best = evaluation.terms, judge(evaluation).baseline
    own, its = (
        f"{bound.perplexity.value:.1f}" for bound in (evaluation.model, evaluation.baselines[best])
    )
    alone = f"{own} (the best baseline: {its})"
    if evaluation.given_relatives is None or not evaluation.given_relatives.below:
        return (
            f"in a {terms.sequence} that it has not seen, the model hesitates among {alone} "
            f"{terms.letter}s at each {terms.token}"
        )
    below = evaluation.given_relatives.below
    row = below[len(below) // 2]
    return (
        f"given relatives less than {row.identity:.0%} identical to a {terms.sequence} that it has "
        f"not seen, if there are any, the model hesitates among {row.model.perplexity.value:.1f} "
        f"{terms.letter}s at each {terms.token} (a profile HMM of them: "
        f"{row.best.perplexity.value:.1f}); without relatives among {alone}"
    )


def next_steps(evaluation: Evaluation, model_dir: object) -> dict[str, str]:
    """Suggested next step → its command or settings, most important first."""
    terms = evaluation.terms
    things = f"{terms.sequence}s"
    if terms.unit is None:
        steps = {
            "new members of your family": "d2plm generate relatives=family.fasta number=30",
            "effects of mutations": "d2plm score wildtype.fasta mutations=variants.csv "
            "relatives=family.fasta",
            "a model of your family": f"d2plm adapt family.fasta init_from={model_dir}",
            f"likelihoods of {things}": f"d2plm score {things}.fasta model_dir={model_dir}",
        }
    else:
        steps = {
            f"more {things}": f"d2plm generate {model_dir} number=100",
            f"likelihoods of {things}": f"d2plm score FILE model_dir={model_dir}",
        }
    if judge(evaluation).difference.verdict is Verdict.BETTER:
        return steps
    more = f"a larger trainer.max_steps, or more {things} in data.input"
    return {"a better model": more, **steps}


def given_relatives_sentence(given: GivenRelatives) -> str:
    pairs = [
        f"perplexity {row.model.perplexity.value:.2f} below {row.identity:.0%} identity (best "
        f"profile HMM: {row.best.perplexity.value:.2f})"
        for row in given.below
    ]
    of_each = f"relatives of each of {given.proteins:,} held-out proteins"
    return f"Given up to {given.most} {of_each}: {', '.join(pairs)}."
