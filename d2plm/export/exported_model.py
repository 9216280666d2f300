"""The exported model: one self-describing folder from which everything downstream works.

Weights (safetensors), model and paradigm configuration, tokenizer, the histogram of training
lengths, a model card, and, once there, the evaluation with the digests of what it was computed on.
Generation, scoring and the registry need nothing else.
"""

import copy
import hashlib
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers.utils.logging import disable_progress_bar

from d2plm import __version__
from d2plm.core.alphabet import tokenizer
from d2plm.core.errors import DataError, ModelError
from d2plm.core.files import nearest_path, write_text
from d2plm.core.precision import resolve_precision
from d2plm.export.model_card import FILE as CARD
from d2plm.export.model_card import model_card
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT, load_dit
from d2plm.paradigms import load_paradigm
from d2plm.paradigms.base import Denoiser, Paradigm

PROVENANCE = "provenance.json"
EVALUATION = "evaluation.json"
SEQUENCE_SCORES = "sequence_scores.npz"
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

    def denoiser(self, precision: str = "auto") -> Denoiser:
        """The model as the function that samplers and scores take, in `precision`."""
        dtype = resolve_precision(precision, self.model.device)
        return self.model if dtype == self.model.dtype else copy.deepcopy(self.model).to(dtype)

    def evaluation(self) -> dict[str, Any] | None:
        """The evaluation in the folder, if there is a whole one."""
        try:
            evaluation: dict[str, Any] = json.loads((self.folder / EVALUATION).read_text())
        except (OSError, ValueError):
            return None
        return evaluation if (self.folder / SEQUENCE_SCORES).is_file() else None

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

    def add_evaluation(self, evaluation: dict[str, Any], **scores: NDArray[Any]) -> None:
        """Put an evaluation and each sequence's scores into the folder, and into the model card.

        Raises:
            DataError: if they cannot be written.
        """
        partial = self.folder / f"partial.{SEQUENCE_SCORES}"
        try:
            np.savez_compressed(partial, **scores)  # type: ignore[arg-type]  # arrays by name
            os.replace(partial, self.folder / SEQUENCE_SCORES)
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be written ({error.strerror})") from error
        write_text(self.folder / EVALUATION, json.dumps(evaluation, indent=2))
        write_text(self.folder / CARD, self.card(evaluation))


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
        weights: by parameter name, in place of the model's own.

    Raises:
        ModelError: if it cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        disable_progress_bar()
        model.save_pretrained(partial, state_dict=weights, max_shard_size=MAX_SHARD_SIZE)
        paradigm.save_config(partial)
        tokenizer(partial).save_pretrained(partial)
        lengths.save(partial)
        content = _provenance(paradigm.name, provenance)
        (partial / PROVENANCE).write_text(json.dumps(content, indent=2))
        exported = ExportedModel(partial, model, paradigm, lengths, content)
        (partial / CARD).write_text(exported.card(name=folder.name), encoding="utf-8")
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(f"cannot write the model to {folder}: {error}") from error
    return folder


def load_export(folder: str | Path, device: str | torch.device = "cpu") -> ExportedModel:
    """Load an export from its folder alone.

    Raises:
        ModelError: if a file is missing or damaged.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(
            f"{path}: no such model folder{nearest_path(path)}; give the folder that training "
            "exported"
        )
    try:
        provenance = json.loads((path / PROVENANCE).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a whole model folder: {PROVENANCE}: {error}; export again"
        ) from error
    return ExportedModel(
        folder=path,
        model=load_dit(path).to(device),
        paradigm=load_paradigm(path),
        lengths=LengthHistogram.load(path),
        provenance=provenance,
    )


def load_scores(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The evaluation in an export, and its scores: float64 `nats`, integer `residues`, `clusters`.

    Raises:
        ModelError: if there is none, or it is damaged.
    """
    try:
        evaluation = json.loads((folder / EVALUATION).read_text())
        with np.load(folder / SEQUENCE_SCORES) as scores:
            return evaluation, {name: scores[name] for name in ("nats", "residues", "clusters")}
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ModelError(
            f"{folder}: has no whole evaluation ({error}); run 'd2plm evaluate' on this model first"
        ) from error


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
    """SHA-256 of the folder's safetensors files, one after another; of one file it is its own.

    Raises:
        ModelError: if one cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)  # goes on where the last file ended
    except OSError as error:
        raise ModelError(f"cannot read the weights in {folder}: {error}") from error
    return digest.hexdigest()


def is_export_of(folder: Path, provenance: dict[str, Any]) -> bool:
    """Whether `folder` holds a whole export with this provenance."""
    try:
        written = json.loads((folder / PROVENANCE).read_text())
        return bool(written == _provenance(written["paradigm"], provenance))
    except (OSError, ValueError, KeyError):
        return False


def _provenance(paradigm: str, provenance: dict[str, Any]) -> dict[str, Any]:
    return {"d2plm_version": __version__, "paradigm": paradigm, **provenance}
