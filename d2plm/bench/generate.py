"""How fast generation is, against the loop that anyone would write.

That loop takes one sequence at a time, all of it at every step. Draws are keyed by sequence and
position, so that both arms must give the same sequences. In fp64 they do, to the letter, and no
ratio is given otherwise. In fp32 the order in which a matrix product adds up differs with the size
of the batch, which moves a draw that falls on the boundary between two residues: once in hundreds
of thousands. The turns that are timed are in fp32.
"""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2plm.bench.arms import (
    Arm,
    Timings,
    Turns,
    require_same_losses,
    serve_arms,
    take_turns,
)
from d2plm.bench.rows import Row, ratio_row
from d2plm.core.alphabet import CANONICAL_START, CANONICAL_STOP, MASK
from d2plm.core.errors import BenchError, require_choice
from d2plm.core.noise import Key, categorical, uniform
from d2plm.data.fasta import read_fasta
from d2plm.data.loader import framed
from d2plm.export.exported_model import load_export
from d2plm.generation.kernels import step_between, tempered
from d2plm.generation.samplers import sample
from d2plm.generation.settings import Sampling
from d2plm.model.config import DiTConfig
from d2plm.model.dit import DiT
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.base import Denoiser, Paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion

MODULE = "d2plm.bench.generate"
PACKED, PLAIN = "packed", "plain loop"
SAMPLERS = {"ancestral": "ancestral", "first hitting": "first_hitting", "infilling": "ancestral"}
CASES = tuple(SAMPLERS)
GAP = 20  # residues wanted of each protein in infilling
WARM_UP = 2  # the first turn, in fp64, and one in fp32
DIGITS = 12  # hexadecimal ones of a digest: a whole number that a float holds

Tokens = NDArray[np.uint8]


def bench_generate(
    proteins: Path,
    model: dict[str, Any],
    *,
    model_dir: Path | None = None,
    cases: Sequence[str] = CASES,
    number: int = 4,
    steps: int | None = None,
    token_budget: int = 16384,
    turns: int = 3,
    threads: int | None = 1,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Row], list[Timings]]:
    """Measure the samplers against the plain loop, on the CPU.

    Args:
        proteins: FASTA of real proteins, for their lengths, and to fill gaps in.
        model: settings of a `DiTConfig`, whose weights are random.
        model_dir: an exported model in its place.
        cases: which of `CASES`.
        number: sequences of a turn, with lengths spread evenly over those of the proteins.
        steps: of `ancestral`; None takes the paradigm's default.
        token_budget: of the packed arm's forward passes.
        turns: of each arm.
        threads: of each arm.
        report: called with one line per stage.

    Raises:
        BenchError: the arms' sequences differ, an arm fails, or the model's source is not the mask.
        ConfigError: a case or a setting is impossible.
    """
    paradigm = AbsorbingDiffusion() if model_dir is None else load_paradigm(model_dir)
    if paradigm.source != "mask":
        raise BenchError(f"{model_dir}: {paradigm.name} has no masks; give another model_dir")
    rows: list[Row] = []
    timings: list[Timings] = []
    for case in cases:
        require_choice("cases", case, CASES)
        sampling = _sampling(case, steps, seed=0).resolved(paradigm)
        report(f"{case}: {number} sequences, sampler={sampling.sampler} steps={sampling.steps}")
        work: dict[str, Any] = {
            "case": case,
            "steps": steps,
            "number": number,
            "proteins": str(proteins),
        }
        work |= {"model": model, "model_dir": None if model_dir is None else str(model_dir)}
        arms = [
            Arm(f"{case}, {PACKED}", MODULE, "packed", {**work, "token_budget": token_budget}),
            Arm(f"{case}, {PLAIN}", MODULE, "plain", work),
        ]
        taken = take_turns(arms, turns=turns, warm_up=WARM_UP, threads=threads, report=report)
        rows += _rows(case, number, *taken.values())
        timings += taken.values()
    return rows, timings


def _rows(case: str, number: int, packed: Timings, plain: Timings) -> list[Row]:
    first = [Timings(timing.name, losses=timing.losses[:1]) for timing in (packed, plain)]
    try:
        require_same_losses(first, 0.0)
    except BenchError as error:
        raise BenchError(
            f"{case}: the packed sampler and the plain loop gave other sequences in fp64 from the "
            "same draws; no ratio is given. This is a defect of the sampler"
        ) from error
    equal = [a == b for a, b in zip(packed.losses[1:], plain.losses[1:], strict=True)]
    return [
        *(Row(arm.name, arm.per_second(number), "sequences/CPU-s") for arm in (packed, plain)),
        ratio_row(f"{case}, plain loop ÷ packed", plain.seconds, packed.seconds, 1.0),
        Row(
            f"{case}: tokens computed, plain loop ÷ packed",
            plain.counts["tokens"] / packed.counts["tokens"],
            "×",
        ),
        Row(f"{case}: turns in fp32 with the same sequences", 100 * sum(equal) / len(equal), "%"),
    ]


def _sampling(case: str, steps: int | None, seed: int) -> Sampling:
    sampler = SAMPLERS[case]
    return Sampling(sampler, None if sampler == "first_hitting" else steps, seed=seed)


