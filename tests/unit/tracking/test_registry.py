"""The champion gate: only a significantly better model on the same residues and masks passes."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from d2plm.core.errors import ModelError, TrackingError
from d2plm.evaluation.result import write_evaluation
from d2plm.tracking.registry import MADE_HERE, Registration, beats, export_digest, register
from d2plm.tracking.runs import tracking_run
from tests.conftest import MonkeyPatch
from tests.evaluations import invented_evaluation
from tests.unit.tracking.conftest import Killed, Refuse, repeat

SEQUENCES, RESIDUES = 200, 100


def evaluated(folder: Path, nats_per_residue: float, seed: int = 0, **digests: str) -> Path:
    """An export's evaluation files: nats that vary by sequence around a mean."""
    folder.mkdir()
    easy_or_hard = np.random.default_rng(0).normal(0, 0.3, SEQUENCES)  # shared by all models
    own = np.random.default_rng(seed).normal(0, 0.01, SEQUENCES)
    nats = RESIDUES * (nats_per_residue + easy_or_hard + own)
    residues = np.full(SEQUENCES, RESIDUES)
    clusters = np.arange(SEQUENCES) // 2
    np.savez(folder / "sequence_scores.npz", nats=nats, residues=residues, clusters=clusters)
    digests = {"masks": "m", "validation": "v", **digests}
    baselines = {"composition": 17, "5-gram": 16}
    write_evaluation(folder, invented_evaluation(9, baselines, digests=digests))
    return folder


def test_a_better_model_alone_passes_although_sequences_vary_far_more(tmp_path: Path) -> None:
    champion = evaluated(tmp_path / "old", 2.87)
    for name, nats, seed, digests in (
        ("better", 2.86, 1, {}),
        ("better, of other data", 2.86, 1, {"train": "more"}),
        ("worse", 2.88, 1, {}),
        ("equal", 2.87, 2, {}),
    ):
        better, reason = beats(evaluated(tmp_path / name, nats, seed=seed, **digests), champion)
        assert better == reason.startswith("better than the champion: ") == ("better" in name)


def test_a_champion_of_other_residues_or_masks_stays(tmp_path: Path) -> None:
    champion = evaluated(tmp_path / "old", 2.0)
    for what in ("masks", "validation"):
        better, reason = beats(evaluated(tmp_path / what, 1.0, **{what: "other"}), champion)
        assert not better
        assert "other data or masks" in reason


def test_an_evaluation_without_its_scores_is_rejected(tmp_path: Path) -> None:
    old, new = evaluated(tmp_path / "old", 2.0), evaluated(tmp_path / "new", 1.0)
    scores = new / "sequence_scores.npz"
    for damage in (lambda: scores.write_bytes(b"PK\x03\x04"), scores.unlink):
        damage()
        with pytest.raises(ModelError, match="d2plm evaluate"):
            beats(new, old)


def test_the_digest_is_of_the_weights_and_the_evaluation(tmp_path: Path) -> None:
    export = evaluated(tmp_path / "model", 2.0)
    weights = bytes(range(256)) * 5000
    (export / "model-00001-of-00002.safetensors").write_bytes(weights)
    (export / "model-00002-of-00002.safetensors").write_bytes(b"more")
    evaluation = (export / "evaluation.json").read_bytes()
    assert export_digest(export) == hashlib.sha256(weights + b"more" + evaluation).hexdigest()


def whole(folder: Path, nats_per_residue: float, seed: int) -> Path:
    export = evaluated(folder, nats_per_residue, seed=seed)
    (export / "model.safetensors").write_bytes(folder.name.encode())
    return export


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return whole(tmp_path / "model", 2.0, 3)


def registered(client: MlflowClient, export: Path, name: str) -> Registration:
    """In a run beside the export."""
    with tracking_run(export.parent / "run") as run:
        return register(client, str(run.id), export, name, export_digest(export))


def models_of(client: MlflowClient, run_id: str) -> list[tuple[str, str]]:
    """The state and the address of each model that was logged to a run."""
    experiment = client.get_run(run_id).info.experiment_id
    found = client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
    return [(model.status, f"models:/{model.model_id}") for model in found]


def test_a_failure_makes_no_champion(client: MlflowClient, refuse: Refuse, tmp_path: Path) -> None:
    first, worse = whole(tmp_path / "first", 2.0, 1), whole(tmp_path / "worse", 3.0, 2)
    made = registered(client, first, "m")
    assert made.is_champion
    assert registered(client, first, "m").version == made.version
    asked = MlflowClient.get_model_version_by_alias
    refuse("get_model_version_by_alias")
    with pytest.raises(TrackingError, match="cannot find the champion of m"):
        registered(client, worse, "m")
    assert str(asked(client, "m", "champion").version) == made.version
    assert str(asked(client, "m", "candidate").version) != made.version


