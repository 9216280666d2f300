"""d2plm evaluate: the bounds of a model, of baselines and of other models on the same residues.

It also reports how the bound depends on the identity to the training proteins and on the masked
fraction, and whether generated proteins resemble natural ones.
"""

import logging
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from d2plm.assembly.preparation import resources
from d2plm.assembly.tracked_run import describe, tracked_run
from d2plm.assembly.training_run import open_stores
from d2plm.config import read
from d2plm.core.errors import ConfigError, require_choice, within
from d2plm.core.files import RUN_CONFIG, is_writable
from d2plm.core.terminal import done, result
from d2plm.data.cache import ArrayCache
from d2plm.data.relatives import RelativesIndex
from d2plm.data.retrieval import held_out_relatives
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.given_relatives import evenly_spaced
from d2plm.evaluation.nearest import nearest_identities, nearest_search
from d2plm.evaluation.plots import plot
from d2plm.evaluation.result import EVALUATION, Evaluation, Quality, write_evaluation
from d2plm.evaluation.tables import as_text
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
from d2plm.settings.commands import PRETRAINED, PipelineSettings
from d2plm.tracking.locations import open_model
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics

PLOT = "evaluation.png"

log = logging.getLogger(__name__)


def run(config: PipelineSettings) -> Evaluation:
    """Evaluate, write the figures beside the model and into its folder, log and print them."""
    device, uri = config.trainer.device, config.tracking.uri
    exported = open_model(config.model_dir, device, uri, key="model_dir")
    own = config.model_dir != PRETRAINED  # the shipped figures are kept
    is_local = own and exported.folder == Path(os.path.expanduser(config.model_dir))
    config = _with_results_folder(config, is_local)
    output_dir, stores = Path(config.output_dir), open_stores(config)
    if not is_writable(output_dir):
        raise ConfigError(
            "cannot be written; choose another folder", {"output_dir": config.output_dir}
        )
    _check(exported, config, stores)
    recorded = _recorded(config)
    digests = {split: store.digest for split, store in stores.items()}
    digests["model"] = weights_digest(exported.folder)
    folder = exported.folder if is_local and is_writable(exported.folder) else output_dir
    evaluation = reusable_evaluation(folder, recorded, digests)
    if evaluation is not None:
        done(f"reusing {folder / EVALUATION} (same model, data and masks)")
    else:
        evaluation = _evaluate(
            exported, config, stores, folder=folder, settings=recorded, digests=digests
        )
    write_evaluation(output_dir, evaluation)
    title = f"{config.name}: {exported.paradigm.name.replace('_', ' ')}"
    plot(evaluation, read_metrics(output_dir / METRICS_FILE), output_dir / PLOT, title)
    report = write_report(Sources(output_dir, exported.folder, Path(config.data.prepared_dir)))
    with tracked_run(config, "evaluate") as tracked:
        tracked.log_metrics(metrics_of(evaluation))
        tracked.log_file(output_dir / EVALUATION, "evaluation")
        tracked.log_file(output_dir / PLOT, "evaluation")
        tracked.log_file(report, "report")
        describe(tracked, config)
    result(as_text(evaluation))
    done(f"the report is {report}")
    return evaluation


def _with_results_folder(config: PipelineSettings, is_local: bool) -> PipelineSettings:
    """Replace an `output_dir` that is the default or belongs to another model's run.

    The results are then written beside the model, or to `work_dir/evaluations` if that is
    impossible.
    """
    output_dir, model_dir = Path(config.output_dir), Path(os.path.expanduser(config.model_dir))
    is_default = output_dir == Path(config.work_dir) / config.paradigm.name
    has_run = (output_dir / RUN_CONFIG).is_file()
    if _is_model_of(output_dir, model_dir) or not (is_default or has_run):
        return config
    run = model_dir.parent
    is_of_a_run = (run / RUN_CONFIG).is_file() and _is_model_of(run, model_dir)
    folder = run if is_of_a_run else run / f"{model_dir.name}-evaluation"
    if not (is_local and is_writable(folder)):
        name = re.sub(r"[^\w.@-]+", "-", config.model_dir).strip("-")
        folder = Path(config.work_dir) / "evaluations" / name
    done(f"the results are written to {folder}: the model is not of a run in {output_dir}")
    return replace(config, output_dir=str(folder))


