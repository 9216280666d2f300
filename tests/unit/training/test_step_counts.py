"""What one training step costs, counted and never timed.

Waits for the device, recompilations, kernels and FLOPs are the same on every machine, so this test
holds on one without a GPU what makes a step fast on one. (Padding is counted in test_packing.)
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from d2plm.core.batch import PackedBatch
from d2plm.data.loader import Collection, Position
from d2plm.data.prefetch import prefetch
from d2plm.data.store import SequenceStore
from d2plm.model import experts, layers
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import training_flops
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.callbacks import MetricsSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.profiler import Profiler
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.distributed import Process
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.plan import Plan
from d2plm.training.trainer import Trainer
from tests.conftest import ESM, EXPERTS, LLAMA, TINY_SIZES, MonkeyPatch, Tokens
from tests.ranks import run
from tests.runs import build as build_run
from tests.synchronisations import CUDA, counting
from tests.unit.model.test_attention import written_out
from tests.unit.training.conftest import Build
from tests.unit.training.test_equality import following

SIZES = {**TINY_SIZES, "num_hidden_layers": 1, "hidden_dropout_prob": 0.1}
FREQUENCIES = {"rope_frequencies": [1.0, 0.5, 0.25, 0.125]}
MODELS: dict[str, dict[str, Any]] = {
    "own": {},
    "as ESM-2": ESM | FREQUENCIES,
    "experts": EXPERTS,
    "llama": LLAMA,
    "relatives": {"relatives_dim": 8},
}


class OnCuda(Trainer):
    """On the stand-in for a CUDA device: no device is set up and no memory is page-locked."""

    def build_process(self, plan: Plan) -> None:
        self.process, self.device, self.plan = Process(device=CUDA), CUDA, plan.resolved(1)

    def build_loader(self, *arguments: Any, **settings: Any) -> None:
        super().build_loader(*arguments, **settings)
        self.loader.pin_memory = False


class ByStep(Callback):
    """The waits of each step."""

    called_last = True

    def __init__(self, waits: list[str]) -> None:
        self.waits, self.steps = waits, dict[int, list[str]]()

    def on_step_begin(self, trainer: Trainer) -> None:
        self.waits.clear()

    def on_step_end(self, trainer: Trainer, *_: object) -> None:
        self.steps[trainer.step] = list(self.waits)


CONTINUOUS: dict[str, Any] = {"num_train_timesteps": None, "time_sampling": "low_variance"}
PLAIN = {"max_grad_norm": None, "loss_aggregation": "rank_average", "precision": "fp16"}
FROZEN = {"optimizer": build_muon, "freeze": ["token_embedding.*"], "precision": "fp16"}


@pytest.mark.parametrize(
    ("paradigm", "model", "changes"),
    [
        (partial(AbsorbingDiffusion, **CONTINUOUS), "relatives", {"max_relatives": 2}),
        (partial(UniformFlowMatching, loss="generalised_kl"), "as ESM-2", FROZEN),
        (partial(AbsorbingDiffusion, schedule="linear_beta", loss="mean"), "experts", {}),
        (partial(MaskFlowMatching, schedule="cubic"), "llama", PLAIN),
    ],
)
def test_a_step_that_does_not_log_never_waits_for_the_device(
    paradigm: Callable[[], Paradigm],
    model: str,
    changes: dict[str, Any],
    build: Build,
    tiny_store: SequenceStore,
    monkeypatch: MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_on_device", cache(layers._on_device.__wrapped__))
    for name in ("max_memory_allocated", "max_memory_reserved", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    settings: dict[str, Any] = {
        "model": DiTConfig(**{**SIZES, **MODELS[model]}),
        "collections": [Collection(tiny_store, relatives=following(len(tiny_store)))],
        "max_steps": 3,
        "compile": False,
        "precision": "bf16",
        "async_prefetch": False,  # its stream needs a device
        "gradient_accumulation_steps": 2,
        **changes,
    }
    with counting() as waits:
        by_step = ByStep(waits)
        logger = MetricLogger(settings=MetricsSettings(every=3))
        callbacks = (GradientHealth(), GarbageCollection(), Profiler(), logger, ProgressBar())
        build(*callbacks, by_step, kind=OnCuda, paradigm=paradigm(), **settings).train()
    assert by_step.steps[2] == []
    assert 0 < len(by_step.steps[3]) <= 7  # it logs


class Reads(TorchDispatchMode):
    """Counts the numbers that Python takes out of tensors."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def train_watched(store: Path, output: Path) -> None:
    changes = {"precision": "bf16", "gradient_accumulation_steps": 2, "every": 0}
    trainer = build_run(store, output, optimizer=build_muon, **changes)
    trainer.callbacks.clear()  # they read
    batches = trainer.loader.stream(Position())
    for _ in range(2):
        with Reads() as reads:
            trainer.train_step(next(batches))
        assert not reads.found, f"step {trainer.step}: {reads.found} numbers were read"


