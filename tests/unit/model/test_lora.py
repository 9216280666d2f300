"""LoRA: a fresh change is none, a merged one is the same function, an adapter is its base's."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from d2plm.core.errors import ModelError
from d2plm.export.exported_model import load_export, save_export, weights_digest
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.lora import CONFIG, WEIGHTS, add_lora, apply_adapter, merged, scale_adapter
from d2plm.paradigms.diffusion import AbsorbingDiffusion

TOKENS = torch.tensor([0, 5, 9, 32, 12, 2, 0, 7, 32, 2], dtype=torch.uint8)
BOUNDS, TIMES = torch.tensor([0, 6, 10], dtype=torch.int32), torch.tensor([0.3, 0.8])


def logits(model: DiT) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, BOUNDS, 6, TIMES)


def changed(model: DiT, rank: int = 3) -> DiT:
    """A copy with changes that are not zero."""
    own = copy.deepcopy(model)
    add_lora(own, rank, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in own.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.1, generator=generator)
    return own


@pytest.fixture
def base(tiny_dit: Callable[..., DiT]) -> DiT:
    return tiny_dit(seed=0)


def test_a_fresh_change_is_none_and_follows_from_the_seed_alone(base: DiT) -> None:
    first, again, other = (copy.deepcopy(base) for _ in range(3))
    for model, seed in ((first, 5), (again, 5), (other, 6)):
        torch.manual_seed(torch.seed())
        add_lora(model, 4, seed)
        assert torch.equal(logits(model), logits(base))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert all(".lora_" in name and name.startswith("blocks.") for name in trained)
    name = "blocks.0.attention.qkv_proj.lora_A.default.weight"
    drawn = [dict(model.named_parameters())[name] for model in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_merged_weights_are_the_same_function(base: DiT) -> None:
    model, plain = changed(base), copy.deepcopy(base)
    plain.load_state_dict(merged(dict(model.named_parameters())))
    assert (logits(plain) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()
    assert (logits(model) - logits(base)).abs().max() > 0.01


@pytest.fixture
def adapter(base: DiT, tmp_path: Path) -> Path:
    """The folder of an adapter of the export in `tmp_path / "base"`."""
    content = AbsorbingDiffusion(), LengthHistogram.of(np.array([5, 9]), 126)
    save_export(tmp_path / "base", base, *content, {})
    weights = {name: p.detach() for name, p in changed(base).named_parameters()}
    digest = weights_digest(tmp_path / "base")
    provenance = {"init_from": str(tmp_path / "base"), "init_from_digest": digest}
    return save_export(tmp_path / "adapter", base, *content, provenance, weights)


def test_an_adapter_alone_is_the_changed_model(base: DiT, adapter: Path) -> None:
    found, expected = logits(load_export(adapter).model), logits(changed(base))
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert not (adapter / "model.safetensors").exists()
    size = sum(tensor.numel() for tensor in load_file(adapter / WEIGHTS).values())
    assert size < base.num_parameters()


def test_peft_reads_the_adapter(adapter: Path) -> None:
    config = LoraConfig.from_pretrained(adapter)
    assert (config.r, config.lora_alpha) == (3, 6)
    names = set(load_file(adapter / WEIGHTS))
    assert "base_model.model.blocks.0.attention.qkv_proj.lora_A.weight" in names
    listed = json.loads((adapter / CONFIG).read_text())["target_modules"]
    assert listed == sorted(listed) != []  # so that equal adapters are equal files


def test_a_part_of_the_change_is_a_part_of_every_weights(base: DiT, adapter: Path) -> None:
    scale_adapter(adapter, 0.25)
    whole = merged(dict(changed(base).named_parameters()))
    own = dict(base.named_parameters())
    for name, weight in load_export(adapter).model.named_parameters():
        expected = own[name] + 0.25 * (whole[name] - own[name])
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


def test_one_of_another_base_is_rejected(adapter: Path, tiny_dit: Callable[..., DiT]) -> None:
    tiny_dit(seed=9).save_pretrained(adapter.with_name("base"))
    with pytest.raises(ModelError, match="other weights"):
        load_export(adapter)
    adapter.with_name("base").rename(adapter.with_name("elsewhere"))
    with pytest.raises(ModelError, match="base"):
        load_export(adapter)
    with pytest.raises(ModelError, match="base"):
        apply_adapter(tiny_dit(hidden_size=24), adapter)


@pytest.mark.parametrize(
    "damage", ["{", "[]", {"lora_alpha": None, "r": 3}, {"r": 7}, {"r": "x"}, {"lora_alpha": [1]}]
)
def test_a_damaged_adapter_is_an_error(adapter: Path, damage: str | dict[str, object]) -> None:
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads((adapter / CONFIG).read_text()), **damage})
    (adapter / CONFIG).write_text(damage)
    with pytest.raises(ModelError, match="adapter"):
        load_export(adapter)
