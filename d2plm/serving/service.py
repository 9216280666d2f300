"""Requests to a served model: a table of rows and some settings in, rows out.

A model has three tasks: `score` reads a `sequence` per row, `infill` a template in the same column,
`generate` a `length` per row, which is sampled if null. Relatives are a setting, because one family
is used for all rows. The settings are those of `d2plm generate` and `score`, with their defaults.
Pydantic checks requests strictly: no value is converted to another type, because "None", "nan" and
"True" are residue letters.
"""

import json
import math
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field
from pydantic.dataclasses import dataclass

from d2plm.core.errors import ConfigError, DataError, did_you_mean, require
from d2plm.core.precision import resolve_precision
from d2plm.core.vocabulary import FIRST, PROTEIN, Tokens, decode
from d2plm.data.family import Family, RelativesCheck
from d2plm.data.relatives import LONGEST_RELATIVE
from d2plm.evaluation.scoring import bound_draws, score_columns
from d2plm.export.exported_model import ExportedModel
from d2plm.generation.lengths import lengths_of, require_length, wanted_lengths
from d2plm.generation.sampler_settings import Sampling, in_a_line
from d2plm.generation.samplers import sample
from d2plm.generation.templates import parse_template
from d2plm.serving.schedule import Progress, Rows, Speed, Work, measured

MAX_ROWS = 4096  # checking a row takes up to 0.1 ms, and no other request is checked meanwhile
CPU_TOKENS, GPU_TOKENS = 2048, 16384  # per forward pass, during which other requests wait
DESIGN = "design"  # the kind of work of `generate` and `infill`
FORMS = ("inputs", "instances", "dataframe_records", "dataframe_split")  # names of MLflow's tables
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # types of pydantic's errors


@dataclass(config=STRICT, frozen=True)
class Settings:
    """Settings of every task."""

    relatives: Annotated[list[str], FailFast(), Field(max_length=256)] = field(default_factory=list)
    seed: int = Field(default=0, ge=0, lt=2**63)


@dataclass(config=STRICT, frozen=True)
class Scoring(Settings):
    task: Literal["score"] = "score"
    max_relatives: int = Field(default=8, ge=1, le=16)  # the memory of a forward pass grows with it
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
    """A protein or template; `length` belongs to another task, other columns are ignored."""

    sequence: str
    length: None = None


class LengthRow(BaseModel, strict=True, allow_inf_nan=False):
    """Length of a design, null to sample it; a table with gaps has its integers as floats."""

    length: Annotated[float, Field(ge=1, multiple_of=1)] | None
    sequence: None = None


def _as_rows(table: Any) -> Any:
    """Convert columns and `dataframe_split` to a list of rows; pydantic checks anything else."""
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
# Defaults of all settings, including the task.
DEFAULTS = asdict(Infilling()) | asdict(Generating()) | asdict(Scoring())


class _Task(BaseModel):
    task: Literal["score", "generate", "infill"] = "score"


class _AnyRequest(BaseModel):
    params: _Task = _Task()


def parse_request(body: bytes | bytearray) -> Request[Any, Any]:
    """Parse and check a request in JSON; raises `DataError` naming the first invalid field."""
    try:
        task = _AnyRequest.model_validate_json(body).params.task
        request = REQUESTS[task].model_validate_json(body)
    except pydantic.ValidationError as invalid:
        reason = _first_reason(invalid)
    else:
        json.loads(body.decode(), object_pairs_hook=_require_distinct, parse_int=float)
        return request
    raise DataError(reason)  # without its cause, which holds the whole request


