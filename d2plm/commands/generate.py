"""d2plm generate: sample proteins, or fill in templates, with an exported model."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.config import Config
from d2plm.core.alphabet import MASK, decode
from d2plm.core.errors import DataError, as_keys, require, require_number
from d2plm.core.precision import resolve_precision
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.data.family import Family, read_family
from d2plm.data.fasta import read_template_fasta, write_fasta
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, wanted_lengths
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.tracking.locations import open_model

Named = tuple[str, NDArray[np.uint8]]  # a design's name and its template, uint8 [L]
LENGTHS = ("length", "min_length", "max_length")


def run(config: Config) -> list[str]:
    """Generate, write the FASTA file and return the sequences."""
    exported = open_model(
        config["model_dir"], config["device"], config["tracking_uri"], key="model_dir"
    )
    return generate(exported, config["generation"], Path(config["output"]), config["precision"])


def generate(
    exported: ExportedModel, settings: dict[str, Any], output: Path, precision: str
) -> list[str]:
    """Generate with an exported model under the `generation` section's settings.

    Raises:
        ConfigError: a setting is impossible, or would be ignored.
        DataError: the templates are unusable, or the output cannot be written.
        ModelError: a template is too long, or the model is damaged.
    """
    with as_keys("generation"):
        sampling = Sampling.of(settings).resolved(exported.paradigm)
        family = _family(exported, settings)
        designs = _designs(exported, settings, family)
    _make_folder(output)
    began = time.perf_counter()
    with Progress("generating") as progress:
        rows = sample(
            exported.denoiser(precision),
            exported.paradigm,
            [template for _, template in designs],
            sampling,
            max_length=exported.max_length,
            relatives=None
            if family is None
            else [family.draw(settings["seed"], index) for index in range(len(designs))],
            device=exported.model.device,
            progress=progress.update,
        )
    seconds = time.perf_counter() - began
    sequences = [decode(row) for row in rows]
    dtype = resolve_precision(precision, exported.model.device)
    note = sampling.note(exported.paradigm, dtype)
    named = zip(designs, sequences, strict=True)
    records = ((f"{name} length={len(one)} {note}", one) for (name, _), one in named)
    write_fasta(output, records)
    residues = sum(int((template == MASK).sum()) for _, template in designs)
    done(
        f"wrote {len(sequences)} proteins to {output} ({len(sequences) / seconds:.3g} proteins, "
        f"{residues / seconds:.3g} residues a second)"
    )
    return sequences


def _family(exported: ExportedModel, settings: dict[str, Any]) -> Family | None:
    """The proteins of `generation.relatives`."""
    if settings["relatives"] is None:
        return None
    exported.require_taking_relatives("generation.relatives")
    path, most = Path(str(settings["relatives"])), settings["max_relatives"]
    return read_family(path, most, exported.max_residues)


def _designs(
    exported: ExportedModel, settings: dict[str, Any], family: Family | None
) -> list[Named]:
    """The templates: `number` designs of each template or length, or of drawn lengths."""
    number = settings["number"]
    require_number("generation.number", number, integer=True, low=1)
    if settings["templates"] is not None:
        for key in LENGTHS:
            unset = 1 if key == "min_length" else None
            wanted = f"{unset or 'null'} with generation.templates, which have lengths of their own"
            require(settings[key] == unset, f"generation.{key}", settings[key], wanted)
        path, designs = Path(settings["templates"]), []
        for name, text in read_template_fasta(path):
            template = parse_template(text, name)
            what, remedy = f"{path}: template {name}", "shorten it around the gaps"
            exported.require_short_enough(what, template, remedy)
            designs += [(f"{name}_{design + 1}", template) for design in range(number)]
        return designs
    lengths = wanted_lengths(
        exported.lengths if family is None else lengths_of(family, exported.max_residues),
        number,
        exported.max_residues,
        seed=settings["seed"],
        **{key: settings[key] for key in LENGTHS},
    )
    return [
        (f"d2plm_{index + 1}", np.full(length, MASK, dtype=np.uint8))
        for index, length in enumerate(lengths)
    ]


def _make_folder(output: Path) -> None:
    # Checked before the work, not after it.
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output.parent}: cannot be made ({error.strerror})") from error
    if output.is_dir():
        raise DataError(f"{output}: is a folder; name a FASTA file to write to")
