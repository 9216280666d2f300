"""Description of each generated protein: its bound and the nearest training protein.

The result needs an MMseqs2 search, so it is saved as `designs.json` beside the FASTA file, with the
digests of all inputs. Statistics of the whole set come from the evaluation if it has compared
generated proteins; otherwise they are computed here, against as many natural proteins.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from d2plm.core.errors import DataError
from d2plm.core.estimate import Estimate
from d2plm.core.files import files_digest, read_json, write_text
from d2plm.data.fasta import FastaRecord, read_fasta
from d2plm.data.store import SequenceStore
from d2plm.evaluation.baselines import fit_composition, sample_composition
from d2plm.evaluation.nearest import nearest_search
from d2plm.evaluation.quality import (
    GENERATED,
    QualitySettings,
    Tokens,
    beside_others,
    compare_quality,
    find_novelty,
)
from d2plm.evaluation.result import Quality, typed
from d2plm.evaluation.scoring import ProteinScore, bound_draws, protein_scores
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.settings.data import ClusterSettings, Resources

FASTA, TEXTS, DESIGNS = "generated.fasta", "generated.jsonl", "designs.json"
SAMPLING = ".sampling.json"  # suffix, in place of the output's own
MASKS_PER_SEQUENCE = 16  # as in d2plm score

Report = Callable[[str], None]


@dataclass(frozen=True)
class Design:
    """A generated protein; its bound is None if it has no residue to predict.

    Attributes:
        nelbo: nats per residue, with the interval over the mask samples.
        nearest: name of the nearest training protein, if one is found; `identity` to it.
        in_training: whether a training protein equals it.
    """

    id: str
    length: int
    residues: int
    nelbo: Estimate | None
    perplexity: float | None
    nearest: str | None
    identity: float
    in_training: bool


@dataclass(frozen=True)
class Designs:
    """All generated proteins of a file.

    Attributes:
        origin: digests and settings that the figures depend on.
        quality: comparison of the whole set with natural proteins, if computed.
    """

    origin: dict[str, Any]
    estimator: str
    proteins: list[Design]
    quality: Quality | None
    format_version: Literal[2] = 2


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
) -> Designs:
    """Describe the proteins of `generated.fasta` in `folder`; saves or reuses `designs.json` there.

    Args:
        folder: folder of the FASTA file; also receives MMseqs2's log.
        held_out: natural proteins that the model was not trained on.
        seed: seed of the masks and of the natural proteins for comparison.
        compare: whether to also compare the set with natural proteins.

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
    if kept is not None and kept.origin == origin:
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
    found = novelty[GENERATED]
    designs = Designs(
        origin,
        exported.paradigm.estimator,
        [
            Design(
                record.name,
                len(record.tokens),
                score.residues,
                score.per_residue,
                score.perplexity if score.residues else None,
                None if nearest < 0 else train.name(nearest),
                identity,
                copied,
            )
            for record, score, nearest, identity, copied in zip(
                records,
                scores,
                found.nearest.proteins.tolist(),
                found.nearest.identities.tolist(),
                found.in_training.tolist(),
                strict=True,
            )
        ],
        compare_quality(sets, novelty, train, quality_settings) if compare else None,
    )
    write_text(folder / DESIGNS, json.dumps(asdict(designs), indent=2))
    return designs


def read_designs(folder: Path) -> Designs | None:
    """Read the saved designs; None if missing or of another version, `DataError` if damaged."""
    return typed(Designs, read_json(folder / DESIGNS))


def write_sampling(output: Path, settings: dict[str, Any]) -> None:
    """Write the sampler's settings beside the sequences, with the digest of the sequences' file."""
    content = {"digest": files_digest(output), "settings": settings}
    write_text(output.with_suffix(SAMPLING), json.dumps(content, indent=2))


def read_sampling(output: Path) -> dict[str, Any] | None:
    """Read the sampler's settings of the sequences in `output`; None if they are not known."""
    kept = read_json(output.with_suffix(SAMPLING))
    return kept["settings"] if kept and kept.get("digest") == files_digest(output) else None


def _scores(
    records: list[FastaRecord], exported: ExportedModel, precision: str, **settings: Any
) -> list[ProteinScore]:
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
    return protein_scores(draws, sequences)
