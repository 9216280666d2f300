"""On a CUDA device: the same values as on a CPU, no wait of the host, no recompilation.

Skipped without one. What can be counted without a device is in test_step_counts.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from d2plm.core.noise import Key
from d2plm.data.loader import Collection
from d2plm.data.store import SequenceStore
from d2plm.evaluation.likelihood import score_sequences
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.model.attention import packed_attention
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.model.layers import sum_segments
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.training import AdamWSettings, CosineSettings, MuonSettings
from d2plm.training.distributed import Process
from d2plm.training.learning_rate import cosine
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.parallelise import in_precision
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer
from tests.conftest import ESM, EXPERTS, LLAMA, TINY_SIZES, DiTFactory, randomise
from tests.runs import make_trainer
from tests.unit.model.test_attention import written_out
from tests.unit.training.test_equality import following

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LOW = 2e-2  # relative, of bf16: 8 bits of mantissa
SIZES = {**TINY_SIZES, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "own": {},
    "as ESM-2": ESM,
    "llama": LLAMA,
    "experts": EXPERTS,
    "relatives": {"relatives_dim": 16},
}
PARADIGMS = {
    "diffusion": AbsorbingDiffusion,
    "flow_matching": MaskFlowMatching,
    "flow_matching_uniform": UniformFlowMatching,
}
OPTIMIZERS = {
    "adamw": partial(build_adamw, settings=AdamWSettings(learning_rate=1e-3)),
    "muon": partial(build_muon, settings=MuonSettings(learning_rate=1e-3)),
}

Build = Callable[..., Trainer]


@pytest.fixture
def build(tiny_store: SequenceStore, tmp_path: Path) -> Build:
    """Changes of settings → a trainer on the device; relatives of a sequence are the next two."""
    index = following(len(tiny_store), every=1)

    def make(kind: type[Trainer] = Trainer, *, model: str = "own", **changes: Any) -> Trainer:
        dit = DiT(DiTConfig(**{**SIZES, **MODELS[model]}))
        randomise(dit)
        of_relatives = {"max_relatives": 2} if model == "relatives" else {}
        settings: dict[str, Any] = {
            "model": dit,
            "paradigm": AbsorbingDiffusion(),
            "collections": [Collection(tiny_store, relatives=index)],
            "output_dir": tmp_path / "run",
            "optimizer": OPTIMIZERS["adamw"],
            "schedule": partial(cosine, settings=CosineSettings(warmup_ratio=0.0)),
            "max_steps": 6,
            "token_budget": 512,
            "max_length": 64,
            "global_batch_tokens": 1024,
            "device": "cuda",
            "precision": "bf16",
            "compile": False,
        }
        return make_trainer(kind, **{**settings, **of_relatives, **changes})

    return make


def losses(trainer: Trainer, steps: int = 4) -> list[list[float]]:
    """Loss and gradient norm of each of the first steps."""
    found = []
    for batch in islice(trainer.batches(), steps):
        trainer.train_step(batch)
        found.append([float(trainer.loss), float(trainer.grad_norm)])
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [8, 60])
def test_attention_within_segments(dtype: torch.dtype, size: int) -> None:
    bounds = torch.tensor([0, 1, 1, 30, 158, 300, 300, 321], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shape = (321, 2, size)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    q, k, v = exact = [x.double().requires_grad_() for x in inputs[:3]]
    expected = written_out(q, k, v, bounds.diff().tolist())
    expected.backward(inputs[3].double())
    ours = [x.cuda().requires_grad_() for x in inputs[:3]]
    found = packed_attention(*ours, bounds.cuda(), 142)
    found.backward(inputs[3].cuda())
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]
    for one, other in pairs:
        error = (one.detach().cpu().double() - other.detach()).norm() / other.detach().norm()
        assert error < LOW


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 200), (torch.bfloat16, 128)])
def test_sums_of_segments(dtype: torch.dtype, width: int) -> None:
    bounds = torch.tensor([0, 5, 5, 70, 300, 301, 1400, 1400], dtype=torch.int32)
    values = torch.randn(1400, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for view in (values[:, :width], values[:, ::2]):
        exact = [view[a:b].double().sum(0) for a, b in pairwise(bounds.tolist())]
        found = sum_segments(view.cuda(), bounds.cuda()).cpu().double()
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(found, torch.stack(exact), rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_masks_are_those_of_a_cpu(build: Build, paradigm: str) -> None:
    trainer = build(paradigm=PARADIGMS[paradigm]())
    for step, batch in enumerate(islice(trainer.batches(), 4)):
        for packed in batch.micro_batches:
            here, there = (
                trainer.paradigm.corrupt(on, Key(3, step)) for on in (packed, packed.to("cpu"))
            )
            assert torch.equal(here.tokens.cpu(), there.tokens)
            assert torch.equal(here.targets.cpu(), there.targets)
            torch.testing.assert_close(here.weights.cpu(), there.weights)


@pytest.mark.parametrize(
    ("model", "optimizer", "paradigm"),
    [
        *((model, "adamw", "diffusion") for model in MODELS),
        *((model, "muon", "diffusion") for model in ("own", "experts")),
        *(("own", "adamw", flow) for flow in ("flow_matching", "flow_matching_uniform")),
    ],
)
def test_losses_are_those_of_a_cpu(build: Build, model: str, optimizer: str, paradigm: str) -> None:
    changes: dict[str, Any] = {"model": model, "optimizer": OPTIMIZERS[optimizer]}
    changes["paradigm"] = PARADIGMS[paradigm]()
    here = losses(build(**changes))
    there = losses(build(**changes, device="cpu", precision="fp32"))
    np.testing.assert_allclose(np.array(here)[:, 0], np.array(there)[:, 0], rtol=LOW)
    np.testing.assert_allclose(np.array(here)[:, 1], np.array(there)[:, 1], rtol=5 * LOW)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        *((model, {}) for model in MODELS),
        *((model, {"optimizer": OPTIMIZERS["muon"]}) for model in ("own", "experts")),
        # Of experts in fp16, torch computes one product after another and reads their bounds.
        *((model, {"precision": "fp16"}) for model in MODELS if model != "experts"),
    ],
)
def test_a_step_never_waits_for_the_device(
    build: Build, model: str, changes: dict[str, Any]
) -> None:
    trainer = build(model=model, **changes)
    batches = trainer.batches()
    for batch in islice(batches, 2):
        trainer.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in islice(batches, 3):
            trainer.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(trainer.loss)


def test_compiled_blocks_compute_the_same_and_are_compiled_once(build: Build) -> None:
    from torch._dynamo.utils import counters

    plain = losses(build())
    torch.compiler.reset()
    counters.clear()
    trainer = build(compile=True)
    assert trainer.compiled
    np.testing.assert_allclose(np.array(losses(trainer))[:, 0], np.array(plain)[:, 0], rtol=LOW)
    assert counters["stats"]["unique_graphs"] <= 2  # the first is a trial of the compiler
    assert not counters["graph_break"]


def test_a_resumed_run_continues_from_exactly_what_was_saved(build: Build) -> None:
    first, second = build(), build()
    for batch in islice(first.batches(), 3):
        first.train_step(batch)
    location = first.save()
    first.saver.finish()
    second.load(location)
    found, expected = (
        (one.parameters, one.ema.shadow, one.optimizer.state_dict()["state"])
        for one in (second, first)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    second.train()
    assert (second.first_step, second.step) == (3, 6)


class OneShardedRank(Trainer):
    """FSDP2 over NCCL with a mesh of one rank."""

    def build_process(self, plan: Plan) -> None:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        mesh, host = (
            init_device_mesh(kind, (1,), mesh_dim_names=("shard",)) for kind in ("cuda", "cpu")
        )
        self.process = Process(0, 1, device, mesh, host, timeout_seconds=60.0)
        self.device, self.plan = device, plan.resolved(1)


@pytest.mark.parametrize("compile", [False, True])
def test_one_rank_of_nccl_with_sharded_parameters_computes_the_same(
    build: Build, tmp_path: Path, compile: bool
) -> None:
    alone = losses(build())
    store = f"file://{tmp_path}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        trainer = build(OneShardedRank, compile=compile)
        np.testing.assert_allclose(losses(trainer), alone, rtol=LOW)
        trainer.save()
        trainer.saver.finish()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", PARADIGMS)
def test_the_bound_and_samples(kind: str, tiny_dit: DiTFactory, tiny_store: SequenceStore) -> None:
    paradigm: Paradigm = PARADIGMS[kind]()
    sequences = [tiny_store[index][:100] for index in range(12)]
    bounds = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        model = tiny_dit(**{**SIZES, "max_position_embeddings": 128}).to(device)
        denoiser = in_precision(model, dtype)
        with torch.inference_mode():
            scores = score_sequences(
                denoiser, paradigm, sequences, masks_per_sequence=4, max_length=128, device=device
            )
        bounds.append(scores.nats)
    np.testing.assert_allclose(*bounds, rtol=LOW)
    templates = [np.full(40, paradigm.vocabulary.mask, dtype=np.uint8)] * 3
    model = in_precision(tiny_dit(**SIZES).cuda(), torch.bfloat16)
    made = sample(
        model, paradigm, templates, Sampling(steps=8, seed=1), max_length=64, device="cuda"
    )
    assert all(len(row) == 40 and (row != paradigm.vocabulary.mask).all() for row in made)
