"""The report's content as plain data, read from a run's folder without computing anything.

Figures are copied from the JSON files, which are checked to belong together. A part that is missing
or belongs to another run is replaced by the reason.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from d2plm.core.errors import DataError
from d2plm.core.files import RUN_CONFIG, files_digest, nearest_path, read_json
from d2plm.core.machine import machine
from d2plm.core.palette import CLASS_OF, CLASSES
from d2plm.core.redaction import redacted_settings
from d2plm.core.vocabulary import decode, open_vocabulary
from d2plm.data.fasta import read_fasta
from d2plm.data.manifest import read_manifest
from d2plm.evaluation.findings import judge, next_steps
from d2plm.evaluation.new_members import headline, members_table, read_members
from d2plm.evaluation.result import EVALUATION, Evaluation, read_evaluation
from d2plm.evaluation.tables import tables_of
from d2plm.evaluation.terms import terms_for
from d2plm.export.designs import DESIGNS, FASTA, Design, Designs, read_designs, read_sampling
from d2plm.export.exported_model import parameters_of, read_provenance, weights_digest
from d2plm.generation.sampler_settings import in_a_line
from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics

ABSENT = {  # part → default reason why it is missing, and how to get it
    "evaluation": "The model has not been evaluated: run d2plm evaluate.",
    "relatives": "The evaluation has no bound given relatives: train with model.relatives_dim and "
    "data.max_relatives, and evaluate with evaluation.relatives_below (docs/science.md).",
    "metrics": "There is no metrics.jsonl, because the model was not trained in this folder: d2plm "
    "train writes it.",
    "identity": "The bound by identity was not requested: run d2plm evaluate with "
    "evaluation.nearest_identity=true.",
    "quality": "No generated {0}s have been compared with natural ones: run d2plm evaluate "
    "with evaluation.generated=200, or d2plm report for the {0}s of generated.fasta.",
}
SHOWN = 50  # generated proteins whose sequence is shown; the FASTA file contains all
BLOCK = 10  # residues per block


@dataclass(frozen=True)
class Sources:
    """The folders from which a report is made; `output_dir` is that of the run."""

    output_dir: Path
    model_dir: Path
    prepared_dir: Path


def gather(sources: Sources) -> dict[str, Any]:
    """Collect everything that the page shows.

    Returns:
        `evaluation`, its `relatives` and `identity`, `metrics`, `manifest`, `model`, `designs`,
        `quality`, `settings`, each as in its file, or None; `missing`, reasons by part; `tables`,
        the verdict, the next steps, the new members of a family, the sequences with their residue
        classes, the sampler's settings, and the FASTA file in base64.

    Raises:
        DataError: if there is nothing to report on, or a file is damaged.
    """
    output_dir = sources.output_dir
    missing: dict[str, str] = {}
    evaluation = read_evaluation(output_dir)
    metrics = read_metrics(output_dir / METRICS_FILE)
    if evaluation is None and not metrics:
        raise DataError(
            f"{output_dir}: contains neither {EVALUATION} nor {METRICS_FILE}"
            f"{nearest_path(output_dir)}; give the output_dir of d2plm train or d2plm evaluate"
        )
    model = _model(sources.model_dir, evaluation, missing)
    terms = evaluation.terms if evaluation else terms_for(open_vocabulary(sources.model_dir))
    # Other alphabets have no search for the nearest training sequence, so no description.
    described = terms.unit is None
    designs = _designs(output_dir, evaluation, model, missing) if described else None
    members = _members(output_dir)
    compared = evaluation.quality if evaluation else None
    quality = compared or (designs.quality if designs else None)
    if members is not None:
        missing["quality"] = (
            "The generated proteins belong to one family, so they are not compared with natural "
            "ones of all families: d2plm evaluate with evaluation.generated=200 compares others."
        )
    of_evaluation = {"relatives": "given_relatives", "identity": "by_identity"}
    parts = {"evaluation": evaluation, "metrics": metrics, "quality": quality}
    parts |= {part: getattr(evaluation, key, None) for part, key in of_evaluation.items()}
    for part, reason in ABSENT.items():
        if part in of_evaluation and (evaluation is None or terms.unit is not None):
            continue
        if not parts[part]:
            missing.setdefault(part, reason.format(terms.sequence))
    return {
        **parts,
        "name": str((model or {}).get("name") or output_dir.resolve().name),
        "terms": terms,
        "finding": evaluation and judge(evaluation),
        "next_steps": evaluation and next_steps(evaluation, sources.model_dir),
        "tables": {
            **({} if evaluation is None else tables_of(evaluation)),
            **({} if quality is None else {"statistics": quality.table()}),
            **({} if members is None else {"members-table": members_table(members)}),
        },
        "last": {name: value for row in metrics for name, value in row.items()},
        "manifest": _manifest(sources.prepared_dir, evaluation, missing),
        "model": model,
        "designs": designs,
        "missing": missing,
        "members": members,
        "proteins": [] if designs is None else _proteins(output_dir, designs),
        "sampling": designs and in_a_line(read_sampling(output_dir / FASTA) or {}),
        "fasta": designs and base64.b64encode((output_dir / FASTA).read_bytes()).decode(),
        "classes": CLASSES,
        "settings": _settings(output_dir, evaluation, model),
        "versions": machine(),
    }


def coloured(sequence: str) -> Iterator[list[tuple[str, str]]]:
    """Split a sequence into blocks, and each block into runs of one class: (class, letters)."""
    for first in range(0, len(sequence), BLOCK):
        block = sequence[first : first + BLOCK]
        runs = groupby(block, key=lambda letter: CLASS_OF.get(letter, ""))
        yield [(name, "".join(letters)) for name, letters in runs]


def _model(
    folder: Path, evaluation: Evaluation | None, missing: dict[str, str]
) -> dict[str, Any] | None:
    """Read the export's provenance and size, if it is the model that was evaluated."""
    provenance = read_provenance(folder)
    if provenance is None:
        missing["model"] = f"There is no exported model in {folder}: run d2plm export."
        return None
    weights = weights_digest(folder)
    if evaluation is not None and evaluation.digests.get("model") != weights:
        missing["model"] = (
            f"The model in {folder} is not the evaluated one: run d2plm evaluate with model_dir=…."
        )
        return None
    return {
        **provenance,
        "parameters": parameters_of(folder),
        "architecture": read_json(folder / "config.json") or {},
        "weights": weights,
    }