def _is_model_of(output_dir: Path, model_dir: Path) -> bool:
    """Whether a run in `output_dir` exports, or would export, the model to `model_dir`."""
    file, model = output_dir / RUN_CONFIG, model_dir.absolute()
    if model == output_dir.absolute() / "model":
        return True
    return file.is_file() and Path(read("train", file).model_dir).absolute() == model


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """Headline figures for trackers, those of the model first."""
    model, given = evaluation.model, evaluation.given_relatives
    low, high = model.perplexity.interval or (None, None)
    metrics = {
        "evaluation/perplexity": model.perplexity.value,
        "evaluation/perplexity_low": low,
        "evaluation/perplexity_high": high,
        "evaluation/perplexity_mlm15": model.perplexity_mlm15,
        "evaluation/nelbo": model.nelbo.value,
        f"evaluation/bits_per_{evaluation.terms.unit}": None
        if model.bits is None
        else model.bits.value,
    }
    for row in [] if given is None else given.below:
        below = f"given_relatives/perplexity_below_{100 * row.identity:.0f}"
        metrics[below] = row.model.perplexity.value
        metrics[f"{below}_hmm"] = row.best.perplexity.value
    for name, bound in evaluation.baselines.items():
        key = name.replace(" × ", "_x_").replace("-", "_")
        metrics[f"versus/{key}"] = bound.perplexity.value
    return {name: value for name, value in metrics.items() if value is not None}


def _check(
    exported: ExportedModel, config: PipelineSettings, stores: dict[str, SequenceStore]
) -> None:
    """Reject invalid settings before anything is computed."""
    settings = config.evaluation
    exported.require_same_vocabulary("model_dir", stores["train"].vocabulary)
    splits = [name for name in stores if name != "train"]
    require_choice("evaluation.split", settings.split, splits)
    if settings.generated:
        with within("generation"):
            Sampling.of(config.generation).resolved(exported.paradigm)


def _evaluate(
    exported: ExportedModel,
    config: PipelineSettings,
    stores: dict[str, SequenceStore],
    **recorded: Any,
) -> Evaluation:
    settings, precision = config.evaluation, config.trainer.precision
    train, held_out = stores["train"], stores[settings.split]
    nearest = nearest_search(settings.nearest_sensitivity)
    longest = min(exported.max_length, int(held_out.lengths.max()) + 2)
    device, prepared = exported.model.device, Path(config.data.prepared_dir)
    if not is_writable(prepared):
        prepared = Path(config.output_dir) / "cache"
    others = {
        str(rival): open_rival(Path(rival), held_out.vocabulary, longest, device, precision)
        for rival in settings.compare_with
    }
    baselines = fit_baselines(train, max_residues=exported.max_residues, report=log.info)
    mmseqs: dict[str, Any] = {"resources": resources(config), "report": log.info}
    folder, identities = prepared / "relatives", None
    suite = SUITES[held_out.vocabulary.name]
    if settings.nearest_identity and suite.homology:
        identities = nearest_identities(held_out, train, prepared / "nearest", nearest, **mmseqs)

    def relatives() -> RelativesIndex:
        chosen = evenly_spaced(len(held_out), settings.relatives_proteins)
        sensitivity = settings.relatives_sensitivity
        return held_out_relatives(held_out, folder, sensitivity, chosen=chosen, **mmseqs)

    def quality() -> Quality:
        return generated_quality(
            exported,
            train,
            held_out,
            settings.generated,
            Path(config.output_dir),
            Sampling.of(config.generation),
            baselines=baselines,
            seed=settings.seed,
            precision=precision,
            nearest=nearest,
            **mmseqs,
        )

    return evaluate(
        exported,
        train,
        held_out,
        **{key: getattr(settings, key) for key in ("masks_per_sequence", "seed", "token_budget")},
        precision=precision,
        baselines=baselines,
        others=others,
        identities=identities,
        relatives=relatives if settings.relatives_below and suite.homology else None,
        choice=settings,
        cache=ArrayCache(folder, log.info),
        quality=quality if settings.generated else None,
        **recorded,
    )


def _recorded(config: PipelineSettings) -> dict[str, Any]:
    """All settings that the figures depend on, except the model and the data."""
    settings: dict[str, Any] = {
        **asdict(config.evaluation),
        "precision": config.trainer.precision,
        "compare_with": {
            str(folder): weights_digest(Path(folder)) for folder in config.evaluation.compare_with
        },
    }
    if config.evaluation.generated:
        settings["generation"] = asdict(config.generation)
    return settings
