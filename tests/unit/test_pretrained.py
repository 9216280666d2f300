"""The shipped model: its files belong together, and commands without another model use it."""

import json
from pathlib import Path

import pytest

from d2plm import load_model
from d2plm.cli import main
from d2plm.config import compose
from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import read_evaluation
from d2plm.export.exported_model import load_export, weights_digest
from d2plm.export.model_evaluation import load_scores
from d2plm.settings.commands import PRETRAINED
from tests.conftest import Captured, MonkeyPatch
from tests.docs.markdown import ROOT

SHIPPED = ROOT / PRETRAINED


def test_the_card_is_of_these_weights_and_figures() -> None:
    evaluation = read_evaluation(SHIPPED)
    assert evaluation is not None
    assert evaluation.digests["model"] == weights_digest(SHIPPED)
    scored, scores = load_scores(SHIPPED)
    assert scored == evaluation
    assert len(scores["nats"]) == evaluation.sequences
    exported = load_export(SHIPPED)
    assert (SHIPPED / "README.md").read_text() == exported.card(evaluation)
    assert "CC BY 4.0" in (SHIPPED / "README.md").read_text()
    provenance, training = exported.provenance, compose("train", ["experiment=pretrained"])
    assert (provenance["name"], provenance["step"]) == ("pretrained", training.trainer.max_steps)
    assert provenance["settings"]["optimizer"]["type"] == training.optimizer.type
    for field in ("hidden_size", "num_hidden_layers", "relatives_dim"):
        assert getattr(exported.model.config, field) == getattr(training.model, field)


def test_its_figures_are_those_of_the_readme() -> None:
    evaluation, page = read_evaluation(SHIPPED), (ROOT / "README.md").read_text()
    assert evaluation is not None
    assert evaluation.given_relatives is not None
    best = evaluation.baselines[judge(evaluation).baseline]
    bounds = [row.model for row in evaluation.given_relatives.below]
    for bound in (evaluation.model, best, *bounds):
        assert f"{bound.perplexity.value:.3f}" in page
    seeds = json.loads((SHIPPED / "seeds.json").read_text())
    assert seeds["0"]["alone"] == pytest.approx(evaluation.model.perplexity.value, abs=1e-3)


def test_commands_take_it_alone(tmp_path: Path, monkeypatch: MonkeyPatch, capfd: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "number=2", "length=30", "steps=4", "output=new.fasta"]) == 0
    assert main(["score", "new.fasta", "evaluation.masks_per_sequence=1", "output=s.csv"]) == 0
    assert main(["embed", "new.fasta", "output=embeddings"]) == 0
    said = capfd.readouterr().err
    assert said.count(f"model: {PRETRAINED}, which is part of D2PLM") == 3
    assert load_model().infill("MKT__", number=1)[0].startswith("MKT")
