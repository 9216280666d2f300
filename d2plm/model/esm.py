"""ESM-2 as a starting point: a Hugging Face `EsmForMaskedLM` folder → an equivalent `DiT`.

Every weight of ESM-2 has a counterpart in a DiT with the options of `DiTConfig`; adaLN, which ESM-2
lacks, starts neutral (no shift, scale 1, gate 1 at every time). Weights are read only from
safetensors files, which are memory-mapped and copied in fp32.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import EsmConfig

from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import ESM2_TOKENS, MASK, PAD
from d2plm.model.dit import DiT, dit_without_memory
from d2plm.model.dit_config import DiTConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
INVERSE_FREQUENCIES = "rotary_embeddings.inv_freq"
EMBEDDING = "esm.embeddings.word_embeddings"
DECODER = "lm_head.decoder.weight"
UNUSED_POSITIONS = 2  # in `max_position_embeddings`, for the padding of learned positions
SHARED_SETTINGS = (  # with the same names in a DiT and an EsmForMaskedLM
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "layer_norm_eps"),
)
MODULES = {  # of a DiT → of an EsmForMaskedLM
    "token_embedding": EMBEDDING,
    "head.norm": "esm.encoder.emb_layer_norm_after",
    "head.dense": "lm_head.dense",
    "head.dense_norm": "lm_head.layer_norm",
}
BLOCK_MODULES = {
    "attention_norm": "attention.LayerNorm",
    "attention.out_proj": "attention.output.dense",
    "feed_forward_norm": "LayerNorm",
    "feed_forward.up_proj": "intermediate.dense",
    "feed_forward.down_proj": "output.dense",
}


def is_esm(folder: str | Path) -> bool:
    """Whether a folder contains an ESM model rather than a `DiT`.

    Raises `ModelError` if its `config.json` cannot be read, or belongs to neither.
    """
    file = Path(folder) / "config.json"
    kind = _read_json(file).get("model_type")
    if kind not in (EsmConfig.model_type, DiTConfig.model_type):
        raise ModelError(
            f"{file}: model_type is {kind!r}; give an exported model or an ESM-2 checkpoint"
        )
    return kind == EsmConfig.model_type


def load_esm(folder: str | Path, *, time_embedding_dim: int | None = 64, seed: int = 0) -> DiT:
    """A `DiT` with the weights of the ESM-2 in `folder`, in evaluation mode and fp32.

    Its logits are those of `EsmForMaskedLM` at every time. The output projection, which ESM-2
    shares with the embeddings, is a copy of them. Raises `ModelError` if this is not an ESM-2
    checkpoint, or a file or a weight is missing, damaged or has another shape.

    Args:
        time_embedding_dim: width of the time embedding, which ESM-2 does not have; None for none.
        seed: seed of the time embedding's weights.
    """
    path = Path(folder)
    config, tensors = _read_config(path), _read_tensors(path)
    # On the meta device, because most parameters come from the checkpoint.
    model = dit_without_memory(_dit_config(config, tensors, time_embedding_dim))
    sources = _sources(config, tensors)
    weights = {
        name: _joined(path, tensors, sources[name], parameter.shape)
        if name in sources
        else model.initial_value(name, parameter.shape, seed)
        for name, parameter in model.named_parameters()
    }
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _joined(
    folder: Path, tensors: dict[str, Tensor], names: list[str], shape: torch.Size
) -> Tensor:
    """An fp32 copy of these tensors, concatenated by rows and checked for its shape."""
    for name in names:
        if name not in tensors:
            raise ModelError(
                f"{folder} has no tensor {name}: it is not a whole EsmForMaskedLM; save one with "
                "save_pretrained"
            )
    whole = torch.cat([tensors[name].to(torch.float32) for name in names])
    if whole.shape != shape:
        raise ModelError(
            f"{folder}: {' + '.join(names)} has the shape {tuple(whole.shape)}, where config.json "
            f"requires {tuple(shape)}; download both again"
        )
    return whole


def _sources(config: EsmConfig, tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """{parameter of the DiT: its source tensors} for every tensor of ESM-2."""
    modules = {ours: [theirs] for ours, theirs in MODULES.items()}
    for i in range(config.num_hidden_layers):
        block, layer = f"blocks.{i}", f"esm.encoder.layer.{i}"
        modules |= {f"{block}.{ours}": [f"{layer}.{it}"] for ours, it in BLOCK_MODULES.items()}
        modules[f"{block}.attention.qkv_proj"] = [
            f"{layer}.attention.self.{kind}" for kind in ("query", "key", "value")
        ]
    sources = {
        f"{ours}.{kind}": [f"{module}.{kind}" for module in theirs]
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }
    shared = config.tie_word_embeddings and DECODER not in tensors
    sources["head.proj.weight"] = [f"{EMBEDDING}.weight" if shared else DECODER]
    sources["head.proj.bias"] = ["lm_head.bias"]
    return sources


def _dit_config(
    config: EsmConfig, tensors: dict[str, Tensor], time_embedding_dim: int | None
) -> DiTConfig:
    # The published frequencies were rounded to fp16; recomputed ones would change the logits.
    frequencies = sorted(name for name in tensors if name.endswith(INVERSE_FREQUENCIES))
    return DiTConfig(
        **{name: getattr(config, name) for name in SHARED_SETTINGS},
        time_embedding_dim=time_embedding_dim,
        max_position_embeddings=config.max_position_embeddings - UNUSED_POSITIONS,
        hidden_dropout_prob=config.hidden_dropout_prob or 0.0,
        initial_gate=1.0,
        rope_theta=getattr(config, "rope_theta", 10_000.0),
        rope_frequencies=tensors[frequencies[0]].float().tolist() if frequencies else None,
        feed_forward="gelu",
        linear_bias=True,
        affine_norm=True,
        qk_norm=False,
        token_dropout=bool(config.token_dropout),
        head="esm",
    )


def _read_config(folder: Path) -> EsmConfig:
    """The folder's configuration; `ModelError` naming the first value that is not ESM-2's."""
    file = folder / "config.json"
    content = _read_json(file)
    if content.get("model_type") != EsmConfig.model_type:
        raise ModelError(f"{file}: model_type is {content.get('model_type')!r}, not 'esm'")
    try:
        config = EsmConfig.from_dict(content)
    except Exception as error:  # transformers checks values with errors of several libraries
        reason = str(error).strip().split("\n")[-1]
        raise ModelError(f"{file}: not an ESM configuration: {reason}; download it again") from None
    for key, wanted in (
        ("vocab_size", len(ESM2_TOKENS)),
        ("mask_token_id", MASK),
        ("pad_token_id", PAD),
        ("position_embedding_type", "rotary"),
        ("emb_layer_norm_before", False),
        ("is_folding_model", False),
        ("is_decoder", False),
    ):
        value = getattr(config, key)
        if value != wanted and (value or wanted):  # null is false
            raise ModelError(f"{file}: {key} is {value!r}, not {wanted!r} as in every ESM-2")
    vocabulary = folder / "vocab.txt"
    if (
        vocabulary.is_file()
        and tuple(vocabulary.read_text(errors="replace").split()) != ESM2_TOKENS
    ):
        raise ModelError(f"{vocabulary}: not the 33 tokens of ESM-2 in their order")
    return config


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file}: {error}; download it again") from error
    # Some checkpoints have other names for a normalisation's parameters.
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = " (a pytorch_model.bin is never opened: it may run any code)"
        hint = pickled if any(folder.glob("pytorch_model*.bin")) else ""
        raise ModelError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}; save the model as safetensors"
        )
    shards = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or any(Path(str(s)).name != s for s in shards.values()):
        raise ModelError(f"{folder / INDEX}: no weight_map of files beside it; download it again")
    files = [folder / shard for shard in sorted({*shards.values()})]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, named in {INDEX}; download it again")
    return files


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read ({error}); give the folder of a model") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: not a JSON object; give the folder of a model")
    return content
