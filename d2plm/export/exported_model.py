"""The exported model: one self-describing folder from which everything downstream works.

Weights (safetensors), model and paradigm configuration, tokenizer, the histogram of training
lengths, a model card and, once computed, the evaluation with the digests of its data and masks.
Generation, scoring and the registry need nothing else.
"""

import copy
import json
import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from d2plm import __version__
from d2plm.core.alphabet import tokenizer
from d2plm.core.errors import D2PLMError, DataError, ModelError
from d2plm.core.files import files_digest, nearest_path, read_json, written_beside
from d2plm.core.precision import resolve_precision
from d2plm.export.model_card import FILE as CARD
from d2plm.export.model_card import model_card
from d2plm.generation.lengths import LengthHistogram
from d2plm.model import lora
from d2plm.model.dit import DiT, load_dit
from d2plm.model.esm import is_esm, load_esm
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.paradigm import Denoiser, Paradigm

PROVENANCE = "provenance.json"
ESM_LENGTHS = 50, 513  # residues of what ESM-2 generates, from … to below
MAX_SHARD_SIZE = "5GB"  # of a safetensors file; larger models have several, and an index


@dataclass(frozen=True)
class ExportedModel:
    """A loaded export.

    Attributes:
        model: the weights, in evaluation mode.
        paradigm: its paradigm, with the settings it was trained under.
        lengths: of the training proteins.
        provenance: where it comes from: data digests, step, tracking run, version.
    """

    folder: Path
    model: DiT
    paradigm: Paradigm
    lengths: LengthHistogram
    provenance: dict[str, Any]

    @property
    def max_length(self) -> int:
        """The longest input in tokens, `<cls>` and `<eos>` included."""
        return self.model.config.max_position_embeddings

    @property
    def max_residues(self) -> int:
        """The longest protein that the model takes."""
        return self.max_length - 2

    def require_short_enough(
        self, what: str, tokens: Sized, remedy: str, error: type[D2PLMError] = ModelError
    ) -> None:
        """Raise `error` if the residues `tokens` are more than the model takes; `what` has them."""
        if len(tokens) > self.max_residues:
            raise error(
                f"{what} has {len(tokens)} residues; the model takes {self.max_residues}: {remedy}"
            )

    def require_taking_relatives(self, key: str) -> None:
        """Raise `ModelError` naming `key` unless the model takes relatives of a protein."""
        if self.model.config.relatives_dim is None:
            raise ModelError(
                f"{key}: {self.folder} was trained without relatives and takes none; give a model "
                "that takes them, such as one of experiment=demo"
            )

    def denoiser(self, precision: str = "auto") -> Denoiser:
        """The model as the function that samplers and scores take, in `precision`."""
        dtype = resolve_precision(precision, self.model.device)
        return self.model if dtype == self.model.dtype else copy.deepcopy(self.model).to(dtype)

    def card(self, evaluation: dict[str, Any] | None = None, name: str | None = None) -> str:
        """The model card, with an evaluation's figures; `name` is the folder's unless given."""
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
    """Write an export, beside and renamed; replaces an older one.

    Args:
        weights: by parameter name, in place of the model's own; of a model with changes of low
            rank, these alone are written, with the location and the digest of the model that they
            change, the provenance's `init_from` and `init_from_digest`.

    Raises:
        ModelError: if it cannot be written.
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
            tokenizer(partial).save_pretrained(partial)
            lengths.save(partial)
            (partial / PROVENANCE).write_text(json.dumps(content, indent=2))
            exported = ExportedModel(partial, model, paradigm, lengths, content)
            (partial / CARD).write_text(exported.card(name=folder.name), encoding="utf-8")
    except (DataError, SafetensorError) as error:
        raise ModelError(f"cannot write the model to {folder}: {error}") from error
    return folder


def load_export(
    folder: str | Path,
    device: str | torch.device = "cpu",
    find_base: Callable[[str], Path] = Path,
) -> ExportedModel:
    """Load an export, or an ESM-2 checkpoint of Hugging Face, from its folder alone.

    ESM-2 is taken as an absorbing diffusion; it has no lengths, so that they are drawn evenly.

    Args:
        find_base: of an adapter, the location of its base model → the folder.

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
        longest = model.config.max_position_embeddings - 2
        evenly = np.arange(min(ESM_LENGTHS[0], longest), min(ESM_LENGTHS[1], longest + 1))
        lengths = LengthHistogram.of(evenly, longest)
        return ExportedModel(path, model, AbsorbingDiffusion(), lengths, {})
    if provenance is None:
        found = (*path.glob(f"*/{PROVENANCE}"), *path.glob(f"*/*/{PROVENANCE}"))
        inside = [file.parent for file in found]
        remedy = f"did you mean {inside[0]}?" if inside else "export again"
        raise ModelError(f"{path} is not a whole model folder: no {PROVENANCE}; {remedy}")
    return ExportedModel(
        folder=path,
        model=_load_model(path, find_base).to(device),
        paradigm=load_paradigm(path),
        lengths=LengthHistogram.load(path),
        provenance=provenance,
    )


def _load_model(folder: Path, find_base: Callable[[str], Path]) -> DiT:
    """The model of an export; of an adapter its base model, changed.

    Raises:
        ModelError: if a file is missing or damaged, or the base model is not the adapter's.
    """
    if not (folder / lora.CONFIG).is_file():
        return load_dit(folder)
    location, digest = lora.base_of(folder)
    base = find_base(location)
    if not base.is_dir() or weights_digest(base) != digest:
        found = "has other weights" if base.is_dir() else "is not there"
        raise ModelError(
            f"{folder}: an adapter of the model {location}, which {found}; put it there, or use "
            "the merged model"
        )
    model = load_dit(base)
    lora.apply_adapter(model, folder)
    return model


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What an export says of where it comes from; None where the folder is no export.

    Raises:
        ModelError: if that file is damaged.
    """
    try:
        return read_json(folder / PROVENANCE)
    except DataError as error:
        raise ModelError(f"{error}; export the model again") from error


def parameters_of(folder: Path) -> int:
    """How many parameters the folder's safetensors files hold, by their headers alone.

    Raises:
        ModelError: if one cannot be read.
    """
    number = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                number += sum(
                    math.prod(tensors.get_slice(name).get_shape())
                    for name in tensors.keys()  # noqa: SIM118  # no mapping
                )
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}") from error
    return number


def weights_digest(folder: Path) -> str:
    """SHA-256 of the folder's safetensors files, one after another.

    Raises:
        DataError: if one cannot be read.
    """
    return files_digest(*sorted(folder.glob("*.safetensors")))


def is_export_of(folder: Path, provenance: dict[str, Any]) -> bool:
    """Whether `folder` holds a whole export with this provenance."""
    try:
        written = read_provenance(folder)
    except ModelError:
        return False
    return written is not None and written == _provenance(written.get("paradigm", ""), provenance)


def _provenance(paradigm: str, provenance: dict[str, Any]) -> dict[str, Any]:
    return {"d2plm_version": __version__, "paradigm": paradigm, **provenance}
