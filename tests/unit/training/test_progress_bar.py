"""ProgressBar and the expected time: the messages, when they appear, and on which rank."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import composition_nats, counts_of, fit_composition
from d2plm.settings.callbacks import CheckpointSettings, EvaluationCallbackSettings, MetricsSettings
from d2plm.training import expected_time
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.trainer import Trainer

Build = Callable[..., Trainer]


class Clock(Callback):
    """A clock that only steps advance: the first by 100 s, the others by `seconds`."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.seconds = 0.0, seconds
        self.tokens: list[int] = []
        monkeypatch.setattr(expected_time.time, "monotonic", lambda: self.now)

    def on_step_begin(self, trainer: Trainer) -> None:
        self.now += self.seconds if self.tokens else 100.0
        assert trainer.batch is not None
        self.tokens.append(sum(trainer.batch.segment_lengths))


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "expected" in line]


def test_the_expected_time_is_said_once_after_ten_steps(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(2.0, monkeypatch)
    trainer = build(clock, ProgressBar(), max_steps=40)
    monkeypatch.setattr(expected_time, "SECONDS", 1e9)
    trainer.train()
    rate = sum(clock.tokens[1:10]) / 18.0 / 1e3
    assert said(capsys) == [  # 100 s for the first step and 2 s for the other 39
        f"expected: 2 min 58 s for 40 steps, 1 min 0 s left ({rate:.1f} k tokens/s)"
    ]


def test_slow_steps_are_not_waited_for(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(Clock(40.0, monkeypatch), ProgressBar(), max_steps=8)
    trainer.train()
    (line,) = said(capsys)
    assert line.startswith("expected: 6 min 20 s for 8 steps, 4 min 0 s left")


def test_after_a_resume_only_what_remains_is_expected(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build(SaveCheckpoint(CheckpointSettings(every=5)), max_steps=5).train()
    build(Clock(3.0, monkeypatch), ProgressBar(), max_steps=27).train()
    (line,) = said(capsys)
    assert line.startswith("expected: 1 min 0 s for the remaining 20 of 27 steps (")


def test_where_the_peak_is_known_the_share_of_it_is_said(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(expected_time, "known_peak", lambda device, dtype: 1e-6)
    monkeypatch.setattr(expected_time, "training_flops", lambda config, lengths: 8e5)
    build(Clock(2.0, monkeypatch), ProgressBar(), max_steps=12).train()
    assert "tokens/s, 40% of 1e-06 TFLOP/s)" in said(capsys)[0]


def test_other_ranks_say_nothing(build: Build, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = build(ProgressBar(), MetricLogger(settings=MetricsSettings(every=1)), max_steps=14)
    trainer.process = replace(trainer.process, rank=1, world_size=2)
    trainer.train()
    assert capsys.readouterr().err == ""


def test_each_evaluation_is_a_row_below_one_heading(
    build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar()
    trainer = build(bar)
    bar.on_train_begin(trainer)
    bar.on_log(trainer, {"loss": 2.5})
    for step, perplexity in ((1000, 17.5), (2000, 16.25), (3000, 16.5)):
        trainer.step = step
        bar.on_evaluate(trainer, {"validation_perplexity": perplexity})
    bar.on_evaluate(trainer, {"another": 1.0})
    bar.on_stop(trainer)
    about, heading, *rows = capsys.readouterr().err.splitlines()
    assert about.startswith("perplexity: ")
    assert heading.split() == ["step", "loss", "perplexity", "best", "tokens", "time"]
    assert len({len(line) for line in (heading, *rows)}) == 1
    assert [row.split()[:4] for row in rows] == [
        ["1,000", "2.5000", "17.500", "now"],
        ["2,000", "2.5000", "16.250", "now"],
        ["3,000", "2.5000", "16.500", "16.250"],
    ]


def test_the_first_line_has_the_composition_baseline_of_the_evaluated_proteins(
    tiny_store: SequenceStore, build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = Evaluate(tiny_store, max_length=64, settings=EvaluationCallbackSettings(sequences=8))
    alpha = fit_composition(tiny_store, 62)
    counts = [counts_of(tokens[:62]) for tokens in held_out.sequences]
    nats = sum(composition_nats(each, alpha) for each in counts)
    expected = math.exp(nats / sum(each.sum() for each in counts))
    assert held_out.reference_perplexity(tiny_store) == pytest.approx(expected)
    bar = ProgressBar()
    trainer = build(bar)
    trainer.add_callback(held_out)
    bar.on_train_begin(trainer)
    bar.on_evaluate(trainer, {"validation_perplexity": 17.5})
    bar.on_stop(trainer)
    assert f"without order, gives {expected:.3f}" in capsys.readouterr().err


def test_the_note_is_of_the_last_row(build: Build) -> None:
    bar = ProgressBar()
    trainer = build(bar)
    bar.on_train_begin(trainer)
    bar.on_log(trainer, {"loss": 2.5, "tokens_per_second": 24_300.0})
    bar.on_log(trainer, {"mine": 1.0})
    assert bar.note == "loss 2.5000  24.3 k tokens/s"


def test_a_training_that_never_began_is_stopped_without_a_word(build: Build) -> None:
    class Refuse(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        build(Refuse(), ProgressBar()).train()


def test_the_rate_is_of_all_ranks(
    build: Build, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(1.0, monkeypatch)
    trainer: Any = build(clock, ProgressBar(), max_steps=12)
    trainer.process = replace(trainer.process, world_size=4, device=torch.device("cpu"))
    trainer.train()
    assert f"({4 * clock.tokens[1] / 1e3:.1f} k tokens/s)" in said(capsys)[0]
