"""Memory and time of a training step with a large vocabulary, beside a plain cross-entropy.

Peak resident memory of one forward and backward above what the process had before, and the mean
CPU time of two. Each loss is computed in a process of its own: `F.cross_entropy` of the logits of
every position, as most trainers do; the package's loss from whole logits; and in chunks.

    python -m benchmarks.large_vocabulary
    python -m benchmarks.large_vocabulary --vocabulary 2048 4096 8192 16384
"""

import time
from statistics import mean

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.measure import Row, in_new_process, parser, peak_bytes, publish, say
from d2plm.core.batch import PackedBatch
from d2plm.core.noise import Key
from d2plm.core.vocabulary import FIRST, Bytes
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms import paradigm as base
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.paradigms.paradigm import denoise

PLAIN, WHOLE, CHUNKS, UNIFORM = "plain", "whole logits", "chunks", "chunks, uniform source"
LENGTH = 256  # tokens of a sequence
MIB = 2**20


class Numbers(Bytes):
    """As many predicted tokens as are asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.predicted = size, size - FIRST - 1


def measure(way: str, size: int, tokens: int) -> tuple[int, float]:
    """(memory before the step [bytes], CPU seconds) of a forward and backward."""
    torch.set_num_threads(1)
    base.LARGE_VOCABULARY = 0  # chunks are asked for
    paradigm = UniformFlowMatching() if way == UNIFORM else AbsorbingDiffusion()
    paradigm.vocabulary = Numbers(size)
    model = DiT(
        DiTConfig(
            vocab_size=size,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=LENGTH,
        )
    )
    model.initialise(0)

    def step(sequences: int) -> None:
        random = np.random.default_rng(0)
        rows = random.integers(FIRST, size - 1, (sequences, LENGTH)).astype(np.uint32)
        batch = PackedBatch.pack(list(rows))
        corrupted = paradigm.corrupt(batch, Key(0))
        if way == PLAIN:
            logits = denoise(model, batch, corrupted.tokens, corrupted.times)
            targets = (corrupted.targets + FIRST).where(corrupted.weights > 0, -100)
            loss = F.cross_entropy(logits, targets, reduction="sum")
        else:
            loss = paradigm.model_loss(model, batch, corrupted, whole_logits=way == WHOLE)
        loss.backward()
        model.zero_grad()

    step(1)
    before = peak_bytes()
    seconds = []
    for _ in range(2):
        start = time.process_time()
        step(tokens // LENGTH)
        seconds.append(time.process_time() - start)
    return before, mean(seconds)


def main() -> None:
    """Measure and print every row."""
    made = parser("large_vocabulary", __doc__)
    made.add_argument("--vocabulary", type=int, nargs="+", default=[32_000], help="sizes")
    made.add_argument("--tokens", type=int, default=4096, help="of a step")
    made.add_argument("--ways", nargs="+", default=[PLAIN, WHOLE, CHUNKS, UNIFORM], help="losses")
    options = made.parse_args()
    rows = []
    for size in options.vocabulary:
        for way in options.ways:
            what = f"V = {size:,}, {way}"
            done = in_new_process(measure, way=way, size=size, tokens=options.tokens)
            before, seconds = done.result
            memory = done.peak_bytes - before
            say(f"{what}: {memory / MIB:.0f} MiB, {seconds:.2f} CPU s")
            rows.append(Row(f"{what}: memory", memory / MIB, "MiB"))
            rows.append(Row(f"{what}: time", seconds, "CPU s"))
    publish(options, rows)


if __name__ == "__main__":
    main()
