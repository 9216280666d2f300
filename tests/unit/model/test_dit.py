"""DiT: packing changes nothing, loading never invents a weight, initialisation is by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

import d2plm.hugging_face  # noqa: F401  # registers the classes of transformers
from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ConfigError, ModelError
from d2plm.model.dit import DiT, load_dit
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import ExpandSegments, rope_tables, rotate

LENGTHS = (30, 12, 12, 1, 45)
TIMES = (0.9, 0.1, 0.5, 0.3, 0.7)
Factory = Callable[..., DiT]


@pytest.fixture(scope="module")
def rows() -> list[NDArray[np.uint8]]:
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


def test_packed_equals_one_at_a_time_in_logits_loss_and_gradients(
    tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
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


def test_every_weight_matters(tiny_dit: Factory, rows: list[NDArray[np.uint8]]) -> None:
    model = tiny_dit()
    batch = PackedBatch.pack(rows)
    before = run(model, batch, TIMES)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kept = parameter.clone()
            # Noise, not scale: a normalisation undoes a scale.
            parameter += torch.randn(kept.shape, generator=torch.Generator().manual_seed(1))
            assert relative(run(model, batch, TIMES), before) > 1e-4, name
            parameter.copy_(kept)


def test_the_time_moves_its_own_sequence_alone(
    tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
    model, batch = tiny_dit(), PackedBatch.pack(rows)
    before = run(model, batch, TIMES).split(LENGTHS)
    after = run(model, batch, (0.9, 0.8, 0.5, 0.3, 0.7)).split(LENGTHS)
    for place in range(len(LENGTHS)):
        moved = relative(after[place], before[place])
        assert moved > 1e-3 if place == 1 else moved < 1e-5


def test_the_order_of_residues_matters_but_not_the_place_in_the_row(
    tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
    model = tiny_dit()
    row = rows[0]
    alone = run(model, PackedBatch.pack([row]), (0.4,))
    behind = run(model, PackedBatch.pack([rows[4], row]), (0.1, 0.4))[45:]
    assert relative(behind, alone) < 1e-5
    swapped = row.copy()
    swapped[[3, 20]] = row[[20, 3]]
    other = run(model, PackedBatch.pack([swapped]), (0.4,))
    assert row[3] != row[20] and relative(other[10], alone[10]) > 1e-4


def test_rotation_depends_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turned = []
        for x, place in ((q, i), (k, j)):
            cos, sin = rope_tables(torch.tensor([place]), 8, 10_000.0)
            turned.append(rotate(x, cos.double(), sin.double()))
        return float((turned[0] * turned[1]).sum())

    assert score(0, 0) == pytest.approx(float((q * k).sum()))
    assert score(3, 10) == pytest.approx(score(53, 60), rel=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 11), rel=1e-3)
    # The complex form of Su et al., eq. 14: pairs turned by m·θ_i, θ_i = base^(−2i/K).
    angles = 7 * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.view_as_complex(torch.stack([q[..., :4], q[..., 4:]], -1)) * torch.polar(
        torch.ones(4, dtype=torch.float64), angles
    )
    cos, sin = rope_tables(torch.tensor([7]), 8, 10_000.0)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(
        rotate(q, cos.double(), sin.double()), expected, rtol=1e-5, atol=1e-6
    )


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


def test_the_gradient_of_a_bf16_modulation_keeps_small_terms() -> None:
    rows = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    tokens = 4096
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32)
    ExpandSegments.apply(rows, torch.zeros(tokens, dtype=torch.long), cu_seqlens).sum().backward()
    assert rows.grad is not None and rows.grad.item() == tokens  # a bf16 running sum stops at 256


def test_sum_segments_passes_torchs_own_checks() -> None:
    values = torch.randn(6, 5)
    cu_seqlens = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32)
    torch.library.opcheck(torch.ops.d2plm.sum_segments.default, (values, cu_seqlens))


# --- saving and loading ------------------------------------------------------------------------


@pytest.fixture
def saved(tiny_dit: Factory, tmp_path: Path) -> Path:
    tiny_dit().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("load", [load_dit, AutoModel.from_pretrained], ids=["own", "AutoModel"])
def test_a_reloaded_model_gives_identical_logits(
    load: Callable[[Path], DiT], saved: Path, tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
    loaded = load(saved)
    assert not loaded.training
    batch = PackedBatch.pack(rows)
    assert torch.equal(run(loaded, batch, TIMES), run(tiny_dit(), batch, TIMES))


def test_a_model_has_no_buffers(tiny_dit: Factory) -> None:
    assert list(tiny_dit().buffers()) == []


def test_a_missing_weight_is_an_error_that_names_it(saved: Path) -> None:
    file = saved / "model.safetensors"
    weights = load_file(file)
    del weights["blocks.1.attention.q_norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"blocks\.1\.attention\.q_norm\.weight"):
        load_dit(saved)


def test_a_superfluous_weight_is_an_error(saved: Path) -> None:
    file = saved / "model.safetensors"
    save_file({**load_file(file), "extra.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"extra\.weight"):
        load_dit(saved)


def test_a_weight_of_another_shape_is_an_error(saved: Path) -> None:
    file = saved / "model.safetensors"
    save_file({**load_file(file), "head.proj.bias": torch.ones(7)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load_dit(saved)


def test_a_configuration_of_other_layers_than_the_weights_is_rejected_before_it_is_built(
    saved: Path,
) -> None:
    content = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**content, "num_hidden_layers": 10**7}))
    with pytest.raises(ModelError, match="num_hidden_layers=10000000, the weights have 2"):
        load_dit(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_is_an_error(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_dit(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_truncated_file_is_a_model_error(saved: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError):
        load_dit(saved)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config"):
        load_dit(tmp_path / "nothing")


# --- initialisation ----------------------------------------------------------------------------


def test_initial_values_depend_on_seed_and_name_alone(tiny_dit: Factory) -> None:
    shallow, deep = tiny_dit(1), tiny_dit(2, num_hidden_layers=3)
    torch.manual_seed(5)
    shallow.initialise(7)
    torch.manual_seed(6)
    deep.initialise(7)
    ours = dict(deep.named_parameters())
    for name, parameter in shallow.named_parameters():
        assert torch.equal(parameter, ours[name]), name
    other = tiny_dit(1)
    other.initialise(8)
    assert not torch.equal(other.token_embedding.weight, shallow.token_embedding.weight)


def test_two_weights_of_one_shape_start_differently(tiny_dit: Factory) -> None:
    model = tiny_dit()
    model.initialise(0)
    weights = dict(model.named_parameters())
    first, second = (weights[f"blocks.{i}.attention.qkv_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_a_fresh_model_predicts_uniformly_and_each_block_is_the_identity(
    tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
    model = tiny_dit()
    model.initialise(0)
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


def test_an_initial_range_that_is_given_holds_for_every_matrix(tiny_dit: Factory) -> None:
    model = tiny_dit(initializer_range=0.02)
    model.initialise(3)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and parameter.any():
            assert float(parameter.std()) == pytest.approx(0.02, rel=0.35), name


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"num_attention_heads": 16}, "num_attention_heads"),
        ({"time_embedding_dim": 7}, "time_embedding_dim"),
        ({"vocab_size": 5}, "vocab_size=5: must be an integer ≥ 6"),
        ({"vocab_size": 300, "relatives_dim": 8}, "vocab_size=300: must be 33 with relatives_dim"),
        ({"relatives_dim": 6}, "relatives_dim"),
        ({"rope_fraction": 0.1}, "rope_fraction=0.1.*a head's 4 pairs"),
        ({"rope_fraction": 0.5, "rope_frequencies": [1.0] * 4}, "rope_fraction=0.5: must be 1"),
        ({"rope_frequencies": [1.0]}, "rope_frequencies"),
        ({"rope_frequencies": [1.0, 0.5, -1.0, 0.1]}, "rope_frequencies"),
        ({"num_experts": 4, "experts_per_token": 5}, "at most num_experts=4"),
        ({"num_experts": 4, "feed_forward": "gelu"}, "feed_forward='gelu'.*experts"),
        ({"num_experts": 4, "linear_bias": True}, "linear_bias=True.*experts"),
        ({"experts_per_token": 2}, "experts_per_token=2.*null without num_experts"),
    ],
)
def test_sizes_that_exclude_each_other_are_rejected_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DiTConfig(**{"hidden_size": 16, "num_attention_heads": 2, **changes})


@pytest.mark.thorough
def test_blocks_compile_as_one_graph_and_change_nothing(
    tiny_dit: Factory, rows: list[NDArray[np.uint8]]
) -> None:
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        pytest.skip("torch.compile needs a C++ compiler on the CPU")
    plain, compiled = tiny_dit(), tiny_dit()
    for block in compiled.blocks:
        block.compile(fullgraph=True)
    batch = PackedBatch.pack(rows)
    results = []
    for model in (plain, compiled):
        logits = run(model, batch, TIMES)
        logits.square().sum().backward()
        results.append((logits, gradients(model)))
    assert relative(results[1][0], results[0][0]) < 1e-5
    for name, gradient in results[0][1].items():
        assert relative(results[1][1][name], gradient) < 1e-4, name
