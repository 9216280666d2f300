"""Description of each generated protein: its bound and the nearest training protein.

The result needs an MMseqs2 search, so it is saved as `designs.json` beside the FASTA file, with the
digests of all inputs. Statistics of the whole set come from the evaluation if it has compared
generated proteins; otherwise they are computed here, against as many natural proteins.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import files_digest, read_json, write_text
from d2plm.data.fasta import FastaRecord, read_fasta
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_composition, sample_composition
from d2plm.evaluation.nearest import nearest_search
from d2plm.evaluation.quality import (
    GENERATED,
    Novelty,
    QualitySettings,
    Tokens,
    beside_others,
    compare_quality,
    find_novelty,
)
from d2plm.evaluation.scoring import bound_draws, protein_scores
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.settings.data import ClusterSettings, Resources

FASTA, TEXTS, DESIGNS = "generated.fasta", "generated.jsonl", "designs.json"
SAMPLING = ".sampling.json"  # suffix, in place of the output's own
FORMAT_VERSION = 1
MASKS_PER_SEQUENCE = 16  # as in d2plm score

Report = Callable[[str], None]


def describe_designs(
    folder: Path,
    exported: ExportedModel,
    train: SequenceStore,
    held_out: SequenceStore,
    *,
    seed: int = 0,
    precision: str = "auto",
    token_budget: int = 16384,
    nearest_sensitivity: float = 7.0,
    compare: bool = True,
    resources: Resources = Resources(),
    report: Report = lambda line: None,
) -> dict[str, Any]:
    """Describe the proteins of `generated.fasta` in `folder`; saves `designs.json` there.

    Args:
        folder: folder of the FASTA file; also receives MMseqs2's log.
        held_out: natural proteins that the model was not trained on.
        seed: seed of the masks and of the natural proteins for comparison.
        compare: whether to also compare the set with natural proteins.
        report: called with one line per stage.

    Returns:
        JSON content: `origin` (digests and settings), `estimator`, `proteins` (for each: id,
        length, residues, nelbo in nats per residue with its interval over the draws, perplexity,
        name and identity of the nearest training protein, whether it is in the training data) and
        `quality` from `compare_quality`, or None. The saved result is reused if nothing changed.

    Raises:
        DataError: if the FASTA file is invalid or has a protein that is too long for the model,
            MMseqs2 is missing or fails, or a file cannot be written.
        ModelError: if a bound is not finite.
    """
    draws = {"masks_per_sequence": MASKS_PER_SEQUENCE, "seed": seed}
    origin = {
        "fasta": files_digest(folder / FASTA),
        "weights": weights_digest(exported.folder),
        "train": train.digest,
        "held_out": held_out.digest,
        "settings": {
            **draws,
            "precision": precision,
            "nearest_sensitivity": nearest_sensitivity,
            "compare": compare,
        },
    }
    kept = read_designs(folder)
    if kept is not None and kept["origin"] == origin:
        report(f"reusing {folder / DESIGNS} (same proteins, model and data)")
        return kept
    records = list(read_fasta(folder / FASTA))
    quality_settings = QualitySettings(
        max_residues=exported.max_residues,
        nearest=nearest_search(nearest_sensitivity),
        # Cascaded clustering takes half a minute.
        diversity=ClusterSettings(
            method="linclust" if compare else "none", min_seq_id=0.5, coverage=0.8
        ),
    )
    report(f"scoring {len(records)} generated proteins")
    scores = _scores(records, exported, precision, token_budget=token_budget, **draws)
    sets: dict[str, Sequence[Tokens]] = {GENERATED: [record.tokens for record in records]}
    if compare:
        concentration = fit_composition(train, exported.max_residues)
        sample = partial(sample_composition, concentration)
        sets = beside_others(sets[GENERATED], held_out, exported.max_residues, seed, sample)
    novelty = find_novelty(
        sets, train, folder, quality_settings, resources=resources, report=report
    )
    designs = {
        "format_version": FORMAT_VERSION,
        "origin": origin,
        "estimator": exported.paradigm.estimator,
        "proteins": [
            {"id": record.name, "length": len(record.tokens), **score, **nearest}
            for record, score, nearest in zip(
                records, scores, _nearest(novelty[GENERATED], train), strict=True
            )
        ],
        "quality": compare_quality(sets, novelty, train, quality_settings) if compare else None,
    }
    write_text(folder / DESIGNS, json.dumps(designs, indent=2))
    return designs


def read_designs(folder: Path) -> dict[str, Any] | None:
    """Read the designs saved in `folder`; None if missing or of another version.

    Raises:
        DataError: if the file is damaged.
    """
    designs = read_json(folder / DESIGNS)
    return designs if designs and designs.get("format_version") == FORMAT_VERSION else None


def write_sampling(output: Path, settings: dict[str, Any]) -> None:
    """Write the sampler's settings beside the generated sequences, with the digest of their file.

    Raises:
        DataError: if the file cannot be written.
    """
    content = {"digest": files_digest(output), "settings": settings}
    write_text(output.with_suffix(SAMPLING), json.dumps(content, indent=2))


def read_sampling(output: Path) -> dict[str, Any] | None:
    """The sampler's settings of the sequences in `output`; None if their file does not hold them.

    Raises:
        DataError: if the file is damaged.
    """
    kept = read_json(output.with_suffix(SAMPLING))
    return kept["settings"] if kept and kept.get("digest") == files_digest(output) else None


def _scores(
    records: list[FastaRecord], exported: ExportedModel, precision: str, **settings: Any
) -> list[dict[str, Any]]:
    """Bound of each protein per residue; None if it has no residue to predict."""
    for record in records:
        what, remedy = f"{FASTA}: {record.name!r}", "another model has generated it"
        exported.require_short_enough(what, record.tokens, remedy, DataError)
    sequences = [record.tokens for record in records]
    draws = bound_draws(
        exported.denoiser(precision),
        exported.paradigm,
        sequences,
        device=exported.model.device,
        names=[record.name for record in records],
        **settings,
    )
    return [
        {
            "residues": score.residues,
            "nelbo": score.nats / score.residues,
            "interval": [end / score.residues for end in score.interval],
            "perplexity": score.perplexity,
        }
        if score.residues
        else {"residues": 0, "nelbo": None, "interval": None, "perplexity": None}
        for score in protein_scores(draws, sequences)
    ]


def _nearest(novelty: Novelty, train: SequenceStore) -> list[dict[str, Any]]:
    found = novelty.nearest
    names = [None if protein < 0 else train.name(protein) for protein in found.proteins.tolist()]
    rows = zip(names, found.identities.tolist(), novelty.in_training.tolist(), strict=True)
    return [
        {"nearest": name, "identity": identity, "in_training": copied}
        for name, identity, copied in rows
    ]