def test_run_model_and_version_are_linked(client: MlflowClient, tmp_path: Path) -> None:
    export = whole(tmp_path / "model", 2.0, 3)
    (export / "provenance.json").write_text(json.dumps({"paradigm": "diffusion", "step": 40}))
    card = "---\nlibrary_name: d2plm\n---\n# A model\n\n" + "It is long.\n\n" * 1000
    (export / "README.md").write_text(card)
    with tracking_run(tmp_path / "run") as run:
        run.log_dataset("mine:validation", "v", "validation", tmp_path, {"num_rows": 3})
        run.log_params({"seed": 1})
        run.log_metrics({"train/loss": 3.0}, 20)
        run.log_metrics({"train/loss": 2.5}, 40)
        run.log_metrics({"evaluation/perplexity": 9.0, "versus/composition": 17.0})
        run.log_metrics({"given_relatives/perplexity_below_90": 5.0})
        run.set_tags({"mlflow.source.git.commit": "abc"})
        run.flush()
        made = register(client, str(run.id), export, "linked", export_digest(export))
    version = client.get_model_version("linked", made.version)
    model = client.get_logged_model(version.source.removeprefix("models:/"))
    assert (version.run_id, model.source_run_id) == (run.id, run.id)
    (made_of,) = client.get_run(str(run.id)).outputs.model_outputs
    assert (made_of.model_id, made_of.step) == (model.model_id, 40)
    assert (model.name, model.params["seed"]) == ("diffusion-step40", "1")
    figures = {metric.key: (metric.value, metric.dataset_name) for metric in model.metrics}
    assert figures == {
        "train/loss": (2.5, None),
        "evaluation/perplexity": (9.0, "mine:validation"),
        "versus/composition": (17.0, "mine:validation"),
        "given_relatives/perplexity_below_90": (5.0, "mine:validation"),
    }
    assert len(client.get_metric_history(str(run.id), "evaluation/perplexity")) == 1
    expected = {"step": "40", "git_revision": "abc", "best_baseline": "5-gram"}
    assert version.tags.items() >= {**expected, "perplexity_best_baseline": "16.0000"}.items()
    assert "# A model" in version.description
    assert len(version.description) <= 5000


def test_killed_registrations(client: MlflowClient, monkeypatch: MonkeyPatch, export: Path) -> None:
    """One that is killed after any request is completed by the next."""
    left = 0

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def made(*arguments: object, **named: object) -> object:
            nonlocal left
            answer = call(*arguments, **named)
            left -= 1
            if left == 0:
                raise Killed
            return answer

        return made

    changing = ("set_", "update_", "create_", "log_", "finalize_", "copy_", "delete_", "link_")
    for name in dir(MlflowClient):
        if name.startswith(changing):
            monkeypatch.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
    with tracking_run(export.parent / "run") as run:
        run.log_metrics({"evaluation/perplexity": 9.0})
        run.flush()
        for kills in count():
            left = kills + 1
            with suppress(Killed):
                made = register(client, str(run.id), export, "killed", export_digest(export))
                break
        left = 0
    assert kills > 10
    assert made.is_champion
    (version,) = client.search_model_versions("name = 'killed'")
    assert sorted(client.get_registered_model("killed").aliases) == ["candidate", "champion"]
    found = client.get_model_version("killed", version.version)
    assert {"export_digest", "perplexity", "best_baseline", "masks_digest"} <= found.tags.keys()
    assert found.description
    assert models_of(client, str(run.id)) == [("READY", version.source)]
    assert len(client.get_metric_history(str(run.id), "evaluation/perplexity")) == 1


def test_a_repeated_request(client: MlflowClient, monkeypatch: MonkeyPatch, export: Path) -> None:
    repeat(monkeypatch, "tracking", "create_logged_model")
    repeat(monkeypatch, "model_registry", "create_model_version")
    made = registered(client, export, "repeated")
    (version,) = client.search_model_versions("name = 'repeated'")
    assert made.version == str(version.version) == "1"
    assert models_of(client, version.run_id) == [("READY", version.source)]


def test_versions_that_a_user_has_made_are_kept(client: MlflowClient, export: Path) -> None:
    made = registered(client, export, "by_hand")
    source = client.get_model_version("by_hand", made.version).source
    for tags in (None, MADE_HERE, MADE_HERE, {**MADE_HERE, "stage": "live"}, MADE_HERE):
        mlflow.register_model(source, "by_hand", tags=tags)
    client.set_registered_model_alias("by_hand", "champion", "3")
    client.update_model_version("by_hand", "4", "mine")
    assert registered(client, export, "by_hand").version == made.version == "1"
    left = client.search_model_versions("name = 'by_hand'")
    assert sorted(int(one.version) for one in left) == [1, 2, 3, 4, 5], "6 is a bare copy"
    assert str(client.get_model_version_by_alias("by_hand", "champion").version) == "3"


def test_copies_are_deleted(client: MlflowClient, monkeypatch: MonkeyPatch, export: Path) -> None:
    with monkeypatch.context() as patched, pytest.raises(Killed):
        repeat(patched, "model_registry", "create_model_version")
        killed = Mock(side_effect=Killed)
        patched.setattr("d2plm.tracking.registry._without_copies", killed)
        registered(client, export, "cut_off")
    assert len(client.search_model_versions("name = 'cut_off'")) == 2
    client.set_registered_model_alias("cut_off", "mine", "2")
    made = registered(client, export, "cut_off")
    (version,) = client.search_model_versions("name = 'cut_off'")
    assert made.version == str(version.version) == "2", "an alias is never lost"


def test_the_search_may_lag(client: MlflowClient, monkeypatch: MonkeyPatch, export: Path) -> None:
    monkeypatch.setattr(MlflowClient, "search_model_versions", lambda *_: [])
    made = registered(client, export, "lagging")
    assert made.version == "1" and made.is_champion
