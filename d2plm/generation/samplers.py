"""Samplers: from templates with masks to proteins.

A template is a row of tokens with `<mask>` for each residue to generate; all others are kept.
Sequences of unequal lengths are packed together. Each draw is keyed by the sequence's index and
position, so the result does not depend on batching. In each step only the sequences with residues
that may change pass through the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.core.batch import PackedBatch, Relatives, under_budget
from d2plm.core.errors import DataError, ModelError
from d2plm.core.noise import Key, categorical, uniform
from d2plm.core.vocabulary import FIRST, Tokens, Vocabulary
from d2plm.data.loader import framed
from d2plm.generation.canvas import Canvas, wanted_in
from d2plm.generation.kernels import step_between, tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.paradigms.paradigm import Denoiser, Paradigm

ROUNDING = 1e-9  # tolerance for rounding a count down to a whole number


def sample(
    model: Denoiser,
    paradigm: Paradigm,
    templates: Sequence[Tokens],
    sampling: Sampling,
    *,
    max_length: int,
    relatives: Sequence[Sequence[NDArray[np.uint8]]] | None = None,
    ids: Sequence[int] | None = None,
    token_budget: int = 16384,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tokens]:
    """Fill the masks of each template; returns tokens [L] of the same dtype.

    Args:
        templates: tokens [L] of the paradigm's vocabulary, with `<mask>` for residues to generate.
        max_length: the model's limit in tokens, including `<cls>` and `<eos>`.
        relatives: relatives of each template, for a model that takes them.
        ids: identities of the templates, which key the draws with the seed; default 0, 1, …
        token_budget: tokens per forward pass; a longer sequence gets a pass of its own.
        progress: called with (steps done, their total), counted over all batches.

    Raises:
        ConfigError: if the settings are invalid.
        DataError: if there are no templates.
        ModelError: if a template exceeds the model's limit, or logits are not finite.
    """
    sampling, vocabulary = sampling.resolved(paradigm), paradigm.vocabulary
    for index, template in enumerate(templates):
        if len(template) + 2 > max_length:
            raise ModelError(
                f"sequence {index} has {len(template)} residues; the model takes {max_length - 2}"
            )
    results: list[Tokens] = [np.empty(0, dtype=vocabulary.dtype)] * len(templates)
    budget = paradigm.pass_tokens(token_budget)
    batches = _batches(templates, budget, relatives, ids or range(len(templates)), vocabulary)
    steps = [_steps(wanted_in(batch, vocabulary), sampling) for batch in batches]
    total, done = sum(steps), 0
    with torch.inference_mode():
        for host_batch in batches:
            canvas = Canvas(model, paradigm, sampling, host_batch.to(device))
            tokens = canvas.batch.computable()
            for tokens in _TRAJECTORIES[str(sampling.sampler)](canvas):  # noqa: B007  # the last
                progress(done := done + 1, total)
            filled = replace(host_batch, tokens=tokens.cpu())
            for index, row in zip(host_batch.sequence_ids.tolist(), filled.split(), strict=True):
                results[index] = row[1:-1].numpy().astype(vocabulary.dtype)
    return results


def _batches(
    templates: Sequence[Tokens],
    token_budget: int,
    relatives: Sequence[Sequence[NDArray[np.uint8]]] | None,
    ids: Sequence[int],
    vocabulary: Vocabulary,
) -> list[PackedBatch]:
    """All templates without padding, keyed by index.

    Templates with similar numbers of masks share a batch: they finish at about the same time, so it
    stays large to the end. The largest come first, so that memory runs out early or not at all.
    """
    if not len(templates):
        raise DataError("there are no sequences: give at least one")
    rows = [framed(template) for template in templates]
    size = [(int((row == vocabulary.mask).sum()), len(row)) for row in rows]
    largest_first = sorted(range(len(rows)), key=size.__getitem__, reverse=True)
    return [
        PackedBatch.pack(
            [rows[index] for index in chosen],
            sequence_ids=chosen,
            draw_ids=[ids[index] for index in chosen],
            relatives=None
            if relatives is None
            else Relatives.pack([relatives[index] for index in chosen]),
        )
        for chosen in under_budget(largest_first, lambda index: len(rows[index]), token_budget)
    ]


def _steps(wanted: Tensor, sampling: Sampling) -> int:
    most = int(wanted.max())
    if sampling.steps is None:
        return most
    return min(sampling.steps, most) if sampling.sampler == "confidence" else sampling.steps


def _times(canvas: Canvas) -> list[float]:
    """The `steps` + 1 times of the process, evenly spaced from the prior to the data."""
    assert canvas.sampling.steps is not None
    prior, data = canvas.paradigm.prior_time, canvas.paradigm.data_time
    return np.linspace(prior, data, canvas.sampling.steps + 1).tolist()


def _jumps(canvas: Canvas) -> Iterator[Tensor]:
    """`ancestral`, `euler` and `remdm`: each residue takes each step independently.

    They differ only in the step's distribution, see `step_between`. Drawing residues of one step
    independently is an error of the order of the step size.
    """
    paradigm, sampling = canvas.paradigm, canvas.sampling
    tokens = canvas.batch.computable()
    key = Key(sampling.seed).stream("prior")
    prior = paradigm.prior_tokens(key, *canvas.indices, dtype=tokens.dtype)
    tokens = tokens.index_copy(0, canvas.places, prior)
    for number, (start, stop) in enumerate(pairwise(_times(canvas))):
        key = Key(sampling.seed, number).stream("token")
        step = step_between(paradigm, sampling, start, stop)
        shown, draws = tokens[canvas.places], uniform(key, *canvas.indices)
        asked = paradigm.may_change(shown, draws, step).nonzero()[:, 0]
        log_p = canvas.log_probabilities(tokens, 1 - step.now, number, asked)
        distribution = paradigm.transition(tempered(log_p, sampling), shown[asked], step)
        drawn = categorical(key, distribution, *canvas.indices_of(asked))
        drawn = torch.where(drawn == 0, canvas.mask, drawn - 1 + FIRST)
        tokens = canvas.with_residues(tokens, drawn, asked)
        yield tokens


def _first_hitting(canvas: Canvas) -> Iterator[Tensor]:
    """One residue after another, each at its own time (Zheng et al., arXiv:2409.02908).

    A residue masked at the corrupted fraction u is still masked at u′ with probability u′/u, so the
    first of n masks is filled at u·U^(1/n) with U uniform, and is any of them with equal
    probability. This is `ancestral` without discretisation, at one evaluation per residue. Each
    sequence of a batch has its own times.
    """
    sampling, wanted, tokens = canvas.sampling, canvas.wanted, canvas.batch.computable()
    corrupted = torch.ones_like(canvas.share)
    for step in range(_steps(wanted, sampling)):
        key = Key(sampling.seed, step)
        draws = 1 - uniform(key.stream("time"), canvas.batch.draw_ids)  # positive
        corrupted = corrupted * draws ** (1 / (wanted - step).clamp(min=1).double())
        order = uniform(key.stream("place"), *canvas.indices)
        masked = tokens[canvas.places] == canvas.mask
        hit = canvas.lowest(order, masked, torch.ones_like(wanted)).nonzero()[:, 0]
        log_p = canvas.log_probabilities(tokens, corrupted, step, hit)
        tokens = canvas.with_residues(tokens, canvas.draw(key, log_p, hit), hit)
        yield tokens


def _by_confidence(canvas: Canvas) -> Iterator[Tensor]:
    """Keep the most confident residues at each step (MaskGIT: Chang et al., arXiv:2202.04200).

    A residue is drawn for every mask; the least probable of the n residues to generate are masked
    again, ⌈n·(1 − kept_s)⌉ of them but always fewer than before, so that a sequence takes at most n
    steps. With `remask`, residues filled in earlier compete too, by their probability now, although
    the model was not trained to judge residues that it sees. The confidence is the model's own,
    before temperature, top-k and top-p.

    Since unlikely residues are drawn again, the sampled distribution is sharper than the model's
    for any number of steps. The model is given the time that corresponds to the number of masks.
    """
    sampling, wanted, tokens = canvas.sampling, canvas.wanted, canvas.batch.computable()
    masks = wanted
    for step, stop in enumerate(_times(canvas)[1 : _steps(wanted, sampling) + 1]):
        every = tokens[canvas.places]
        competes = ((every == canvas.mask) | sampling.remask) & (masks > 0)[canvas.segments]
        asked = competes.nonzero()[:, 0]
        log_p = canvas.log_probabilities(tokens, masks / wanted.clamp(min=1).double(), step, asked)
        shown = every[asked].long()
        drawn = canvas.draw(Key(sampling.seed, step), log_p, asked)
        residues = torch.where(shown == canvas.mask, drawn, shown)
        confidence = torch.ones_like(canvas.segments, dtype=torch.float64)
        confidence[asked] = log_p.gather(-1, (residues - FIRST)[:, None])[:, 0].exp()
        planned = (wanted.double() * (1 - canvas.paradigm.kept(stop)) - ROUNDING).ceil().long()
        masks = torch.minimum(planned, masks - 1).clamp(min=0)
        hidden = canvas.lowest(confidence, competes, masks)[asked]
        tokens = canvas.with_residues(tokens, residues.masked_fill(hidden, canvas.mask), asked)
        yield tokens


_TRAJECTORIES: dict[str, Callable[[Canvas], Iterator[Tensor]]] = {
    "ancestral": _jumps,
    "euler": _jumps,
    "remdm": _jumps,
    "first_hitting": _first_hitting,
    "confidence": _by_confidence,
}
