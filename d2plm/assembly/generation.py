"""Generating with a model and the `generation` section: the templates and the output file."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from d2plm.core.errors import DataError, require, within
from d2plm.core.files import is_writable, require_other_output, write_text, written_beside
from d2plm.core.precision import resolve_precision
from d2plm.core.progress import Progress
from d2plm.core.shards import Shard, in_shards, interleaved
from d2plm.core.terminal import done
from d2plm.core.vocabulary import Tokens, Vocabulary
from d2plm.data.compressed import open_input
from d2plm.data.fasta import read_template_fasta, write_fasta
from d2plm.data.fasta_export import require_form
from d2plm.data.ingest import digest_of_files
from d2plm.data.records import require_distinct
from d2plm.export.designs import FASTA, TEXTS, write_sampling
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.generation.lengths import prompted
from d2plm.generation.sampler_settings import Sampling, in_a_line
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.settings.evaluation import GenerationSettings

Named = tuple[str, Tokens]  # (name of a design, template [L])
LENGTHS = ("length", "min_length", "max_length")
OF_A_FAMILY = ("identity", "keep", "avoid", "near", "filter")


def output_name(vocabulary: Vocabulary) -> str:
    """Default name of the output file: FASTA, or JSON lines for text."""
    return TEXTS if vocabulary.is_text else FASTA


def generate(
    exported: ExportedModel, settings: GenerationSettings, output: Path, precision: str
) -> list[str]:
    """Generate with an exported model and the settings of the `generation` section.

    Raises:
        ConfigError: if a setting is invalid or would be ignored.
        DataError: if the templates are invalid or the output cannot be written.
        ModelError: if a template is too long or the model is damaged.
    """
    generation = _Generation.of(exported, settings, output, precision)
    began = time.perf_counter()
    sequences = generation.draw(Shard())
    generation.write(sequences, time.perf_counter() - began)
    return sequences


def generate_shard(
    exported: ExportedModel,
    settings: GenerationSettings,
    output: Path,
    precision: str,
    shard: Shard,
) -> dict[str, Any]:
    """Generate a shard's designs, which equal those of `generate`; the last shard writes all.

    Returns the `output`, the `shard` and the `missing` shards; raises the errors of `generate` and
    `in_shards`.
    """
    generation = _Generation.of(exported, settings, output, precision)
    templates = settings.templates and digest_of_files("generation.templates", settings.templates)
    made_of = asdict(settings) | {"templates": templates, "precision": generation.dtype}
    made_of["model"] = weights_digest(exported.folder)

    def join(files: list[Path]) -> None:
        parts = (json.loads(file.read_text("utf-8")) for file in files)
        generation.write([*interleaved(parts)])

    def compute(file: Path) -> None:
        write_text(file, json.dumps(generation.draw(shard)))

    missing = in_shards(output, shard, made_of, compute, join)
    return {"output": str(output), "shard": str(shard), "missing": missing}


@dataclass(frozen=True)
class _Generation:
    exported: ExportedModel
    designs: list[Named]
    sampling: Sampling
    output: Path
    precision: str

    @classmethod
    def of(
        cls, exported: ExportedModel, settings: GenerationSettings, output: Path, precision: str
    ) -> Self:
        """Check everything before hours of work; see `generate` for the errors."""
        require_other_output("output", output, [settings.templates])
        require_form(output, exported.vocabulary, (".jsonl", ".txt"))
        with within("generation"):
            sampling = Sampling.of(settings).resolved(exported.paradigm)
            for key in OF_A_FAMILY:
                value, default = getattr(settings, key), getattr(GenerationSettings(), key)
                require(value == default, key, value, f"{default!r} without generation.relatives")
            designs = _designs(exported, settings)
        require_writable(output)
        return cls(exported, designs, sampling, output, precision)

    @property
    def dtype(self) -> torch.dtype:
        return resolve_precision(self.precision, self.exported.model.device)

    def draw(self, shard: Shard) -> list[str]:
        own = [template for _, template in shard.of_all(self.designs)]
        if not own and self.designs:
            return []  # fewer designs than shards
        with Progress("generating") as progress:
            rows = sample(
                self.exported.denoiser(self.precision),
                self.exported.paradigm,
                own,
                self.sampling,
                max_length=self.exported.max_length,
                ids=shard.numbers(0, len(own)),
                device=self.exported.model.device,
                progress=progress.update,
            )
        return [self.exported.vocabulary.decode(row) for row in rows]

    def write(self, sequences: list[str], seconds: float | None = None) -> None:
        """Write the sequences of all designs and the sampler's settings; report the speed."""
        vocabulary, output = self.exported.vocabulary, self.output
        described = self.sampling.described(self.exported.paradigm, self.dtype)
        note = in_a_line(described)
        names = [name for name, _ in self.designs]
        lengths = [len(template) for _, template in self.designs]
        headers = [
            f"{name} length={length} {note}" for name, length in zip(names, lengths, strict=True)
        ]
        if vocabulary.is_text:
            _write_texts(output, zip(names, sequences, lengths, strict=True), note)
        else:
            write_fasta(output, zip(headers, sequences, strict=True))
        units, tokens = (f"{noun}s" for noun in vocabulary.nouns)
        said = f"wrote {len(sequences)} {units} to {output}"
        if seconds is not None:
            drawn = sum(int((template == vocabulary.mask).sum()) for _, template in self.designs)
            rates = f"{len(sequences) / seconds:.3g} {units}, {drawn / seconds:.3g} {tokens}"
            said += f" ({rates} a second)"
        done(said)
        write_sampling(output, described)


