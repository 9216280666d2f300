"""The loss of a large vocabulary, in chunks, is that of whole logits, and holds no whole logits."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST
from d2plm.data.loader import framed
from d2plm.model.dit import DiT
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.training.forecast import counting_saved
from tests.conftest import DiTFactory, MonkeyPatch
from tests.unit.paradigms.numbered_tokens import NumberedTokens, of

VOCABULARY = NumberedTokens(5000)
CHUNK = 7  # positions
PARADIGMS: list[tuple[type[Paradigm], dict[str, Any]]] = [
    (AbsorbingDiffusion, {"loss": "elbo"}),
    (AbsorbingDiffusion, {"loss": "mean", "shift": True}),
    (MaskFlowMatching, {"loss": "elbo", "time_sampling": "low_variance"}),
    *((UniformFlowMatching, {"loss": loss}) for loss in UniformFlowMatching.losses),
]
EVERY = pytest.mark.parametrize(("paradigm_class", "settings"), PARADIGMS)


@pytest.fixture
def model(tiny_dit: DiTFactory) -> DiT:
    model = tiny_dit(vocab_size=VOCABULARY.size).double().train()
    assert isinstance(model, DiT)
    return model


def batch_of(lengths: list[int], first: int = 0) -> PackedBatch:
    random = np.random.default_rng(1)
    last = VOCABULARY.size - 1
    tokens = [
        framed(random.integers(FIRST, last, length, dtype=VOCABULARY.dtype)) for length in lengths
    ]
    ids = [first + index for index in range(len(tokens))]
    return PackedBatch.pack(tokens, token_budget=64, draw_ids=ids, global_sequences=5)


def gradients(
    paradigm: Paradigm, model: DiT, batches: list[PackedBatch], **options: Any
) -> dict[str, Tensor]:
    """The gradients of the micro-batches' summed loss, with the loss itself."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        corrupted = paradigm.corrupt(batch, Key(1))
        loss = paradigm.model_loss(model, batch, corrupted, **options)
        loss.backward()
        total += loss.detach()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **found}


@EVERY
def test_in_chunks_loss_and_gradients_are_those_of_whole_logits_which_autograd_does_not_keep(
    paradigm_class: type[Paradigm], settings: dict[str, Any], model: DiT, monkeypatch: MonkeyPatch
) -> None:
    paradigm = of(paradigm_class(**settings), VOCABULARY)
    micro_batches = [batch_of([11, 30, 4]), batch_of([25, 9], first=3)]
    assert micro_batches[0].tokens.dtype == torch.uint16
    monkeypatch.setattr(base, "CHUNK_LOGITS", CHUNK * VOCABULARY.size)
    found = gradients(paradigm, model, micro_batches)
    expected = gradients(paradigm, model, micro_batches, whole_logits=True)
    assert found.keys() == expected.keys() and len(found) > 20
    for name, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12 * scale, msg=name)
    kept, corrupted = {}, paradigm.corrupt(micro_batches[0], Key(1))
    for whole in (False, True):
        with counting_saved(model) as saved:
            paradigm.model_loss(model, micro_batches[0], corrupted, whole_logits=whole)
        kept[whole] = sum(saved.values())
    assert kept[False] < 64 * 5000 * 8 / 2 < kept[True]  # no logits


@EVERY
def test_a_batch_without_targets_has_no_loss_and_a_gradient_of_zero(
    paradigm_class: type[Paradigm], settings: dict[str, Any], model: DiT
) -> None:
    """Ranks exchange gradients, so that each must have one."""
    paradigm = of(paradigm_class(**settings), VOCABULARY)
    found = gradients(paradigm, model, [batch_of([0])])
    assert set(found) == {"loss", *dict(model.named_parameters())}
    assert not any(value.any() for value in found.values())


def test_a_pass_has_no_more_logits_than_its_limit() -> None:
    paradigm = AbsorbingDiffusion()
    assert paradigm.pass_tokens(16384) == 16384
    paradigm.vocabulary = NumberedTokens(128_000)
    assert paradigm.pass_tokens(16384) == base.PASS_LOGITS // paradigm.vocabulary.size == 262
