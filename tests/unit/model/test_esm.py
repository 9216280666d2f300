"""ESM-2 checkpoints: the DiT computes what EsmForMaskedLM computes, and continues from there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM
from transformers.utils.logging import disable_progress_bar

from d2plm.config import compose
from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import CLS, EOS, ESM2_TOKENS, MASK, PAD
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.esm import is_esm, load_esm

disable_progress_bar()

Row = NDArray[np.uint8]
TOLERANCE = 1e-5  # of a logit, in standard deviations of the logits
SHIPPED = {  # layers, width, heads, feed-forward width
    "esm2_8m": (6, 320, 20, 1280),
    "esm2_35m": (12, 480, 20, 1920),
    "esm2_150m": (30, 640, 20, 2560),
    "esm2_650m": (33, 1280, 20, 5120),
}


def esm_like(layers: int, width: int, heads: int, inner: int, **more: Any) -> EsmConfig:
    """A configuration as the published checkpoints have them."""
    return EsmConfig(
        vocab_size=33,
        mask_token_id=MASK,
        pad_token_id=PAD,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


@pytest.fixture(scope="module")
@torch.no_grad()
def theirs() -> EsmForMaskedLM:
    """An EsmForMaskedLM whose every parameter is random and none of them small."""
    model = EsmForMaskedLM(esm_like(2, 48, 4, 96))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.2, generator=generator)
        else:
            scale = 3.0 if "word_embeddings" in name else 1.0
            parameter.normal_(0, scale * parameter.shape[-1] ** -0.5, generator=generator)
    # Those of the published checkpoints went through fp16, and are not what is computed anew.
    frequencies = 1 / 10_000 ** (torch.arange(0, 12, 2) / 12)
    for buffer in inverse_frequencies(model):
        buffer.copy_(frequencies.half())
    return model.eval()


def inverse_frequencies(model: EsmForMaskedLM) -> list[Tensor]:
    """Of the model or of each layer, as the version of transformers has them."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]


def protein(length: int, masked: float, seed: int) -> Row:
    """<cls>, `length` tokens of every kind but <pad>, a share of them <mask>, <eos>."""
    random = np.random.default_rng(seed)
    row = random.integers(EOS, MASK, size=length, dtype=np.uint8)
    row[random.permutation(length)[: round(masked * length)]] = MASK
    return np.concatenate([[CLS], row, [EOS]]).astype(np.uint8)


@torch.no_grad()
def packed_difference(theirs: EsmForMaskedLM, ours: DiT, sequences: list[Row]) -> float:
    """Largest difference: several in a row, with a tail of <pad>, against one by one."""
    budget, segments = sum(map(len, sequences)) + 13, len(sequences) + 3
    batch = PackedBatch.pack(sequences, token_budget=budget, max_segments=segments)
    logits = ours(batch.tokens, batch.cu_seqlens, batch.max_seqlen, torch.rand(segments))
    alone = [theirs(torch.from_numpy(row.astype(np.int64))[None]).logits[0] for row in sequences]
    expected = torch.cat(alone)
    assert logits.isfinite().all()
    assert float(expected.std()) > 1
    return float((logits[: len(expected)] - expected).abs().max() / expected.std())


@pytest.fixture
def folder(theirs: EsmForMaskedLM, tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "esm")
    return tmp_path / "esm"


@pytest.fixture(scope="module")
def sequences() -> list[Row]:
    lengths, masked = (60, 23, 23, 1, 140), (0.15, 1.0, 0.6, 0.0, 0.0)
    return [*map(protein, lengths, masked, range(5))]


@pytest.mark.parametrize("time_embedding_dim", [64, None], ids=["with a time", "without"])
def test_a_small_checkpoint_s_logits_are_reproduced(
    time_embedding_dim: int | None, theirs: EsmForMaskedLM, folder: Path, sequences: list[Row]
) -> None:
    ours = load_esm(folder, time_embedding_dim=time_embedding_dim)
    assert not ours.training and ours.dtype == torch.float32
    assert ours.config.max_position_embeddings == 1024
    assert packed_difference(theirs, ours, sequences) < TOLERANCE
    assert packed_difference(theirs, ours, [protein(1022, 0.3, 0)]) < TOLERANCE


def test_a_checkpoint_without_token_dropout_is_reproduced(
    theirs: EsmForMaskedLM, folder: Path, sequences: list[Row]
) -> None:
    edit(folder / "config.json", token_dropout=False)
    plain = EsmForMaskedLM.from_pretrained(folder).eval()
    ours = load_esm(folder)
    assert packed_difference(plain, ours, sequences) < TOLERANCE
    assert packed_difference(theirs, ours, sequences) > 0.1


@pytest.fixture
def inputs(sequences: list[Row]) -> tuple[Any, ...]:
    """The arguments of a model's call on the sequences at any times."""
    batch = PackedBatch.pack(sequences)
    return batch.tokens, batch.cu_seqlens, batch.max_seqlen, torch.rand(len(sequences))


def test_frequencies_seen_without_gradients_serve_training(
    folder: Path, inputs: tuple[Any, ...]
) -> None:
    ours = load_esm(folder)
    ours.config.rope_frequencies = [f * 1.25 for f in ours.config.rope_frequencies]
    with torch.inference_mode():
        ours(*inputs)
    ours(*inputs).sum().backward()
    assert ours.blocks[0].attention.qkv_proj.weight.grad.any()


OF_A_LAYER = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"


