"""The exported model: a self-describing folder.

It contains the weights (safetensors), the configurations of model and paradigm, the vocabulary, the
histogram of training lengths, a model card and, once computed, the evaluation with the digests of
its data and masks. Generation, scoring and the registry need nothing else.
"""

import copy
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import REPOCARD_NAME as CARD
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from d2plm import __version__
from d2plm.core.errors import D2PLMError, DataError, ModelError
from d2plm.core.files import (
    PROVENANCE,
    SAVED_BY,
    files_digest,
    nearest_path,
    read_json,
    written_beside,
)
from d2plm.core.number_text import counted
from d2plm.core.precision import resolve_precision
from d2plm.core.terminal import first_few
from d2plm.core.vocabulary import PROTEIN, Vocabulary
from d2plm.data.fasta import FastaRecord
from d2plm.evaluation.result import EVALUATION, Evaluation
from d2plm.export.hugging_face_tokenizer import hugging_face_tokenizer
from d2plm.export.model_card import model_card
from d2plm.generation.lengths import LengthHistogram
from d2plm.model import lora
from d2plm.model.dit import DiT, load_dit
from d2plm.model.esm import is_esm, load_esm
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Denoiser, Paradigm

MAX_SHARD_SIZE = "5GB"  # maximum size of a safetensors file; larger models have several

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportedModel:
    """A loaded export.

    Attributes:
        model: the model, in evaluation mode.
        paradigm: the paradigm with the settings of the training.
        lengths: lengths of the training proteins.
        provenance: data digests, step, tracking run, version, digests of the files.
    """

    folder: Path
    model: DiT
    paradigm: Paradigm
    lengths: LengthHistogram
    provenance: dict[str, Any]

    @property
    def vocabulary(self) -> Vocabulary:
        return self.paradigm.vocabulary

    @property
    def max_length(self) -> int:
        """Maximum input length in tokens, including `<cls>` and `<eos>`."""
        return self.model.config.max_position_embeddings

    @property
    def max_residues(self) -> int:
        """Maximum protein length, in residues."""
        return self.max_length - 2

    def require_short_enough(
        self, what: str, tokens: Sized, remedy: str, error: type[D2PLMError] = ModelError
    ) -> None:
        """Raise `error` if `tokens` is longer than the model supports; `what` names the protein."""
        if len(tokens) > self.max_residues:
            units = f"{self.vocabulary.nouns.token}s"
            raise error(
                f"{what} has {len(tokens)} {units}, but the model supports at most "
                f"{self.max_residues}: {remedy}"
            )

    def all_short_enough(
        self, records: Iterable[FastaRecord], can_cut: bool = True
    ) -> Iterator[FastaRecord]:
        """Yield the records, then raise one `DataError` for all that are too long for the model."""
        too_long, number = list[str](), 0
        for record in records:
            number += 1
            if len(record.tokens) > self.max_residues:
                too_long.append(f"{record.name} ({len(record.tokens):,})")
            yield record
        if too_long:
            cut = ", or window to cut them into pieces" * can_cut
            raise DataError(
                f"{len(too_long):,} of {counted(number, 'record')} have more than the "
                f"{self.max_residues} {self.vocabulary.nouns.token}s that the model supports: "
                f"{first_few(too_long)}; set max_residues={self.max_residues} to leave them "
                f"out{cut}"
            )

    def require_taking_relatives(self) -> None:
        """Raise `ModelError` unless the model takes relatives."""
        self.require_proteins("relatives")
        if self.model.config.relatives_dim is None:
            raise ModelError(
                f"relatives: not supported by {self.folder}, which was trained without relatives; "
                "use a model trained with relatives, such as one of experiment=demo"
            )

    def require_proteins(self, key: str) -> None:
        """Raise `ModelError` naming `key` unless the model is a protein model."""
        if self.vocabulary != PROTEIN:
            raise ModelError(
                f"{key}: is for proteins, but {self.folder} is a model of "
                f"{self.vocabulary.nouns.sequence}s (alphabet {self.vocabulary.name})"
            )

    def require_same_vocabulary(self, key: str, wanted: Vocabulary) -> None:
        """Raise `ModelError` naming `key` unless the model has the vocabulary `wanted`."""
        own = self.vocabulary
        if own != wanted:
            raise ModelError(
                f"{key}: {self.folder} is a model of {own.nouns.sequence}s (alphabet {own.name}), "
                f"but the data are {wanted.nouns.sequence}s (alphabet {wanted.name}, or of another "
                "tokenizer); give a model and data of the same vocabulary"
            )

    def denoiser(self, precision: str = "auto") -> Denoiser:
        """The model in `precision`, for samplers and scores."""
        dtype = resolve_precision(precision, self.model.device)
        return self.model if dtype == self.model.dtype else copy.deepcopy(self.model).to(dtype)

    def card(self, evaluation: Evaluation | None = None, name: str | None = None) -> str:
        """The model card, with the figures of `evaluation`; `name` defaults to the folder's."""
        return model_card(
            self.paradigm,
            self.provenance,
            name=name or self.folder.name,
            parameters=self.model.num_parameters(),
            max_residues=self.max_residues,
            evaluation=evaluation,
        )


