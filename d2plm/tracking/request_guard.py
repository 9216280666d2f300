"""A strict reader of requests that replaces the lenient one of MLflow's server.

MLflow casts a table to the model's signature before the model sees it: null, true and NaN become
the strings "None", "True" and "nan", which are residue letters, and NumPy drops a trailing NUL.
MLflow also reads bodies of any size and repeats them in its errors. The model therefore replaces
two functions of the server that loads it. Parquet is not supported: a small file may unpack to any
size, and the request could not contain settings.
"""

import csv
import inspect
import io
import json
import logging
import reprlib
import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import pandas as pd

from d2plm.core.errors import ConfigError, DataError, did_you_mean
from d2plm.tracking.serving import INPUTS, SETTINGS, require_small_family

Columns = dict[str, list[Any]]

# Functions of the server that are replaced, with their parameters: the first answers a request, the
# second decorates the handler, which reads the body.
ANSWER, DECORATE = "invocations", "_async_catch_mlflow_exception"
HOOKS = {ANSWER: ["data", "content_type", "model", "input_schema"], DECORATE: ["func"]}
SHAPES = {
    "inputs": "columns, or a list of rows",
    "instances": "columns, or a list of rows",
    "dataframe_records": "a list of rows",
    "dataframe_split": "an object of columns and data",
}
KINDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list of strings",
}
BYTES_PER_RESIDUE, MIN_BYTES = 16, 2**20  # limits on a request's body
MAX_NUMBER = 2**63
MAX_MESSAGE = 500  # characters, since a message may quote the request

log = logging.getLogger(__name__)


def guard(server: ModuleType, max_residues: int) -> None:
    """Make MLflow's scoring server read requests strictly, and reject bad ones with a reason.

    Args:
        server: the module `mlflow.pyfunc.scoring_server`, while it loads the model.
        max_residues: maximum residues per request; also limits its rows and bytes.
    """
    for name, parameters in HOOKS.items():
        hook = getattr(server, name, None)
        if hook is None or [*inspect.signature(hook).parameters] != parameters:
            raise ConfigError(
                f"{server.__name__} has no {name}({', '.join(parameters)}), so requests cannot be "
                "checked; use the mlflow version in requirements.lock"
            )
    max_bytes = max(BYTES_PER_RESIDUE * max_residues, MIN_BYTES)
    reading = threading.Lock()  # limits the memory to one parsed body
    decorate = getattr(server, DECORATE)

    def answer(data: bytes, content_type: str | None, model: Any, input_schema: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            read = _reader(content_type)
            if read is None:
                accepted = f"Content-Type: must be {' or '.join(READERS)}, in UTF-8"
                status, document = 415, _error("BAD_REQUEST", accepted)
            elif len(data) > max_bytes:
                reason = f"the request is longer than {max_bytes:,} bytes; send fewer rows"
                status, document = 413, _error("BAD_REQUEST", reason)
            else:
                with reading:
                    columns, settings = _read(data, read, max_residues)
                    _require_registered(settings, model)
                    table = _table(columns, max_residues)
                predictions = model.predict(table, params=settings).to_dict("records")
                status, document = 200, {"predictions": predictions}
        except (ConfigError, DataError) as error:
            status, document = 400, _error("INVALID_PARAMETER_VALUE", str(error))
        except MlflowException as error:
            status = error.get_http_status_code()
            document = _error(error.error_code, error.message)
        except Exception:  # the server must answer; it logs the cause
            log.exception("a request failed")
            bug = "this is a bug in D2PLM; the server's log has the details"
            status, document = 500, _error("INTERNAL_ERROR", bug)
        return server.InvocationsResponse(json.dumps(document), status, "application/json")

    setattr(server, ANSWER, answer)
    setattr(server, DECORATE, lambda func: _bounded(decorate(func), max_bytes))


def _bounded(handler: Callable[..., Any], max_bytes: int) -> Callable[..., Any]:
    """Limit the body that a handler receives to `max_bytes` + 1; the rest is discarded."""

    @wraps(handler)
    async def bounded(request: Any) -> Any:
        body = bytearray()
        async for chunk in request.stream():  # to the end, because clients send all before reading
            body += chunk[: max_bytes + 1 - len(body)]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": bytes(body)}

        return await handler(type(request)(request.scope, receive))

    return bounded


def _error(code: str, message: str) -> dict[str, Any]:
    shown = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} …"
    return {"error_code": code, "message": shown}


