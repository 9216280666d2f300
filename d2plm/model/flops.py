"""Model FLOPs: the operations that a step requires, independently of the implementation."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from d2plm.model.dit_config import DiTConfig


def token_parameters(config: DiTConfig) -> int:
    """Matrix parameters that a token passes through (adaLN works once per sequence).

    The head counts at every token, as in other models' scaling laws, although training projects
    only the corrupted tokens to the logits of a large vocabulary; the embedding, a lookup, does not
    count. In a mixture of experts only the router and the token's own experts count.
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    matrices = {"swiglu": 3, "gelu": 2}[config.feed_forward]
    block, inner = 4 * width * width, config.intermediate_size
    if config.num_experts is not None:
        inner = config.experts_per_token * inner + (config.shared_expert_size or 0)
        block += width * config.num_experts
    block += matrices * width * inner
    head = width * config.vocab_size + (width * width if config.head == "esm" else 0)
    return layers * block + head


def training_flops(
    config: DiTConfig, segment_lengths: Sequence[int] | NDArray[np.integer]
) -> float:
    """Forward and backward FLOPs of sequences of these lengths in tokens, without padding.

    6·P per token for the matrices and 12·layers·hidden·l² per sequence for attention. The encoder
    of relatives is not included: its work depends on the number of relatives found.
    """
    lengths = np.asarray(segment_lengths, dtype=np.float64)
    matrices = 6.0 * token_parameters(config) * lengths.sum()
    attention = 12.0 * config.num_hidden_layers * config.hidden_size * np.square(lengths).sum()
    return float(matrices + attention)
