"""Requests to a served model: a table of rows and some settings in, rows out.

A model has three tasks: `score` reads a `sequence` per row, `infill` a template in the same column,
`generate` a `length` per row, which is sampled if null. Relatives are a setting, because one family
is used for all rows. The settings are those of `d2plm generate` and `score`, with their defaults.
Pydantic checks requests strictly: no value is converted to another type, because "None", "nan" and
"True" are residue letters.
"""

import math
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import asdict, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic.dataclasses import dataclass

from d2plm.core.errors import ConfigError, DataError, did_you_mean, require
from d2plm.core.precision import resolve_precision
from d2plm.core.vocabulary import PROTEIN, Tokens
from d2plm.data.family import Family, RelativesCheck
from d2plm.evaluation.scoring import bound_draws, score_columns
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, require_length, wanted_lengths
from d2plm.generation.sampler_settings import Sampling
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template

MAX_ROWS = 65536
FORMS = ("inputs", "instances", "dataframe_records", "dataframe_split")  # names of MLflow's tables
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # types of pydantic's errors


@dataclass(config=STRICT, frozen=True)
class Settings:
    """Settings of every task; `max_relatives` are drawn from the relatives for each protein."""

    relatives: Annotated[list[str], FailFast(), Field(max_length=256)] = field(default_factory=list)
    max_relatives: int = Field(default=8, ge=1, le=16)  # the memory of a forward pass grows with it
    seed: int = Field(default=0, ge=0, lt=2**63)


@dataclass(config=STRICT, frozen=True)
class Scoring(Settings):
    task: Literal["score"] = "score"
    masks_per_sequence: int = Field(default=16, ge=1, le=1024)


@dataclass(config=STRICT, frozen=True)
class Designing(Settings, Sampling):
    """Settings of `generate` and `infill`; `number` designs are made for each row."""

    number: int = Field(default=1, ge=1)


@dataclass(config=STRICT, frozen=True)
class Generating(Designing):
    task: Literal["generate"] = "generate"
    min_length: int = 1
    max_length: int | None = None


@dataclass(config=STRICT, frozen=True)
class Infilling(Designing):
    task: Literal["infill"] = "infill"


class SequenceRow(BaseModel, strict=True):
    """A protein or template; other columns are ignored, but for that of another task."""

    sequence: str
    length: None = None


class LengthRow(BaseModel, strict=True, allow_inf_nan=False):
    """Residues of a design, null to sample them; a table with gaps has its integers as floats."""

    length: Annotated[float, Field(ge=1, multiple_of=1)] | None
    sequence: None = None


def _as_rows(table: Any) -> Any:
    """Convert columns and `dataframe_split` to a list of rows; the rest is left to pydantic."""
    match table:
        case {"columns": [*names], "data": [*rows]}:
            pass
        case dict():
            columns = [value if isinstance(value, list) else [value] for value in table.values()]
            if len({*map(len, columns)}) > 1:
                raise ValueError("columns must have the same number of rows")
            names, rows = [*table], [*zip(*columns, strict=True)]
        case _:
            return table
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise ValueError("columns must have different names")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{len(rows):,} rows; at most {MAX_ROWS:,} are accepted")
    if not all(isinstance(row, list | tuple) and len(row) == len(names) for row in rows):
        raise ValueError("rows must be lists of one value per column")
    return [dict(zip(names, row, strict=True)) for row in rows]


Row = TypeVar("Row")
Params = TypeVar("Params", Scoring, Generating, Infilling)
Limits = Field(min_length=1, max_length=MAX_ROWS, validation_alias=pydantic.AliasChoices(*FORMS))


class Request(BaseModel, Generic[Row, Params], strict=True, extra="forbid"):
    """A request for the task of its params."""

    rows: Annotated[list[Row], FailFast(), BeforeValidator(_as_rows), Limits]
    params: Params


class ScoreRequest(Request[SequenceRow, Scoring]):
    params: Scoring = Scoring()


REQUESTS: dict[str, type[Request[Any, Any]]] = {
    "score": ScoreRequest,
    "generate": Request[LengthRow, Generating],
    "infill": Request[SequenceRow, Infilling],
}
# Defaults of all settings; that of the task is what a request without one means.
DEFAULTS = asdict(Infilling()) | asdict(Generating()) | asdict(Scoring())


class _Task(BaseModel):
    task: Literal["score", "generate", "infill"] = "score"


class _AnyRequest(BaseModel):
    params: _Task = _Task()


def parse_request(body: bytes | bytearray) -> Request[Any, Any]:
    """Parse and check a request in JSON.

    Raises:
        DataError: naming the first field that is invalid.
    """
    try:
        task = _AnyRequest.model_validate_json(body).params.task
        return REQUESTS[task].model_validate_json(body)
    except pydantic.ValidationError as invalid:
        reason = _first_reason(invalid)
    raise DataError(reason)  # without its cause, which holds the whole request


def _first_reason(invalid: pydantic.ValidationError) -> str:
    error = invalid.errors(include_url=False, include_context=False)[0]
    place, problem = ".".join(map(str, error["loc"])) or "the request", error["msg"]
    if error["type"] in UNKNOWN:
        name, known = str(error["loc"][-1]), (*DEFAULTS, "params", *FORMS)
        problem = "has no place in this request"
        problem += "" if name in known else did_you_mean(name, known)
    elif error["type"] not in ("missing", "json_invalid"):
        place += f"={reprlib.repr(error['input'])}"
    return f"{place}: {problem}"


