"""d2plm generate: sample proteins, or fill in templates, with an exported model."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.alphabet import MASK, decode
from d2plm.config import Config
from d2plm.data.fasta import read_template_fasta, write_fasta
from d2plm.errors import require, require_number
from d2plm.export import ExportedModel, load_export
from d2plm.generation.infilling import parse_template
from d2plm.generation.samplers import Sampling, sample
from d2plm.precision import resolve_device
from d2plm.progress import Progress


def run(config: Config) -> list[str]:
    """Generate, write the FASTA file and return the sequences."""
    exported = resolve_model(config["model_dir"], config["tracking_uri"], config["device"])
    return generate(exported, config["generation"], Path(config["output"]), config["precision"])


def resolve_model(location: str, tracking_uri: str | None, device: str) -> ExportedModel:
    """Load an exported folder, or `models:/NAME@ALIAS` from the registry."""
    device = resolve_device(device)
    if not str(location).startswith("models:/"):
        return load_export(location, device)
    from d2plm.tracking.registry import download
    from d2plm.tracking.runs import open_client

    name, at, alias = str(location).removeprefix("models:/").partition("@")
    require(bool(name and at and alias), "model_dir", location, "a folder or models:/NAME@ALIAS")
    return load_export(download(open_client(tracking_uri), name, alias), device)


def generate(
    exported: ExportedModel, settings: dict[str, Any], output: Path, precision: str
) -> list[str]:
    """Generate with an exported model under the `generation` section's settings."""
    sampling = Sampling(
        **{
            key: settings[key]
            for key in ("sampler", "steps", "temperature", "top_k", "top_p", "corrector", "seed")
        }
    ).resolved(exported.paradigm)
    require_number("generation.number", settings["number"], integer=True, low=1)
    names, templates = _templates(exported, settings)
    began = time.perf_counter()
    with Progress("generating") as progress:
        rows = sample(
            exported.denoiser(precision),
            exported.paradigm,
            templates,
            sampling,
            max_length=exported.max_length,
            device=exported.model.device,
            progress=progress.update_of,
        )
    seconds = time.perf_counter() - began
    note = (
        f"paradigm={exported.paradigm.name} sampler={sampling.sampler} steps={sampling.steps} "
        f"temperature={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} "
        f"corrector={sampling.corrector} seed={sampling.seed}"
    )
    sequences = [decode(row) for row in rows]
    write_fasta(
        output,
        (
            (f"{name} length={len(sequence)} {note}", sequence)
            for name, sequence in zip(names, sequences, strict=True)
        ),
    )
    print(f"wrote {len(sequences)} proteins to {output} ({len(sequences) / seconds:.1f} a second)")
    return sequences


def _templates(
    exported: ExportedModel, settings: dict[str, Any]
) -> tuple[list[str], list[NDArray[np.uint8]]]:
    """Names and templates: from the file, `number` designs each, or masks of sampled lengths."""
    number = settings["number"]
    if settings["templates"] is not None:
        names, templates = [], []
        for name, text in read_template_fasta(Path(settings["templates"])):
            template = parse_template(text, name)
            names += [f"{name}_{design + 1}" for design in range(number)]
            templates += [template] * number
        return names, templates
    lengths = exported.lengths.sample(
        number,
        settings["seed"],
        low=settings["min_length"],
        high=settings["max_length"] or exported.max_length - 2,
    )
    return (
        [f"d2plm_{index + 1}" for index in range(number)],
        [np.full(length, MASK, dtype=np.uint8) for length in lengths],
    )