def test_a_step_of_two_ranks_reads_no_number(store: Path, tmp_path: Path) -> None:
    run(train_watched, store, tmp_path, world_size=2)


def test_all_blocks_are_one_graph_compiled_once(build: Build, monkeypatch: MonkeyPatch) -> None:
    # Graphs are captured before kernels are made of them, for which there may be no compiler.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    changes: dict[str, Any] = {"precision": "bf16", "gradient_accumulation_steps": 2}
    changes |= {"plan": Plan(activation_checkpointing=2), "max_steps": 2}
    changes["model"] = DiTConfig(**TINY_SIZES, **EXPERTS)
    trainer = build(compile=True, **changes)
    assert trainer.compiled
    counters.clear()  # of the trial whether anything compiles
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer.train()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    torch._dynamo.reset()


NO_KERNEL = {
    f"aten.{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view")
} | {"aten.promote_types"}


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if not func.is_view and func.namespace != "profiler" and name not in NO_KERNEL:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


# At most, in the second step of a model of two blocks, uncompiled, with one micro-batch; lower them
# with what you save. AdamW's own are 4. Muon's are 110: 15 products and 4 kernels around them for
# each of five shapes, whatever the depth.
@pytest.mark.thorough
@pytest.mark.parametrize(("optimizer", "most"), [(build_adamw, 469), (build_muon, 575)])
def test_a_step_launches_no_more_kernels_than_it_did(
    optimizer: Callable[..., Optimizer], most: int, build: Build, monkeypatch: MonkeyPatch
) -> None:
    with counting():
        monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        trainer = build(kind=OnCuda, optimizer=optimizer, compile=False, precision="bf16")
        batches = prefetch(trainer.loader.stream(Position()), CUDA, enabled=False)
        trainer.train_step(next(batches))
        batch = next(batches)
        with Launches() as counts:
            trainer.train_step(batch)
    assert counts.found.total() <= most, counts.found


def attention_written_out(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """In matrix products that torch counts; the packed operator hides its own."""
    return written_out(q_THK, k_THK, v_THK, cu_seqlens.diff().tolist())


def groups_written_out(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Likewise for the experts' products."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    if right.ndim == 3:
        return torch.cat([x @ w for x, w in zip(left.split(sizes), right, strict=True)])
    parts = zip(left.split(sizes, dim=1), right.split(sizes), strict=True)
    return torch.stack([x @ y for x, y in parts])


@pytest.mark.parametrize("model", [*MODELS][:4])
def test_flops_are_what_torch_counts(
    model: str, proteins: list[Tokens], monkeypatch: MonkeyPatch
) -> None:
    """Σ over all matrix products of a forward and its backward; adaLN's are the formula's rest."""
    monkeypatch.setattr(layers, "packed_attention", attention_written_out)
    monkeypatch.setattr(experts, "grouped_product", groups_written_out)
    config = DiTConfig(**{**TINY_SIZES, **MODELS[model]})
    lengths = [11, 64, 64, 3, 40]
    batch = PackedBatch.pack([p[:n] for p, n in zip(proteins, lengths, strict=False)])
    times = torch.linspace(0, 1, len(lengths))
    with FlopCounterMode(display=False) as counted:
        logits = DiT(config)(batch.tokens, batch.cu_seqlens, batch.max_seqlen, times)
        logits.sum().backward()
    segments, width = len(lengths), config.hidden_size
    time, depth = config.time_embedding_dim or 0, config.num_hidden_layers
    modulation = time * (depth * 6 * width + 2 * width)
    once_a_segment = 6 * segments * (2 * time * time + modulation)
    once_a_segment -= 2 * segments * time * time  # the sinusoids have no gradient
    expected = training_flops(config, lengths) + once_a_segment
    assert counted.get_total_flops() == expected
