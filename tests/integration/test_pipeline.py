"""The pipeline from a FASTA file to a registered model, and the use of its outputs."""

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pandas
import pytest
import torch
from mlflow import MlflowClient
from transformers import AutoModel, AutoTokenizer

import d2plm.hugging_face  # noqa: F401  # registers the classes of transformers
from d2plm.assembly.training_run import build_trainer, open_stores
from d2plm.cli import main
from d2plm.config import read
from d2plm.core.vocabulary import encode
from d2plm.evaluation.likelihood import score_sequences
from d2plm.export.exported_model import load_export
from d2plm.tracking.runs import Runs
from d2plm.training import checkpoint
from tests.conftest import Captured
from tests.evaluations import BASELINES
from tests.integration.conftest import Finished


def test_the_work_folder_contains_the_results_of_every_step(finished: Finished) -> None:
    for step in ("prepare", "train", "evaluate", "register", "generate"):
        assert f"── {step} ──" in finished.output
    work_dir = finished.work_dir
    assert json.loads((work_dir / "manifest.json").read_text())["leaking_pairs_after"] == 0
    evaluation = json.loads((work_dir / "evaluation.json").read_text())
    assert set(evaluation["baselines"]) == set(BASELINES)
    assert evaluation["baselines"]["uniform"]["perplexity"]["value"] == pytest.approx(20)
    perplexity = evaluation["model"]["perplexity"]
    low, high = perplexity["interval"]
    assert low < perplexity["value"] < high
    assert set(evaluation["digests"]) == {"train", "validation", "masks", "model"}
    assert (work_dir / "generated.fasta").read_text().count(">") == 3
    assert (work_dir / "diffusion" / "evaluation.png").stat().st_size > 10_000
    designs = json.loads((work_dir / "diffusion" / "designs.json").read_text())["proteins"]
    report = (work_dir / "report.html").read_text()
    assert len(designs) == 3
    assert all(f'value="{design["nelbo"]["value"]}"' in report for design in designs)


def test_tracking_contains_one_run_with_data_config_metrics_and_model(finished: Finished) -> None:
    client = MlflowClient(tracking_uri=finished.tracking_uri)
    experiment = client.get_experiment_by_name("d2plm-diffusion")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    kept = json.loads((finished.output_dir / "tracking_run.json").read_text())
    assert (run.info.run_id, run.info.status) == (kept["run_id"], "FINISHED")
    splits = {one.dataset.name.split(":")[1] for one in run.inputs.dataset_inputs}
    assert splits == {"train", "validation"}
    assert run.data.params["model.hidden_size"] == "32"
    evaluation = json.loads((finished.work_dir / "evaluation.json").read_text())
    perplexity = evaluation["model"]["perplexity"]["value"]
    assert run.data.metrics["evaluation/perplexity"] == pytest.approx(perplexity)
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 5
    logged = client.download_artifacts(run.info.run_id, "report/report.html")
    assert Path(logged).read_text() == (finished.work_dir / "report.html").read_text()
    version = client.get_model_version_by_alias("d2plm-diffusion", "champion")
    assert version.tags["perplexity"] == f"{perplexity:.4f}"
    assert version.tags["masks_digest"] == evaluation["digests"]["masks"]


def test_the_registered_model_loads_by_alias_and_scores_the_same(finished: Finished) -> None:
    mlflow.set_tracking_uri(finished.tracking_uri)
    registered = mlflow.pyfunc.load_model("models:/d2plm-diffusion@champion")
    exported = load_export(finished.output_dir / "model")
    proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLVAGGNPLKWE"]
    rows = pandas.DataFrame({"sequence": proteins})
    table = registered.predict(rows, params={"masks_per_sequence": 3})
    scores = score_sequences(
        exported.denoiser(),
        exported.paradigm,
        [encode(protein) for protein in proteins],
        masks_per_sequence=3,
        max_length=exported.max_length,
    )
    np.testing.assert_allclose(table["nats"], scores.nats, rtol=1e-6)


def test_the_reloaded_model_gives_the_trained_models_logits(finished: Finished) -> None:
    config = read("train", finished.output_dir / "config.yaml")
    trainer = build_trainer(config, open_stores(config), Runs())
    root = trainer.saver.root
    newest = checkpoint.newest_whole(root)
    assert newest is not None
    trainer.load(root.of(newest))
    tokens = torch.randint(4, 24, (60,))
    inputs = (tokens, torch.tensor([0, 25, 60], dtype=torch.int32), 60, torch.tensor([0.2, 0.9]))
    with trainer.ema.swapped_in(), torch.no_grad():
        expected = trainer.model.eval()(*inputs)
        reloaded = AutoModel.from_pretrained(finished.output_dir / "model").eval()
        torch.testing.assert_close(reloaded(*inputs), expected, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(finished.output_dir / "model")
    assert tokenizer("MKX")["input_ids"] == [0, 20, 15, 24, 2]


def test_changed_settings_do_not_continue_from_the_old_checkpoint(
    finished: Finished, tmp_path: Path, capsys: Captured
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.output_dir, copy)
    before = (copy / "config.yaml").read_text()
    changed = [f"output_dir={copy}", "tracking=none", "optimizer.learning_rate=0.1"]
    assert main(["train", *finished.arguments(), *changed]) == 1
    assert "optimizer.learning_rate" in capsys.readouterr().err
    assert (copy / "config.yaml").read_text() == before


def test_export_takes_a_named_checkpoint(finished: Finished, tmp_path: Path) -> None:
    root = checkpoint.Root(str(finished.output_dir / "checkpoints"))
    first, exported = root.of(root.names()[0]), tmp_path / "exported"
    words = [f"trainer.resume='{first}'", f"model_dir='{exported}'"]
    assert main(["export", *finished.arguments(), *words]) == 0
    assert load_export(exported).provenance["step"] == 5
