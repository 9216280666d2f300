"""Model FLOPs: what the mathematics of a step needs, whatever the implementation does."""

from collections.abc import Iterable

from d2plm.model.config import DiTConfig


def token_parameters(config: DiTConfig) -> int:
    """Matrix parameters that every token passes through (adaLN works once per sequence)."""
    width, layers = config.hidden_size, config.num_hidden_layers
    matrices = {"swiglu": 3, "gelu": 2}[config.feed_forward]
    block = 4 * width * width + matrices * width * config.intermediate_size
    head = width * config.vocab_size + (width * width if config.head == "esm" else 0)
    return layers * block + head


def training_flops(config: DiTConfig, segment_lengths: Iterable[int]) -> float:
    """Forward and backward FLOPs of sequences of these lengths in tokens, without padding.

    6·P per token for the matrices and 12·layers·hidden·l² per sequence for attention.
    """
    lengths = list(segment_lengths)
    matrices = 6.0 * token_parameters(config) * sum(lengths)
    attention = 12.0 * config.num_hidden_layers * config.hidden_size * sum(n * n for n in lengths)
    return matrices + attention
