"""Python interface to a trained model: generate, infill, score and embed proteins or other text.

    from d2plm import load_model
    model = load_model()
    model.generate(5, length=120, seed=1)

Proteins are strings of residue letters; models of other alphabets read and write their own
sequences, whose tokens take the place of residues. Results equal those of `d2plm generate` and
`d2plm score` with the same settings. Everything stays in memory; use the commands for large files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import fields
from functools import wraps
from io import IOBase
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from d2plm.core.errors import (
    ConfigError,
    DataError,
    did_you_mean,
    in_one_line,
    require,
    require_number,
)
from d2plm.core.vocabulary import PROTEIN, Tokens, decode
from d2plm.data import retrieval
from d2plm.data.alignment_files import alignment_columns
from d2plm.data.family import Family, RelativesCheck
from d2plm.evaluation.embedding import embeddings
from d2plm.evaluation.scoring import (
    ProteinScore,
    bound_draws,
    mutational_effects,
    protein_scores,
    pseudo_log_likelihoods,
    require_masked,
)
from d2plm.export.exported_model import ExportedModel
from d2plm.families.variants import Variant, VariantError, place_variants
from d2plm.generation.lengths import lengths_of, prompted
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.settings.commands import PRETRAINED
from d2plm.settings.schema import MAX_SEED
from d2plm.tracking.locations import HubSettings, model_folder, open_export

__all__ = ["ProteinScore", "SequenceModel", "load_model", "retrieve_relatives"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Settings = TypeVar("Settings")
# Types that are rejected in place of a list, and what to pass instead.
REFUSED = (
    (Mapping, "pass list(NAME.values())"),
    (Set, "pass a list, which has an order"),
    (bytes | bytearray | memoryview, "decode it"),
    (PathLike | IOBase, "read its sequences first"),
)


def _of_numpy(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Convert numpy scalars among the arguments to Python numbers and strings."""

    @wraps(function)
    def called(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        plain = {name: _plain(value) for name, value in named.items()}
        return function(*map(_plain, arguments), **plain)  # type: ignore[arg-type]  # as they were

    return called


@_of_numpy
def load_model(
    location: str | Path = PRETRAINED,
    *,
    device: str = "auto",
    precision: str = "auto",
    token_budget: int = 16384,
    tracking_uri: str | None = None,
    **hub: Any,
) -> "SequenceModel":
    """Load a trained model for generation and scoring.

        model = load_model()
        model = load_model("models:/d2plm-diffusion@champion", tracking_uri="sqlite:///mlflow.db")

    Args:
        location: folder of an exported model or of ESM-2, by default the shipped one;
            `models:/NAME@ALIAS` or `models:/NAME/3` in the MLflow registry; or the name of an
            ESM-2 model on the Hugging Face Hub.
        device: `cpu`, `cuda`, or `auto`, which uses CUDA if available.
        precision: precision of matrix products: `bf16`, `fp32`, `fp64`, or `auto`, the fastest
            that the hardware supports. Scores agree between batches and machines up to rounding.
        token_budget: tokens per forward pass; smaller values need less memory.
        tracking_uri: URI of the registry; `MLFLOW_TRACKING_URI` takes precedence.
        **hub: fields of `HubSettings` (`d2plm.tracking.locations`) for a model on the Hub:
            revision, token, cache_dir, subfolder, local_files_only, force_download.

    Raises:
        ConfigError: if an argument is invalid or the device is not available.
        ModelError: if a file of the model is missing or damaged.
        TrackingError: if the registry lacks the model or cannot be reached.
    """
    of_hub = _settings(HubSettings, hub)
    folder = model_folder(location, tracking_uri, key="location", hub=of_hub)
    exported = open_export(folder, device, tracking_uri, of_hub)
    return SequenceModel(exported, precision=precision, token_budget=token_budget)


@_of_numpy
def retrieve_relatives(
    sequences: str | Sequence[str],
    reference: str | Path,
    *,
    cache_dir: str | Path | None = None,
    **settings: Any,
) -> list[list[str]]:
    """Find the relatives of each protein in a reference collection with MMseqs2.

        relatives = retrieve_relatives(proteins, "reference.fasta.gz", identity_below=0.9)
        model.score(proteins, relatives=relatives)

    A protein that is itself in the reference is never its own relative.

    Args:
        reference: FASTA, plain or compressed; a store; or prepared data, of which the training
            proteins are searched.
        cache_dir: folder that caches results for later calls with the same arguments; None
            disables the cache.
        **settings: fields of `RetrievalSettings` (`d2plm.data.retrieval`): identity_below,
            min_coverage, max_relatives, mutual_identity_below, sensitivity, max_e_value.

    Returns:
        For each protein, the sequences of its relatives, most confident first; possibly empty.

    Raises:
        ConfigError: if a setting is unknown or invalid.
        DataError: if a sequence has an invalid letter, the reference cannot be read, or MMseqs2
            is missing or fails.
    """
    require(isinstance(reference, str | PathLike), "reference", reference, "a path")
    is_path = cache_dir is None or isinstance(cache_dir, str | PathLike)
    require(is_path, "cache_dir", cache_dir, "a path or None")
    wanted = _settings(retrieval.RetrievalSettings, settings)
    texts = _several(sequences, "sequence")
    tokens = [PROTEIN.encode(text, f"sequence {index}") for index, text in enumerate(texts)]
    keeping = TemporaryDirectory() if cache_dir is None else nullcontext(cache_dir)
    with keeping as folder:
        found = retrieval.retrieve_relatives(tokens, reference, Path(folder), wanted)
    return [[decode(relative.tokens) for relative in own] for own in found]


class SequenceModel:
    """An exported model that reads and writes proteins, or other sequences. See `load_model`.

    Proteins are parsed as in a FASTA file: upper or lower case; blanks, gaps and a final stop are
    removed. Methods that take several sequences also accept one; they return a list in any case.

    Args:
        exported: result of `load_export`; kept as an attribute.
        precision, token_budget: as in `load_model`.
    """

    @_of_numpy
    def __init__(
        self, exported: ExportedModel, *, precision: str = "auto", token_budget: int = 16384
    ) -> None:
        wanted = "a loaded export; load_model takes its folder"
        require(isinstance(exported, ExportedModel), "exported", exported, wanted)
        require_number("token_budget", token_budget, integer=True, low=1)
        self.exported = exported
        self._denoiser = exported.denoiser(precision)
        self._batching: dict[str, Any] = {"token_budget": token_budget, "device": self.device}

    def __repr__(self) -> str:
        parameters = self.exported.model.num_parameters()
        return (
            f"{type(self).__name__}({str(self.exported.folder)!r}: {self.exported.paradigm.name}, "
            f"{parameters:,} parameters, up to {self.max_residues} "
            f"{self.exported.vocabulary.nouns.token}s)"
        )

    @property
    def max_residues(self) -> int:
        """Maximum length of a protein in residues, or of another sequence in tokens."""
        return self.exported.max_residues

    @property
    def device(self) -> torch.device:
        return self.exported.model.device

    @_of_numpy
    def generate(
        self,
        number: int = 1,
        *,
        length: int | Iterable[int] | None = None,
        min_length: int = 1,
        max_length: int | None = None,
        prompt: str | None = None,
        relatives: Sequence[str] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Generate new proteins; the result is a deterministic function of the arguments.

            model.generate(5, seed=1)
            model.generate(2, length=[80, 120], temperature=0.8, steps=64)  # two of each length
            model.generate(20, relatives=family)  # new members of a family

        Args:
            number: number of proteins, or of proteins per length if `length` is given.
            length: one length or several, in residues; None samples from the lengths of the
                training proteins, or of the relatives if given.
            min_length, max_length: range of sampled lengths, in residues; None is the model's
                limit.
            prompt: beginning of each protein, which counts towards its length.
            relatives: members of a family, from whose alignment new members are sampled without the
                model (`d2plm.families.designs`).
            **sampling: fields of `Sampling` (`d2plm.generation.sampler_settings`): seed, sampler,
                steps, temperature, top_k, top_p and more.

        Returns:
            Sequences, grouped by length.

        Raises:
            ConfigError: if a setting is unknown, invalid, or has no effect with the others.
            ModelError: if an output of the model is not finite.
        """
        settings = _settings(Sampling, sampling)
        require_number("number", number, integer=True, low=1)
        family = self._family(relatives, 1)
        if length is not None and not isinstance(length, int):
            length = [_plain(one) for one in _listed(length, "length", "an integer or", "integers")]
        if family is not None and length is None and prompt is None:
            return self._sample([None] * number, settings, family, min_length, max_length)
        templates = prompted(
            self.exported.lengths if family is None else lengths_of(family, self.max_residues),
            number,
            self.max_residues,
            self.exported.vocabulary,
            prompt,
            length=length,
            min_length=min_length,
            max_length=max_length,
            seed=settings.seed,
        )
        return self._sample(templates, settings, family)

    @_of_numpy
    def infill(
        self,
        templates: str | Sequence[str],
        number: int = 1,
        *,
        relatives: Sequence[str] | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Fill in the gaps of templates; given residues are kept.

            model.infill("MKT____GGLL", number=2, seed=1)

        Args:
            templates: residue letters, with `_` or `<mask>` for each residue to fill in; in text,
                where `_` is a character, `<mask>`, or `<mask:12>` for twelve tokens.
            number: number of designs per template.
            relatives: as in `generate`.
            **sampling: as in `generate`.

        Returns:
            `number` designs of the first template, then of the next, and so on.

        Raises:
            ConfigError: if a setting is unknown, invalid, or has no effect with the others.
            DataError: if a template has an invalid letter or no gaps.
            ModelError: if a template is too long or an output is not finite.
        """
        settings = _settings(Sampling, sampling)
        require_number("number", number, integer=True, low=1)
        parsed = []
        for index, text in enumerate(_several(templates, "template")):
            template = parse_template(text, str(index), self.exported.vocabulary)
            self.exported.require_short_enough(f"template {index}", template, "shorten it")
            parsed += [template] * number
        return self._sample(parsed, settings, self._family(relatives, 1))

    @_of_numpy
    def score(
        self,
        sequences: str | Sequence[str],
        *,
        masks_per_sequence: int = 16,
        seed: int = 0,
        relatives: Sequence[str] | Sequence[Sequence[str]] | None = None,
        max_relatives: int = 8,
    ) -> list[ProteinScore]:
        """Compute the likelihood bound of each protein; lower means more likely.

            for score in model.score(["MKTAYIAKQR", "GSHMLEDPVA"]):
                print(score.nats, score.interval, score.perplexity)

        Args:
            masks_per_sequence: mask samples per protein; more samples narrow the interval.
            seed: combined with a protein's index to seed its samples, so the bound of the same
                protein at another index differs by sampling error.
            relatives: one list for all proteins, or one list per protein (see
                `retrieve_relatives`), for a model that takes relatives. The bound is then on
                −log p(sequence | relatives). Each mask sample uses up to `max_relatives` newly
                sampled relatives, excluding the protein itself. A protein whose list is empty is
                scored without relatives.

        Returns:
            For each protein, the number of scored residues, the bound on −log p(sequence | length)
            in nats with its 95 % interval over the samples, and the perplexity.

        Raises:
            ConfigError: if a value is out of range.
            DataError: if a sequence is empty or has an invalid letter, or if no protein has a
                relative other than itself.
            ModelError: if a protein is too long or a bound is not finite.
        """
        tokens, names = self._read(sequences)
        require_number("seed", seed, integer=True, low=0, high=MAX_SEED)
        if relatives is not None:
            self.exported.require_taking_relatives()
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
        return protein_scores(draws, tokens, self.exported.vocabulary)

    @_of_numpy
    def embed(
        self, sequences: str | Sequence[str], *, layer: int = -1, pooled: bool = False
    ) -> list[NDArray[np.float32]]:
        """Return a layer's embedding of each protein: float32 [L, D], or [D] if pooled.

            vectors = np.stack(model.embed(proteins, pooled=True))

        Args:
            layer: 0 is the input of the first block and n the output of the n-th block; the last
                (also -1) is taken after the final normalisation.
            pooled: whether to average over the residues.

        Raises:
            ConfigError: if the model has no such layer.
            DataError: if a sequence is empty or has an invalid letter.
            ModelError: if a protein is too long.
        """
        tokens, _ = self._read(sequences)
        require(isinstance(pooled, bool), "pooled", pooled, "True or False")
        return embeddings(
            self._denoiser,  # type: ignore[arg-type]  # an export's denoiser is its model
            self.exported.paradigm,
            tokens,
            layer=layer,
            pooled=pooled,
            token_budget=self._batching["token_budget"],
        )

    def pseudo_log_likelihood(self, sequences: str | Sequence[str]) -> list[float]:
        """Σ_i log p(x_i | all other residues) of each protein, in nats; higher means more likely.

            model.pseudo_log_likelihood("MKTAYIAKQR")

        For comparison with published values (Salazar et al., arXiv:1910.14659). It is not a
        log-likelihood, and it needs one forward row per residue.

        Raises:
            DataError: if a sequence is empty or has an invalid letter.
            ModelError: if a protein is too long, a value is not finite, or the model has a uniform
                source and therefore no masked prediction.
        """
        remedy = "use score, which every model has"
        paradigm = require_masked(self.exported.paradigm, "pseudo_log_likelihood", remedy)
        tokens, names = self._read(sequences)
        return pseudo_log_likelihoods(
            self._denoiser, paradigm, tokens, **self._batching, names=names
        ).tolist()

    @_of_numpy
    def score_mutations(
        self,
        wild_type: str,
        variants: str | Sequence[str],
        *,
        mutation_offset: int | Literal["auto"] = "auto",
        relatives: Sequence[str] | None = None,
    ) -> list[float]:
        """Score each variant; a higher score means more likely, and the wild type scores 0.

            model.score_mutations("MKTAYIAKQR", ["A4G", "A4G:K8R", "WT"])

        With relatives, the score is computed from their alignment (`families.mutation_effects`)
        without the model. Otherwise it is Σ_i log p(mutant_i) − log p(wild type_i) by masked
        marginals (Meier et al., doi:10.1101/2021.07.09.450648): all positions that a variant
        changes are masked at once in the wild type.

        Args:
            variants: wild-type residue, position from 1 and mutant residue, such as `A4G`; several
                substitutions are separated by `:`. HGVS is also read: `p.Ala4Gly`.
            mutation_offset: 24 if the first residue of `wild_type` has number 25; "auto" infers it.
            relatives: all known relatives of the wild type; aligned rows keep their columns.

        Raises:
            ConfigError: if the offset is not an integer, or cannot be inferred.
            DataError: if a variant is malformed or does not match the wild type.
            ModelError: if the wild type is too long, a score is not finite, or the model has a
                uniform source and therefore no masked prediction.
        """
        self.exported.require_proteins("score_mutations")
        tokens = PROTEIN.encode(wild_type, "wild_type")
        texts = _several(variants, "variant")
        found, _ = place_variants(texts, tokens, offset=mutation_offset)
        placed = [one for one in found if isinstance(one, Variant)]
        for index, one in enumerate(found):
            if isinstance(one, VariantError):
                raise DataError(f"variant {index}: {one}")
        families = self._families(relatives, 1, [tokens])
        if families is not None:
            from d2plm.families.mutation_effects import FamilyEffects  # imports HMMER

            effects = FamilyEffects.of(tokens, families[0].members, families[0].columns)
            return effects.effects(placed)["score"].tolist()
        remedy = "use a model of diffusion, or of flow matching from masks"
        paradigm = require_masked(self.exported.paradigm, "score_mutations", remedy)
        self.exported.require_short_enough("the wild type", tokens, "shorten it")
        return mutational_effects(
            self._denoiser, paradigm, tokens, placed, **self._batching
        ).tolist()

    def _families(
        self,
        relatives: Sequence[str] | Sequence[Sequence[str]] | None,
        most: int,
        proteins: list[Tokens],
    ) -> list[Family] | None:
        """Build each protein's family, from relatives shared by all or from a list per protein."""
        if relatives is None:
            return None
        given = _listed(relatives, "relatives")
        if not given:
            raise DataError("relatives: there are none; give at least one, or omit relatives")
        for_all = any(isinstance(one, str) for one in given)
        if not for_all and len(given) != len(proteins):
            raise ConfigError(
                f"relatives: {len(given)} given for {len(proteins)} proteins; pass one list of "
                "strings for all proteins, or one list of strings per protein"
            )
        lists = [given] if for_all else [_listed(own, "relatives") for own in given]
        families = [self._family(own or None, most) or Family([], most) for own in lists]
        families *= len(proteins) if for_all else 1
        check = RelativesCheck("relatives", "sequences")
        for number, pair in enumerate(zip(families, proteins, strict=True)):
            check.add(str(number), *pair)
        check.report()
        return families

    def _family(self, relatives: Sequence[str] | None, most: int) -> Family | None:
        if relatives is None:
            return None
        texts = _strings(_listed(relatives, "relatives"), "relative")
        tokens = [
            PROTEIN.encode(text, f"relative {i}", aligned=True) for i, text in enumerate(texts)
        ]
        columns = alignment_columns([PROTEIN.raw(text) for text in texts], tokens)
        return Family.of(tokens, most, columns=columns)

    def _sample(
        self,
        templates: Sequence[Tokens | None],
        sampling: Sampling,
        family: Family | None = None,
        min_length: int = 1,
        max_length: int | None = None,
    ) -> list[str]:
        if family is not None:
            from d2plm.families.designs import FamilyDesigns  # imports HMMER

            self.exported.require_proteins("relatives")
            made = FamilyDesigns(family).design(
                templates, sampling, min_length=min_length, max_length=max_length
            )
            return [decode(one.tokens) for one in made]
        rows = sample(
            self._denoiser,
            self.exported.paradigm,
            [one for one in templates if one is not None],
            sampling,
            max_length=self.exported.max_length,
            **self._batching,
        )
        return [self.exported.vocabulary.decode(row) for row in rows]

    def _read(self, sequences: str | Sequence[str]) -> tuple[list[Tokens], list[str]]:
        """Encode the sequences, and name each one for errors."""
        texts = _several(sequences, "sequence")
        named = {f"sequence {index}": text for index, text in enumerate(texts)}
        tokens = [self.exported.vocabulary.encode(text, name) for name, text in named.items()]
        for name, one in zip(named, tokens, strict=True):
            self.exported.require_short_enough(name, one, "shorten it")
        return tokens, list(named)


def _settings(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """Build an instance of the dataclass `kind`; rejects unknown fields."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in values:
        if name not in known:
            raise ConfigError(
                f"{name}: no such setting{did_you_mean(name, known)}; "
                f"choose from {', '.join(known)}"
            )
    return kind(**values)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _several(texts: object, noun: str) -> list[str]:
    """List one text or several; `noun` names them in errors."""
    listed = [texts] if isinstance(texts, str) else _listed(texts, f"{noun}s", "a string or")
    return _strings(listed, noun)


def _strings(texts: list[Any], noun: str) -> list[str]:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            remedy = "give a string, and leave missing values out"
            raise DataError(f"{noun} {index}: {in_one_line(text)} is not a string; {remedy}")
    return texts


def _listed(values: object, argument: str, one: str = "", of: str = "strings") -> list[Any]:
    """List an ordered collection of one dimension; raises `ConfigError` for anything else."""
    refusal = f"{argument}: must be {f'{one} a list of {of}'.strip()}, not {type(values).__name__}"
    dimensions = len(getattr(values, "shape", (0,)))
    remedy = next((said for refused, said in REFUSED if isinstance(values, refused)), "")
    if dimensions > 1:
        column = "mutant" if argument == "variants" else "sequence"
        remedy = f"pass one column of it, such as df['{column}']"
    if remedy or isinstance(values, str) or not isinstance(values, Iterable) or not dimensions:
        raise ConfigError(f"{refusal}{'; ' * bool(remedy)}{remedy}")
    listed = list(values)
    is_letters = all(isinstance(part, str) and len(part) == 1 for part in listed)
    if is_letters and "".join(listed) == str(values):  # text of another library's class
        raise ConfigError(f"{refusal}; pass str() of it")
    return listed
