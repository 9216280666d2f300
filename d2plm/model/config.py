"""DiTConfig: the architecture of a DiT, as saved in the `config.json` of every exported model."""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from d2plm.core.alphabet import EOS, PAD, TOKENS
from d2plm.core.errors import require, require_choice, require_number

FEED_FORWARDS = ("swiglu", "gelu")
HEADS = ("linear", "esm")


class DiTConfig(PretrainedConfig):
    """Sizes and rates of a `DiT`; every argument is a key of the `model` config group.

    The options after `rope_theta` are those of ESM-2 (Lin et al., doi:10.1126/science.ade2574),
    with which a `DiT` computes what `EsmForMaskedLM` computes: see `d2plm.model.esm`.

    Args:
        hidden_size: width D of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H; `hidden_size / num_attention_heads` must be even (RoPE).
        intermediate_size: width F of the feed-forward's hidden layer.
        time_embedding_dim: width C of the time embedding that feeds adaLN.
        max_position_embeddings: the longest input in tokens, `<cls>` and `<eos>` included.
        hidden_dropout_prob: dropout after each attention and feed-forward output.
        layer_norm_eps: epsilon of every normalisation.
        initializer_range: standard deviation of the initial weights; None takes 1/√fan_in for
            matrices and 1 for embeddings.
        initial_gate: what adaLN's gates start at: 0 is adaLN-Zero, in which every block starts as
            the identity; 1 learns faster in short runs of small models.
        rope_theta: base of the rotary frequencies.
        rope_frequencies: the rotary frequencies themselves, in radians per position, one for each
            pair of a head's channels; None computes them from `rope_theta`. ESM-2 was trained with
            frequencies rounded to fp16.
        feed_forward: `swiglu`, or `gelu` for two matrices with the exact GELU between them.
        linear_bias: whether the linear layers of the blocks have biases.
        affine_norm: whether the normalisations that adaLN modulates have a weight and bias of
            their own.
        qk_norm: whether queries and keys are normalised.
        token_dropout: take `<mask>` as no input at all: its embedding is zeroed, and those of its
            sequence are scaled by 0.88 / (1 - masked share), as ESM-2 does.
        head: `linear`, a projection alone; or `esm`, with a dense layer, GELU and normalisation
            before it.

    Raises:
        ConfigError: on an impossible value.
    """

    model_type = "d2plm_dit"

    def __init__(
        self,
        vocab_size: int = len(TOKENS),
        hidden_size: int = 128,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        intermediate_size: int = 384,
        time_embedding_dim: int = 256,
        max_position_embeddings: int = 1024,
        hidden_dropout_prob: float = 0.0,
        layer_norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        initial_gate: float = 0.0,
        rope_theta: float = 10_000.0,
        rope_frequencies: Sequence[float] | None = None,
        feed_forward: str = "swiglu",
        linear_bias: bool = False,
        affine_norm: bool = False,
        qk_norm: bool = True,
        token_dropout: bool = False,
        head: str = "linear",
        **kwargs: object,
    ) -> None:
        for name, number in (
            ("hidden_size", hidden_size),
            ("num_hidden_layers", num_hidden_layers),
            ("num_attention_heads", num_attention_heads),
            ("intermediate_size", intermediate_size),
        ):
            require_number(name, number, integer=True, low=1)
        require(
            hidden_size % (2 * num_attention_heads) == 0,
            "num_attention_heads",
            num_attention_heads,
            f"such that hidden_size / num_attention_heads is an even integer "
            f"(hidden_size={hidden_size})",
        )
        require_number("time_embedding_dim", time_embedding_dim, integer=True, low=2)
        require(time_embedding_dim % 2 == 0, "time_embedding_dim", time_embedding_dim, "even")
        require_number("max_position_embeddings", max_position_embeddings, integer=True, low=3)
        require_number("hidden_dropout_prob", hidden_dropout_prob, low=0, high=1, high_open=True)
        require_number("layer_norm_eps", layer_norm_eps, low=0, low_open=True)
        if initializer_range is not None:
            require_number("initializer_range", initializer_range, low=0, low_open=True)
        require_number("initial_gate", initial_gate)
        require_number("rope_theta", rope_theta, low=0, low_open=True)
        if rope_frequencies is not None:
            _require_frequencies(rope_frequencies, hidden_size // num_attention_heads // 2)
        require_choice("feed_forward", feed_forward, FEED_FORWARDS)
        require_choice("head", head, HEADS)
        for name, switch in (
            ("linear_bias", linear_bias),
            ("affine_norm", affine_norm),
            ("qk_norm", qk_norm),
            ("token_dropout", token_dropout),
        ):
            require(isinstance(switch, bool), name, switch, "true or false")
        require(vocab_size == len(TOKENS), "vocab_size", vocab_size, str(len(TOKENS)))
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.time_embedding_dim = time_embedding_dim
        self.max_position_embeddings = max_position_embeddings
        self.hidden_dropout_prob = hidden_dropout_prob
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.initial_gate = initial_gate
        self.rope_theta = rope_theta
        self.rope_frequencies = None if rope_frequencies is None else list(rope_frequencies)
        self.feed_forward = feed_forward
        self.linear_bias = linear_bias
        self.affine_norm = affine_norm
        self.qk_norm = qk_norm
        self.token_dropout = token_dropout
        self.head = head
        super().__init__(**{"pad_token_id": PAD, "eos_token_id": EOS, **kwargs})

    def settings(self) -> dict[str, Any]:
        """Every argument by name."""
        names = [*inspect.signature(DiTConfig.__init__).parameters][1:-1]  # not self, not kwargs
        return {name: getattr(self, name) for name in names}


def _require_frequencies(frequencies: Sequence[float], count: int) -> None:
    require(
        isinstance(frequencies, (list, tuple)) and len(frequencies) == count,
        "rope_frequencies",
        frequencies,
        f"a list of {count} numbers, half a head's size",
    )
    for frequency in frequencies:
        require_number("rope_frequencies", frequency, low=0, low_open=True)
