"""A second run, by the components as KFP's executor runs them: what it reuses and its artifacts."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from mlflow import MlflowClient

from d2plm.cli import main
from pipelines import steps
from tests.conftest import MonkeyPatch
from tests.integration.conftest import Finished

Outputs = dict[str, Any]


def execute(component: Any, folder: Path, **parameters: Any) -> tuple[Outputs, Outputs, Path]:
    """Run a component's body; returns its outputs, its artifacts' metadata, and their folder."""
    from google.protobuf.json_format import ParseDict
    from kfp.dsl.executor import Executor
    from kfp.pipeline_spec import pipeline_spec_pb2

    folder = folder / component.name
    kinds = {
        name: output.type.partition("@")[0]
        for name, output in (component.component_spec.outputs or {}).items()
    }
    artifacts = {
        name: {
            "artifacts": [{"name": name, "uri": str(folder / name), "type": {"schemaTitle": kind}}]
        }
        for name, kind in kinds.items()
        if kind.startswith("system.")
    }
    file = folder / "output.json"
    given = {
        "inputs": {"parameterValues": {"modules": "", **parameters}},
        "outputs": {"artifacts": artifacts, "outputFile": str(file)},
    }
    Executor(given, component).execute()
    written = json.loads(file.read_text())
    ParseDict(written, pipeline_spec_pb2.ExecutorOutput())
    metadata = {name: one["artifacts"][0]["metadata"] for name, one in written["artifacts"].items()}
    return written["parameterValues"], metadata, folder


def test_a_second_run_reuses_what_is_unchanged_and_has_artifacts(
    copied: Finished, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    from pipelines import components

    work_dir = copied.work_dir
    (known,) = (work_dir / "pipeline_runs").glob("*.yaml")
    config, output_dir = str(known), work_dir / "diffusion"
    in_process = Mock(side_effect=lambda file, *_: main(["train", f"--config-file={file}"]))
    monkeypatch.setattr(steps, "train_locally", in_process)
    files = [work_dir / "data" / "manifest.json", output_dir / "model" / "model.safetensors"]
    before = [file.stat().st_mtime_ns for file in files]
    evaluation = (output_dir / "evaluation.json").read_text()

    prepared, found, folder = execute(components.prepare, tmp_path, config=config)
    manifest = json.loads((work_dir / "data" / "manifest.json").read_text())
    assert prepared["digest"] == found["dataset"]["train_digest"] == manifest["digests"]["train"]
    assert found["dataset"]["train_sequences"] == manifest["counts"]["train_sequences"]
    assert json.loads((folder / "dataset").read_text()) == manifest

    after = {"config": config, "model_dir": str(output_dir / "model")}
    given = {"config": config, "data_digest": prepared["digest"]}
    trained, found, folder = execute(components.train, tmp_path, **given)
    assert in_process.call_count == 1
    assert trained["model_dir"] == found["model"]["folder"] == after["model_dir"]
    assert found["model"]["parameters"] > 1000 and found["model"]["steps"] > 0
    assert found["model"]["tokens_per_second"] > 0
    assert (folder / "model").read_text().startswith("---")

    evaluated, found, folder = execute(components.evaluate, tmp_path, **after)
    figures = found["metrics"]
    assert figures["perplexity_low"] < figures["perplexity"] < figures["perplexity_high"]
    assert evaluated["perplexity"] == figures["perplexity"]
    assert any(name.startswith("versus/") for name in figures)
    assert "<html" in (folder / "report").read_text()

    registered, found, folder = execute(components.register, tmp_path, **after, perplexity=2.0)
    address = f"models:/d2plm-diffusion/{registered['version']}"
    assert found["registered"]["model"] == address
    assert found["registered"]["alias"] in ("champion", "candidate")
    assert (folder / "registered").read_text() == f"{address}\n"
    client = MlflowClient(tracking_uri=copied.tracking_uri)
    assert len(client.search_model_versions("name = 'd2plm-diffusion'")) == 1
    assert [file.stat().st_mtime_ns for file in files] == before
    assert (output_dir / "evaluation.json").read_text() == evaluation

    generated, found, folder = execute(components.generate, tmp_path, **after, version="1")
    assert generated["file"] == found["sequences"]["file"] == str(output_dir / "generated.fasta")
    assert (folder / "sequences").read_text() == (output_dir / "generated.fasta").read_text()
    assert json.loads((folder / "designs").read_text())
