"""d2plm score: the likelihood of each protein in a FASTA file, or the effects of mutations.

Proteins are read twice, once to refuse what cannot be scored before hours are spent on the rest,
and scored some at a time, so memory does not grow with the file. A table of variants is held as a
whole.
"""

import csv
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from d2plm.config import Config
from d2plm.core.alphabet import is_canonical
from d2plm.core.errors import DataError, did_you_mean, require, require_number
from d2plm.core.progress import Progress
from d2plm.core.terminal import JSON, done, manner
from d2plm.data.compressed import open_input
from d2plm.data.fasta import FastaRecord, read_fasta
from d2plm.evaluation.scoring import (
    Variant,
    bound_draws,
    mutational_effects,
    numbering_hint,
    parse_variant,
    place,
    protein_scores,
    pseudo_log_likelihoods,
    require_masked,
    variants_by_positions,
)
from d2plm.export.exported_model import ExportedModel
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.tracking.locations import open_model

COLUMNS = ("name", "residues", "nats", "nats_low", "nats_high", "perplexity")
PSEUDO_LOG_LIKELIHOOD = "pseudo_log_likelihood"
VARIANT_COLUMNS = ("mutant", "mutation", "variant")  # in this order of preference
NAME_COLUMN, MEASURED_COLUMN, SCORE_COLUMN = "name", "DMS_score", "d2plm_score"
UNMEASURED = ("", "na", "nan")

_CHUNK_TOKENS = 1 << 18  # of proteins that are scored together
_HEADER_BYTES = 128 << 10