def _reader(content_type: str | None) -> Callable[[str], tuple[Columns, Any]] | None:
    media_type, *parameters = (content_type or "").lower().replace(" ", "").split(";")
    return None if {*parameters} - {"", "charset=utf-8"} else READERS.get(media_type)


def _read(
    data: bytes, reader: Callable[[str], tuple[Columns, Any]], max_residues: int
) -> tuple[Columns, Any]:
    """Parse the columns and settings of a request, and check the types of the settings."""
    try:
        columns, settings = reader(data.decode("utf-8-sig"))
    except RecursionError:
        raise DataError("the request is nested too deeply") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"the request cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError("params: must be an object of settings")
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None:
            near = did_you_mean(name, SETTINGS)
            raise ConfigError(f"{reprlib.repr(name)}: no such setting{near}")
        null = value is None and setting.default is None
        if not _is_of(setting.kind, value) and not null:
            raise ConfigError(f"{name}={reprlib.repr(value)}: must be {KINDS[setting.kind]}")
        if setting.kind is list:  # MLflow pads each string to the length of the longest
            require_small_family(value, max_residues)
    return columns, settings


def _require_registered(settings: dict[str, Any], model: Any) -> None:
    """Raise `ConfigError` for a setting newer than the model, which MLflow would drop."""
    known = {parameter.name for parameter in model.metadata.get_params_schema() or ()}
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{name}: the model was registered by a version without this setting; register it "
                "again, or omit the setting"
            )


def _read_json(text: str) -> tuple[Columns, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON; send null")

    request = json.loads(text, parse_constant=refuse)
    forms = [form for form in SHAPES if isinstance(request, dict) and form in request]
    if len(forms) != 1 or {*request} - {*SHAPES, "params"}:
        forms_text = ", ".join(SHAPES)
        raise DataError(f"send a JSON object with one of {forms_text}, and optionally params")
    settings = request.get("params")
    return _columns(forms[0], request[forms[0]]), {} if settings is None else settings


def _columns(form: str, data: Any) -> Columns:
    match form, data:
        case (("inputs" | "instances"), dict()):
            return {n: value if isinstance(value, list) else [value] for n, value in data.items()}
        case "dataframe_split", {"columns": list(names), "data": list(rows)}:
            return _by_column(names, rows)
        case (("inputs" | "instances" | "dataframe_records"), list(rows)) if all(
            isinstance(row, dict) for row in rows
        ):
            names = [name for name in INPUTS if any(name in row for row in rows)]
            return {name: [row.get(name) for row in rows] for name in names}
    raise DataError(f"{form}: must be {SHAPES[form]}")


def _read_csv(text: str) -> tuple[Columns, Any]:
    """Columns of strings, without settings; an empty length is null."""
    names, *rows = [*csv.reader(io.StringIO(text.rstrip("\r\n")), strict=True)] or [[]]
    columns = _by_column(names, rows)
    if "length" in columns:
        columns["length"] = [value or None for value in columns["length"]]
    return columns, {}


def _by_column(names: list[Any], rows: list[Any]) -> Columns:
    if len({*map(str, names)}) < len(names):
        raise DataError("columns: must have different names")
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise DataError(f"row {number}: must have {len(names)} values, one per column")
    return {str(name): [row[place] for row in rows] for place, name in enumerate(names)}


def _table(columns: Columns, max_rows: int) -> pd.DataFrame:
    """Table of the model's columns; `serving` checks that sequences are strings."""
    known = {name: columns[name] for name in INPUTS if name in columns}
    rows = max(map(len, known.values()), default=0)
    if rows > max_rows:
        raise DataError(f"{rows:,} rows; this server accepts {max_rows:,} residues per request")
    if any(len(values) < rows for values in known.values()):
        raise DataError("sequence and length: must have the same number of rows")
    for row, value in enumerate(known.get("length", ())):
        if value is not None and not _is_number(value):
            raise DataError(f"row {row}: length={reprlib.repr(value)}: must be a number or null")
    table = pd.DataFrame(known, dtype=object)
    return table.astype({name: float for name in known if name == "length"})


def _is_of(kind: type, value: Any) -> bool:
    if kind is list:
        return type(value) is list and all(type(one) is str for one in value)
    return _is_number(value) if kind is float else type(value) is kind and _is_small(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and _is_small(value)


def _is_small(value: Any) -> bool:
    return isinstance(value, str) or abs(value) < MAX_NUMBER


READERS = {"application/json": _read_json, "text/csv": _read_csv}