def _write_texts(output: Path, texts: Iterable[tuple[str, str, int]], note: str) -> None:
    """Write (name, text, number of tokens) as JSON lines, or the texts separated by blank lines."""
    with written_beside(output) as partial, open(partial, "w", encoding="utf-8") as file:
        for name, text, tokens in texts:
            if output.suffix.lower() == ".txt":
                file.write(f"{text}\n\n")
            else:
                row = {"name": name, "text": text, "tokens": tokens, "settings": note}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _designs(exported: ExportedModel, settings: GenerationSettings) -> list[Named]:
    """Templates of all designs: `number` per given template or length, or of sampled lengths."""
    number, vocabulary, prompt = settings.number, exported.vocabulary, settings.prompt
    require(number > 0, "generation.number", number, "an integer ≥ 1")
    if settings.templates is not None:
        designs = []
        for name, template in named_templates(settings, vocabulary):
            what, remedy = f"{settings.templates}: template {name}", "shorten it around the gaps"
            exported.require_short_enough(what, template, remedy)
            designs += [(f"{name}_{design + 1}", template) for design in range(number)]
        return designs
    of_template = prompted(
        exported.lengths,
        number,
        exported.max_residues,
        vocabulary,
        prompt,
        seed=settings.seed,
        **{key: getattr(settings, key) for key in LENGTHS},
    )
    return [(f"d2plm_{index + 1}", template) for index, template in enumerate(of_template)]


def named_templates(settings: GenerationSettings, vocabulary: Vocabulary) -> list[Named]:
    """The templates of a file, by name.

    Raises:
        ConfigError: if another setting determines lengths.
        DataError: if the file or a template is invalid.
    """
    for key in (*LENGTHS, "prompt"):
        unset = 1 if key == "min_length" else None
        wanted = f"{unset or 'null'} with generation.templates, which determine the lengths"
        value = getattr(settings, key)
        require(value == unset, f"generation.{key}", value, wanted)
    path, found = Path(str(settings.templates)), []
    templates = [*_read_templates(path, vocabulary)]
    names = [one[0] or f"template{number}" for number, one in enumerate(templates, 1)]
    require_distinct(names, path)  # designs are named after them
    for name, (_, text, where) in zip(names, templates, strict=True):
        try:
            found.append((name, parse_template(text, name, vocabulary)))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    return found


def require_writable(output: Path) -> None:
    """Raise `DataError` before the generation, not after it, if a file cannot be written."""
    if not is_writable(output.parent):
        raise DataError(f"{output}: cannot be written; check the folder and its permissions")


def _read_templates(path: Path, vocabulary: Vocabulary) -> Iterator[tuple[str, str, str]]:
    """Yield (name, text, location) of each template: FASTA or, for text, JSON lines or lines."""
    if not vocabulary.is_text:
        yield from read_template_fasta(path)
        return
    with open_input(path) as source:
        for number, line in enumerate(source.content, start=1):
            where, name = f"{path}, line {number}", f"line{number}"
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if text and ".jsonl" in path.suffixes:
                try:
                    row = json.loads(text)
                    name, text = str(row.get("name") or name), row["text"]
                    if not isinstance(text, str):
                        raise TypeError(text)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise DataError(
                        f'{where}: is not {{"text": "…"}}; write one such object a '
                        "line, or give a .txt file with one template a line"
                    ) from None
            if text:
                yield name, text, where
