"""The padded DiT equals the packed one, and a peer does the same work."""

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.measure import require_same_losses, take_turns
from benchmarks.padded import PaddedDiT, PaddingCollator, padded_loss
from benchmarks.workload import workload_of
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import CLS, EOS
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.conftest import FASTA, TINY_SIZES, DiTFactory

SMALL_FASTA = FASTA.with_name("uniprot_500.fasta.gz")
LENGTHS = (40, 3, 17, 40, 2)
STEPS = 4


def batch_of_proteins() -> PackedBatch:
    """<cls> residues <eos> of several lengths, and a tail of padding."""
    random = np.random.default_rng(0)
    rows = [random.integers(4, 24, size=length + 2, dtype=np.uint8) for length in LENGTHS]
    for row in rows:
        row[0], row[-1] = CLS, EOS
    return PackedBatch.pack(rows, token_budget=sum(map(len, rows)) + 9, max_segments=len(rows) + 2)


@pytest.mark.parametrize("length", [None, 64])
def test_a_padded_dit_has_the_logits_and_gradients_of_the_packed_one(
    length: int | None, tiny_dit: DiTFactory
) -> None:
    batch, paradigm, dit = batch_of_proteins(), AbsorbingDiffusion(), tiny_dit()
    corrupted = paradigm.corrupt(batch, Key(0))
    packed = dit(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times)
    nats, count = paradigm.loss(packed, batch, corrupted)
    expected = gradients(dit, nats / count)

    computed: list[int] = []
    dit.blocks[0].feed_forward.register_forward_hook(
        lambda _module, inputs, _output: computed.append(inputs[0][..., 0].numel())
    )
    padded, model = PaddingCollator(length)([(batch, corrupted)]), PaddedDiT(dit)
    loss = padded_loss(model, padded)
    assert computed == [len(LENGTHS) * (length or max(LENGTHS) + 2)]  # every position
    torch.testing.assert_close(loss.double(), nats / count, rtol=1e-6, atol=0)
    for name, gradient in gradients(dit, loss).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * scale)
    logits = model(padded["input_ids"], padded["attention_mask"], padded["times"])
    at_tokens = logits[padded["attention_mask"].bool()]
    torch.testing.assert_close(at_tokens, packed[: len(at_tokens)], rtol=1e-5, atol=1e-5)


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
def test_a_peer_has_our_losses() -> None:
    from benchmarks.peers import dit_arms

    with workload_of(SMALL_FASTA, TINY_SIZES, token_budget=1024, max_length=512) as workload:
        settings = {"device": "cpu", "precision": "fp32"}
        arms = {arm.name: arm for arm in dit_arms(workload, settings, STEPS)}
        compared = [arms["packed"], arms["HF Trainer, to longest"]]
        timings = take_turns(compared, turns=1, steps=STEPS - 1, threads=1)
    require_same_losses([*timings.values()], 2e-5)
