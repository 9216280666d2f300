"""DiTConfig: the architecture of a DiT, as saved in the `config.json` of every exported model."""

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from d2plm.core.errors import require, require_choice, require_number
from d2plm.core.vocabulary import EOS, ESM2_TOKENS, PAD

FEED_FORWARDS = ("swiglu", "gelu")
HEADS = ("linear", "esm")
NORMS = ("layer", "rms")
NUMBERS: dict[str, dict[str, Any]] = {
    "vocab_size": {"integer": True, "low": 6},  # four special tokens, a predicted one and <mask>
    "hidden_size": {"integer": True, "low": 1},
    "num_hidden_layers": {"integer": True, "low": 1},
    "num_attention_heads": {"integer": True, "low": 1},
    "intermediate_size": {"integer": True, "low": 1},
    "time_embedding_dim": {"integer": True, "low": 2, "optional": True},
    "max_position_embeddings": {"integer": True, "low": 3},
    "hidden_dropout_prob": {"low": 0, "high": 1, "high_open": True},
    "layer_norm_eps": {"low": 0, "low_open": True},
    "initializer_range": {"low": 0, "low_open": True, "optional": True},
    "initial_gate": {},
    "rope_theta": {"low": 0, "low_open": True},
    "rope_fraction": {"low": 0, "low_open": True, "high": 1},
    "relatives_dim": {"integer": True, "low": 4, "optional": True},
    "num_experts": {"integer": True, "low": 2, "optional": True},
    "experts_per_token": {"integer": True, "low": 2, "optional": True},
    "shared_expert_size": {"integer": True, "low": 1, "optional": True},
    "balance_rate": {"low": 0, "optional": True},
    "auxiliary_loss": {"low": 0, "optional": True},
}
OF_EXPERTS = ("experts_per_token", "shared_expert_size", "balance_rate", "auxiliary_loss")


