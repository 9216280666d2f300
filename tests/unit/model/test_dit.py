"""DiT: packing changes nothing, loading never invents a weight, initialisation is by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ConfigError, ModelError
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import ExpandSegments
from tests.conftest import Tokens

LENGTHS = (30, 12, 12, 1, 45)
TIMES = (0.9, 0.1, 0.5, 0.3, 0.7)
Factory = Callable[..., DiT]


@pytest.fixture(scope="module")
def rows() -> list[Tokens]:
    random = np.random.default_rng(0)
    return [random.integers(0, 33, size=n, dtype=np.uint8) for n in LENGTHS]


def run(model: DiT, batch: PackedBatch, times: tuple[float, ...]) -> Tensor:
    padded = torch.tensor([*times, *[0.0] * (batch.num_segments - len(times))])
    return model(batch.tokens, batch.cu_seqlens, batch.max_seqlen, padded)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())


def gradients(model: DiT) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_packed_equals_one_at_a_time(tiny_dit: Factory, rows: list[Tokens]) -> None:
    model = tiny_dit()
    targets = [torch.from_numpy(row.astype(np.int64)) for row in rows]
    packed = PackedBatch.pack(rows, token_budget=120, max_segments=9)
    logits = run(model, packed, TIMES)[: sum(LENGTHS)]
    loss = F.cross_entropy(logits, torch.cat(targets), reduction="sum")
    loss.backward()
    at_once = gradients(model)

    alone = [
        run(model, PackedBatch.pack([row]), (time,)) for row, time in zip(rows, TIMES, strict=True)
    ]
    apart = sum(F.cross_entropy(x, y, reduction="sum") for x, y in zip(alone, targets, strict=True))
    assert isinstance(apart, Tensor)
    apart.backward()
    one_by_one = gradients(model)
    assert relative(logits, torch.cat(alone)) < 1e-5
    assert relative(loss, apart) < 1e-5
    assert at_once.keys() == one_by_one.keys() == dict(model.named_parameters()).keys()
    for name, gradient in at_once.items():
        assert relative(gradient, one_by_one[name]) < 1e-5, name


def test_expanding_rows_equals_indexing_with_its_gradient() -> None:
    rows = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    segments = torch.tensor([0, 0, 0, 2, 3, 3])  # segment 1 is empty
    cu_seqlens = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    upstream = torch.randn(6, 5, dtype=torch.float64)
    out = ExpandSegments.apply(rows, segments, cu_seqlens)
    assert torch.equal(out, rows[segments])
    (found,) = torch.autograd.grad(out, rows, upstream)
    (wanted,) = torch.autograd.grad(rows[segments], rows, upstream)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    torch.library.opcheck(torch.ops.d2plm.sum_segments.default, (upstream, cu_seqlens))


def test_the_gradient_of_a_bf16_modulation_keeps_small_terms() -> None:
    rows = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = 4096
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    ExpandSegments.apply(rows, torch.zeros(tokens, dtype=torch.long), cu_seqlens).sum().backward()
    assert rows.grad is not None and rows.grad.item() == tokens  # a bf16 running sum stops at 256


@pytest.fixture
def saved(tiny_dit: Factory, tmp_path: Path) -> Path:
    tiny_dit().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_that_are_not_the_models_are_named(saved: Path) -> None:
    weights, name = load_file(saved / "model.safetensors"), "blocks.1.attention.q_norm.weight"
    for other, named in (
        ({key: tensor for key, tensor in weights.items() if key != name}, name),
        ({**weights, "extra.weight": torch.ones(2)}, r"extra\.weight"),
        ({**weights, "head.proj.bias": torch.ones(7)}, ""),
    ):
        save_file(other, saved / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=named):
            load_dit(saved)


def test_a_configuration_of_other_layers_is_rejected_before_it_is_built(saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 10**7}))
    with pytest.raises(ModelError, match="num_hidden_layers=10000000"):
        load_dit(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_truncated_or_missing_file_is_a_model_error(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError):
        load_dit(saved)
    (saved / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_dit(saved)


def test_initial_values_depend_on_seed_and_name_alone(tiny_dit: Factory) -> None:
    shallow, deep = tiny_dit(1), tiny_dit(2, num_hidden_layers=3)
    torch.manual_seed(5)
    shallow.initialise(7)
    torch.manual_seed(6)
    deep.initialise(7)
    ours = dict(deep.named_parameters())
    for name, parameter in shallow.named_parameters():
        assert torch.equal(parameter, ours[name]), name
    first, second = (ours[f"blocks.{i}.attention.qkv_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    other = tiny_dit(1)
    other.initialise(8)
    assert not torch.equal(other.token_embedding.weight, shallow.token_embedding.weight)


def test_a_fresh_model_predicts_uniformly(tiny_dit: Factory, rows: list[Tokens]) -> None:
    model = tiny_dit()
    model.initialise(0)
    assert list(model.buffers()) == []
    assert (run(model, PackedBatch.pack(rows), TIMES) == 0).all()
    for name, parameter in model.named_parameters():
        zero = name.endswith(".bias") or ".modulation." in name or name.startswith("head.")
        if zero:
            assert (parameter == 0).all(), name
        elif name.endswith("_norm.weight"):
            assert (parameter == 1).all(), name
        else:
            embedding = name == "token_embedding.weight"
            wanted = 1.0 if embedding else parameter.shape[1] ** -0.5
            assert float(parameter.std()) == pytest.approx(wanted, rel=0.35), name
    model = tiny_dit(initializer_range=0.02)
    model.initialise(3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and parameter.any():
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.35), name


@pytest.mark.parametrize(
    "changes",  # the first is the one that is named
    [
        {"num_attention_heads": 3},
        {"time_embedding_dim": 7},
        {"vocab_size": 5},
        {"vocab_size": 300, "relatives_dim": 8},
        {"rope_fraction": 0.5, "rope_frequencies": [1.0] * 4},
        {"rope_frequencies": [1.0, 0.5, -1.0, 0.1]},
        {"experts_per_token": 5, "num_experts": 4},
        {"feed_forward": "gelu", "num_experts": 4},
        {"experts_per_token": 2},
    ],
    ids=str,
)
def test_sizes_that_exclude_each_other_are_rejected_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(changes))}="):
        DiTConfig(**{"hidden_size": 16, "num_attention_heads": 2, **changes})
