"""ProgressBar: its first line, and silence where training never began."""

import math

import pytest

from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import composition_nats, counts_of, fit_composition
from d2plm.settings.callbacks import EvaluationCallbackSettings
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.trainer import Trainer
from tests.conftest import Captured
from tests.unit.training.conftest import Build


def test_the_first_line_has_the_composition_baseline_of_the_evaluated_proteins(
    tiny_store: SequenceStore, build: Build, capsys: Captured
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


def test_a_training_that_never_began_is_stopped_without_a_word(build: Build) -> None:
    class Refuse(Callback):
        def on_train_begin(self, trainer: Trainer) -> None:
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        build(Refuse(), ProgressBar()).train()
