"""Generating with the `generation` section: the FASTA file, and a description of new members."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.alphabet import MASK, decode
from d2plm.core.errors import DataError, as_keys, require, require_number
from d2plm.core.files import require_other_output
from d2plm.core.precision import resolve_precision
from d2plm.core.progress import Progress
from d2plm.core.terminal import done, result
from d2plm.data.family import Family, read_family
from d2plm.data.fasta import read_template_fasta, write_fasta
from d2plm.evaluation.new_members import header, headline, members_table, write_members
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, wanted_lengths
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template

Named = tuple[str, NDArray[np.uint8]]  # (name of a design, template [L])
LENGTHS = ("length", "min_length", "max_length")


def generate(
    exported: ExportedModel,
    settings: dict[str, Any],
    output: Path,
    precision: str,
    family: tuple[Family, Family] | None = None,
) -> list[str]:
    """Generate with an exported model and the settings of the `generation` section.

    Args:
        family: (members given to the model, held-out members for comparison), instead of those in
            the settings; a model that takes no relatives uses only their lengths.

    Raises:
        ConfigError: if a setting is invalid or would be ignored.
        DataError: if the templates are invalid or the output cannot be written.
        ModelError: if a template is too long or the model is damaged.
    """
    require_other_output("output", output, [settings[key] for key in ("relatives", "templates")])
    with as_keys("generation"):
        sampling = Sampling.of(settings).resolved(exported.paradigm)
        given, held_out = family or _family(exported, settings)
        designs = _designs(exported, settings, given)
    relatives = None
    if given is not None and exported.model.config.relatives_dim is not None:
        relatives = given.draw_for_designs(len(designs), sampling.seed)
    _make_folder(output)
    began = time.perf_counter()
    with Progress("generating") as progress:
        rows = sample(
            exported.denoiser(precision),
            exported.paradigm,
            [template for _, template in designs],
            sampling,
            max_length=exported.max_length,
            relatives=relatives,
            device=exported.model.device,
            progress=progress.update,
        )
    seconds = time.perf_counter() - began
    sequences = [decode(row) for row in rows]
    dtype = resolve_precision(precision, exported.model.device)
    note = sampling.note(exported.paradigm, dtype)
    if relatives is not None and given is not None:
        note += f" relatives={len(given.members)} max_relatives={given.most}"
    names = [name for name, _ in designs]
    headers = [
        f"{name} length={len(one)} {note}" for name, one in zip(names, sequences, strict=True)
    ]
    write_fasta(output, zip(headers, sequences, strict=True))
    residues = sum(int((template == MASK).sum()) for _, template in designs)
    done(
        f"wrote {len(sequences)} proteins to {output} ({len(sequences) / seconds:.3g} proteins, "
        f"{residues / seconds:.3g} residues a second)"
    )
    if given is not None and held_out is not None:
        from d2plm.evaluation.membership import describe_members  # imports HMMER

        members = describe_members(rows, names, given, held_out, seed=settings["seed"])
        headers = [f"{one} {more}" for one, more in zip(headers, header(members), strict=True)]
        write_fasta(output, zip(headers, sequences, strict=True))
        _write_members(members, output)
    return sequences


def _write_members(members: dict[str, Any], output: Path) -> None:
    """Print how many of the generated proteins are members; write the JSON file and the plot."""
    from d2plm.evaluation.plots import plot_new_members

    result("\n".join([headline(members), *members_table(members)]))
    file = write_members(members, output)
    picture = file.with_suffix(".png")
    plot_new_members(members, picture)
    done(f"wrote {file} and {picture}")


def _family(
    exported: ExportedModel, settings: dict[str, Any]
) -> tuple[Family | None, Family | None]:
    """(given, held-out) members of `generation.relatives`; templates hold out none."""
    if settings["relatives"] is None:
        return None, None
    exported.require_taking_relatives("generation.relatives")
    path, most = Path(str(settings["relatives"])), settings["max_relatives"]
    family = read_family(path, most)
    if settings["templates"] is not None:
        return family, None
    return family.hold_out(settings["held_out_members"], settings["seed"])


def _designs(
    exported: ExportedModel, settings: dict[str, Any], family: Family | None
) -> list[Named]:
    """Templates of all designs: `number` for each given template or length, or of drawn lengths."""
    number = settings["number"]
    require_number("generation.number", number, integer=True, low=1)
    if settings["templates"] is not None:
        for key in LENGTHS:
            unset = 1 if key == "min_length" else None
            wanted = f"{unset or 'null'} with generation.templates, which determine the lengths"
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
    # Checked before generation, not after it.
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output.parent}: cannot be created ({error.strerror})") from error
    if output.is_dir():
        raise DataError(f"{output}: is a folder; give a FASTA file to write")
