"""d2plm evaluate: the bounds of a model, of baselines and of other models on the same residues.

It also reports how the bound depends on the identity to the training proteins and on the masked
fraction, and whether generated proteins resemble natural ones.
"""

import json
import logging
from pathlib import Path
from typing import Any

from d2plm.assembly.preparation import resources
from d2plm.assembly.tracked_run import describe, tracked_run
from d2plm.assembly.training_run import open_stores
from d2plm.config import Config
from d2plm.core.errors import as_keys, require, require_choice, require_number
from d2plm.core.files import write_text
from d2plm.core.terminal import done, result
from d2plm.data.cache import ArrayCache
from d2plm.data.homology import SearchSettings
from d2plm.data.relatives import RelativesIndex
from d2plm.data.retrieval import held_out_relatives
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.findings import EVALUATION, best_profile
from d2plm.evaluation.given_relatives import RelativesChoice
from d2plm.evaluation.nearest import nearest_identities, nearest_search
from d2plm.evaluation.plots import plot
from d2plm.evaluation.summary import table
from d2plm.evaluation.terms import SUITES
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.export.model_evaluation import (
    evaluate,
    generated_quality,
    open_rival,
    reusable_evaluation,
)
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.generation.sampler_settings import Sampling
from d2plm.tracking.locations import open_export
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics

