"""d2plm generate: sample proteins, or fill in templates, with an exported model."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import MASK, decode
from d2plm.config import Config
from d2plm.data.fasta import read_template_fasta, write_fasta
from d2plm.errors import DataError, ModelError, require, require_number
from d2plm.export import ExportedModel, load_export
from d2plm.generation.infilling import parse_template
from d2plm.generation.lengths import require_length
from d2plm.generation.samplers import sample
from d2plm.generation.settings import Sampling
from d2plm.precision import resolve_device, resolve_precision
from d2plm.progress import Progress
from d2plm.terminal import done

Named = tuple[str, NDArray[np.uint8]]  # a design's name and its template, uint8 [L]
UNSET = {"length": None, "min_length": 1, "max_length": None}  # nothing said of lengths


def run(config: Config) -> list[str]:
    """Generate, write the FASTA file and return the sequences."""
    exported = resolve_model(config["model_dir"], config["tracking_uri"], config["device"])
    return generate(exported, config["generation"], Path(config["output"]), config["precision"])


def resolve_model(location: str, tracking_uri: str | None, device: str) -> ExportedModel:
    """Load an exported folder, or `models:/NAME@ALIAS` from the registry."""
    device = resolve_device(device)
    if not str(location).startswith("models:/"):
        return load_export(location, device)
    from d2plm.tracking.mlflow_run import open_client
    from d2plm.tracking.registry import download

    name, at, alias = str(location).removeprefix("models:/").partition("@")
    require(bool(name and at and alias), "model_dir", location, "a folder or models:/NAME@ALIAS")
    return load_export(download(open_client(tracking_uri), name, alias), device)


def generate(
    exported: ExportedModel, settings: dict[str, Any], output: Path, precision: str
) -> list[str]:
    """Generate with an exported model under the `generation` section's settings.

    Raises:
        ConfigError: a setting is impossible, or would be ignored.
        DataError: the templates are unusable, or the output cannot be written.
        ModelError: a template is too long, or the model is damaged.
    """
    sampling = Sampling.of(settings)
    sampling = sampling.resolved(exported.paradigm)
    designs = _designs(exported, settings)
    _make_folder(output)
    began = time.perf_counter()
    with Progress("generating") as progress:
        rows = sample(
            exported.denoiser(precision),
            exported.paradigm,
            [template for _, template in designs],
            sampling,
            max_length=exported.max_length,
            device=exported.model.device,
            progress=progress.update_of,
        )
    seconds = time.perf_counter() - began
    sequences = [decode(row) for row in rows]
    dtype = resolve_precision(precision, exported.model.device)
    note = sampling.note(exported.paradigm, dtype)
    write_fasta(
        output,
        (
            (f"{name} length={len(sequence)} {note}", sequence)
            for (name, _), sequence in zip(designs, sequences, strict=True)
        ),
    )
    residues = sum(int((template == MASK).sum()) for _, template in designs)
    done(
        f"wrote {len(sequences)} proteins to {output} ({len(sequences) / seconds:.3g} proteins, "
        f"{residues / seconds:.3g} residues a second)"
    )
    return sequences


def _designs(exported: ExportedModel, settings: dict[str, Any]) -> list[Named]:
    """What to fill in: `number` designs of each template or length, or of drawn lengths."""
    number = settings["number"]
    require_number("generation.number", number, integer=True, low=1)
    if settings["templates"] is not None:
        _require_unset(settings, UNSET, "generation.templates, which have lengths of their own")
        return _of_templates(Path(settings["templates"]), number, exported.max_length - 2)
    return [
        (f"d2plm_{index + 1}", np.full(length, MASK, dtype=np.uint8))
        for index, length in enumerate(_lengths(exported, settings))
    ]


def _of_templates(path: Path, number: int, limit: int) -> list[Named]:
    designs = []
    for name, text in read_template_fasta(path):
        template = parse_template(text, name)
        if len(template) > limit:
            raise ModelError(
                f"{path}: template {name} has {len(template)} residues; the model takes {limit}: "
                "cut it around what is wanted"
            )
        designs += [(f"{name}_{design + 1}", template) for design in range(number)]
    return designs


def _lengths(exported: ExportedModel, settings: dict[str, Any]) -> list[int]:
    """Residues of each protein: given ones, or drawn from the training proteins' lengths."""
    number, length, limit = settings["number"], settings["length"], exported.max_length - 2
    if length is None:
        low, high = settings["min_length"], settings["max_length"]
        require_length("generation.min_length", low, limit)
        if high is not None:
            require_length("generation.max_length", high, limit, low)
        return exported.lengths.sample(number, settings["seed"], low=low, high=high or limit)
    drawn = ("min_length", "max_length")
    _require_unset(settings, drawn, "generation.length, which leaves nothing to draw")
    lengths = list(length) if isinstance(length, list | tuple) else [length]
    require(bool(lengths), "generation.length", length, "a length, or several")
    for one in lengths:
        require_length("generation.length", one, limit)
    return [one for one in lengths for _ in range(number)]


def _require_unset(settings: dict[str, Any], keys: Iterable[str], reason: str) -> None:
    for key in keys:
        default, value = UNSET[key], settings[key]
        wanted = f"{'null' if default is None else default} with {reason}"
        require(value == default, f"generation.{key}", value, wanted)


def _make_folder(output: Path) -> None:
    # Before the work, not after it.
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output.parent}: cannot be made ({error.strerror})") from error
    if output.is_dir():
        raise DataError(f"{output}: is a folder; name a FASTA file to write to")
