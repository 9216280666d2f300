"""Evaluating an exported model, and saving the evaluation inside the export.

The figures are saved beside the weights with the digests of the data and masks, so that an
evaluation is reused if nothing has changed, and compared only with evaluations on the same data.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from huggingface_hub.constants import REPOCARD_NAME as CARD
from numpy.typing import NDArray

from d2plm.core.errors import DataError, ModelError
from d2plm.core.files import write_text, written_beside
from d2plm.core.progress import Progress
from d2plm.core.vocabulary import PROTEIN, Tokens, Vocabulary
from d2plm.data.cache import ArrayCache
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.baselines import Baselines, fit_baselines, sample_reference
from d2plm.evaluation.given_relatives import PROFILES_VERSION, evaluate_given_relatives
from d2plm.evaluation.likelihood import MASKING_VERSION, SequenceScores, score_sequences
from d2plm.evaluation.masked_lm import MaskedLM
from d2plm.evaluation.nearest import nearest_search
from d2plm.evaluation.quality import (
    QualitySettings,
    beside_others,
    compare_quality,
    compare_texts,
    find_novelty,
)
from d2plm.evaluation.result import (
    EVALUATION,
    MODEL,
    SEQUENCE_SCORES,
    Evaluation,
    Quality,
    read_evaluation,
    write_evaluation,
)
from d2plm.evaluation.summary import HeldOut, summarise
from d2plm.evaluation.terms import SUITES, terms_for
from d2plm.export.exported_model import ExportedModel, load_export
from d2plm.generation.lengths import prompted
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Denoiser, Paradigm
from d2plm.settings.data import Resources, SearchSettings
from d2plm.settings.evaluation import EvaluationSettings


def evaluate(
    exported: ExportedModel,
    train: SequenceStore,
    held_out: SequenceStore,
    *,
    masks_per_sequence: int = 16,
    seed: int = 0,
    token_budget: int = 16384,
    precision: str = "auto",
    baselines: Baselines | None = None,
    others: Mapping[str, tuple[Denoiser, Paradigm]] | None = None,
    identities: NDArray[np.float64] | None = None,
    relatives: Callable[[], RelativesIndex] | None = None,
    choice: EvaluationSettings = EvaluationSettings(),
    cache: ArrayCache | None = None,
    quality: Callable[[], Quality] | None = None,
    folder: Path | None = None,
    settings: dict[str, Any] | None = None,
    digests: dict[str, str] | None = None,
) -> Evaluation:
    """Evaluate an exported model; writes the figures to its folder and its model card.

        prepared = open_prepared(Path("prepared"))
        evaluation = evaluate(exported, prepared.splits["train"], prepared.splits["validation"])
        print(d2plm.evaluation.tables.as_text(evaluation))

    Longer proteins are cut to the model's maximum length.

    Args:
        train: proteins on which the baselines are fitted.
        held_out: proteins that are scored.
        masks_per_sequence: mask samples per protein.
        seed: seed of the masks, which are the same for all models.
        precision: precision of matrix products, see `d2plm.core.precision`.
        baselines: fitted baselines; None fits them on `train`.
        others: further models to score, by name; see `open_rival`.
        identities: float64 [N], identity of each held-out protein to the nearest training protein.
        relatives: returns the relatives of each held-out protein among the others; called only for
            models that take relatives.
        choice: settings that select the relatives of a protein.
        cache: cache of the profile HMMs' figures, which are the same for every model.
        quality: returns the result of `compare_quality`; called last, because it takes longest.
        folder: where the figures are written, instead of the model's folder and card.
        settings, digests: recorded unchanged; None records those of this call.

    Raises:
        ConfigError: if a value is out of range.
        DataError: if the folder cannot be written.
        ModelError: if a bound is not finite.
    """
    max_residues = exported.max_residues
    if baselines is None:
        baselines = fit_baselines(train, max_residues=max_residues)
    vocabulary = held_out.vocabulary
    sequences = [tokens[:max_residues] for tokens in held_out]
    per_sequence = [baselines.score(tokens) for tokens in sequences]
    units = None
    if SUITES[vocabulary.name].unit is not None:
        scored = (tokens[vocabulary.is_predicted(tokens)] for tokens in sequences)
        units = np.array([vocabulary.byte_count(tokens) for tokens in scored])
    proteins = HeldOut(
        lengths=held_out.lengths,
        clusters=clusters_of(held_out),
        baselines={
            name: np.array([scores[name] for scores in per_sequence]) for name in baselines.scorers
        },
        identities=identities,
        units=units,
        terms=terms_for(vocabulary),
    )
    draws = {"masks_per_sequence": masks_per_sequence, "seed": seed, "token_budget": token_budget}
    own = exported.denoiser(precision), exported.paradigm

    def score(
        name: str,
        denoiser: Denoiser,
        paradigm: Paradigm,
        proteins: Sequence[Tokens] = sequences,
        relatives: Sequence[Sequence[Tokens]] | None = None,
        masks: int = masks_per_sequence,
    ) -> SequenceScores:
        with Progress(f"evaluating {name}") as progress:
            return score_sequences(
                *(denoiser, paradigm, proteins),
                masks_per_sequence=masks,
                max_length=exported.max_length,
                seed=seed,
                token_budget=token_budget,
                device=exported.model.device,
                unigram=baselines.unigram,
                data_digest=held_out.digest,
                relatives=relatives,
                with_mlm15=relatives is None,
                progress=progress.update,
            )

    scores = score(MODEL, *own)
    given = None
    if relatives is not None and exported.model.config.relatives_dim is not None:
        index = relatives()
        given_to_each = [choice.relatives_below, choice.max_relatives, choice.relatives_proteins]
        made_of = [PROFILES_VERSION, held_out.digest, index.digest, given_to_each, max_residues]
        given = evaluate_given_relatives(
            lambda name, which, related: score(name, *own, which, related, choice.relatives_masks),
            *(list(held_out), proteins.clusters, index, choice, max_residues),
            keep=lambda compute: (
                compute() if cache is None else cache.array("profiles", made_of, compute)
            ),
        )
    evaluation = summarise(
        scores,
        {name: score(name, *other) for name, other in (others or {}).items()},
        proteins,
        exported.lengths,
        given_relatives=given,
        quality=None if quality is None else quality(),
        settings=settings or {**draws, "precision": precision},
        digests=digests or {"train": train.digest, "validation": held_out.digest},
    )
    folder = folder or exported.folder
    with written_beside(folder / SEQUENCE_SCORES) as partial:
        np.savez_compressed(
            partial, nats=scores.nats, residues=scores.residues, clusters=proteins.clusters
        )
    write_evaluation(folder, evaluation)
    if folder == exported.folder:
        write_text(folder / CARD, exported.card(evaluation))
    return evaluation


def generated_quality(
    exported: ExportedModel,
    train: SequenceStore,
    held_out: SequenceStore,
    number: int,
    folder: Path,
    sampling: Sampling,
    *,
    baselines: Baselines,
    seed: int = 0,
    precision: str = "auto",
    nearest: SearchSettings = nearest_search(),
    resources: Resources = Resources(),
    report: Callable[[str], None] = lambda line: None,
) -> Quality:
    """Generate sequences and compare them with as many natural ones and samples of a baseline.

    Args:
        number: number of generated sequences; limited to the number of held-out ones.
        folder: folder of MMseqs2's log.
        baselines: the best one that ignores order is sampled.
        seed: seed of the lengths and of the sequences for comparison.
        nearest: settings of the search for similar training proteins.
    """
    vocabulary, limit = held_out.vocabulary, exported.max_residues
    suite, things = SUITES[vocabulary.name], f"{vocabulary.nouns.sequence}s"
    if number > len(held_out):
        number = len(held_out)
        report(f"generating only {number} {things}, the number of held-out {things}")
    with Progress("generating") as progress:
        generated = sample(
            exported.denoiser(precision),
            exported.paradigm,
            prompted(exported.lengths, number, limit, vocabulary, seed=seed),
            sampling,
            max_length=exported.max_length,
            device=exported.model.device,
            progress=progress.update,
        )
    samples = partial(sample_reference, baselines)
    sets = beside_others(generated, held_out, limit, seed, samples, suite.reference)
    if not suite.homology:
        return compare_texts(sets, train, limit, terms_for(vocabulary))
    settings = QualitySettings(max_residues=limit, nearest=nearest)
    novelty = find_novelty(sets, train, folder, settings, resources=resources, report=report)
    return compare_quality(sets, novelty, train, settings)


def open_rival(
    folder: Path,
    vocabulary: Vocabulary,
    longest: int,
    device: torch.device,
    precision: str = "auto",
) -> tuple[Denoiser, Paradigm]:
    """Open a model to compare with: an export, or a Hugging Face masked language model.

    Raises:
        ModelError: if the folder is neither, or the model is of another vocabulary or does not
            support `longest` tokens.
    """
    if (folder / Paradigm.config_name).is_file():
        rival = load_export(folder, device)
        rival.require_same_vocabulary("evaluation.compare_with", vocabulary)
        if rival.max_length < longest:
            raise ModelError(
                f"{folder}: supports {rival.max_length} tokens, but the proteins have up to "
                f"{longest}; compare models with the same maximum length"
            )
        return rival.denoiser(precision), rival.paradigm
    if vocabulary != PROTEIN:
        raise ModelError(
            f"evaluation.compare_with: {folder} is not an export of D2PLM, and other masked "
            "language models are compared on proteins alone"
        )
    # The exact-k bound of a model without time does not depend on the schedule.
    return MaskedLM(folder, device), AbsorbingDiffusion()


def reusable_evaluation(
    folder: Path, settings: dict[str, Any], digests: Mapping[str, str]
) -> Evaluation | None:
    """Read the evaluation in a folder; None unless it has these settings and digests."""
    try:
        evaluation, _ = load_scores(folder)
    except ModelError:
        return None
    same = evaluation.masking_version == MASKING_VERSION and evaluation.settings == settings
    return evaluation if same and evaluation.digests.items() >= digests.items() else None


def load_scores(folder: Path) -> tuple[Evaluation, dict[str, NDArray[Any]]]:
    """Load the evaluation in an export: float64 `nats`, integer `residues`, `clusters`.

    Raises:
        ModelError: if the evaluation is missing or damaged.
    """
    try:
        evaluation = read_evaluation(folder)
        if evaluation is None:
            raise ValueError(f"{EVALUATION} is missing")
        with np.load(folder / SEQUENCE_SCORES) as scores:
            return evaluation, {name: scores[name] for name in ("nats", "residues", "clusters")}
    except (OSError, ValueError, KeyError, BadZipFile, DataError) as error:
        raise ModelError(
            f"{folder}: has no complete evaluation ({error}); run 'd2plm evaluate' on it first"
        ) from error
