"""The pipeline from a FASTA file to a registered model, and the use of its outputs."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from d2plm.training import checkpoint
from tests.commands import d2plm
from tests.evaluations import BASELINES
from tests.integration.conftest import Finished, steps
from tests.runs import wait_for


def test_every_step_runs_and_says_what_it_did(finished: Finished) -> None:
    for step in ("prepare", "train", "evaluate", "register", "generate"):
        assert f"── {step} ──" in finished.output
    assert "composition" in finished.output
    last = finished.output.partition("── done in ")[2]
    assert len(last.splitlines()) <= 15
    for text in (
        "hesitates among",
        "generated.fasta",
        "mlflow ui",
        "d2plm score",
        "submit-pipeline",
    ):
        assert text in last, text
    assert "KFP Executor" not in finished.output


def test_the_work_folder_contains_what_the_run_said(finished: Finished) -> None:
    work_dir = finished.work_dir
    config = yaml.safe_load((work_dir / "config.yaml").read_text())
    assert config["paradigm"]["name"] == "diffusion"
    manifest = json.loads((work_dir / "manifest.json").read_text())
    assert manifest["leaking_pairs_after"] == 0
    evaluation = json.loads((work_dir / "evaluation.json").read_text())
    assert set(evaluation["baselines"]) == set(BASELINES)
    assert evaluation["residues"] > 0
    assert evaluation["baselines"]["uniform"]["perplexity"]["value"] == pytest.approx(20)
    perplexity = evaluation["model"]["perplexity"]
    low, high = perplexity["interval"]
    assert low < perplexity["value"] < high
    assert set(evaluation["digests"]) == {"train", "validation", "masks", "model"}
    assert (work_dir / "generated.fasta").read_text().count(">") == 3
    assert (work_dir / "model" / "model.safetensors").is_file()
    assert (work_dir / "mlflow.db").is_file()
    assert (work_dir / "diffusion" / "evaluation.png").stat().st_size > 10_000
    designs = json.loads((work_dir / "diffusion" / "designs.json").read_text())["proteins"]
    report = (work_dir / "report.html").read_text()
    assert len(designs) == 3
    assert all(f'value="{design["nelbo"]["value"]}"' in report for design in designs)


def test_tracking_contains_one_run_with_data_config_metrics_and_model(finished: Finished) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=finished.tracking_uri)
    experiment = client.get_experiment_by_name("d2plm-diffusion")
    run = client.get_run(
        json.loads((finished.output_dir / "tracking_run.json").read_text())["run_id"]
    )
    assert run.info.experiment_id == experiment.experiment_id
    assert run.info.status == "FINISHED"
    assert "this model" in run.data.tags["mlflow.note.content"]
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert {d.dataset.name.split(":")[1] for d in run.inputs.dataset_inputs} == {
        *("train", "validation")
    }
    assert run.data.params["model.hidden_size"] == "32"
    evaluation = json.loads((finished.work_dir / "evaluation.json").read_text())
    assert run.data.metrics["evaluation/perplexity"] == pytest.approx(
        evaluation["model"]["perplexity"]["value"]
    )
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 5
    logged = client.download_artifacts(run.info.run_id, "report/report.html")
    assert Path(logged).read_text() == (finished.work_dir / "report.html").read_text()


def test_the_registered_model_loads_by_alias_and_scores_the_same(finished: Finished) -> None:
    import mlflow

    from d2plm.evaluation.likelihood import score_sequences
    from d2plm.export.exported_model import load_export

    mlflow.set_tracking_uri(finished.tracking_uri)
    registered = mlflow.pyfunc.load_model("models:/d2plm-diffusion@champion")
    exported = load_export(finished.output_dir / "model")
    proteins = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLVAGGNPLKWE"]
    import pandas

    table = registered.predict(
        pandas.DataFrame({"sequence": proteins}), params={"masks_per_sequence": 3}
    )
    from d2plm.core.vocabulary import encode

    scores = score_sequences(
        exported.denoiser(),
        exported.paradigm,
        [encode(p) for p in proteins],
        masks_per_sequence=3,
        max_length=exported.max_length,
    )
    np.testing.assert_allclose(table["nats"], scores.nats, rtol=1e-6)

    version = mlflow.MlflowClient().get_model_version_by_alias("d2plm-diffusion", "champion")
    evaluation = json.loads((finished.work_dir / "evaluation.json").read_text())
    assert version.tags["perplexity"] == f"{evaluation['model']['perplexity']['value']:.4f}"
    assert version.tags["masks_digest"] == evaluation["digests"]["masks"]


def test_the_export_alone_generates_and_scores(finished: Finished, tmp_path: Path) -> None:
    export = tmp_path / "only"
    shutil.copytree(finished.output_dir / "model", export)
    (tmp_path / "two.fasta").write_text(">a\nMKTAYIAKQRQISFVK\n>b\nGSHMLVAGG\n")

    def run(*words: str) -> str:
        # Only the package and the export are there: no repository, no data, no store.
        result = d2plm(*words, folder=tmp_path, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
        assert result.returncode == 0, result.stderr
        return result.stdout

    run("generate", "model_dir=only", "output=new.fasta", "generation.number=4")
    assert (tmp_path / "new.fasta").read_text().count(">") == 4
    rows = list(csv.DictReader(io.StringIO(run("score", "model_dir=only", "input=two.fasta"))))
    assert [row["name"] for row in rows] == ["a", "b"]
    assert [int(row["residues"]) for row in rows] == [16, 9]
    assert all(0 < float(row["nats"]) < 100 for row in rows)


def test_the_reloaded_model_gives_the_trained_models_logits(finished: Finished) -> None:
    from transformers import AutoModel, AutoTokenizer

    import d2plm.hugging_face  # noqa: F401  # registers the classes of transformers
    from d2plm.assembly.training_run import build_trainer, open_stores
    from d2plm.config import read
    from d2plm.tracking.runs import Runs
    from d2plm.training import checkpoint

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


def test_a_second_run_reuses_what_is_unchanged_and_reports_it(finished: Finished) -> None:
    before = (finished.output_dir / "evaluation.json").read_text()
    said = {
        "prepare": "reusing prepared data",
        "train": "training is complete",
        "evaluate": "reusing",
        "register": "already registered",
    }
    for command, expected in said.items():
        again = d2plm(command, *finished.arguments())
        assert again.returncode == 0, again.stderr
        assert expected in again.stdout + again.stderr
    assert (finished.output_dir / "evaluation.json").read_text() == before


def test_changed_settings_do_not_continue_from_the_old_checkpoint(
    finished: Finished, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.output_dir, copy)
    before = (copy / "config.yaml").read_text()
    result = d2plm(
        "train",
        *finished.arguments(),
        f"output_dir={copy}",
        "tracking=none",
        "optimizer.learning_rate=0.1",
    )
    assert result.returncode == 1
    assert "optimizer.learning_rate" in result.stderr
    assert "resume=none" in result.stderr
    assert (copy / "config.yaml").read_text() == before


@pytest.mark.thorough
def test_flow_matching_runs_into_its_own_folder_and_experiment(
    finished: Finished, tmp_path: Path
) -> None:
    # On the data that are prepared already: this is about the paradigm.
    arguments = [
        *finished.arguments(),
        "paradigm=flow_matching",
        f"output_dir={tmp_path / 'flow_matching'}",
    ]
    for command in ("train", "evaluate", "register"):
        result = d2plm(command, *arguments)
        assert result.returncode == 0, result.stderr
    assert "d2plm-flow_matching version 1" in result.stdout
    generated = d2plm(
        "generate",
        f"model_dir={tmp_path / 'flow_matching' / 'model'}",
        f"output={tmp_path / 'g.fasta'}",
        "generation.number=2",
    )
    assert generated.returncode == 0, generated.stderr
    assert "sampler=euler steps=50" in (tmp_path / "g.fasta").read_text()


@pytest.mark.thorough
def test_export_takes_a_named_checkpoint(finished: Finished, tmp_path: Path) -> None:
    from d2plm.export.exported_model import load_export
    from d2plm.training import checkpoint

    root = checkpoint.Root(str(finished.output_dir / "checkpoints"))
    first = root.of(root.names()[0])
    result = d2plm(
        "export",
        *finished.arguments(),
        f"trainer.resume='{first}'",
        f"model_dir='{tmp_path / 'exported'}'",
    )
    assert result.returncode == 0, result.stderr
    assert load_export(tmp_path / "exported").provenance["step"] == 5


def test_the_model_card_s_commands_are_ones_that_exist(finished: Finished) -> None:
    from d2plm.config import compose

    card = (finished.output_dir / "model" / "README.md").read_text()
    commands = [line.split() for line in card.splitlines() if line.startswith("d2plm ")]
    assert {words[1] for words in commands} == {"generate", "score"}
    for _, command, *overrides in commands:
        compose(command, overrides)


@pytest.mark.thorough
def test_a_pipeline_that_is_terminated_ends_its_steps_too(
    finished: Finished, tmp_path: Path
) -> None:
    # Its training would take minutes; the data are prepared already.
    arguments = [*finished.arguments(), "trainer.max_steps=100000"]
    arguments = [word for word in arguments if not word.startswith("work_dir=")]
    run = subprocess.Popen(
        [
            *(sys.executable, "-m", "d2plm", "pipeline", "run", *arguments),
            f"work_dir={tmp_path / 'run'}",
            f"data.prepared_dir='{finished.work_dir / 'data'}'",
            "callbacks.metrics.every=1",
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    output_dir = tmp_path / "run" / "diffusion"
    try:
        wait_for(lambda: steps(output_dir) > 2)
        os.killpg(run.pid, signal.SIGTERM)  # as service managers do
        assert run.wait(180) == 143
    finally:
        run.kill()
    rows = steps(output_dir)
    assert checkpoint.newest_whole(checkpoint.Root(str(output_dir / "checkpoints"))) is not None
    time.sleep(2)
    assert steps(output_dir) == rows


@pytest.mark.thorough
def test_a_training_that_is_killed_fails_the_pipeline_and_is_marked_so(
    finished: Finished, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    # Killed by SIGKILL, it can say nothing itself.
    arguments = [word for word in finished.arguments() if not word.startswith("work_dir=")]
    result = d2plm(
        *("pipeline", "run", *arguments, f"work_dir={tmp_path}"),
        f"data.prepared_dir='{finished.work_dir / 'data'}'",
        *("--module", "tests.integration.killed", "callbacks.killed={}"),
    )
    assert result.returncode == 1
    assert "is marked FAILED" in result.stdout.split("── finish ──")[1]
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("d2plm: error")]
    assert "the pipeline failed: " in error
    assert "the step train ended with exit code 137" in error
    run_id = json.loads((tmp_path / "diffusion" / "tracking_run.json").read_text())["run_id"]
    run = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db").get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["pipeline.state"] == "FAILED"
    assert not (tmp_path / "diffusion" / "evaluation.json").exists()
