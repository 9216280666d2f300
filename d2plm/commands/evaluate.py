"""d2plm evaluate: an exported model's bound beside the baselines, on the same residues."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np

from d2plm.commands.prepare import tracking_arguments
from d2plm.commands.train import open_stores
from d2plm.config import Config
from d2plm.data.prepare import clusters_of
from d2plm.errors import require_choice
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.likelihood import MASKING_VERSION, score_sequences
from d2plm.evaluation.report import FORMAT_VERSION, plot, read_metrics, summarise, table
from d2plm.export import EVALUATION, ExportedModel, load_export
from d2plm.files import write_text
from d2plm.precision import resolve_device
from d2plm.progress import Progress
from d2plm.tracking.runs import tracking_run
from d2plm.training.callbacks.metrics import FILE as METRICS_FILE

PLOT = "evaluation.png"

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Evaluate, write the figures beside the model and into it, log them, print the table."""
    exported = load_export(config["model_dir"], resolve_device(config["trainer"]["device"]))
    output_dir = Path(config["output_dir"])
    evaluation = _reusable(exported, config)
    if evaluation is not None:
        print(f"reusing {exported.folder / EVALUATION} (same model, data and masks)")
    else:
        evaluation = _evaluate(exported, config)
    write_text(output_dir / EVALUATION, json.dumps(evaluation, indent=2))
    plot(
        evaluation,
        read_metrics(output_dir / METRICS_FILE),
        output_dir / PLOT,
        f"{config['name']}: {exported.paradigm.name.replace('_', ' ')}",
    )
    with tracking_run(output_dir, **tracking_arguments(config)) as tracked:
        model = evaluation["model"]
        tracked.log_metrics(
            {
                "perplexity": model["perplexity"],
                "perplexity_low": model["perplexity_interval"][0],
                "perplexity_high": model["perplexity_interval"][1],
                "perplexity_mlm15": model["perplexity_mlm15"],
                "nelbo": model["nelbo"],
                **{
                    f"baseline_{name}".replace("-", "_"): values["perplexity"]
                    for name, values in evaluation["baselines"].items()
                },
            }
        )
        tracked.log_file(output_dir / EVALUATION, "evaluation")
        tracked.log_file(output_dir / PLOT, "evaluation")
    print(table(evaluation))
    return evaluation


def _evaluate(exported: ExportedModel, config: Config) -> dict[str, Any]:
    stores, settings = open_stores(config), config["evaluation"]
    require_choice(
        "evaluation.split", settings["split"], [name for name in stores if name != "train"]
    )
    held_out = stores[settings["split"]]
    max_residues = exported.max_length - 2
    baselines = fit_baselines(stores["train"], max_residues=max_residues, report=log.info)
    sequences = [tokens[:max_residues] for tokens in held_out]
    per_sequence = [baselines.score(tokens) for tokens in sequences]
    baseline_nats = {
        name: np.array([scores[name] for scores in per_sequence]) for name in baselines.scorers
    }
    with Progress("evaluating") as progress:
        scores = score_sequences(
            exported.denoiser(config["trainer"]["precision"]),
            exported.paradigm,
            sequences,
            masks_per_sequence=settings["masks_per_sequence"],
            max_length=exported.max_length,
            seed=settings["seed"],
            token_budget=settings["token_budget"],
            device=exported.model.device,
            unigram=baselines.unigram,
            data_digest=held_out.digest,
            progress=progress.update_of,
        )
    clusters = clusters_of(held_out)
    evaluation = summarise(
        scores,
        baseline_nats,
        clusters,
        exported.lengths,
        held_out.lengths,
        settings,
        {split: store.digest for split, store in stores.items()},
    )
    exported.add_evaluation(
        evaluation, nats=scores.nats, residues=scores.residues, clusters=clusters
    )
    return evaluation


def _reusable(exported: ExportedModel, config: Config) -> dict[str, Any] | None:
    """The evaluation inside the export, if it was made on these data with these settings.

    A new export replaces the folder, so an evaluation inside it is of that very model.
    """
    evaluation = exported.evaluation()
    if evaluation is None:
        return None
    stores = open_stores(config)
    same = (
        evaluation["format_version"] == FORMAT_VERSION
        and evaluation["masking_version"] == MASKING_VERSION
        and evaluation["settings"] == config["evaluation"]
        and all(evaluation["digests"].get(s) == store.digest for s, store in stores.items())
    )
    return evaluation if same else None