@dataclass(frozen=True)
class Table:
    """A table of variants as text.

    Attributes:
        columns: the header.
        rows: the cells of each row.
        delimiter: between the cells.
    """

    path: Path
    columns: list[str]
    rows: list[list[str]]
    delimiter: str

    def column(self, *names: str) -> int | None:
        """Which column has the first of these names that there is, in either case."""
        lower = [column.strip().lower() for column in self.columns]
        return next((lower.index(name.lower()) for name in names if name.lower() in lower), None)

    @contextmanager
    def naming(self, row: int) -> Iterator[None]:
        """Put the row, from 0, before an error about it."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{self.path}, row {row + 1}: {error}") from None


def run(config: Config) -> dict[str, Any]:
    """Score every protein, or every variant, and write a CSV row each."""
    output, masked = config["output"], config[PSEUDO_LOG_LIKELIHOOD]
    require(isinstance(masked, bool), PSEUDO_LOG_LIKELIHOOD, masked, "true or false")
    require_number("mutation_offset", config["mutation_offset"], integer=True)
    require(
        output is None or output not in (config["input"], config["mutations"]),
        "output",
        output,
        "another file than those that are read",
    )
    exported = open_model(
        config["model_dir"], config["device"], config["tracking_uri"], key="model_dir"
    )
    score = score_proteins if config["mutations"] is None else score_variants
    return score(config, exported)


def score_proteins(config: Config, exported: ExportedModel) -> dict[str, Any]:
    """Write a row with the bound, and the pseudo-log-likelihood, of each record of the input.

    Gives the `output`; without one, with `--json`, the rows.
    """
    predicting = None
    if config[PSEUDO_LOG_LIKELIHOOD]:
        remedy = f"set {PSEUDO_LOG_LIKELIHOOD}=false to have the bound alone"
        predicting = require_masked(exported.paradigm, PSEUDO_LOG_LIKELIHOOD, remedy)
    masks = config["evaluation"]["masks_per_sequence"]
    require_number("evaluation.masks_per_sequence", masks, integer=True, low=1)
    records = _reader(Path(str(config["input"])))
    tokens = 0
    for record in records():
        _require_short_enough(record, exported)
        residues = int(is_canonical(record.tokens).sum())
        tokens += (len(record.tokens) + 2) * (masks + (residues if predicting else 0))
    written, rows = 0, []
    with (
        _written_whole(config["output"]) as file,
        Progress("scoring", tokens, unit="tokens") as progress,
    ):
        writer = csv.writer(file, lineterminator="\n")
        columns = [*COLUMNS, *([PSEUDO_LOG_LIKELIHOOD] if predicting else [])]
        writer.writerow(columns)
        settings = _settings(config, exported, progress)
        for row in _protein_rows(config, exported, predicting, records(), settings):
            writer.writerow(row)
            written += 1
            if config["output"] is None and JSON in manner():
                rows.append(dict(zip(columns, [row[0], *map(_number, row[1:])], strict=True)))
    _say_written(written, "proteins", config["output"])
    return {"output": config["output"], "number": written, "proteins": rows}


def score_variants(config: Config, exported: ExportedModel) -> dict[str, Any]:
    """Write the table of variants with a column of their effects, and say how it correlates.

    Gives the `output`, the scores in the order of the rows and the correlation by protein.
    """
    paradigm = require_masked(
        exported.paradigm, "mutations", "give a model of diffusion, or of flow matching from masks"
    )
    table = read_table(Path(str(config["mutations"])))
    measured = _measured(table)
    proteins = list(read_fasta(Path(str(config["input"]))))
    rows_of = _rows_by_protein(table, proteins, str(config["input"]))
    variants = _place_all(table, proteins, rows_of, config["mutation_offset"])
    tokens = 0
    for protein, rows in rows_of.items():
        _require_short_enough(proteins[protein], exported)
        sharing = variants_by_positions([variants[row] for row in rows])
        tokens += (len(proteins[protein].tokens) + 2) * len(sharing)
    scores, correlations = np.zeros(len(table.rows)), []
    with (
        _written_whole(config["output"]) as file,
        Progress("scoring", tokens, unit="tokens") as progress,
    ):
        model = exported.denoiser(config["precision"])
        settings = _settings(config, exported, progress)
        for protein, rows in rows_of.items():
            name, wild_type = proteins[protein].name, proteins[protein].tokens
            changes = [variants[row] for row in rows]
            scores[rows] = mutational_effects(
                model, paradigm, wild_type, changes, name=name, **settings
            )
            if measured is not None:
                correlations.append(_correlation(name, scores[rows], measured[rows]))
                progress.say(correlations[-1])
        _write_table(file, table, scores)
    _say_written(len(scores), "variants", config["output"])
    return {"output": config["output"], "scores": scores, "correlations": correlations}


def read_table(path: Path) -> Table:
    """Read a CSV or TSV file of variants, plain or compressed; `-` is standard input.

    Raises:
        DataError: it is missing, damaged, empty, lacks the variants, is scored already, or has a
            row with too many or too few cells.
    """
    with open_input(path) as source:
        start = source.content.peek(_HEADER_BYTES)[:_HEADER_BYTES].decode("utf-8-sig", "replace")
        header = next(iter(start.lstrip().splitlines()), "")
        # What no comma parts into columns is parted by none: a variant may be written A24G,L30P.
        delimiter = max("\t;,", key=header.count)
        # Bytes that are no UTF-8 go through to the output as they are.
        text = io.TextIOWrapper(source.content, "utf-8-sig", "surrogateescape", newline="")
        try:
            lines = [line for line in csv.reader(text, delimiter=delimiter, strict=True) if line]
        except csv.Error as error:
            raise DataError(f"{path}: not a readable CSV file ({error}); write it again") from None
    if len(lines) < 2:
        what = "has no rows" if lines else "is empty"
        raise DataError(f"{path}: {what}; give a table with a header and at least one variant")
    table = Table(path, lines[0], lines[1:], delimiter if delimiter in header else ",")
    _check_columns(table)
    return table


def _check_columns(table: Table) -> None:
    if table.column(SCORE_COLUMN) is not None:
        raise DataError(
            f"{table.path}: has a column {SCORE_COLUMN} already; rename or remove it, so that it "
            "is not overwritten"
        )
    if table.column(*VARIANT_COLUMNS) is None:
        near = next((c for c in table.columns if get_close_matches(c, VARIANT_COLUMNS)), None)
        raise DataError(
            f"{table.path}: has no column of variants; name it {' or '.join(VARIANT_COLUMNS)} "
            f"({f'did you mean {near!r}?' if near else f'it has: {_listed(table.columns)}'})"
        )
    for number, cells in enumerate(table.rows, start=1):
        if len(cells) != len(table.columns):
            raise DataError(
                f"{table.path}, row {number}: has {len(cells)} cells, and the header has "
                f"{len(table.columns)}; quote what holds a {table.delimiter!r}"
            )


def _write_table(file: TextIO, table: Table, scores: NDArray[np.float64]) -> None:
    writer = csv.writer(file, delimiter=table.delimiter, lineterminator="\n")
    writer.writerow([*table.columns, SCORE_COLUMN])
    for cells, score in zip(table.rows, scores, strict=True):
        writer.writerow([*cells, f"{score:.6f}"])


def _measured(table: Table) -> NDArray[np.float64] | None:
    """float64 [N]: the measured effects, NaN where there is none; None without their column."""
    column = table.column(MEASURED_COLUMN)
    if column is None:
        return None
    values = np.full(len(table.rows), np.nan)
    for row, cells in enumerate(table.rows):
        if cells[column].strip().lower() not in UNMEASURED:
            try:
                values[row] = float(cells[column])
            except ValueError:
                raise DataError(
                    f"{table.path}, row {row + 1}: {MEASURED_COLUMN} {cells[column]!r} is no "
                    "number; leave it empty where nothing was measured"
                ) from None
    return values


def _rows_by_protein(
    table: Table, proteins: Sequence[FastaRecord], input_name: str
) -> dict[int, list[int]]:
    """Index of each wild type → the rows with its variants.

    With one wild type a column of names is not looked at: it may hold the variants' own.
    """
    if len(proteins) == 1:
        return {0: list(range(len(table.rows)))}
    column = table.column(NAME_COLUMN)
    if column is None:
        raise DataError(
            f"{table.path}: {input_name} has {len(proteins)} proteins; add a column {NAME_COLUMN} "
            "with the record that each variant changes"
        )
    numbers = {record.name: number for number, record in enumerate(proteins)}
    if len(numbers) < len(proteins):
        names = [record.name for record in proteins]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{input_name}: two records are called {twice!r}; rename one")
    rows_of: dict[int, list[int]] = {}
    for row, cells in enumerate(table.rows):
        name = cells[column].strip()
        if name not in numbers:
            raise DataError(
                f"{table.path}, row {row + 1}: {input_name} has no record {name!r}"
                f"{did_you_mean(name, numbers)}; give it one of the names there"
            )
        rows_of.setdefault(numbers[name], []).append(row)
    return rows_of


def _place_all(
    table: Table, proteins: Sequence[FastaRecord], rows_of: dict[int, list[int]], offset: int
) -> dict[int, Variant]:
    """Row → its variant."""
    column = table.column(*VARIANT_COLUMNS)
    assert column is not None
    parsed = []
    for row, cells in enumerate(table.rows):
        with table.naming(row):
            parsed.append(parse_variant(cells[column]))
    variants = {}
    for protein, rows in rows_of.items():
        record = proteins[protein]
        for row in rows:
            with table.naming(row):
                try:
                    variants[row] = place(
                        parsed[row], record.tokens, offset=offset, name=record.name
                    )
                except DataError as error:
                    every = (one for r in rows for one in parsed[r])
                    hint = numbering_hint(every, record.tokens)
                    raise DataError(f"{error}; {hint}") from None
    return variants


def _correlation(name: str, scores: NDArray[np.float64], measured: NDArray[np.float64]) -> str:
    known = np.isfinite(measured)
    count = int(known.sum())
    distinct = min(len(np.unique(values[known])) for values in (scores, measured))
    if distinct < 2:
        return f"{name}: no rank correlation with {MEASURED_COLUMN}: {count} variants, no spread"
    rho = float(spearmanr(scores[known], measured[known]).statistic)
    return f"{name}: Spearman's rho with {MEASURED_COLUMN} {rho:.3f} ({count} variants)"


def _protein_rows(
    config: Config,
    exported: ExportedModel,
    predicting: MaskedParadigm | None,
    records: Iterable[FastaRecord],
    settings: dict[str, Any],
) -> Iterator[list[str | int]]:
    model, evaluation = exported.denoiser(config["precision"]), config["evaluation"]
    first = 0
    for chunk in _chunks(records):
        names, sequences = [r.name for r in chunk], [r.tokens for r in chunk]
        draws = bound_draws(
            model,
            exported.paradigm,
            sequences,
            masks_per_sequence=evaluation["masks_per_sequence"],
            seed=evaluation["seed"],
            first_id=first,
            names=names,
            **settings,
        )
        first += len(chunk)
        scores = protein_scores(draws, sequences)
        rows = [[score.nats, *score.interval, score.perplexity] for score in scores]
        if predicting is not None:
            pseudo = pseudo_log_likelihoods(model, predicting, sequences, names=names, **settings)
            rows = [[*row, value] for row, value in zip(rows, pseudo.tolist(), strict=True)]
        for name, score, values in zip(names, scores, rows, strict=True):
            cells = ("" if np.isnan(value) else f"{value:.4f}" for value in values)
            yield [name, score.residues, *cells]


def _settings(config: Config, exported: ExportedModel, progress: Progress) -> dict[str, Any]:
    """What every score is told of how to run."""
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress.update(done)

    return {
        "token_budget": config["evaluation"]["token_budget"],
        "device": exported.model.device,
        "progress": advance,
    }


def _reader(path: Path) -> Callable[[], Iterator[FastaRecord]]:
    """Reads a FASTA file whenever it is called; one that can be read but once is kept."""
    if path.is_file():
        return partial(read_fasta, path)
    records = list(read_fasta(path))
    return lambda: iter(records)


def _chunks(records: Iterable[FastaRecord]) -> Iterator[list[FastaRecord]]:
    chunk: list[FastaRecord] = []
    tokens = 0
    for record in records:
        chunk.append(record)
        tokens += len(record.tokens) + 2
        if tokens >= _CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _require_short_enough(record: FastaRecord, exported: ExportedModel) -> None:
    residues, most = len(record.tokens), exported.max_residues
    if residues > most:
        raise DataError(
            f"record {record.name!r} has {residues} residues, and this model takes {most}; leave "
            "it out, or cut it into parts (mutation_offset gives a part its numbering)"
        )


class _StandardOutput(io.StringIO):
    """Standard output, whatever that is when something is written: a bar puts itself there."""

    def write(self, text: str) -> int:
        return sys.stdout.write(text)


@contextmanager
def _written_whole(output: str | None) -> Iterator[TextIO]:
    """A text file that is written beside `output` and renamed at the end; None: standard output.

    With `--json` what would go to standard output is dropped, as the document holds it.
    """
    if output is None:
        yield io.StringIO() if JSON in manner() else _StandardOutput()
        return
    file = Path(str(output))
    partial_file = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial_file.open("w", encoding="utf-8", errors="surrogateescape") as stream:
                yield stream
            os.replace(partial_file, file)
        finally:
            partial_file.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be written ({error.strerror}); choose a folder that you may write to, "
            "with space left"
        ) from error


def _say_written(count: int, what: str, output: str | None) -> None:
    if output is not None:
        done(f"wrote {output} ({count} {what})")


def _number(cell: str | int) -> float | None:
    """A cell of the table; None for an empty one."""
    return None if cell == "" else float(cell) if isinstance(cell, str) else cell


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
