"""Requests to a served model: a table of rows and some settings in, a table out.

A model has three tasks: `score` reads a `sequence` per row, `infill` a template in the same column,
`generate` a `length` per row, which is sampled if missing. Relatives are a setting, because one
family is used for all rows. The settings are those of `d2plm generate` and `score`, with their
defaults and checks; settings that the task would ignore are rejected. The interface to MLflow is
in `served_model`.
"""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import islice
from types import NoneType
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import pandas as pd

from d2plm.core.errors import (
    ConfigError,
    DataError,
    did_you_mean,
    require,
    require_choice,
    require_number,
)
from d2plm.core.precision import resolve_precision
from d2plm.core.vocabulary import PROTEIN, Tokens
from d2plm.data.family import Family
from d2plm.evaluation.scoring import BITS_PER_BYTE, bound_draws, score_columns
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, require_length, wanted_lengths
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template

Value = bool | int | float | str | list[str] | None

TASKS = ("score", "generate", "infill")
DESIGN = ("generate", "infill")
COLUMNS = {"score": "sequence", "infill": "sequence", "generate": "length"}
# Columns, all optional; a length is a float because a column of integers cannot have gaps.
INPUTS = {"sequence": str, "length": float}
# Numbers of tokens, one of them for each vocabulary; bits per byte are of texts alone.
SCORES = {
    **dict.fromkeys(("residues", "bases", "codons", "bytes", "tokens"), int),
    **dict.fromkeys(("nats", "nats_low", "nats_high", "perplexity", BITS_PER_BYTE), float),
}
DESIGNS = {"row": int, "sequence": str, "length": int, "settings": str}
MAX_RESIDUES = 65536
MAX_MASKS = 1024  # mask samples per row
MAX_FAMILY = 256  # relatives per request
MAX_DRAWN = 16  # relatives per row at a time; the memory of a forward pass grows with it


class Setting(NamedTuple):
    """A setting of a request.

    Attributes:
        kind: bool, int, float, str, or list (of strings); null is accepted if it is the default.
        tasks: tasks that use the setting.
    """

    kind: type
    default: Value
    tasks: tuple[str, ...]


def _kind(annotation: Any) -> type:
    """`int` for `int` and for `int | None`."""
    return next(kind for kind in get_args(annotation) or (annotation,) if kind is not NoneType)


SETTINGS = {
    "task": Setting(str, "score", TASKS),
    "masks_per_sequence": Setting(int, 16, ("score",)),
    "number": Setting(int, 1, DESIGN),
    "min_length": Setting(int, 1, ("generate",)),
    "max_length": Setting(int, None, ("generate",)),
    **{
        field.name: Setting(_kind(field.type), cast(Value, field.default), DESIGN)
        for field in fields(Sampling)
    },
    "seed": Setting(int, 0, TASKS),
    "relatives": Setting(list, [], TASKS),
    "max_relatives": Setting(int, 8, TASKS),
}