def _manifest(
    folder: Path, evaluation: Evaluation | None, missing: dict[str, str]
) -> dict[str, Any] | None:
    """Read the manifest of the prepared data, if the evaluation used them."""
    manifest = read_manifest(folder)
    if manifest is None:
        missing["manifest"] = (
            f"There are no prepared data in {folder}: give the folder that d2plm prepare wrote to "
            "d2plm report as prepared_dir=…."
        )
        return None
    used = {} if evaluation is None else evaluation.digests
    if any(used.get(split, digest) != digest for split, digest in manifest["digests"].items()):
        missing["manifest"] = (
            f"The evaluation did not use the data in {folder}: give its data to d2plm report as "
            "prepared_dir=…, or run d2plm evaluate on these."
        )
        return None
    return manifest


def _designs(
    output_dir: Path,
    evaluation: Evaluation | None,
    model: dict[str, Any] | None,
    missing: dict[str, str],
) -> Designs | None:
    """Read the designs, if they describe the FASTA file's proteins, this model and these data."""
    if not (output_dir / FASTA).is_file():
        missing["designs"] = (
            f"No proteins have been generated: run d2plm generate with output={FASTA} in this "
            "folder and then d2plm report, or the pipeline's last step."
        )
        return None
    again = f"run d2plm report with output_dir={output_dir}."
    designs = read_designs(output_dir)
    if designs is None:
        missing["designs"] = f"There is no complete {DESIGNS}: {again}"
        return None
    origin = designs.origin
    same = origin["fasta"] == files_digest(output_dir / FASTA)
    if evaluation is not None:
        same &= origin["train"] == evaluation.digests["train"]
    if model is not None:
        same &= origin["weights"] == model["weights"]
    if not same:
        missing["designs"] = (
            f"{DESIGNS} belongs to other proteins, or another model or data: {again}"
        )
        return None
    return designs


def _proteins(
    output_dir: Path, designs: Designs
) -> list[tuple[Design, list[list[tuple[str, str]]] | None]]:
    """List the designs, the first ones with their sequence in coloured residues."""
    records = read_fasta(output_dir / FASTA)
    proteins = []
    for place, (record, design) in enumerate(zip(records, designs.proteins, strict=True)):
        blocks = list(coloured(decode(record.tokens))) if place < SHOWN else None
        proteins.append((design, blocks))
    return proteins


def _members(output_dir: Path) -> dict[str, Any] | None:
    file = output_dir / FASTA
    members = read_members(file) if file.is_file() else None
    if members is None:
        return None
    rows = [{**row, "blocks": list(coloured(row["columns"]))} for row in members["alignment"]]
    return {**members, "headline": headline(members), "rows": rows}


def _settings(
    output_dir: Path, evaluation: Evaluation | None, model: dict[str, Any] | None
) -> dict[str, str]:
    """Heading → settings without secrets: the composed configuration, or those in the export."""
    found = {}
    file = output_dir / RUN_CONFIG
    if file.is_file():
        try:
            composed = redacted_settings(yaml.safe_load(file.read_text(encoding="utf-8")))
        except (OSError, AttributeError, yaml.YAMLError) as error:
            raise DataError(f"{file}: is not a configuration ({error}); train again") from error
        found[f"the run's composed configuration ({RUN_CONFIG})"] = yaml.safe_dump(
            composed, sort_keys=False, allow_unicode=True
        )
    elif model is not None and "settings" in model:
        found["the model's training settings (from its export)"] = json.dumps(
            redacted_settings(model["settings"]), indent=2
        )
    if evaluation is not None:
        found["the evaluation"] = json.dumps(redacted_settings(evaluation.settings), indent=2)
    return found
