"""DiT: the bidirectional transformer that predicts clean tokens from corrupted ones and a time.

Its forward takes packed input; `forward_padded` takes the usual (batch, length) tensors, and
`d2plm.hugging_face` has the classes of `AutoModel`. Parallelism, compilation and precision are
applied from outside.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from d2plm.core.batch import Relatives, positions, segment_ids
from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import PAD
from d2plm.model.alignment import align
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import (
    HEAD,
    Block,
    Layout,
    Reduce,
    TimeEmbedding,
    drop_masked_tokens,
    rope_tables,
)
from d2plm.model.relatives_encoder import RelativesEncoder

ZERO = (  # weights that start at zero, as the modulations do: all logits are equal at first
    *("head.proj.weight", "relatives.gate.weight"),
    *("relatives.to_hidden.weight", "relatives.to_logits.weight"),
)


class DiT(PreTrainedModel):
    """Diffusion transformer over packed sequences: T tokens, S segments, V vocabulary."""

    config_class = DiTConfig
    base_model_prefix = "dit"
    main_input_name = "tokens"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _input_embed_layer = "token_embedding"

    def __init__(self, config: DiTConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.time_embedding = TimeEmbedding(config) if config.time_embedding_dim else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head = HEAD[config.head](config)
        self.relatives = RelativesEncoder(config) if config.relatives_dim else None
        self.post_init()

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        times: Tensor,
        relatives: Relatives | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Logits [T, V] of the clean token at every position, or the result of `reduce`.

        Raises `ModelError` if relatives are given to a model without an encoder for them.

        Args:
            tokens: integer [T], corrupted tokens of the packed row.
            cu_seqlens: int32 [S + 1] segment bounds; the last value is T.
            max_seqlen: upper bound on the segment lengths.
            times: float [S], the paradigm's time of each segment, in [0, 1].
            relatives: relatives of some segments. They are aligned here, so that hidden residues
                cannot influence the alignment, unless they include an alignment to these very
                `tokens`.
            reduce: called with the last hidden states [T, D], in fp32 or better, and the function
                that projects any M of them to logits [M, V]; for large vocabularies, and not with
                relatives.
        """
        x, time = self.embed(tokens, cu_seqlens, times)
        known = None
        if relatives is not None:
            hidden, known = self._encoded(relatives, tokens, cu_seqlens)
            x = x + hidden
        layout = self.layout(tokens, cu_seqlens, x.dtype)
        recomputed = self.gradient_checkpointing and self.training
        for block in self.blocks:
            call = partial(self._gradient_checkpointing_func, block) if recomputed else block
            x = call(x, time, layout, cu_seqlens, max_seqlen)
        logits = self.head(x, time, layout, reduce)
        return logits if known is None else logits + known

    def embed(
        self, tokens: Tensor, cu_seqlens: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The first hidden states [T, D] and the time embedding [S, C], if there is one."""
        x = self.token_embedding(tokens.long())
        if self.config.token_dropout:
            segments = segment_ids(cu_seqlens, len(tokens))
            is_mask = tokens == self.config.vocab_size - 1
            x = drop_masked_tokens(x, is_mask, segments, cu_seqlens)
        return x, None if self.time_embedding is None else self.time_embedding(times)

    def layout(self, tokens: Tensor, cu_seqlens: Tensor, dtype: torch.dtype) -> Layout:
        """The positions of a row's tokens, with rotary angles in `dtype`."""
        config, segments = self.config, segment_ids(cu_seqlens, len(tokens))
        cos, sin = rope_tables(
            positions(cu_seqlens, segments),
            config.hidden_size // config.num_attention_heads,
            config.rope_theta,
            config.rope_frequencies,
            config.rope_fraction,
        )
        real = None if config.num_experts is None else tokens != PAD
        return Layout(segments, cu_seqlens, cos.to(dtype), sin.to(dtype), real)

    def _encoded(
        self, relatives: Relatives, tokens: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Contributions of relatives to the hidden states [T, D] and to the logits [T, V]."""
        if self.relatives is None:
            raise ModelError(
                "this model was trained without relatives and takes none; train one with "
                "relatives_dim above 0"
            )
        alignment = relatives.alignment
        if alignment is None:
            alignment = align(tokens, cu_seqlens, relatives)
        return self.relatives(alignment, len(tokens))

    def forward_padded(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        times: Tensor,
        relatives: Relatives | None = None,
    ) -> Tensor:
        """Padded ids, mask (1 = token) [B, L], times [B] → logits [B, L, V], zero at padding."""
        keep = attention_mask.bool()
        lengths = keep.sum(dim=1)
        cu_seqlens = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        packed = DiT.forward(
            self, input_ids[keep], cu_seqlens, input_ids.shape[1], times, relatives
        )
        logits = packed.new_zeros(*input_ids.shape, packed.shape[-1])
        logits[keep] = packed
        return logits

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every parameter from (seed, its name) alone: ranks with different shards agree."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, parameter.shape, seed))

    def initial_value(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """The initial value of the parameter `name`, in fp32 on the CPU."""
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith("modulation.bias") and name.startswith("blocks."):
            shifts_scales_gates = torch.zeros(2, 3, self.config.hidden_size)
            shifts_scales_gates[:, 2] = self.config.initial_gate
            return shifts_scales_gates.flatten()
        if name.endswith(".bias") or ".modulation." in name or name in ZERO:
            return torch.zeros(shape)
        std = self.config.initializer_range
        if std is None:
            std = 1.0 if name.startswith("token_embedding") else shape[-1] ** -0.5
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(shape, generator=generator) * std

    def set_dropout(self, probability: float) -> None:
        self.config.hidden_dropout_prob = probability
        for block in self.blocks:
            block.dropout = probability  # type: ignore[assignment]  # typed as a module's tensor


def dit_without_memory(config: DiTConfig) -> DiT:
    """A `DiT` on the meta device."""
    with torch.device("meta"):
        return DiT(config)


def load_dit(folder: str | Path) -> DiT:
    """Load a `DiT` from an exported folder, in evaluation mode and fp32.

    Raises `ModelError` if a file or a weight is missing or has another shape.
    """
    path = Path(folder)
    for file in ("config.json", "model.safetensors"):
        # Large weights are in several files, listed in an index.
        if not (path / file).is_file() and not (path / f"{file}.index.json").is_file():
            raise ModelError(f"{path} is not a whole model folder: {file} is missing; export again")
    disable_progress_bar()
    try:
        _require_its_layers(path)
        model, report = DiT.from_pretrained(
            path, output_loading_info=True, local_files_only=True, dtype=torch.float32
        )
    # Most of these come from a damaged config.json.
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model in {path}: {error}; export it again") from error
    wrong = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    if wrong or report["mismatched_keys"]:
        raise ModelError(
            f"the weights in {path} do not fit its config.json "
            f"(first: {(wrong or sorted(report['mismatched_keys']))[0]}): export it again"
        )
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):  # `from_pretrained` gives every parameter a gradient
            parameter.requires_grad_(False)
    return model.eval()


def _require_its_layers(folder: Path) -> None:
    """Raise `ValueError`, before building, unless config.json has the weights' number of layers."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    stored = len({name.split(".")[1] for name in names if name.startswith("blocks.")})
    wanted = content.get("num_hidden_layers", stored)
    if wanted != stored:
        raise ValueError(f"config.json has num_hidden_layers={wanted}, the weights have {stored}")