PLOT = "evaluation.png"
BITS = ("bits_per_byte", "bits_per_base")

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Evaluate, write the figures beside the model and into its folder, log and print them."""
    device, uri = config["trainer"]["device"], config["tracking"]["uri"]
    exported = open_export(config["model_dir"], device, uri)  # a folder: the figures go into it
    output_dir, stores = Path(config["output_dir"]), open_stores(config)
    _check(exported, config, stores)
    recorded = _recorded(config)
    digests = {split: store.digest for split, store in stores.items()}
    evaluation = reusable_evaluation(exported.folder, recorded, digests)
    if evaluation is not None:
        done(f"reusing {exported.folder / EVALUATION} (same model, data and masks)")
    else:
        evaluation = _evaluate(exported, config, stores, settings=recorded, digests=digests)
    write_text(output_dir / EVALUATION, json.dumps(evaluation, indent=2))
    title = f"{config['name']}: {exported.paradigm.name.replace('_', ' ')}"
    plot(evaluation, read_metrics(output_dir / METRICS_FILE), output_dir / PLOT, title)
    report = write_report(
        Sources(output_dir, exported.folder, Path(config["data"]["prepared_dir"]))
    )
    with tracked_run(config, "evaluate") as tracked:
        tracked.log_metrics(_metrics(evaluation))
        tracked.log_file(output_dir / EVALUATION, "evaluation")
        tracked.log_file(output_dir / PLOT, "evaluation")
        tracked.log_file(report, "report")
        describe(tracked, config)
    result(table(evaluation))
    done(f"the report is {report}")
    return evaluation


def _metrics(evaluation: dict[str, Any]) -> dict[str, float]:
    """Headline figures for the tracker, those of the model first."""
    model = evaluation["model"]
    low, high = model["perplexity_interval"] or (None, None)
    metrics = {
        "evaluation/perplexity": model["perplexity"],
        "evaluation/perplexity_low": low,
        "evaluation/perplexity_high": high,
        "evaluation/perplexity_mlm15": model["perplexity_mlm15"],
        "evaluation/nelbo": model["nelbo"],
        **{f"evaluation/{key}": bits for key, bits in model.items() if key in BITS},
    }
    for row in (evaluation["given_relatives"] or {"below": []})["below"]:
        below = f"given_relatives/perplexity_below_{100 * row['identity']:.0f}"
        metrics[below] = row["model"]["perplexity"]
        metrics[f"{below}_hmm"] = row[best_profile(row)]["perplexity"]
    for name, values in evaluation["baselines"].items():
        key = name.replace(" × ", "_x_").replace("-", "_")
        metrics[f"versus/{key}"] = values["perplexity"]
    return {name: value for name, value in metrics.items() if value is not None}


def _check(exported: ExportedModel, config: Config, stores: dict[str, SequenceStore]) -> None:
    """Reject invalid settings before anything is computed."""
    settings = config["evaluation"]
    exported.require_same_vocabulary("model_dir", stores["train"].vocabulary)
    splits = [name for name in stores if name != "train"]
    require_choice("evaluation.split", settings["split"], splits)
    least_values = {"masks_per_sequence": 1, "token_budget": 1, "seed": 0, "generated": 0}
    for key, least in least_values.items():
        require_number(f"evaluation.{key}", settings[key], integer=True, low=least)
    folders = settings["compare_with"]
    require(isinstance(folders, list), "evaluation.compare_with", folders, "a list, [folder,…]")
    _nearest(config)
    _relatives(config)
    sensitivity = settings["relatives_sensitivity"]
    require_number("evaluation.relatives_sensitivity", sensitivity, low=1, high=7.5)
    if settings["generated"]:
        with as_keys("generation"):
            Sampling.of(config["generation"]).resolved(exported.paradigm)


def _nearest(config: Config) -> SearchSettings:
    with as_keys("evaluation", {"sensitivity": "evaluation.nearest_sensitivity"}):
        return nearest_search(config["evaluation"]["nearest_sensitivity"])


def _relatives(config: Config) -> RelativesChoice:
    settings = config["evaluation"]
    below = settings["relatives_below"]
    require(isinstance(below, list), "evaluation.relatives_below", below, "a list, [0.9,…]")
    keys = {"identities": "relatives_below", "most": "max_relatives"}
    keys |= {"masks_per_sequence": "relatives_masks", "proteins": "relatives_proteins"}
    with as_keys("evaluation", {name: f"evaluation.{key}" for name, key in keys.items()}):
        values = {name: settings[key] for name, key in keys.items() if name != "identities"}
        return RelativesChoice(tuple(below), **values)


def _evaluate(
    exported: ExportedModel, config: Config, stores: dict[str, SequenceStore], **recorded: Any
) -> dict[str, Any]:
    settings, precision = config["evaluation"], config["trainer"]["precision"]
    train, held_out, nearest = stores["train"], stores[settings["split"]], _nearest(config)
    longest = min(exported.max_length, int(held_out.lengths.max()) + 2)
    device, prepared = exported.model.device, Path(config["data"]["prepared_dir"])
    others = {
        str(rival): open_rival(Path(rival), held_out.vocabulary, longest, device, precision)
        for rival in settings["compare_with"]
    }
    baselines = fit_baselines(train, max_residues=exported.max_residues, report=log.info)
    mmseqs: dict[str, Any] = {"resources": resources(config), "report": log.info}
    choice, folder, identities = _relatives(config), prepared / "relatives", None
    suite = SUITES[held_out.vocabulary.name]
    if settings["nearest_identity"] and suite.homology:
        identities = nearest_identities(held_out, train, prepared / "nearest", nearest, **mmseqs)

    def relatives() -> RelativesIndex:
        chosen, sensitivity = choice.of(len(held_out)), settings["relatives_sensitivity"]
        return held_out_relatives(held_out, folder, sensitivity, chosen=chosen, **mmseqs)

    def quality() -> dict[str, Any]:
        return generated_quality(
            exported,
            train,
            held_out,
            settings["generated"],
            Path(config["output_dir"]),
            Sampling.of(config["generation"]),
            baselines=baselines,
            seed=settings["seed"],
            precision=precision,
            nearest=nearest,
            **mmseqs,
        )

    return evaluate(
        exported,
        train,
        held_out,
        **{key: settings[key] for key in ("masks_per_sequence", "seed", "token_budget")},
        precision=precision,
        baselines=baselines,
        others=others,
        identities=identities,
        relatives=relatives if settings["relatives_below"] and suite.homology else None,
        choice=choice,
        cache=ArrayCache(folder, log.info),
        quality=quality if settings["generated"] else None,
        **recorded,
    )


def _recorded(config: Config) -> dict[str, Any]:
    """All settings that the figures depend on, except the model and the data."""
    settings: dict[str, Any] = {
        **config["evaluation"],
        "precision": config["trainer"]["precision"],
        "compare_with": {
            str(folder): weights_digest(Path(folder))
            for folder in config["evaluation"]["compare_with"]
        },
    }
    if settings["generated"]:
        settings["generation"] = config["generation"]
    return settings
