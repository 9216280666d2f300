"""Losses, bounds and samples of proteins, as they were before there were other vocabularies.

The values were computed with commit 3a026bc; print those of the present code with
`python -m tests.unit.paradigms.test_pinned_values`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.core.batch import PackedBatch, positions, segment_ids
from d2plm.core.noise import Key
from d2plm.core.vocabulary import decode, encode
from d2plm.data.loader import framed
from d2plm.evaluation.likelihood import score_sequences
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm, denoise

PROTEINS = ("MKVLAAGXXWY", "ACDEFGHIKLMNPQRSTVWYU", "GG")
TEMPLATES = ("________", "MK__LX_Y<mask>", "_")
PARADIGMS: dict[str, Paradigm] = {
    "diffusion": AbsorbingDiffusion(),
    "diffusion mean": AbsorbingDiffusion(loss="mean"),
    "diffusion shift": AbsorbingDiffusion(shift=True),
    "diffusion continuous": AbsorbingDiffusion(
        num_train_timesteps=None, schedule="cosine", time_sampling="low_variance"
    ),
    "flow": MaskFlowMatching(),
    "uniform": UniformFlowMatching(),
    "uniform kl": UniformFlowMatching(loss="generalised_kl"),
    "uniform mean": UniformFlowMatching(loss="mean"),
}
FILE = Path(__file__).with_name("pinned_values.json")


def model(tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor) -> Tensor:
    """Logits [T, 33], float64, which depend on the whole segment and on the time."""
    segments = segment_ids(cu_seqlens, len(tokens))
    place = positions(cu_seqlens, segments)
    value = (tokens.double() * (1 + place)).sin()
    context = torch.zeros(len(times), dtype=torch.float64).index_add_(0, segments, value)
    angle = value + context[segments] + times.double()[segments]
    return 2 * torch.sin(angle[:, None] + 0.7 * torch.arange(33, dtype=torch.float64))


def digest(tensor: Tensor) -> str:
    content = f"{tensor.dtype} {tensor.tolist()}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def values(paradigm: Paradigm) -> dict[str, Any]:
    batch = PackedBatch.pack([framed(encode(text)) for text in PROTEINS], token_budget=48)
    corrupted = paradigm.corrupt(batch, Key(3, 5))
    logits = denoise(model, batch, corrupted.tokens, corrupted.times).requires_grad_()
    loss, count = paradigm.loss(logits, batch, corrupted)
    (gradient,) = torch.autograd.grad(loss, logits)
    unigram = np.arange(1, 21) / 210
    scores = score_sequences(
        model, paradigm, [encode(text) for text in PROTEINS], masks_per_sequence=3, unigram=unigram
    )
    templates = [parse_template(text, text) for text in TEMPLATES]
    return {
        "tokens": digest(corrupted.tokens),
        "targets": digest(corrupted.targets),
        "loss": [float(loss.detach()), float(count), float(gradient.square().sum())],
        "bound": scores.draws.flatten().tolist(),
        "mlm15": None if scores.mlm15 is None else scores.mlm15.nats.tolist(),
        "samples": {
            sampler: [
                decode(tokens)
                for tokens in sample(
                    model, paradigm, templates, sampling(sampler), max_length=32, token_budget=16
                )
            ]
            for sampler in paradigm.samplers
        },
    }


def sampling(sampler: str) -> Sampling:
    steps = None if sampler == "first_hitting" else 6
    corrector = 2.0 if sampler == "euler" else 0.0
    return Sampling(
        sampler=sampler, steps=steps, temperature=0.9, top_p=0.95, corrector=corrector, seed=1
    )


@pytest.mark.parametrize("name", PARADIGMS)
def test_proteins_have_the_losses_bounds_and_samples_that_they_had(name: str) -> None:
    expected, found = json.loads(FILE.read_text())[name], values(PARADIGMS[name])
    for exact in ("tokens", "targets", "samples"):
        assert found[exact] == expected[exact]
    for real in ("loss", "bound", "mlm15"):
        if expected[real] is None:
            assert found[real] is None
        else:
            np.testing.assert_allclose(found[real], expected[real], rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    print(json.dumps({name: values(one) for name, one in PARADIGMS.items()}, indent=1))