@pytest.mark.parametrize(
    "names", [["esm.rotary_embeddings.inv_freq"], [OF_A_LAYER.format(i) for i in range(2)]]
)
def test_the_names_of_older_and_newer_checkpoints_are_known(
    names: list[str], theirs: EsmForMaskedLM, folder: Path, sequences: list[Row]
) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        for name in [*weights]:
            usual = name.replace(".gamma", ".weight").replace(".beta", ".bias")
            weights[usual] = weights.pop(name)
            if "inv_freq" in name:
                del weights[name]
        weights |= {name: inverse_frequencies(theirs)[0].clone() for name in names}

    rewrite(folder, change)
    assert packed_difference(theirs, load_esm(folder), sequences) < TOLERANCE


def test_half_precision_is_widened_and_missing_frequencies_are_computed(folder: Path) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        for name in [*weights]:
            weights[name] = weights[name].half()
            if "inv_freq" in name:
                del weights[name]

    rewrite(folder, change)
    ours = load_esm(folder)
    assert ours.config.rope_frequencies is None
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}


def test_an_untied_projection_is_read(folder: Path, sequences: list[Row]) -> None:
    projection = torch.randn(33, 48, generator=torch.Generator().manual_seed(3)) / 3
    rewrite(folder, lambda weights: weights.update({"lm_head.decoder.weight": projection}))
    edit(folder / "config.json", tie_word_embeddings=False)
    untied = EsmForMaskedLM.from_pretrained(folder).eval()
    assert torch.equal(untied.lm_head.decoder.weight, projection)
    assert packed_difference(untied, load_esm(folder), sequences) < TOLERANCE


def test_the_model_does_not_depend_on_the_file_once_it_is_loaded(folder: Path) -> None:
    ours, file = load_esm(folder), folder / "model.safetensors"
    before = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 4)
        stream.write(bytes(file.stat().st_size // 2))
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, before[name]), name


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


OTHERS: dict[str, Any] = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "vocab_size": 30,
    "emb_layer_norm_before": True,
    "mask_token_id": 4,
    "is_folding_model": True,
}


def test_another_architecture_or_vocabulary_is_rejected_in_one_line(folder: Path) -> None:
    whole = (folder / "config.json").read_text()
    for key, value in OTHERS.items():
        (folder / "config.json").write_text(json.dumps({**json.loads(whole), key: value}))
        with pytest.raises(ModelError, match=rf"config\.json: .*{key}") as caught:
            load_esm(folder)
        assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(whole)
    (folder / "vocab.txt").write_text("\n".join(ESM2_TOKENS))
    load_esm(folder)
    (folder / "vocab.txt").write_text("\n".join(reversed(ESM2_TOKENS)))
    with pytest.raises(ModelError, match=r"vocab\.txt"):
        load_esm(folder)


def test_a_weight_that_is_missing_or_of_another_shape_is_named(folder: Path) -> None:
    bias = "esm.encoder.layer.1.attention.self.key.bias"
    inner = "esm.encoder.layer.0.intermediate.dense.weight"
    weights = load_file(folder / "model.safetensors")
    rewrite(folder, lambda weights: weights.pop(bias))
    with pytest.raises(ModelError, match=bias):
        load_esm(folder)
    rewrite(folder, lambda found: found.update({**weights, inner: torch.ones(64, 48)}))
    with pytest.raises(ModelError, match=inner):
        load_esm(folder)


def test_damaged_and_missing_files_are_named_and_no_pickles_opened(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(ModelError, match=name):
            load_esm(folder)
        (folder / name).unlink()
        with pytest.raises(ModelError, match=name):
            load_esm(folder)
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04anything")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        load_esm(folder)


def test_shards_are_read_and_an_index_cannot_lead_out_of_the_folder(
    theirs: EsmForMaskedLM, tmp_path: Path, sequences: list[Row]
) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert packed_difference(theirs, load_esm(tmp_path), sequences) < TOLERANCE
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_esm(tmp_path)
    edit(tmp_path / "model.safetensors.index.json", weight_map={"a": "../model.safetensors"})
    with pytest.raises(ModelError, match="weight_map"):
        load_esm(tmp_path)


def test_kinds_of_folders_differ(
    folder: Path, tiny_dit: Callable[..., DiT], tmp_path: Path
) -> None:
    tiny_dit().save_pretrained(tmp_path / "dit")
    assert is_esm(folder) and not is_esm(tmp_path / "dit")
    edit(tmp_path / "dit" / "config.json", model_type="bert")
    with pytest.raises(ModelError, match="model_type is 'bert'"):
        is_esm(tmp_path / "dit")
    with pytest.raises(ModelError, match=r"nothing.config\.json"):
        is_esm(tmp_path / "nothing")


def test_saving_keeps_logits_and_dropout(
    folder: Path, inputs: tuple[Any, ...], tmp_path: Path
) -> None:
    ours = load_esm(folder)
    ours.set_dropout(0.3)
    ours.save_pretrained(tmp_path / "exported")
    again = load_dit(tmp_path / "exported")
    assert again.config.settings() == ours.config.settings()
    assert again.config.hidden_dropout_prob == 0.3
    assert torch.equal(again(*inputs), ours(*inputs))
    ours.train()
    assert not torch.equal(ours(*inputs), ours(*inputs))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_configurations_are_esm2_with_time(name: str) -> None:
    layers, *widths = SHIPPED[name]
    config = DiTConfig(**vars(compose("train", [f"model={name}"]).model))
    assert config.num_hidden_layers == layers
    config.num_hidden_layers = 1
    with torch.device("meta"):
        ours, theirs = DiT(config), EsmForMaskedLM(esm_like(1, *widths))
    learnt = ("time_embedding", "modulation")
    counted = [p.numel() for n, p in ours.named_parameters() if not any(x in n for x in learnt)]
    shared = 33 * config.hidden_size  # the projection is a second time there
    contacts = theirs.esm.contact_head.regression.in_features + 1
    assert sum(counted) == theirs.num_parameters() - contacts + shared