def _require_distinct(pairs: list[tuple[str, Any]]) -> None:
    """Raise `DataError` if an object in JSON repeats a key, of which parsers use the last."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise DataError(f"the request: the key {reprlib.repr(key)} occurs twice; remove one")


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
        self.device = exported.model.device
        self.token_budget = CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS
        self.speed = Speed()

    def answer(self, request: Request[Any, Any]) -> Rows:
        return self.work(request).run(lambda done: None)

    def work(self, request: Request[Any, Any]) -> Work:
        """Check a request.

        Returns:
            The work that computes its answer. For `score`, one row per row of the request: its
            residues or other tokens, the bound in nats with its interval, the perplexity, and for
            texts the bits per byte. Otherwise one row per design: the index of the request's row,
            the sequence, its length, and the settings that determine it.

        Raises:
            ConfigError: if a setting is invalid or would be ignored.
            DataError: if a sequence is invalid, or the request too large.
            ModelError: during the work, if the model's output is not finite.
        """
        rows, params = request.rows, request.params
        family = self._family(params)
        if isinstance(params, Scoring):
            texts = [(row.sequence, f"row {index}") for index, row in enumerate(rows)]
            sequences = [self.vocabulary.encode(*one) for one in texts]
            self._require_within_limit(sum(map(len, sequences)))
            self._require_short_enough(sequences)
            return self._scoring(sequences, params, family)
        self._require_within_limit(params.number * len(rows))
        if isinstance(params, Generating):
            templates = self._masks([row.length for row in rows], params, family)
        else:
            templates = self._templates([row.sequence for row in rows], params.number)
        self._require_within_limit(sum(map(len, templates)))
        if family is not None:
            if isinstance(params, Generating):  # a null length is that of a member's path
                given = [row.length for row in rows for _ in range(params.number)]
                pairs = zip(templates, given, strict=True)
                free = [one if length else None for one, length in pairs]
                return self._new_members(free, params, family)
            return self._new_members(templates, params, family)
        return self._designing(templates, params)

    def measure(self) -> dict[str, float]:
        """Measure forward passes, from which `work` estimates seconds.

        Returns:
            Residues of the longest sequences that are scored and generated per second.
        """
        longest, dtype = self.exported.max_residues, self.vocabulary.dtype
        full = [np.full(longest, FIRST, dtype)] * max(self.token_budget // (longest + 2), 1)
        tokens, once = len(full) * (longest + 2), Scoring(masks_per_sequence=1)
        speed = Speed(measured(self._scoring([full[0][:1]], once, None)))
        speed.token = max(measured(self._scoring(full, once, None)) - speed.forward, 0.0) / tokens
        self.speed = speed
        if self.exported.model.config.relatives_dim is not None:
            relatives = [np.full(longest, FIRST + number, dtype) for number in range(1, 9)]
            family = Family.of(relatives, len(relatives))
            without = self._scoring(full, once, None).seconds
            more = measured(self._scoring(full, once, family)) - without
            speed.relative = max(more, 0.0) / (tokens * longest * len(relatives))
        masks = [np.full(longest, self.vocabulary.mask, dtype)] * len(full)
        work = self._designing(masks, Generating(steps=2))
        speed.kinds[work.kind] = measured(work) / work.seconds
        defaults = {
            "scored with the default masks": self._scoring(full, Scoring(), None),
            "generated with the default steps": self._designing(masks, Generating()),
        }
        return {what: len(full) * longest / work.seconds for what, work in defaults.items()}

    def _family(self, params: Settings) -> Family | None:
        texts, most = params.relatives, 1
        if isinstance(params, Scoring):
            most = params.max_relatives
            fits = bool(texts) or most == DEFAULTS["max_relatives"]
            require(fits, "max_relatives", most, "omitted without relatives")
        if not texts:
            return None
        takes = self.exported.model.config.relatives_dim is not None
        if not (takes if isinstance(params, Scoring) else self.vocabulary == PROTEIN):
            raise ConfigError("relatives: not supported by this model; omit them")
        self._require_within_limit(sum(map(len, texts)), "relatives: ")
        return Family.of(
            [PROTEIN.encode(x, f"relative {i}", True) for i, x in enumerate(texts)], most
        )

    def _work(
        self,
        task: str,
        sequences: list[Tokens],
        passes: Sequence[int],
        family: Family | None,
        run: Callable[[Progress], Rows],
    ) -> Work:
        """Work that passes each sequence `passes` times through the model."""
        lengths, relatives = np.array([len(one) + 2 for one in sequences]), 0.0
        if family is not None:
            members = [min(len(one), LONGEST_RELATIVE) for one in family.members]
            relatives = min(family.most, len(members)) * float(np.mean(members))
        kind = task if family is None else f"{task} given relatives"
        tokens = int(lengths @ passes)
        forward = max(tokens / self.token_budget, int(max(passes)) if task == DESIGN else 1)
        return Work(kind, self.speed.seconds(kind, forward, tokens, relatives), run)

    def _scoring(self, sequences: list[Tokens], params: Scoring, family: Family | None) -> Work:
        names = [f"row {row}" for row in range(len(sequences))]
        draws = params.masks_per_sequence
        total = draws * sum(len(one) + 2 for one in sequences)

        def run(progress: Progress) -> Rows:
            if family is not None:
                check = RelativesCheck("relatives", "the request")
                for name, one in zip(names, sequences, strict=True):
                    check.add(name, family, one)
                check.report()
            done = 0

            def after_pass(tokens: int) -> None:
                nonlocal done
                done += tokens
                progress(done / total)

            nats = bound_draws(
                self.denoiser,
                self.exported.paradigm,
                sequences,
                masks_per_sequence=draws,
                seed=params.seed,
                families=None if family is None else [family] * len(sequences),
                token_budget=self.token_budget,
                device=self.device,
                names=names,
                progress=after_pass,
            )
            columns = score_columns(nats, sequences, self.vocabulary)
            rows = zip(*(column.tolist() for column in columns.values()), strict=True)
            # JSON has no NaN.
            finite = ([None if math.isnan(value) else value for value in row] for row in rows)
            return [dict(zip(columns, row, strict=True)) for row in finite]

        return self._work("score", sequences, [draws] * len(sequences), family, run)

    def _new_members(
        self, templates: Sequence[Tokens | None], params: Designing, family: Family
    ) -> Work:
        from d2plm.families.designs import FamilyDesigns  # imports HMMER

        lengths = dict[str, Any]()
        if isinstance(params, Generating):
            lengths = {"min_length": params.min_length, "max_length": params.max_length}
        longest = max(family.members, key=len)
        shown = [longest if one is None else one for one in templates]
        self._require_within_limit(sum(map(len, shown)))
        # Measured on two cores: the table of pairs, the alignment, and the steps of all designs.
        columns = float(np.median([min(len(one), LONGEST_RELATIVE) for one in family.members]))
        steps = len(shown) * max(map(len, shown))
        seconds = columns**2 * (3.2e-5 + 1.6e-8 * steps) + 2e-3 * len(family.members)

        def run(progress: Progress) -> Rows:
            law = FamilyDesigns(family, lambda text: progress(0.0))
            sampling = law.sampling(Sampling.of(vars(params)))
            settings = f"{in_a_line(sampling.applied())} relatives={len(family.members)}"
            made = law.design(
                templates, sampling, **lengths, progress=lambda done, total: progress(done / total)
            )
            return _rows_of_designs(
                [(decode(one.tokens), len(one.tokens)) for one in made], params, settings
            )

        return Work(f"{DESIGN} given relatives", seconds, run)

    def _designing(self, templates: list[Tokens], params: Designing) -> Work:
        paradigm = self.exported.paradigm
        sampling = Sampling.of(vars(params)).resolved(paradigm)
        dtype = resolve_precision("auto", self.device)
        settings = in_a_line(sampling.described(paradigm, dtype))
        masks = [int((one == self.vocabulary.mask).sum()) for one in templates]
        steps = sampling.steps or max(masks)
        # If each residue is drawn once, passes beyond the number of residues have no effect.
        once = paradigm.source == "mask" and sampling.sampler != "remdm" and not sampling.corrector
        passes = [min(steps, number) for number in masks] if once else [steps] * len(masks)

        def run(progress: Progress) -> Rows:
            designs = sample(
                self.denoiser,
                paradigm,
                templates,
                sampling,
                max_length=self.exported.max_length,
                token_budget=self.token_budget,
                device=self.device,
                progress=lambda done, total: progress(done / total),
            )
            texts = [(self.vocabulary.decode(tokens), len(tokens)) for tokens in designs]
            return _rows_of_designs(texts, params, settings)

        return self._work(DESIGN, templates, passes, None, run)

    def _templates(self, texts: list[str], number: int) -> list[Tokens]:
        """Repeat the template of each text `number` times."""
        marks = (mark for text in texts for mark in re.findall(r"<mask:(\d{1,6})>", text))
        self._require_within_limit(number * (sum(map(len, texts)) + sum(map(int, marks))))
        named = [(text, f"of row {row}") for row, text in enumerate(texts)]
        parsed = [parse_template(text, name, self.vocabulary) for text, name in named]
        self._require_short_enough(parsed)
        return [template for template in parsed for _ in range(number)]

    def _masks(
        self, given: list[float | None], params: Generating, family: Family | None
    ) -> list[Tokens]:
        """Make `number` templates of masks for each length; null lengths are sampled."""
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


def _rows_of_designs(texts: list[tuple[str, int]], params: Designing, settings: str) -> Rows:
    names = ("row", "sequence", "length", "settings")
    return [
        dict(zip(names, (i // params.number, *text, settings), strict=True))
        for i, text in enumerate(texts)
    ]