class Service:
    """Answers requests with one exported model.

    Args:
        max_residues: limit on the total residues of a request, given and generated.

    Raises:
        ConfigError: if `max_residues` is not a positive integer.
    """

    def __init__(self, exported: ExportedModel, max_residues: int = MAX_RESIDUES) -> None:
        require_number("max_residues", max_residues, integer=True, low=1)
        self.exported, self.max_residues = exported, max_residues
        self.denoiser = exported.denoiser()

    def answer(
        self,
        table: pd.DataFrame,
        settings: Mapping[str, Any],
        progress: Callable[[], None] = lambda: None,
    ) -> pd.DataFrame:
        """Answer one request.

        Args:
            table: table with the task's column, see `COLUMNS`.
            settings: any of `SETTINGS`.
            progress: called after each forward pass; its exceptions end the request.

        Returns:
            For `score`, one row per row of the table: its residues or other tokens, the bound in
            nats with its interval, the perplexity, and for texts the bits per byte. Otherwise one
            row per design: the index of the table's row, the sequence, its length, and the settings
            that determine it.

        Raises:
            ConfigError: if a setting is invalid, or the task would ignore it.
            DataError: if the table is invalid, or requests too many residues.
            ModelError: if the model's output is not finite.
        """
        values = _complete(settings)
        task = values["task"]
        column = _column(table, task)
        family = self._family(values)
        if task == "score":
            return self._score(column, values, family, progress)
        sampling = Sampling.of(values).resolved(self.exported.paradigm)
        rows, templates = self._templates(column, values, family)
        relatives, given = None, ""
        if family is not None:
            relatives = family.draw_for_designs(len(templates), sampling.seed)
            given = f" relatives={len(family.members)} max_relatives={family.most}"
        designs = sample(
            self.denoiser,
            self.exported.paradigm,
            templates,
            sampling,
            max_length=self.exported.max_length,
            device=self.exported.model.device,
            relatives=relatives,
            progress=lambda done, total: progress(),
        )
        dtype = resolve_precision("auto", self.exported.model.device)
        return pd.DataFrame(
            {
                "row": rows,
                "sequence": [self.exported.vocabulary.decode(design) for design in designs],
                "length": [len(design) for design in designs],
                "settings": sampling.note(self.exported.paradigm, dtype) + given,
            }
        )

    def _family(self, values: dict[str, Any]) -> Family | None:
        texts, most = list(values["relatives"]), values["max_relatives"]
        if not texts:
            wanted = "omitted without relatives"
            require(most == SETTINGS["max_relatives"].default, "max_relatives", most, wanted)
            return None
        if self.exported.model.config.relatives_dim is None:
            raise ConfigError("relatives: not supported by this model; omit them")
        require_small_family(_texts(texts, "relative"), self.max_residues)
        require_number("max_relatives", most, integer=True, low=1, high=MAX_DRAWN)
        tokens = [PROTEIN.encode(text, f"relative {i}") for i, text in enumerate(texts)]
        return Family.of(tokens, most)

    def _score(
        self,
        column: list[Any],
        values: dict[str, Any],
        family: Family | None,
        progress: Callable[[], None],
    ) -> pd.DataFrame:
        masks, texts = values["masks_per_sequence"], _texts(column)
        require_number("masks_per_sequence", masks, integer=True, low=1, high=MAX_MASKS)
        vocabulary = self.exported.vocabulary
        sequences = [vocabulary.encode(text, f"row {row}") for row, text in enumerate(texts)]
        self._require_within_limit(sum(map(len, sequences)))
        self._require_short_enough(sequences)
        draws = bound_draws(
            self.denoiser,
            self.exported.paradigm,
            sequences,
            masks_per_sequence=masks,
            seed=values["seed"],
            families=None if family is None else [family] * len(sequences),
            device=self.exported.model.device,
            names=[f"row {row}" for row in range(len(sequences))],
            progress=lambda tokens: progress(),
        )
        scores = pd.DataFrame(score_columns(draws, sequences, vocabulary))
        for name in scores.columns[scores.isna().any()]:
            scores[name] = scores[name].astype(object).where(scores[name].notna(), None)
        return scores  # without NaN, which JSON does not have

    def _templates(
        self, column: list[Any], values: dict[str, Any], family: Family | None
    ) -> tuple[list[int], list[Tokens]]:
        """(row index of each design, template of each design)."""
        number, generating = values["number"], values["task"] == "generate"
        vocabulary = self.exported.vocabulary
        require_number("number", number, integer=True, low=1)
        self._require_within_limit(number * len(column))
        if generating:
            lengths = self._lengths(column, values, family)
            self._require_within_limit(sum(lengths))
            templates = [np.full(one, vocabulary.mask, vocabulary.dtype) for one in lengths]
        else:
            texts = _texts(column)
            marks = (mark for text in texts for mark in re.findall(r"<mask:(\d+)>", text))
            self._require_within_limit(number * (sum(map(len, texts)) + sum(map(int, marks))))
            named = [(text, f"of row {row}") for row, text in enumerate(texts)]
            parsed = [parse_template(text, name, vocabulary) for text, name in named]
            self._require_short_enough(parsed)
            templates = [template for template in parsed for _ in range(number)]
        return [row for row in range(len(column)) for _ in range(number)], templates

    def _lengths(
        self, column: list[Any], values: dict[str, Any], family: Family | None
    ) -> list[int]:
        """Length of each design: given in the row, or sampled from a histogram."""
        limit, number = self.exported.max_residues, values["number"]
        to_draw = number * sum(map(pd.isna, column))
        bounds = {name: values[name] for name in ("min_length", "max_length")}
        for name, value in () if to_draw else bounds.items():
            wanted = "omitted if every row has a length"
            require(value == SETTINGS[name].default, name, value, wanted)
        histogram = self.exported.lengths if family is None else lengths_of(family, limit)
        drawn = iter(wanted_lengths(histogram, to_draw, limit, seed=values["seed"], **bounds))
        lengths: list[int] = []
        for row, length in enumerate(column):
            if pd.isna(length):
                lengths += islice(drawn, number)
                continue
            whole = int(length) if float(length).is_integer() else length
            require_length(f"row {row}: length", whole, limit)
            lengths += [whole] * number
        return lengths

    def _require_within_limit(self, tokens: int) -> None:
        if tokens > self.max_residues:
            token = self.exported.vocabulary.nouns.token
            raise DataError(
                f"the request has or generates at least {tokens:,} {token}s; this server accepts "
                f"{self.max_residues:,} per request; send fewer rows"
            )

    def _require_short_enough(self, sequences: list[Tokens]) -> None:
        for row, sequence in enumerate(sequences):
            what = f"row {row}: the sequence"
            self.exported.require_short_enough(what, sequence, "shorten it", DataError)


