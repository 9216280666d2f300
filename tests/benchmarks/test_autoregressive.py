"""The control goes from left to right: its probabilities of all proteins of a length sum to 1."""

import pytest

from tests.commands import python_c

PROGRAM = """
from itertools import product

import numpy as np
import torch

from benchmarks.speedrun.autoregressive import Autoregressive
from d2plm.core.vocabulary import CANONICAL_START
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.data.loader import framed
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig

model = DiT(DiTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                      intermediate_size=16, time_embedding_dim=16)).double().eval()
model.initialise(0)
torch.nn.init.normal_(model.head.proj.weight)
paradigm = Autoregressive(shift=True, loss="mean")
pairs = CANONICAL_START + np.array([*product(range(20), repeat=2)], dtype=np.uint8)
proteins = [framed(pair) for pair in pairs]
ids = list(range(len(proteins)))
batch = PackedBatch.pack(proteins, sequence_ids=ids, draw_ids=ids)
with torch.no_grad():
    draw = paradigm.bound(model, batch, Key(0))
    corrupted = paradigm.corrupt(batch, Key(0))
    logits = model(corrupted.tokens, batch.cu_seqlens, batch.max_seqlen, corrupted.times.float())
    loss, count = paradigm.loss(logits, batch, corrupted)
total = (-draw.nats).exp().sum().item()
assert abs(total - 1) < 1e-9, total
assert (-draw.nats).exp().std() > 1e-6
assert count == 2 * len(proteins)
assert abs(loss - draw.nats.sum()) < 1e-6, (loss, draw.nats.sum())
"""


@pytest.mark.thorough
def test_its_probabilities_sum_to_one_and_its_loss_is_its_likelihood() -> None:
    # In a process of its own: the control makes the attention of the whole process causal.
    done = python_c(PROGRAM)
    assert done.returncode == 0, done.stderr
