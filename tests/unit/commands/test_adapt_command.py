"""`d2plm adapt`: the split, the interpolation towards the base, the files, and rejected input."""

import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from d2plm.assembly import adaptation
from d2plm.assembly.adaptation import INTERPOLATIONS
from d2plm.cli import main
from d2plm.commands.adapt import run
from d2plm.config import compose
from d2plm.core.errors import DataError
from d2plm.core.vocabulary import decode
from d2plm.data.family import read_family
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.data.manifest import open_prepared
from d2plm.evaluation import family_bound
from d2plm.evaluation.family_bound import ADAPTED, BASE, compare_on_family, family_verdict
from d2plm.evaluation.result import Compared
from d2plm.export.exported_model import load_export, save_export
from d2plm.families.profile_hmm import alignment_nats, members_nats
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.flow_matching import MaskFlowMatching
from tests.conftest import FASTA, MonkeyPatch

FAMILY = FASTA.with_name("family_abc_importers.fasta.gz")
LIMIT = 126
Configured = Callable[..., Any]  # overrides → configuration
TINY = (
    *("trainer.max_steps=3", "callbacks.evaluation.every=2", "callbacks.checkpoint.every=2"),
    *("data.token_budget=1024", "evaluation.masks_per_sequence=1", "generation.number=3"),
    *("generation.steps=4", "tracking=none", "trainer.compile=false"),
    # Few and coarse searches, which find planted families.
    *("data.cluster.method=none", "data.search.sensitivity=1", "data.relatives_sensitivity=1"),
    *("data.search_directions=from_held_out", "data.max_relatives=2"),
)


def beginnings(source: Path, number: int, file: Path) -> Path:
    """A FASTA file of the first 60 residues of the first proteins of `source`."""
    few = islice(read_fasta(source), number)
    write_fasta(file, ((one.name, decode(one.tokens[:60])) for one in few))
    return file


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    """A model of flow matching that takes relatives."""
    lengths = LengthHistogram.of(np.array([40, 50]), LIMIT)
    folder = tmp_path_factory.mktemp("exports") / "base"
    return save_export(folder, tiny_dit(relatives_dim=8), MaskFlowMatching(), lengths, {})


@pytest.fixture
def configured(base: Path, tmp_path: Path, new_mlflow_store: Path) -> Configured:
    """Overrides → the configuration of an adaptation of a few steps."""
    family = beginnings(FAMILY, 60, tmp_path / "family.fasta")
    general = beginnings(FASTA, 4, tmp_path / "general.fasta")
    store = shutil.copy(new_mlflow_store, tmp_path)

    def of(*words: str) -> Any:
        own = [f"input='{family}'", f"init_from='{base}'", f"general='{general}'"]
        own += [f"work_dir='{tmp_path / 'work'}'", f"tracking.uri='sqlite:///{store}'"]
        return compose("adapt", [*own, *TINY, *words])

    return of


def test_a_family_is_adapted_to_compared_and_grown(
    configured: Configured, base: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def train_here(file: Path, *_: object) -> None:
        assert main(["train", f"--config-file={file}"]) == 0

    def first_members(held_out: list[Any], folder: Path, *_: Any, **__: Any) -> list[list[Any]]:
        few = islice(open_prepared(folder).splits["train"], 2)
        return [[SimpleNamespace(tokens=one) for one in few]] * len(held_out)

    monkeypatch.setattr(adaptation, "train_locally", train_here)
    monkeypatch.setattr(adaptation, "retrieve_relatives", first_members)  # searches take seconds
    words = ["trainer.lora_rank=2", "max_general_loss=9", "identity=0.7", "tracking=mlflow"]
    config = configured(*words)
    found, work = run(config), tmp_path / "work"
    kept = json.loads((work / "adaptation.json").read_text())["test"]
    assert kept == json.loads(json.dumps(found["test"]))
    names = {"unigram", "5-gram", "composition", BASE, f"{BASE}, alone", ADAPTED}
    assert names | {family_bound.FAMILY_PROFILE, family_bound.WITH_PAIRS} < {*found["test"]}
    assert [row["share"] for row in found["shares"]] == [*INTERPOLATIONS]
    assert found["verdict"] in (work / "adaptation.md").read_text()
    assert len([*read_fasta(work / "members.fasta")]) == 3
    adapted, before = load_export(work / "model"), load_export(base)
    assert adapted.paradigm.settings == before.paradigm.settings
    share = adapted.provenance["adaptation"]["share"]
    assert share == min(found["shares"], key=lambda row: row["validation_nelbo"])["share"]
    trained = load_export(work / "training" / "model").model.state_dict()
    for name, weight in adapted.model.state_dict().items():
        own = before.model.state_dict()[name]
        torch.testing.assert_close(weight, own + share * (trained[name] - own))
    alone = load_export(work / "adapter").model.state_dict()
    for name, weight in adapted.model.state_dict().items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-5, atol=1e-6)
    client = MlflowClient(tracking_uri=config.tracking.uri)
    [experiment] = [one for one in client.search_experiments() if one.name != "Default"]
    [tracked] = client.search_runs([experiment.experiment_id])
    logged = tracked.data.metrics["family/adapted_model"]
    assert logged == pytest.approx(found["test"][ADAPTED]["perplexity"]["value"])
    artifacts = {one.path for one in client.list_artifacts(tracked.info.run_id, "adaptation")}
    assert "adaptation/adaptation.md" in artifacts


def test_a_family_of_copies_is_rejected(configured: Configured, tmp_path: Path) -> None:
    few = tmp_path / "few.fasta"
    own = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPD"
    write_fasta(few, [(str(n), own) for n in range(60)])
    with pytest.raises(DataError, match=r"cannot be split by .*generation.relatives=.*mutations="):
        run(configured(f"input={few}"))


def test_the_profile_of_all_members_is_that_of_the_same_relatives() -> None:
    members = read_family(FAMILY, most=8).members[:12]
    expected = alignment_nats(members[10:], [members[:10]] * 2)
    np.testing.assert_allclose(members_nats(members[:10], members[10:]), expected, rtol=1e-6)


def test_the_verdict_is_against_the_best_of_the_others() -> None:
    random, residues = np.random.default_rng(0), np.full(40, 100)
    noise = random.normal(size=40)
    nats = {"5-gram": 290 + noise, BASE: 270 + noise, ADAPTED: 260 + noise}
    figures = compare_on_family(nats, residues, np.arange(40))
    assert [*figures] == ["5-gram", BASE, ADAPTED]
    base = figures[BASE]
    assert isinstance(base, Compared) and base.difference.value == pytest.approx(-0.1)
    assert family_verdict(figures).startswith(f"better than the best of the others, {BASE}: ")
    figures = compare_on_family({**nats, ADAPTED: 280 + noise}, residues, np.arange(40))
    assert family_verdict(figures).startswith(f"worse than the best of the others, {BASE}: ")
