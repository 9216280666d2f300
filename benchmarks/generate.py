"""The samplers against a plain loop: one sequence at a time, all of it at every step.

Draws are keyed by sequence and position, so that both must generate the same sequences. In fp64
they do, to the letter, and no ratio is reported otherwise. In fp32 the order of the sums in a
matrix product depends on the size of the batch, which moves a draw on the boundary between two
residues: once in hundreds of thousands. The turns that are timed are in fp32, on the CPU.

    python -m benchmarks.generate
    python -m benchmarks.generate --model-dir runs/demo/diffusion/model --cases infilling
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.measure import PROTEINS, BenchError, Row, alternate, parser, publish, ratio_row, say
from benchmarks.workload import fill_weights, model_settings
from d2plm.core.noise import Key, categorical, uniform
from d2plm.core.vocabulary import CANONICAL_START, CANONICAL_STOP, MASK
from d2plm.data.fasta import read_fasta
from d2plm.data.loader import framed
from d2plm.export.exported_model import load_export
from d2plm.generation.kernels import step_between, tempered
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Denoiser, Paradigm

SAMPLERS = {"ancestral": "ancestral", "first hitting": "first_hitting", "infilling": "ancestral"}
PACKED, PLAIN = "packed", "plain loop"
GAP = 20  # residues to fill in, of each protein

Tokens = NDArray[np.uint8]


def case_rows(
    model: DiT, paradigm: Paradigm, case: str, templates: list[Tokens], given: argparse.Namespace
) -> list[Row]:
    """Measure a sampler against the plain loop.

    Raises:
        BenchError: the sequences differ in fp64.
    """
    computed = {PACKED: 0, PLAIN: 0}

    @torch.inference_mode()
    def generate(name: str, seed: int) -> list[bytes]:
        def counting(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
            computed[name] += len(tokens)
            return model(tokens, cu_seqlens, max_seqlen, times)

        steps = None if case == "first hitting" else given.steps
        settings = Sampling.of({"sampler": SAMPLERS[case], "steps": steps, "seed": seed})
        if name == PLAIN:
            found = plain_loop(counting, paradigm, templates, settings)
        else:
            longest = max(map(len, templates)) + 2
            found = sample(
                counting,
                paradigm,
                templates,
                settings,
                max_length=longest,
                token_budget=given.token_budget,
            )
        return [row.tobytes() for row in found]

    say(f"{case}: {len(templates)} sequences, in fp64")
    model.double()
    if generate(PACKED, 0) != generate(PLAIN, 0):
        raise BenchError(
            f"{case}: the packed sampler and the plain loop generated other sequences in fp64 from "
            "the same draws; no ratio is reported. This is a defect of the sampler"
        )
    model.float()
    computed.update(dict.fromkeys(computed, 0))
    made: dict[str, dict[int, list[bytes]]] = {PACKED: {}, PLAIN: {}}

    def turn(name: str, number: int) -> None:
        made[name][number] = generate(name, number + 1)

    works = {name: partial(turn, name) for name in made}
    seconds = alternate(works, given.turns)
    equal = sum(made[PACKED][number] == made[PLAIN][number] for number in range(given.turns))
    ratio = computed[PLAIN] / computed[PACKED]
    return [
        *(
            Row(f"{case}, {name}", len(templates) / median(taken), "sequences/CPU-s")
            for name, taken in seconds.items()
        ),
        ratio_row(f"{case}, plain loop ÷ packed", seconds[PLAIN], seconds[PACKED], 1.0),
        Row(f"{case}: tokens computed, plain loop ÷ packed", ratio, "×"),
        Row(f"{case}: turns in fp32 with the same sequences", 100 * equal / given.turns, "%"),
    ]


def _templates(case: str, proteins: Path, number: int, max_length: int) -> list[Tokens]:
    """Masks alone, or for infilling a gap in the middle of each protein."""
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


# --- the plain loop ----------------------------------------------------------------------------


def plain_loop(
    model: Denoiser, paradigm: Paradigm, templates: Sequence[Tokens], sampling: Sampling
) -> list[Tokens]:
    """The result of `sample` by `ancestral` and `first_hitting`, one sequence after another."""
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
    fraction = _masked_fraction(tokens)
    times = np.linspace(paradigm.prior_time, paradigm.data_time, sampling.steps + 1).tolist()
    for step, (start, stop) in enumerate(pairwise(times)):
        log_p = _log_p(model, paradigm, tokens, fraction * (1 - paradigm.kept(start)))[places]
        distribution = paradigm.transition(
            tempered(log_p, sampling), tokens[places], step_between(paradigm, sampling, start, stop)
        )
        key = Key(sampling.seed, step).stream("token")
        drawn = categorical(key, distribution, index, places)
        shown = torch.where(drawn == 0, MASK, drawn - 1 + CANONICAL_START)
        tokens[places] = shown.to(tokens.dtype)


def _first_hitting(
    model: Denoiser, paradigm: Paradigm, sampling: Sampling, tokens: Tensor, index: Tensor
) -> None:
    corrupted = _masked_fraction(tokens)
    for step, left in enumerate(range(int((tokens == MASK).sum()), 0, -1)):
        key, masked = Key(sampling.seed, step), (tokens == MASK).nonzero()[:, 0]
        corrupted = corrupted * (1 - uniform(key.stream("time"), index)) ** (1 / left)
        place = masked[uniform(key.stream("place"), index, masked).argmin()][None]
        log_p = _log_p(model, paradigm, tokens, corrupted)[place]
        probabilities = tempered(log_p, sampling).exp()
        drawn = categorical(key.stream("residue"), probabilities, index, place)
        tokens[place] = (drawn + CANONICAL_START).to(tokens.dtype)


def _masked_fraction(tokens: Tensor) -> Tensor:
    """Masks as a fraction of the residues that can be corrupted, float64."""
    masked = tokens == MASK
    canonical = (tokens >= CANONICAL_START) & (tokens < CANONICAL_STOP)
    return masked.sum().double() / (masked | canonical).sum()


def _log_p(model: Denoiser, paradigm: Paradigm, tokens: Tensor, corrupted: Tensor) -> Tensor:
    """Of every residue of the one sequence, float64 [T, 20]."""
    time = paradigm.time_at_corrupted_fraction(corrupted[None]).float()
    bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
    return paradigm.log_probabilities(model(tokens, bounds, len(tokens), time)).double()


def main() -> None:
    """The command line."""
    made = parser("generate", __doc__)
    made.set_defaults(proteins=PROTEINS.with_name("uniprot_500.fasta.gz"))
    made.add_argument("--model", default="nano", help="a file of configs/model; random weights")
    made.add_argument("--model-dir", type=Path, help="an exported model instead")
    made.add_argument("--cases", nargs="*", choices=SAMPLERS, default=list(SAMPLERS))
    made.add_argument("--number", type=int, default=4, help="of sequences")
    made.add_argument("--steps", type=int, help="of ancestral sampling")
    made.add_argument("--token-budget", type=int, default=16384, help="of a forward pass")
    made.add_argument("--turns", type=int, default=3)
    made.add_argument("--threads", type=int, default=1)
    given = made.parse_args()
    torch.set_num_threads(given.threads)
    if given.model_dir is not None:
        exported = load_export(given.model_dir)
        model, paradigm = exported.model, exported.paradigm
    else:
        model, paradigm = DiT(DiTConfig(**model_settings(given.model))).eval(), AbsorbingDiffusion()
        fill_weights(model, 0, std=0.1)
    if paradigm.source != "mask":
        raise BenchError(f"{paradigm.name} has no masks; choose another model")
    longest, rows = model.config.max_position_embeddings, list[Row]()
    for case in given.cases:
        templates = _templates(case, given.proteins, given.number, longest)
        rows += case_rows(model, paradigm, case, templates, given)
    publish(given, rows)


if __name__ == "__main__":
    main()
