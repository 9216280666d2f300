"""A trained model in Python: generate, fill in and score proteins, as residue letters.

    from d2plm import load_model
    model = load_model("runs/demo/model")
    model.generate(5, length=120, seed=1)

Results are those of `d2plm generate` and `d2plm score` with the same settings. Everything is held
in memory and nothing is written; use the commands for larger files.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from d2plm.core.alphabet import MASK, decode
from d2plm.core.errors import ConfigError, DataError, did_you_mean, require_number
from d2plm.data import retrieval
from d2plm.data.family import Family
from d2plm.data.records import encode_residues
from d2plm.evaluation.embedding import embeddings
from d2plm.evaluation.mutations import place_variants
from d2plm.evaluation.scoring import (
    ProteinScore,
    bound_draws,
    mutational_effects,
    protein_scores,
    pseudo_log_likelihoods,
    require_masked,
)
from d2plm.export import hugging_face  # noqa: F401  # registers the classes of AutoModel
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, wanted_lengths
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.tracking.locations import open_model

__all__ = ["ProteinModel", "ProteinScore", "load_model", "retrieve_relatives"]

Tokens = NDArray[np.uint8]
Settings = TypeVar("Settings")


def load_model(
    location: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    token_budget: int = 16384,
    tracking_uri: str | None = None,
) -> "ProteinModel":
    """A trained model, ready to generate and score.

        model = load_model("runs/demo/model")
        model = load_model("models:/d2plm-diffusion@champion", tracking_uri="sqlite:///mlflow.db")

    Args:
        location: an exported folder, or one of ESM-2; `models:/NAME@ALIAS` or `models:/NAME/3` in
            the MLflow registry; the name of an ESM-2 on the Hugging Face Hub.
        device: `cpu`, `cuda`, or `auto`, which takes CUDA where there is a device.
        precision: of matrix products: `bf16`, `fp32`, `fp64`, or `auto`, the fastest that the
            hardware supports. Scores agree between batches and machines up to its rounding.
        token_budget: tokens of one forward pass; fewer take less memory.
        tracking_uri: where the registry is; `MLFLOW_TRACKING_URI` wins.

    Raises:
        ConfigError: for an impossible argument, or a device that this machine lacks.
        ModelError: if a file of the model is missing or damaged.
        TrackingError: if the registry does not have it, or cannot be reached.
    """
    exported = open_model(location, device, tracking_uri, key="location")
    return ProteinModel(exported, precision=precision, token_budget=token_budget)


def retrieve_relatives(
    sequences: str | Sequence[str],
    reference: str | Path,
    *,
    cache_dir: str | Path | None = None,
    **settings: Any,
) -> list[list[str]]:
    """The relatives of each protein in a reference collection, the surest first, by MMseqs2.

        relatives = retrieve_relatives(proteins, "reference.fasta.gz", identity_below=0.9)
        model.score(proteins, relatives=relatives)

    A protein that is itself in the reference is never its own relative.

    Args:
        reference: FASTA, plain or compressed; a store; or prepared data, whose training proteins
            are then searched.
        cache_dir: where the result is kept, so that the same call takes no second search; None
            keeps nothing.
        **settings: any field of `RetrievalSettings` (`d2plm.data.retrieval`): identity_below,
            min_coverage, max_relatives, mutual_identity_below, sensitivity, max_e_value.

    Returns:
        For each protein the residue letters of its relatives, none where there are none.

    Raises:
        ConfigError: on a setting that is unknown or impossible.
        DataError: for a letter that is no residue, a reference that cannot be read, or if MMseqs2
            is missing or fails.
    """
    wanted = _settings(retrieval.RetrievalSettings, settings)
    texts = enumerate(_several(sequences))
    tokens = [encode_residues(text, f"sequence {index}") for index, text in texts]
    keeping = TemporaryDirectory() if cache_dir is None else nullcontext(cache_dir)
    with keeping as folder:
        found = retrieval.retrieve_relatives(tokens, reference, Path(folder), wanted)
    return [[decode(relative.tokens) for relative in own] for own in found]


class ProteinModel:
    """An exported model whose proteins are residue letters. See `load_model`.

    Sequences are read as from a FASTA file: in either case, blanks, gaps and a final stop removed.
    Where several sequences are taken, a single one may be passed; results are lists all the same.

    Args:
        exported: the result of `load_export`, also kept as an attribute.
        precision, token_budget: as of `load_model`.
    """

    def __init__(
        self, exported: ExportedModel, *, precision: str = "auto", token_budget: int = 16384
    ) -> None:
        require_number("token_budget", token_budget, integer=True, low=1)
        self.exported = exported
        self._denoiser = exported.denoiser(precision)
        self._batching: dict[str, Any] = {"token_budget": token_budget, "device": self.device}

    def __repr__(self) -> str:
        parameters = self.exported.model.num_parameters()
        return (
            f"{type(self).__name__}({str(self.exported.folder)!r}: {self.exported.paradigm.name}, "
            f"{parameters:,} parameters, up to {self.max_residues} residues)"
        )

    @property
    def max_residues(self) -> int:
        """The longest protein that the model takes, in residues."""
        return self.exported.max_residues

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.exported.model.device

    def generate(
        self,
        number: int = 1,
        *,
        length: int | Sequence[int] | None = None,
        min_length: int = 1,
        max_length: int | None = None,
        relatives: Sequence[str] | None = None,
        max_relatives: int = 8,
        **sampling: Any,
    ) -> list[str]:
        """New proteins; with the same arguments, the same ones.

            model.generate(5, seed=1)
            model.generate(2, length=[80, 120], temperature=0.8, steps=64)  # two of each length
            model.generate(20, relatives=family)  # new members, by a model that takes relatives

        Args:
            number: of proteins; with given lengths, of each.
            length: residues, one number or several; None draws each from the lengths of the
                training proteins, or of the relatives where there are any.
            min_length, max_length: of drawn lengths, residues; None is the model's limit.
            relatives: members of a family, for a model that takes them; as many as `max_relatives`
                are drawn for each new protein. All are given: the command holds some of a family
                back to compare with, unless `generation.held_out_members=0`.
            **sampling: any field of `Sampling` (`d2plm.generation.sampler_settings`): seed,
                sampler, steps, temperature, top_k, top_p and more.

        Returns:
            Residue letters, those of one length next to each other.

        Raises:
            ConfigError: on a setting that is unknown, impossible, or useless with the others.
            ModelError: if an output of the model is not finite.
        """
        settings = _settings(Sampling, sampling)
        require_number("number", number, integer=True, low=1)
        family = self._family(relatives, max_relatives)
        lengths = wanted_lengths(
            self.exported.lengths if family is None else lengths_of(family, self.max_residues),
            number,
            self.max_residues,
            length=length,
            min_length=min_length,
            max_length=max_length,
            seed=settings.seed,
        )
        wanted = [np.full(one, MASK, dtype=np.uint8) for one in lengths]
        return self._sample(wanted, settings, family)

    def infill(
        self,
        templates: str | Sequence[str],
        number: int = 1,
        *,
        relatives: Sequence[str] | None = None,
        max_relatives: int = 8,
        **sampling: Any,
    ) -> list[str]:
        """The templates with their gaps filled in; given residues are kept.

            model.infill("MKT____GGLL", number=2, seed=1)

        Args:
            templates: residue letters, `_` or `<mask>` for each residue that is wanted.
            number: of designs for each template.
            relatives, max_relatives: as of `generate`.
            **sampling: as of `generate`.

        Returns:
            `number` designs of the first template, then of the next, ….

        Raises:
            ConfigError: on a setting that is unknown, impossible, or useless with the others.
            DataError: for an illegal letter, or a template without gaps.
            ModelError: for a template that is too long, or if an output is not finite.
        """
        settings = _settings(Sampling, sampling)
        require_number("number", number, integer=True, low=1)
        parsed = []
        for index, text in enumerate(_several(templates)):
            template = parse_template(text, str(index))
            self.exported.require_short_enough(f"template {index}", template, "shorten it")
            parsed += [template] * number
        return self._sample(parsed, settings, self._family(relatives, max_relatives))

    def score(
        self,
        sequences: str | Sequence[str],
        *,
        masks_per_sequence: int = 16,
        seed: int = 0,
        relatives: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_relatives: int = 8,
    ) -> list[ProteinScore]:
        """The likelihood bound of each protein: fewer nats are likelier.

            for score in model.score(["MKTAYIAKQR", "GSHMLEDPVA"]):
                print(score.nats, score.interval, score.perplexity)

        Args:
            masks_per_sequence: draws of each, from which the interval is; more are more exact.
            seed: of the draws of a protein, with its place among the sequences: in another place
                its bound differs by chance.
            relatives: of all the proteins, or a list for each of them (see `retrieve_relatives`),
                for a model that takes relatives: the bound is then of −log p(sequence | relatives).
                As many as `max_relatives` are drawn anew with each draw; the protein itself is left
                out. A protein whose own list is empty is scored without.

        Returns:
            For each protein its scored residues, the bound of −log p(sequence | length) in nats
            with its 95 % interval over the draws, and the perplexity.

        Raises:
            ConfigError: on a value out of range.
            DataError: for a letter that is no residue, no letters, or relatives among which no
                protein has another one than itself.
            ModelError: for a protein that is too long, or a bound that is not finite.
        """
        tokens, names = self._read(sequences)
        require_number("seed", seed, integer=True, low=0)
        draws = bound_draws(
            self._denoiser,
            self.exported.paradigm,
            tokens,
            masks_per_sequence=masks_per_sequence,
            seed=seed,
            families=self._families(relatives, max_relatives, tokens),
            **self._batching,
            names=names,
        )
        return protein_scores(draws, tokens)

    def embed(
        self, sequences: str | Sequence[str], *, layer: int = -1, pooled: bool = False
    ) -> list[NDArray[np.float32]]:
        """What a layer holds of each protein's residues: float32 [L, D], or their mean, [D].

            vectors = np.stack(model.embed(proteins, pooled=True))

        Args:
            layer: 0 is what enters the first block, n what leaves the n-th, and of the last one,
                also -1, its final normalisation.
            pooled: whether the mean over the residues is returned.

        Raises:
            ConfigError: if the model has no such layer.
            DataError: for a letter that is no residue, or no letters.
            ModelError: for a protein that is too long.
        """
        tokens, _ = self._read(sequences)
        budget = self._batching["token_budget"]
        return embeddings(
            self._denoiser,  # type: ignore[arg-type]  # an export's denoiser is its model
            self.exported.paradigm,
            tokens,
            layer=layer,
            pooled=pooled,
            token_budget=budget,
        )

    def pseudo_log_likelihood(self, sequences: str | Sequence[str]) -> list[float]:
        """Σ_i log p(x_i | all other residues) of each protein, nats: higher is likelier.

            model.pseudo_log_likelihood("MKTAYIAKQR")

        For comparison with published figures (Salazar et al., arXiv:1910.14659): it is no
        log-likelihood, and takes as many forward rows for a protein as it has residues.

        Raises:
            DataError: for a letter that is no residue, or no letters.
            ModelError: for a protein that is too long, a value that is not finite, or a model of
                the uniform source, which has no masked prediction.
        """
        remedy = "use score, which every model has"
        paradigm = require_masked(self.exported.paradigm, "pseudo_log_likelihood", remedy)
        tokens, names = self._read(sequences)
        return pseudo_log_likelihoods(
            self._denoiser, paradigm, tokens, **self._batching, names=names
        ).tolist()

    def score_mutations(
        self,
        wild_type: str,
        variants: str | Sequence[str],
        *,
        mutation_offset: int = 0,
        relatives: Sequence[str] | None = None,
        max_relatives: int = 8,
    ) -> list[float]:
        """Σ_i log p(mutant_i) − log p(wild type_i) of each variant: higher is likelier.

            model.score_mutations("MKTAYIAKQR", ["A4G", "A4G:K8R", "WT"])

        The masked marginals of Meier et al. (doi:10.1101/2021.07.09.450648): all positions that a
        variant changes are masked at once in the wild type. The wild type itself scores 0.

        Args:
            wild_type: residue letters.
            variants: `A4G`, wild-type residue, position from 1, mutant residue; several changes
                separated by `:`.
            mutation_offset: 24 where the first residue of `wild_type` is number 25.
            relatives: of the wild type, for a model that takes them; `max_relatives` at a time,
                and the mean over several draws where there are more.

        Raises:
            ConfigError: if the offset is no integer.
            DataError: for a malformed variant, or one that does not fit the wild type.
            ModelError: for a wild type that is too long, a score that is not finite, or a model of
                the uniform source, which has no masked prediction.
        """
        remedy = "give a model of diffusion, or of flow matching from masks"
        paradigm = require_masked(self.exported.paradigm, "score_mutations", remedy)
        require_number("mutation_offset", mutation_offset, integer=True)
        tokens = encode_residues(wild_type, "wild_type")
        self.exported.require_short_enough("the wild type", tokens, "shorten it")
        placed = place_variants(_several(variants), tokens, offset=mutation_offset)
        families = self._families(relatives, max_relatives, [tokens])
        family = None if families is None else families[0]
        return mutational_effects(
            self._denoiser, paradigm, tokens, placed, family=family, **self._batching
        ).tolist()

    def _families(
        self,
        relatives: Sequence[str] | Sequence[Sequence[str]] | None,
        most: int,
        proteins: list[Tokens],
    ) -> list[Family] | None:
        """The family of each of the proteins, from relatives of all or from a list for each."""
        if relatives is None:
            return None
        given = _several(relatives)
        for_all = all(isinstance(one, str) for one in given)
        if not for_all and (
            len(given) != len(proteins) or any(isinstance(one, str) for one in given)
        ):
            raise ConfigError(
                f"relatives: {len(given)} given for {len(proteins)} proteins; give texts, for all "
                "proteins, or as many lists of texts as there are proteins"
            )
        lists = [given] if for_all else given
        families = [self._family(own or None, most) or Family([], most) for own in lists]
        families *= len(proteins) if for_all else 1
        pairs = zip(families, proteins, strict=True)
        if proteins and not any(family.has_others(protein) for family, protein in pairs):
            raise DataError(
                "there are no relatives but the proteins themselves; give others, or score without"
            )
        return families

    def _family(self, relatives: Sequence[str] | None, most: int) -> Family | None:
        if relatives is None:
            return None
        self.exported.require_taking_relatives("relatives")
        if isinstance(relatives, str) or not all(isinstance(one, str) for one in relatives):
            raise ConfigError(
                "relatives: give a list of proteins as texts, such as the first list that "
                "retrieve_relatives returns, or the records of a FASTA file"
            )
        tokens = [encode_residues(text, f"relative {i}") for i, text in enumerate(relatives)]
        return Family.of(tokens, most)

    def _sample(
        self, templates: list[Tokens], sampling: Sampling, family: Family | None = None
    ) -> list[str]:
        relatives = None
        if family is not None:
            relatives = family.draw_for_designs(len(templates), sampling.seed)
        rows = sample(
            self._denoiser,
            self.exported.paradigm,
            templates,
            sampling,
            max_length=self.exported.max_length,
            relatives=relatives,
            **self._batching,
        )
        return [decode(row) for row in rows]

    def _read(self, sequences: str | Sequence[str]) -> tuple[list[Tokens], list[str]]:
        """The sequences as tokens, and their names in errors."""
        named = {f"sequence {index}": text for index, text in enumerate(_several(sequences))}
        tokens = [encode_residues(text, name) for name, text in named.items()]
        for name, one in zip(named, tokens, strict=True):
            self.exported.require_short_enough(name, one, "shorten it")
        return tokens, list(named)


def _settings(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """The dataclass `kind` with these values of its fields."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{name}: no such setting{did_you_mean(name, known)}; one of {', '.join(known)}"
            )
    return kind(**values)


def _several(texts: str | Sequence[Any]) -> list[Any]:
    return [texts] if isinstance(texts, str) else list(texts)
