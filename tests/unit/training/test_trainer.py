"""Trainer: gradients whatever the cut, resuming bit for bit, relatives, stopping on a signal."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.core.noise import Key
from d2plm.core.vocabulary import MASK
from d2plm.data.loader import Collection, GlobalBatch, Position, framed
from d2plm.data.store import SequenceStore
from d2plm.model import dit
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from d2plm.settings.training import AdamWSettings, CosineSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.learning_rate import cosine
from d2plm.training.optimizer import build_adamw
from d2plm.training.parallelise import WORTH_COMPILING, compile_blocks
from tests import runs
from tests.conftest import EXPERTS, TINY_SIZES, MonkeyPatch, randomise
from tests.unit.training.conftest import Build, Recorder
from tests.unit.training.test_equality import RELATIVES, dense_model, following

STEPS = 6


@pytest.fixture
def make_trainer(build: Build) -> Build:
    return partial(
        build,
        optimizer=partial(build_adamw, settings=AdamWSettings(learning_rate=1e-2)),
        schedule=partial(cosine, settings=CosineSettings(warmup_ratio=0.2)),
        max_length=128,
    )


def cut(sequences: Sequence[np.ndarray], bins: int) -> GlobalBatch:
    """The same global batch as `bins` micro-batches of one shape."""
    shares = np.array_split(np.arange(len(sequences)), bins)
    return GlobalBatch(
        [
            PackedBatch.pack(
                [sequences[i] for i in share],
                draw_ids=share,
                global_sequences=len(sequences),
                token_budget=sum(len(sequences[i]) for i in share) + 3 * bins,
                max_segments=len(share) + 2,
            )
            for share in shares
        ],
        Position(0, 1),
        [len(sequence) for sequence in sequences],
    )


def test_a_step_is_plain_adamw_on_the_mean_loss(
    make_trainer: Build, proteins: list[np.ndarray]
) -> None:
    """One step against cross-entropy, clipping and AdamW written out on a second model."""
    sequences = [framed(tokens[:40]) for tokens in proteins[:6]]
    paradigm = AbsorbingDiffusion(loss="mean")
    ours, theirs = (make_trainer(paradigm=paradigm, max_grad_norm=0.05) for _ in range(2))
    for trainer in (ours, theirs):
        randomise(trainer.model)
    ours.train_step(cut(sequences, 3))

    batch = cut(sequences, 1).micro_batches[0]
    noised = paradigm.corrupt(batch, Key(0, 0))
    logits = theirs.model(noised.tokens, batch.cu_seqlens, batch.max_seqlen, noised.times)
    masked = noised.tokens == 32
    loss = functional.cross_entropy(logits[masked, 4:24], batch.tokens[masked].long() - 4)
    parameters = list(theirs.model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    norm = torch.sqrt(torch.stack([gradient.square().sum() for gradient in gradients]).sum())
    assert norm > 0.05
    rate = 1e-2 * 1 / 2  # the warm-up is round(0.2·6) = 1 step
    for parameter, mine, gradient in zip(
        parameters, ours.model.parameters(), gradients, strict=True
    ):
        clipped = gradient * 0.05 / (norm + 1e-6)
        embedding = parameter is theirs.model.token_embedding.weight
        decay = 0.01 if parameter.ndim >= 2 and not embedding else 0.0
        # At the first step both bias-corrected moments are the gradient and its square.
        update = clipped / (clipped.abs() + 1e-8)
        expected = parameter * (1 - rate * decay) - rate * update
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=2e-5)
    assert float(ours.loss) == pytest.approx(loss.item(), rel=1e-5)
    assert float(ours.grad_norm) == pytest.approx(norm.item(), rel=1e-4)
    assert ours.position == Position(0, 1)


def test_training_learns_which_residues_occur(
    make_trainer: Build, make_store: Callable[[list[np.ndarray]], SequenceStore]
) -> None:
    random = np.random.default_rng(0)
    store = make_store([random.integers(4, 6, 40, dtype=np.uint8) for _ in range(50)])
    recorder, changes = Recorder(), {"paradigm": AbsorbingDiffusion(loss="mean"), "max_steps": 40}
    make_trainer(recorder, collections=[Collection(store)], **changes).train()
    assert recorder.losses[0] == pytest.approx(np.log(20), rel=1e-5)
    assert np.mean(recorder.losses[-8:]) == pytest.approx(np.log(2), abs=0.08)


def test_max_epochs_is_the_number_of_batches_in_them(make_trainer: Build) -> None:
    trainer = make_trainer(max_epochs=2, max_steps=None, token_budget=4096)
    steps = trainer.loader.batches_in_epoch(0) + trainer.loader.batches_in_epoch(1)
    assert trainer.max_steps == steps
    trainer.train()
    assert (trainer.step, trainer.position) == (steps, Position(2, 0))


def test_events_come_in_order(make_trainer: Build) -> None:
    seen: list[str] = []

    class Everything(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                seen.append(name)
            return super().__getattribute__(name)

    make_trainer(Everything(), max_steps=1, gradient_accumulation_steps=2).train()
    assert seen == [
        *("on_init", "on_train_begin", "on_epoch_begin", "on_step_begin", "on_micro_step_begin"),
        *("on_micro_step_end", "on_micro_step_begin", "on_micro_step_end"),
        *("on_before_optimizer_step", "on_step_end", "on_train_end", "on_stop"),
    ]


RESUMED: dict[str, dict[str, Any]] = {
    "experts and dropout": {
        "sizes": {**EXPERTS, "hidden_dropout_prob": 0.2, "initial_gate": 1.0},
        "gradient_accumulation_steps": 2,
    },
    "relatives": RELATIVES,
    "low rank": {"model": dense_model, "lora_rank": 2, "precision": "fp64"},
}


@pytest.mark.parametrize("of", RESUMED)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(
    of: str, store: Path, tmp_path: Path
) -> None:
    settings = {**RESUMED[of], "log": False, "max_steps": 4, "every": 99}
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    runs.train(store, unbroken, settings)
    with pytest.raises(KeyboardInterrupt):
        stop = runs.At("on_step_end", 2, runs.interrupt)
        runs.build(store, broken, callbacks=[stop], **settings).train()
    torch.manual_seed(123)  # what else was drawn in the process must not matter
    runs.train(store, broken, settings)
    runs.assert_same_run(broken, unbroken)
    if "experts" in of:
        kept = runs.tensors(runs.newest(broken))
        assert kept["model/blocks.0.feed_forward.router.bias"].any()


def test_dropout_is_on_in_training(make_trainer: Build, tmp_path: Path) -> None:
    losses = []
    for probability in (0.0, 0.3):
        model = DiTConfig(**TINY_SIZES, hidden_dropout_prob=probability, initial_gate=1.0)
        trainer = make_trainer(model=model, output_dir=tmp_path / str(probability), max_steps=2)
        trainer.train()
        losses.append(float(trainer.loss))
    assert abs(losses[0] - losses[1]) > 1e-4


def test_where_a_run_starts(make_trainer: Build, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trainer(Recorder(stop_after=4, save_every=2)).train()
    folder = tmp_path / "run" / "checkpoints" / "step-00000002"

    def steps(output: str, resume: str) -> int:
        recorder = Recorder(save_every=1)
        settings = {"resume": resume, "output_dir": tmp_path / output, "save_total_limit": 9}
        make_trainer(recorder, **settings).train()
        return len(recorder.losses)

    assert steps("elsewhere", str(folder)) == STEPS - 2
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun's: the same run goes on
        assert steps("run", "none") == STEPS - 4
    assert steps("run", "none") == STEPS
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == STEPS
    assert len(list((tmp_path / "run" / "checkpoints.old").iterdir())) == 4
    for file in (tmp_path / "run" / "checkpoints").glob("*/.metadata"):
        file.unlink()
    assert steps("run", "auto") == STEPS, "no checkpoint is whole"


def test_a_checkpoint_of_another_run_is_rejected(make_trainer: Build, tmp_path: Path) -> None:
    make_trainer(Recorder(save_every=3)).train()
    for changes, words in (
        ({"seed": 1}, "seed: 0 → 1"),
        ({"identity": {"seed": 0, "model": {"hidden_size": 32}}}, "resume=none"),
        ({"model": DiTConfig(**{**TINY_SIZES, "hidden_size": 32})}, "does not fit this model"),
        ({"resume": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        with pytest.raises(CheckpointError, match=words):
            make_trainer(**changes).train()


def test_impossible_settings_are_named(make_trainer: Build) -> None:
    changes: list[dict[str, Any]] = [{"max_steps": None}, {"max_epochs": 1, "max_steps": 5}]
    changes += [{"max_length": 129}, {"max_length": "long"}, {"token_budget": 100}]
    for change in changes:
        with pytest.raises(ConfigError, match=f"{next(iter(change))}="):
            make_trainer(**change)


def test_blocks_are_compiled_where_that_pays_in_the_whole_run(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    monkeypatch.setattr("torch.ones", lambda *_, **__: 1)  # on a device that is not here
    cases: list[tuple[bool | str, str, float, bool]] = [
        ("auto", "cpu", WORTH_COMPILING / 2, False),
        ("auto", "cpu", WORTH_COMPILING, True),
        ("auto", "cuda", 0.0, True),
        (False, "cuda", 1e20, False),
    ]
    for setting, device, flops, compiled in cases:
        blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        assert compile_blocks(blocks, setting, torch.device(device), flops) is compiled
        assert ("forward" in vars(blocks[0])) is compiled


def test_relatives_are_for_models_and_paradigms_that_take_them(build: Build) -> None:
    taking = DiTConfig(**TINY_SIZES, relatives_dim=8)
    for number, named in ((None, "null"), (0, "0")):
        with pytest.raises(ConfigError, match=f"max_relatives={named}"):
            build(model=taking, max_relatives=number)
    with pytest.raises(ConfigError, match="max_relatives=2"):
        build(max_relatives=2)
    for paradigm in (UniformFlowMatching(), AbsorbingDiffusion(shift=True)):
        with pytest.raises(ConfigError, match="relatives_dim=8"):
            build(model=taking, max_relatives=2, paradigm=paradigm)


def test_only_corrupted_tokens_are_aligned(
    build: Build, tiny_store: SequenceStore, monkeypatch: MonkeyPatch
) -> None:
    """In training and in the bound."""
    data = Collection(tiny_store, relatives=following(len(tiny_store), every=1))
    model = DiTConfig(**TINY_SIZES, relatives_dim=8)
    trainer = build(model=model, max_relatives=2, collections=[data], max_steps=2)
    spy = mock.Mock(wraps=dit.align)
    monkeypatch.setattr(dit, "align", spy)
    corrupt = mock.Mock(wraps=trainer.paradigm.corrupt)
    monkeypatch.setattr(trainer.paradigm, "corrupt", corrupt)
    trainer.train()
    batches = [call.args[0] for call in corrupt.call_args_list]
    aligned = [call.args[0] for call in spy.call_args_list]
    assert len(aligned) == len(batches) == 2
    trainer.paradigm.bound(trainer.denoiser, batches[0], Key(0), draw=0, draws=1)
    aligned.append(spy.call_args.args[0])
    for tokens, batch in zip(aligned, [*batches, batches[0]], strict=True):
        changed = tokens != batch.tokens
        assert changed.any()
        assert (tokens[changed] == MASK).all()