class Service:
    """Answers requests with one exported model.

    Args:
        max_residues: limit on the residues of a request, given and generated; and, counted
            separately, on those of its relatives.
    """

    def __init__(self, exported: ExportedModel, max_residues: int = sys.maxsize) -> None:
        self.exported, self.max_residues = exported, max_residues
        self.denoiser, self.vocabulary = exported.denoiser(), exported.vocabulary

    def answer(
        self, request: Request[Any, Any], progress: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Answer one request.

        Args:
            progress: called after each forward pass; its exceptions end the request.

        Returns:
            For `score`, one row per row of the request: its residues or other tokens, the bound in
            nats with its interval, the perplexity, and for texts the bits per byte. Otherwise one
            row per design: the index of the request's row, the sequence, its length, and the
            settings that determine it.

        Raises:
            ConfigError: if a setting is invalid or would be ignored.
            DataError: if a sequence is invalid, or the request too large.
            ModelError: if the model's output is not finite.
        """
        rows, params = request.rows, request.params
        family = self._family(params)
        if isinstance(params, Scoring):
            return self._scores([row.sequence for row in rows], params, family, progress)
        self._require_within_limit(params.number * len(rows))
        if isinstance(params, Generating):
            templates = self._masks([row.length for row in rows], params, family)
        else:
            templates = self._templates([row.sequence for row in rows], params.number)
        self._require_within_limit(sum(map(len, templates)))
        return self._designs(templates, params, family, progress)

    def _family(self, params: Settings) -> Family | None:
        texts, most = params.relatives, params.max_relatives
        if not texts:
            fits = most == DEFAULTS["max_relatives"]
            require(fits, "max_relatives", most, "omitted without relatives")
            return None
        if self.exported.model.config.relatives_dim is None:
            raise ConfigError("relatives: not supported by this model; omit them")
        self._require_within_limit(sum(map(len, texts)), "relatives: ")
        return Family.of(
            [PROTEIN.encode(x, f"relative {i}", True) for i, x in enumerate(texts)], most
        )

    def _scores(
        self, texts: list[str], params: Scoring, family: Family | None, progress: Callable[[], None]
    ) -> list[dict[str, Any]]:
        names = [f"row {row}" for row in range(len(texts))]
        sequences = [self.vocabulary.encode(*one) for one in zip(texts, names, strict=True)]
        self._require_within_limit(sum(map(len, sequences)))
        self._require_short_enough(sequences)
        if family is not None:
            check = RelativesCheck("relatives", "the request")
            for name, one in zip(names, sequences, strict=True):
                check.add(name, family, one)
            check.report()
        draws = bound_draws(
            self.denoiser,
            self.exported.paradigm,
            sequences,
            masks_per_sequence=params.masks_per_sequence,
            seed=params.seed,
            families=None if family is None else [family] * len(sequences),
            device=self.exported.model.device,
            names=names,
            progress=lambda tokens: progress(),
        )
        columns = score_columns(draws, sequences, self.vocabulary)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        # JSON has no NaN.
        finite = ([None if math.isnan(value) else value for value in row] for row in rows)
        return [dict(zip(columns, row, strict=True)) for row in finite]

    def _designs(
        self,
        templates: list[Tokens],
        params: Designing,
        family: Family | None,
        progress: Callable[[], None],
    ) -> list[dict[str, Any]]:
        paradigm, device = self.exported.paradigm, self.exported.model.device
        sampling, relatives = Sampling.of(vars(params)).resolved(paradigm), None
        settings = sampling.note(paradigm, resolve_precision("auto", device))
        if family is not None:
            relatives = family.draw_for_designs(templates, sampling.seed)
            settings += f" relatives={len(family.members)} max_relatives={family.most}"
        designs = sample(
            self.denoiser,
            paradigm,
            templates,
            sampling,
            max_length=self.exported.max_length,
            device=device,
            relatives=relatives,
            progress=lambda done, total: progress(),
        )
        texts = [(self.vocabulary.decode(tokens), len(tokens)) for tokens in designs]
        return [
            {"row": i // params.number, "sequence": text, "length": length, "settings": settings}
            for i, (text, length) in enumerate(texts)
        ]

    def _templates(self, texts: list[str], number: int) -> list[Tokens]:
        """`number` templates of each text."""
        marks = (mark for text in texts for mark in re.findall(r"<mask:(\d{1,6})>", text))
        self._require_within_limit(number * (sum(map(len, texts)) + sum(map(int, marks))))
        named = [(text, f"of row {row}") for row, text in enumerate(texts)]
        parsed = [parse_template(text, name, self.vocabulary) for text, name in named]
        self._require_short_enough(parsed)
        return [template for template in parsed for _ in range(number)]

    def _masks(
        self, given: list[float | None], params: Generating, family: Family | None
    ) -> list[Tokens]:
        """`number` templates of masks for each length; None is sampled from a histogram."""
        number, limit = params.number, self.exported.max_residues
        histogram = self.exported.lengths if family is None else lengths_of(family, limit)
        low, high = params.min_length, params.max_length
        lengths = wanted_lengths(
            histogram, number * len(given), limit, min_length=low, max_length=high, seed=params.seed
        )
        for row, length in enumerate(given):
            if length is not None:
                require_length(f"row {row}: length", int(length), high or limit, low)
                lengths[row * number : (row + 1) * number] = [int(length)] * number
        return [np.full(one, self.vocabulary.mask, self.vocabulary.dtype) for one in lengths]

    def _require_within_limit(self, tokens: int, what: str = "") -> None:
        if tokens > self.max_residues:
            raise DataError(
                f"{what}the request has or generates at least {tokens:,} "
                f"{self.vocabulary.nouns.token}s; this server accepts {self.max_residues:,} per "
                "request; send fewer rows"
            )

    def _require_short_enough(self, sequences: list[Tokens]) -> None:
        for row, sequence in enumerate(sequences):
            what = f"row {row}: the sequence"
            self.exported.require_short_enough(what, sequence, "shorten it", DataError)