def save_export(
    folder: Path,
    model: DiT,
    paradigm: Paradigm,
    lengths: LengthHistogram,
    provenance: dict[str, Any],
    weights: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write an export atomically, replacing an older one.

    Args:
        weights: weights by parameter name, instead of the model's own. If they contain low-rank
            updates, only these are written, as an adapter with the location and digest of its
            base model (`init_from` and `init_from_digest` in the provenance).

    Raises:
        ModelError: if the folder cannot be written.
    """
    disable_progress_bar()
    content = _provenance(paradigm.name, provenance)
    try:
        with written_beside(folder) as partial:
            partial.mkdir()
            if weights is not None and lora.is_changed(weights):
                model.config.save_pretrained(partial)
                base, digest = provenance["init_from"], provenance["init_from_digest"]
                lora.save_adapter(partial, weights, base, digest)
            else:
                model.save_pretrained(partial, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)
            paradigm.save_config(partial)
            tokenizer = hugging_face_tokenizer(
                paradigm.vocabulary, model.config.max_position_embeddings
            )
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
            lengths.save(partial)
            files = sorted(filter(Path.is_file, partial.iterdir()))
            content["files"] = {file.name: files_digest(file) for file in files}
            (partial / PROVENANCE).write_text(json.dumps(content, indent=2))
            exported = ExportedModel(partial, model, paradigm, lengths, content)
            (partial / CARD).write_text(exported.card(name=folder.name), encoding="utf-8")
    except (DataError, SafetensorError) as error:
        raise ModelError(f"cannot write the model to {folder}: {error}") from error
    return folder


def load_export(
    folder: str | Path, device: str | torch.device = "cpu", find_base: Callable[[str], Path] = Path
) -> ExportedModel:
    """Load an export, or a Hugging Face checkpoint of ESM-2, from its folder.

    ESM-2 is treated as an absorbing diffusion model; its lengths are sampled uniformly, because it
    records none.

    Args:
        find_base: maps the location of an adapter's base model to a folder.

    Raises:
        ModelError: if a file is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"{path}: no such model folder{nearest_path(path)}; give the folder that training "
            "exported"
        )
    provenance = read_provenance(path)
    if provenance is None and (path / "config.json").is_file() and is_esm(path):
        model = load_esm(path).to(device)
        lengths = LengthHistogram.uniform(model.config.max_position_embeddings - 2)
        return ExportedModel(path, model, AbsorbingDiffusion(), lengths, {})
    if provenance is None:
        found = (*path.glob(f"*/{PROVENANCE}"), *path.glob(f"*/*/{PROVENANCE}"))
        inside = [file.parent for file in found]
        remedy = f"did you mean {inside[0]}?" if inside else "export again"
        raise ModelError(f"{path}: not a model folder (no {PROVENANCE}); {remedy}")
    if SAVED_BY in provenance and not (path / EVALUATION).is_file():
        log.warning(
            "%s: was saved by %s, perhaps with other weights than those that were evaluated: the "
            "figures in its %s no longer hold; run 'd2plm evaluate' on it",
            path,
            provenance[SAVED_BY],
            CARD,
        )
    return ExportedModel(
        folder=path,
        model=_load_model(path, find_base).to(device),
        paradigm=load_paradigm(path),
        lengths=LengthHistogram.load(path),
        provenance=provenance,
    )


def _load_model(folder: Path, find_base: Callable[[str], Path]) -> DiT:
    """Load the model of an export; an adapter is applied to its base model."""
    if not (folder / lora.CONFIG).is_file():
        return load_dit(folder)
    location, digest = lora.base_of(folder)
    base = find_base(location)
    if not base.is_dir() or weights_digest(base) != digest:
        found = "has other weights" if base.is_dir() else "does not exist"
        raise ModelError(
            f"{folder}: is an adapter of the model {location}, which {found}; restore that model, "
            "or use the merged model"
        )
    model = load_dit(base)
    lora.apply_adapter(model, folder)
    return model


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """Read an export's provenance; None if the folder is no export, `ModelError` if damaged."""
    try:
        return read_json(folder / PROVENANCE)
    except DataError as error:
        raise ModelError(f"{error}; export the model again") from error


def parameters_of(folder: Path) -> int:
    """Count the parameters by the headers of the folder's safetensors files."""
    number = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                number += sum(
                    math.prod(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118  # not a mapping
                )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}") from error
    return number


def weights_digest(folder: Path) -> str:
    """SHA-256 of the folder's concatenated safetensors files."""
    return files_digest(*sorted(folder.glob("*.safetensors")))


def is_export_of(folder: Path, provenance: dict[str, Any]) -> bool:
    """Whether `folder` contains an export with this provenance, whose files are as written."""
    if not is_whole_export(folder):
        return False
    written = read_provenance(folder) or {}
    del written["files"]
    return written == _provenance(written.get("paradigm", ""), provenance)


def is_whole_export(folder: Path) -> bool:
    """Whether `folder` contains an export of this version of d2plm whose files are as written."""
    try:
        written = read_provenance(folder) or {}
        files = written.get("files", {})
        whole = all(files_digest(folder / name) == files[name] for name in files)
    except (ModelError, DataError):
        return False
    return bool(files) and whole and written.get("d2plm_version") == __version__


def _provenance(paradigm: str, provenance: dict[str, Any]) -> dict[str, Any]:
    return {"d2plm_version": __version__, "paradigm": paradigm, **provenance}
