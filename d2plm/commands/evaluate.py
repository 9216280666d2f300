"""d2plm evaluate: a model's bound beside baselines and other models, on the same residues.

Also what the bound does not say: how it depends on the identity to the training proteins and on the
fraction that is masked, and whether generated proteins are like natural ones.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.assembly.preparation import resources
from d2plm.assembly.tracked_run import describe, tracked_run
from d2plm.assembly.training_run import open_stores
from d2plm.config import Config
from d2plm.core.alphabet import MASK
from d2plm.core.errors import ModelError, as_keys, require, require_choice, require_number
from d2plm.core.files import write_text
from d2plm.core.precision import resolve_device
from d2plm.core.progress import Progress
from d2plm.core.terminal import done, result
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.document import FORMAT_VERSION
from d2plm.evaluation.evaluate import evaluate
from d2plm.evaluation.likelihood import MASKING_VERSION
from d2plm.evaluation.masked_lm import MaskedLM
from d2plm.evaluation.nearest import NearestSettings, nearest_identities
from d2plm.evaluation.plots import plot
from d2plm.evaluation.quality import QualitySettings, beside_others, compare_quality
from d2plm.evaluation.report import table
from d2plm.export.exported_model import EVALUATION, ExportedModel, load_export, weights_digest
from d2plm.export.report_content import Sources
from d2plm.export.report_page import write_report
from d2plm.generation.samplers import sample
from d2plm.generation.settings import Sampling
from d2plm.paradigms.base import Denoiser, Paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.training.callbacks.metrics import FILE as METRICS_FILE
from d2plm.training.callbacks.metrics import read_metrics

PLOT = "evaluation.png"

log = logging.getLogger(__name__)


def run(config: Config) -> dict[str, Any]:
    """Evaluate, write the figures beside the model and into it, log them, print the table."""
    exported = load_export(config["model_dir"], resolve_device(config["trainer"]["device"]))
    output_dir = Path(config["output_dir"])
    evaluation = _reusable(exported, config)
    if evaluation is not None:
        done(f"reusing {exported.folder / EVALUATION} (same model, data and masks)")
    else:
        evaluation = _evaluate(exported, config)
    write_text(output_dir / EVALUATION, json.dumps(evaluation, indent=2))
    plot(
        evaluation,
        read_metrics(output_dir / METRICS_FILE),
        output_dir / PLOT,
        f"{config['name']}: {exported.paradigm.name.replace('_', ' ')}",
    )
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
    """The headline figures, for the tracker, which groups them by what stands before the slash.

    Those that there are none of are left out.
    """
    model = evaluation["model"]
    low, high = model["perplexity_interval"] or (None, None)
    metrics = {
        "evaluation/perplexity": model["perplexity"],
        "evaluation/perplexity_low": low,
        "evaluation/perplexity_high": high,
        "evaluation/perplexity_mlm15": model["perplexity_mlm15"],
        "evaluation/nelbo": model["nelbo"],
    }
    for name, values in evaluation["baselines"].items():
        metrics[f"baseline/{name}".replace("-", "_")] = values["perplexity"]
    return {name: value for name, value in metrics.items() if value is not None}


def _evaluate(exported: ExportedModel, config: Config) -> dict[str, Any]:
    stores, settings = open_stores(config), config["evaluation"]
    train, held_out = stores["train"], _held_out(stores, settings["split"])
    _check(exported, config)
    longest = min(exported.max_length, int(held_out.lengths.max()) + 2)
    others = {
        str(folder): _open_other(Path(folder), longest, config)
        for folder in settings["compare_with"]
    }
    max_residues = exported.max_residues
    baselines = fit_baselines(train, max_residues=max_residues, report=log.info)
    identities = _identities(config, held_out, train) if settings["nearest_identity"] else None

    def quality() -> dict[str, Any]:
        return _quality(exported, config, held_out, train, baselines.concentration)

    return evaluate(
        exported,
        train,
        held_out,
        masks_per_sequence=settings["masks_per_sequence"],
        seed=settings["seed"],
        token_budget=settings["token_budget"],
        precision=config["trainer"]["precision"],
        baselines=baselines,
        others=others,
        identities=identities,
        quality=quality if settings["generated"] else None,
        settings=_settings(config),
        digests={split: store.digest for split, store in stores.items()},
    )


def _held_out(stores: dict[str, SequenceStore], split: str) -> SequenceStore:
    require_choice("evaluation.split", split, [name for name in stores if name != "train"])
    return stores[split]


def _check(exported: ExportedModel, config: Config) -> None:
    """Refuse what is impossible before anything is computed."""
    settings = config["evaluation"]
    for key, least in (
        ("masks_per_sequence", 1),
        ("token_budget", 1),
        ("seed", 0),
        ("generated", 0),
    ):
        require_number(f"evaluation.{key}", settings[key], integer=True, low=least)
    folders = settings["compare_with"]
    require(isinstance(folders, list), "evaluation.compare_with", folders, "a list, [folder,…]")
    NearestSettings(sensitivity=settings["nearest_sensitivity"])
    if settings["generated"]:
        with as_keys("generation"):
            Sampling.of(config["generation"]).resolved(exported.paradigm)


def _open_other(folder: Path, longest: int, config: Config) -> tuple[Denoiser, Paradigm]:
    """A model to compare with: an export of ours, or a Hugging Face masked language model.

    Raises:
        ModelError: if it is neither, or cannot take the `longest` input in tokens.
    """
    device = resolve_device(config["trainer"]["device"])
    if (folder / Paradigm.config_name).is_file():
        other = load_export(folder, device)
        if other.max_length < longest:
            raise ModelError(
                f"{folder}: takes {other.max_length} tokens, the proteins have up to {longest}; "
                "compare models that take the same residues"
            )
        return other.denoiser(config["trainer"]["precision"]), other.paradigm
    # The exact-k bound of a model that is told no time is the same under every schedule.
    return MaskedLM(folder, device), AbsorbingDiffusion()


def _identities(
    config: Config, held_out: SequenceStore, train: SequenceStore
) -> NDArray[np.float64]:
    settings = NearestSettings(sensitivity=config["evaluation"]["nearest_sensitivity"])
    folder = Path(config["data"]["prepared_dir"]) / "nearest"
    return nearest_identities(
        held_out, train, folder, settings, resources=resources(config), report=log.info
    )


def _quality(
    exported: ExportedModel,
    config: Config,
    held_out: SequenceStore,
    train: SequenceStore,
    concentration: NDArray[np.float64],
) -> dict[str, Any]:
    """Generated proteins beside as many natural and composition ones."""
    settings, max_residues = config["evaluation"], exported.max_residues
    number, seed = min(settings["generated"], len(held_out)), settings["seed"]
    if number < settings["generated"]:
        log.info("generating %d proteins, as many as are held out, to set beside them", number)
    lengths = exported.lengths.sample(number, seed, high=max_residues)
    with Progress("generating") as progress:
        generated = sample(
            exported.denoiser(config["trainer"]["precision"]),
            exported.paradigm,
            [np.full(length, MASK, dtype=np.uint8) for length in lengths],
            Sampling.of(config["generation"]),
            max_length=exported.max_length,
            device=exported.model.device,
            progress=progress.update_of,
        )
    return compare_quality(
        beside_others(generated, held_out, concentration, max_residues, seed),
        train,
        Path(config["output_dir"]),
        QualitySettings(
            max_residues=max_residues,
            nearest=NearestSettings(sensitivity=settings["nearest_sensitivity"]),
        ),
        resources=resources(config),
        report=log.info,
    )


def _settings(config: Config) -> dict[str, Any]:
    """All that the figures are a function of, beside the model and the data."""
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


def _reusable(exported: ExportedModel, config: Config) -> dict[str, Any] | None:
    """The evaluation inside the export, if it was made on these data with these settings.

    A new export replaces the folder, so an evaluation inside it is of that very model.
    """
    evaluation = exported.evaluation()
    if evaluation is None:
        return None
    stores = open_stores(config)
    same = (
        evaluation.get("format_version") == FORMAT_VERSION
        and evaluation["masking_version"] == MASKING_VERSION
        and evaluation["settings"] == _settings(config)
        and all(evaluation["digests"].get(s) == store.digest for s, store in stores.items())
    )
    return evaluation if same else None