class DiTConfig(PretrainedConfig):
    """Sizes and rates of a `DiT`.

    With some options a `DiT` computes what `EsmForMaskedLM` (Lin et al.,
    doi:10.1126/science.ade2574) computes, see `d2plm.model.esm`, or, bidirectionally, what the
    layers of Llama (Touvron et al., arXiv:2302.13971) and GPT-NeoX (Black et al., arXiv:2204.06745)
    compute; tests compare them.

    Args:
        vocab_size: tokens V of the vocabulary, of which the last is `<mask>`.
        hidden_size: width D of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads H; `hidden_size / num_attention_heads` must be even (RoPE).
        intermediate_size: width F of the hidden layer of the feed-forward, or of each expert.
        time_embedding_dim: width C of the time embedding that feeds adaLN; None for a model that is
            not given the time, without adaLN.
        max_position_embeddings: the longest input in tokens, `<cls>` and `<eos>` included.
        hidden_dropout_prob: dropout after each attention and feed-forward output.
        layer_norm_eps: epsilon of every normalisation.
        initializer_range: standard deviation of the initial weights; None takes 1/√fan_in for
            matrices and 1 for embeddings.
        initial_gate: initial value of adaLN's gates: 0 is adaLN-Zero, in which every block starts
            as the identity; 1 learns faster in short runs of small models.
        rope_theta: base of the rotary frequencies.
        rope_fraction: fraction of each head's channels that are rotated, to whole pairs.
        rope_frequencies: the rotary frequencies themselves, in radians per position, one for each
            pair of a head's channels; None computes them from `rope_theta`. ESM-2 was trained with
            frequencies rounded to fp16.
        feed_forward: `swiglu`, or `gelu` for two matrices with the exact GELU between them.
        linear_bias: whether the linear layers of the blocks have biases.
        norm: `layer` normalisation, or `rms` without mean and bias (arXiv:1910.07467).
        affine_norm: whether the normalisations before attention, feed-forward and head have a
            weight (and, of `layer`, a bias) of their own, in addition to adaLN.
        parallel_residual: whether attention and feed-forward both read a block's input, and are
            added to it together.
        qk_norm: whether queries and keys are normalised.
        token_dropout: zero the embedding of `<mask>` and scale those of its sequence by
            0.88 / (1 - masked fraction), as ESM-2 does.
        head: `linear`, a projection alone; or `esm`, with a dense layer, GELU and normalisation
            before it.
        relatives_dim: width of the encoder of a protein's relatives, a multiple of four; None for a
            model without relatives.
        num_experts: experts in place of each block's feed-forward (`d2plm.model.experts`); None for
            a dense model.
        experts_per_token: the experts that a token passes; None is 2. With one alone, whose
            normalised gate is always 1, the router would not learn.
        shared_expert_size: width of one more expert, which all tokens pass; None for none.
        balance_rate: step of the bias that balances the experts' loads; 0 for no bias, None is
            0.01 unless there is an `auxiliary_loss`.
        auxiliary_loss: coefficient of the loss that balances them; None is 0, no such loss.

    Raises:
        ConfigError: on an impossible value.
    """

    model_type = "d2plm_dit"

    def __init__(
        self,
        vocab_size: int = len(ESM2_TOKENS),
        hidden_size: int = 128,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 4,
        intermediate_size: int = 384,
        time_embedding_dim: int | None = 256,
        max_position_embeddings: int = 1024,
        hidden_dropout_prob: float = 0.0,
        layer_norm_eps: float = 1e-5,
        initializer_range: float | None = None,
        initial_gate: float = 0.0,
        rope_theta: float = 10_000.0,
        rope_fraction: float = 1.0,
        rope_frequencies: Sequence[float] | None = None,
        feed_forward: str = "swiglu",
        linear_bias: bool = False,
        norm: str = "layer",
        affine_norm: bool = False,
        parallel_residual: bool = False,
        qk_norm: bool = True,
        token_dropout: bool = False,
        head: str = "linear",
        relatives_dim: int | None = None,
        num_experts: int | None = None,
        experts_per_token: int | None = None,
        shared_expert_size: int | None = None,
        balance_rate: float | None = None,
        auxiliary_loss: float | None = None,
        **kwargs: object,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name in SETTINGS}
        for name, limits in NUMBERS.items():
            require_number(name, settings[name], **limits)
        wanted = f"such that hidden_size={hidden_size} / num_attention_heads is an even integer"
        even = hidden_size % (2 * num_attention_heads) == 0
        require(even, "num_attention_heads", num_attention_heads, wanted)
        even = time_embedding_dim is None or time_embedding_dim % 2 == 0
        require(even, "time_embedding_dim", time_embedding_dim, "even")
        if relatives_dim is not None:
            require(relatives_dim % 4 == 0, "relatives_dim", relatives_dim, "a multiple of four")
            wanted = f"{len(ESM2_TOKENS)} with relatives_dim: relatives are proteins"
            require(vocab_size == len(ESM2_TOKENS), "vocab_size", vocab_size, wanted)
        pairs = hidden_size // num_attention_heads // 2
        wanted = f"such that at least one of a head's {pairs} pairs of channels is rotated"
        require(round(rope_fraction * pairs) > 0, "rope_fraction", rope_fraction, wanted)
        if num_experts is None:
            for name in OF_EXPERTS:
                require(settings[name] is None, name, settings[name], "null without num_experts")
        else:
            settings["experts_per_token"] = chosen = experts_per_token or 2
            settings["auxiliary_loss"] = auxiliary_loss or 0.0
            if balance_rate is None:
                settings["balance_rate"] = 0.0 if auxiliary_loss else 0.01
            wanted = f"at most num_experts={num_experts}"
            require(chosen <= num_experts, "experts_per_token", chosen, wanted)
            wanted = "'swiglu' with num_experts: experts have no other feed-forward"
            require(feed_forward == "swiglu", "feed_forward", feed_forward, wanted)
            wanted = "false with num_experts: experts have no biases"
            require(not linear_bias, "linear_bias", linear_bias, wanted)
        if rope_frequencies is not None:
            fits = isinstance(rope_frequencies, (list, tuple)) and len(rope_frequencies) == pairs
            wanted = f"a list of {pairs} numbers, half a head's size"
            require(fits, "rope_frequencies", rope_frequencies, wanted)
            wanted = "1 with rope_frequencies, which are of all channels"
            require(rope_fraction == 1, "rope_fraction", rope_fraction, wanted)
            for frequency in rope_frequencies:
                require_number("rope_frequencies", frequency, low=0, low_open=True)
            settings["rope_frequencies"] = list(rope_frequencies)
        require_choice("feed_forward", feed_forward, FEED_FORWARDS)
        require_choice("norm", norm, NORMS)
        require_choice("head", head, HEADS)
        for name in ("linear_bias", "affine_norm", "parallel_residual", "qk_norm", "token_dropout"):
            require(isinstance(settings[name], bool), name, settings[name], "true or false")
        for name, value in settings.items():
            setattr(self, name, value)
        super().__init__(**{"pad_token_id": PAD, "eos_token_id": EOS, **kwargs})

    def settings(self) -> dict[str, Any]:
        """Every argument by name."""
        return {name: getattr(self, name) for name in SETTINGS}


SETTINGS = [*inspect.signature(DiTConfig.__init__).parameters][1:-1]  # not self, not kwargs