def require_small_family(relatives: list[str], max_residues: int) -> None:
    """Raise `DataError` if a request has too many relatives, or too many residues in them."""
    if len(relatives) > MAX_FAMILY:
        raise DataError(
            f"relatives: {len(relatives):,} proteins; this server accepts {MAX_FAMILY} per "
            "request; send the nearest ones, or a sample"
        )
    residues = sum(map(len, relatives))
    if residues > max_residues:
        raise DataError(
            f"relatives: {residues:,} residues; this server accepts {max_residues:,} per request; "
            "send fewer relatives"
        )


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults; rejects unknown settings and those that the task would ignore."""
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(f"{name}: no such setting{did_you_mean(name, SETTINGS)}")
    values = {name: settings.get(name, setting.default) for name, setting in SETTINGS.items()}
    require_choice("task", values["task"], TASKS)
    for name, setting in SETTINGS.items():
        wanted = f"omitted with task={values['task']!r}, which does not use it"
        fits = values["task"] in setting.tasks or values[name] == setting.default
        require(fits, name, values[name], wanted)
    require_number("seed", values["seed"], integer=True, low=0)
    return values


def _column(table: pd.DataFrame, task: str) -> list[Any]:
    name = COLUMNS[task]
    for other in set(COLUMNS.values()) - {name}:
        if other in table and table[other].notna().any():
            raise DataError(
                f"task={task!r} reads the column {name!r}, not {other!r}; omit {other!r}"
            )
    if name not in table or not len(table):
        # MLflow drops columns that are not in the signature, and without columns all rows.
        raise DataError(
            f"the table has no rows with the column {name!r}, which task={task!r} reads"
        )
    return table[name].tolist()


def _texts(column: list[Any], each: str = "row") -> list[str]:
    for number, value in enumerate(column):
        if not isinstance(value, str):
            null = pd.api.types.is_scalar(value) and pd.isna(value)
            shown = "null" if null else reprlib.repr(value)
            raise DataError(f"{each} {number}: {shown} is not a string; send one")
    return column
