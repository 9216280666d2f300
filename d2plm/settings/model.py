"""The architecture of a DiT."""

from dataclasses import dataclass
from typing import Literal

from d2plm.core.errors import require
from d2plm.settings.schema import Settings, key

PROTEIN_TOKENS = 33  # of ESM-2's vocabulary
OF_EXPERTS = ("experts_per_token", "shared_expert_size", "balance_rate")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Sizes and options of a `DiT`, which its `DiTConfig` holds.

    With some options a `DiT` computes the same function as `EsmForMaskedLM` (Lin et al.,
    doi:10.1126/science.ade2574), see `d2plm.model.esm`, or the bidirectional form of the layers of
    Llama (Touvron et al., arXiv:2302.13971) and GPT-NeoX (Black et al., arXiv:2204.06745); tests
    compare the first.
    """

    vocab_size: int = key(PROTEIN_TOKENS, low=6)
    """tokens of the vocabulary, of which the last is <mask>; set from the data"""
    hidden_size: int = key(128, low=1)
    """width of the residual stream"""
    num_hidden_layers: int = key(5, low=1)
    """number of blocks"""
    num_attention_heads: int = key(4, low=1)
    """attention heads; hidden_size / num_attention_heads must be even"""
    intermediate_size: int = key(384, low=1)
    """width of the feed-forward, or of each expert"""
    time_embedding_dim: int | None = key(256, low=2)
    """width of adaLN's time embedding; null: no time and no adaLN"""
    max_position_embeddings: int = key(1024, low=3)
    """longest input in tokens, <cls> and <eos> included"""
    hidden_dropout_prob: float = key(0.0, low=0, below=1)
    """dropout after each attention and feed-forward output"""
    layer_norm_eps: float = key(1e-5, above=0)
    """epsilon of every normalisation"""
    initializer_range: float | None = key(None, above=0)
    """standard deviation of the initial weights; null: 1/√fan_in, embeddings 1"""
    initial_gate: float = key(0.0)
    """adaLN's initial gate; 0: adaLN-Zero, 1 learns faster in short runs of small models"""
    rope_theta: float = key(10_000.0, above=0)
    """base of the rotary position frequencies"""
    rope_fraction: float = key(1.0, above=0, high=1)
    """rotated fraction of each head's channels"""
    rope_frequencies: list[float] | None = key(None, above=0)
    """radians per position of each pair of channels; null: from rope_theta"""
    feed_forward: Literal["swiglu", "gelu"] = key("swiglu")
    """feed-forward: SwiGLU, or two matrices with GELU between them"""
    linear_bias: bool = key(False)
    """biases in the blocks' linear layers"""
    norm: Literal["layer", "rms"] = key("layer")
    """normalisation; rms has no mean and bias (arXiv:1910.07467)"""
    affine_norm: bool = key(False)
    """normalisations have a weight (and bias) beside adaLN"""
    parallel_residual: bool = key(False)
    """attention and feed-forward both read the block's input"""
    qk_norm: bool = key(True)
    """normalise queries and keys"""
    token_dropout: bool = key(False)
    """zero the embedding of <mask> and rescale the others, as in ESM-2"""
    head: Literal["linear", "esm"] = key("linear")
    """output head; esm has a dense layer, GELU and normalisation before it"""
    relatives_dim: int | None = key(None, low=4)
    """width of the encoder of relatives; null: none"""
    num_experts: int | None = key(None, low=2)
    """experts in place of a feed-forward; null: a dense model"""
    experts_per_token: int | None = key(None, low=2)
    """experts that each token passes; null: 2 (one alone would not train the router)"""
    shared_expert_size: int | None = key(None, low=1)
    """width of an expert that all tokens pass; null: none"""
    balance_rate: float | None = key(None, low=0)
    """step of the bias that balances loads; 0: none; null: 0.01"""

    def __post_init__(self) -> None:
        super().__post_init__()
        hidden, heads, experts = self.hidden_size, self.num_attention_heads, self.num_experts
        wanted = f"such that hidden_size={hidden} / num_attention_heads is an even integer"
        require(hidden % (2 * heads) == 0, "num_attention_heads", heads, wanted)
        width = self.time_embedding_dim
        require(width is None or width % 2 == 0, "time_embedding_dim", width, "even")
        if self.relatives_dim is not None:
            require(
                self.relatives_dim % 4 == 0,
                "relatives_dim",
                self.relatives_dim,
                "a multiple of four",
            )
            wanted = f"{PROTEIN_TOKENS} with relatives_dim: relatives are proteins"
            require(self.vocab_size == PROTEIN_TOKENS, "vocab_size", self.vocab_size, wanted)
        pairs = hidden // heads // 2
        fraction, frequencies = self.rope_fraction, self.rope_frequencies
        wanted = f"such that at least one of a head's {pairs} pairs of channels is rotated"
        require(round(fraction * pairs) > 0, "rope_fraction", fraction, wanted)
        if experts is None:
            for name in OF_EXPERTS:
                value = getattr(self, name)
                require(value is None, name, value, "null without num_experts")
        else:
            chosen = self.experts_per_token or 2
            require(
                chosen <= experts, "experts_per_token", chosen, f"at most num_experts={experts}"
            )
            wanted = "'swiglu' with num_experts: experts have no other feed-forward"
            require(self.feed_forward == "swiglu", "feed_forward", self.feed_forward, wanted)
            wanted = "false with num_experts: experts have no biases"
            require(not self.linear_bias, "linear_bias", self.linear_bias, wanted)
        if frequencies is not None:
            wanted = f"a list of {pairs} numbers, half a head's size"
            require(len(frequencies) == pairs, "rope_frequencies", frequencies, wanted)
            wanted = "1 with rope_frequencies, which are of all channels"
            require(fraction == 1, "rope_fraction", fraction, wanted)