def _templates(case: str, proteins: Path, number: int, max_length: int) -> list[Tokens]:
    """From scratch masks alone; for infilling a gap in the middle of each protein."""
    records = (record.tokens for record in read_fasta(proteins))
    fitting = sorted((tokens for tokens in records if len(tokens) + 2 <= max_length), key=len)
    if not fitting:
        raise BenchError(f"{proteins}: no protein is as short as {max_length - 2} residues")
    spread = (2 * np.arange(number) + 1) * len(fitting) // (2 * number)
    templates = []
    for protein in (fitting[index] for index in spread):
        wanted = GAP if case == "infilling" else len(protein)
        start = max(len(protein) - wanted, 0) // 2
        template = protein.copy()
        template[start : start + wanted] = MASK
        templates.append(template)
    return templates


def _model(settings: dict[str, Any]) -> DiT:
    """Random weights, none of them zero, so that what the model sees counts."""
    model = DiT(DiTConfig(**settings))
    model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1, generator=generator)
    return model.eval()


def _serve(
    turns: Turns,
    generate: Callable[[Denoiser, Paradigm, list[Tokens], Sampling], list[Tokens]],
    *,
    case: str,
    steps: int | None,
    number: int,
    proteins: str,
    model: dict[str, Any],
    model_dir: str | None,
) -> None:
    """An arm: a turn is a generation of all sequences, with a seed of its own."""
    exported = None if model_dir is None else load_export(model_dir)
    paradigm = AbsorbingDiffusion() if exported is None else exported.paradigm
    network = _model(model) if exported is None else exported.model
    limit = network.config.max_position_embeddings
    templates = _templates(case, Path(proteins), number, limit)
    turns.counts["tokens"] = 0

    def counting(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
        turns.counts["tokens"] += len(tokens)
        return network(tokens, cu_seqlens, max_seqlen, times)

    turns.begin()
    for seed in itertools.count():
        network.to(torch.float32 if seed else torch.float64)
        with torch.inference_mode():
            rows = generate(counting, paradigm, templates, _sampling(case, steps, seed))
        turns(int(hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()[:DIGITS], 16))


def _packed(turns: Turns, *, token_budget: int, **work: Any) -> None:
    def generate(
        model: Denoiser, paradigm: Paradigm, templates: list[Tokens], sampling: Sampling
    ) -> list[Tokens]:
        longest = max(map(len, templates)) + 2
        return sample(
            model, paradigm, templates, sampling, max_length=longest, token_budget=token_budget
        )

    _serve(turns, generate, **work)


# --- the plain loop ----------------------------------------------------------------------------


def _plain(turns: Turns, **work: Any) -> None:
    _serve(turns, plain_loop, **work)


def plain_loop(
    model: Denoiser, paradigm: Paradigm, templates: Sequence[Tokens], sampling: Sampling
) -> list[Tokens]:
    """What `sample` gives by `ancestral` and `first_hitting`, one sequence after another."""
    sampling = sampling.resolved(paradigm)
    fill = {"ancestral": _ancestral, "first_hitting": _first_hitting}[str(sampling.sampler)]
    filled = []
    for index, template in enumerate(templates):
        tokens = torch.from_numpy(framed(template))
        fill(model, paradigm, sampling, tokens, torch.tensor(index))
        filled.append(tokens.numpy()[1:-1])
    return filled


def _ancestral(
    model: Denoiser, paradigm: Paradigm, sampling: Sampling, tokens: Tensor, index: Tensor
) -> None:
    assert sampling.steps is not None
    places = (tokens == MASK).nonzero()[:, 0]
    share = _share_of_masks(tokens)
    times = np.linspace(paradigm.prior_time, paradigm.data_time, sampling.steps + 1).tolist()
    for step, (start, stop) in enumerate(pairwise(times)):
        log_p = _log_p(model, paradigm, tokens, share * (1 - paradigm.kept(start)))[places]
        between = step_between(paradigm, sampling, start, stop)
        distribution = paradigm.transition(tempered(log_p, sampling), tokens[places], between)
        key = Key(sampling.seed, step).stream("token")
        drawn = categorical(key, distribution, index, places)
        shown = torch.where(drawn == 0, MASK, drawn - 1 + CANONICAL_START)
        tokens[places] = shown.to(tokens.dtype)


def _first_hitting(
    model: Denoiser, paradigm: Paradigm, sampling: Sampling, tokens: Tensor, index: Tensor
) -> None:
    corrupted = _share_of_masks(tokens)
    for step, left in enumerate(range(int((tokens == MASK).sum()), 0, -1)):
        key, masked = Key(sampling.seed, step), (tokens == MASK).nonzero()[:, 0]
        corrupted = corrupted * (1 - uniform(key.stream("time"), index)) ** (1 / left)
        place = masked[uniform(key.stream("place"), index, masked).argmin()][None]
        log_p = _log_p(model, paradigm, tokens, corrupted)[place]
        probabilities = tempered(log_p, sampling).exp()
        drawn = categorical(key.stream("residue"), probabilities, index, place)
        tokens[place] = (drawn + CANONICAL_START).to(tokens.dtype)


def _share_of_masks(tokens: Tensor) -> Tensor:
    """What the masks are of the residues that can be corrupted, float64."""
    masked = tokens == MASK
    canonical = (tokens >= CANONICAL_START) & (tokens < CANONICAL_STOP)
    return masked.sum().double() / (masked | canonical).sum()


def _log_p(model: Denoiser, paradigm: Paradigm, tokens: Tensor, corrupted: Tensor) -> Tensor:
    """Of every residue of the one sequence, float64 [T, 20]."""
    time = paradigm.time_at_corrupted_fraction(corrupted[None]).float()
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return paradigm.log_probabilities(model(tokens, bounds, len(tokens), time)).double()


if __name__ == "__main__":
    serve_arms({"packed": _packed, "plain": _plain})
