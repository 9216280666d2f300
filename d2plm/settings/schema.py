"""Settings as frozen dataclasses: validation, and the list of keys that help and completion show.

A field defines a key once: its name, type, default, range and description. Validation at
construction, the composed configuration, `--help`, completion, `docs/configuration.md` and the JSON
schema are all derived from the fields. Nothing here imports torch, transformers or Hydra.
"""

import ast
import inspect
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from itertools import pairwise
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from d2plm.core.errors import ConfigError, did_you_mean

Kind = TypeVar("Kind", bound="Settings")

MAX_SEED = 2**64 - 1  # `d2plm.core.noise.Key` has 64 bits: larger seeds would equal smaller ones

PathKind = Literal["file", "folder", "any", "model"]  # see `d2plm.config.check_paths`


@dataclass(frozen=True)
class Form:
    """The format of a text: a regular expression of the whole text, and its description."""

    pattern: str
    words: str

    def fits(self, text: str) -> bool:
        return re.fullmatch(self.pattern, text) is not None


def key(
    default: Any = MISSING,
    *,
    form: Form | None = None,
    names: Form | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    path: PathKind | None = None,
    composed: str | None = None,
    registry: str | None = None,
) -> Any:
    """A field of `Settings`, described by the docstring below it; required without a default.

    Args:
        default: lists and dictionaries are copied.
        form: format of a text, or of each text in a list or mapping.
        names: format of the names in a mapping.
        low, high: bounds of a number, or of each number of a list.
        above, below: the same without the bound itself.
        path: kind of file that the value is the path of.
        composed: default in a composed configuration if it differs, such as `${work_dir}/data`.
        registry: group of the registry (`d2plm.settings.registry`) with the section's types.
    """
    metadata = {
        "form": form,
        "names": names,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
        "path": path,
        "composed": composed,
        "registry": registry,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if registry is not None:  # an object of settings
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type["Settings"]) -> Any:
    """A field that holds another section, with its defaults."""
    return field(default_factory=kind, metadata={"low": None})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all sections; raises `ConfigError` for a value that does not fit its field."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if "low" in one.metadata:  # made by `key`; a subclass may have others
                value = getattr(self, one.name)
                if isinstance(value, Real) and hasattr(value, "item"):  # numpy's
                    object.__setattr__(self, one.name, value := value.item())
                _require_fits(one, value)


def _require_fits(one: Field[Any], value: object) -> None:
    kinds = _alternatives(one.type)
    if any(_fits(kind, value, one.metadata) for kind in kinds):
        return
    choices = [str(c) for kind in kinds for c in get_args(kind) if get_origin(kind) is Literal]
    choices += ["true", "false"] if bool in kinds else []
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    wanted = " or ".join(dict.fromkeys(_wanted(kind, one.metadata) for kind in kinds))
    raise ConfigError(f"must be {wanted}{near}", {one.name: value})


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(kind: Any, value: Any, limits: Mapping[str, Any]) -> bool:
    if isinstance(value, str) and not _is_utf8(value):  # bytes of a path or of the command line
        return False
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin is list:
        is_list = isinstance(value, list | tuple)
        return is_list and all(_fits_any(arguments[0], one, limits) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(
            _fits(str, name, {"form": limits.get("names")}) and _fits_any(arguments[1], one, limits)
            for name, one in value.items()
        )
    if kind in (int, float):
        return _is_number(kind, value) and _within(value, limits)
    if kind is Any:
        return True
    form = limits.get("form")
    if form is not None and isinstance(value, str) and not form.fits(value):
        return False
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _fits_any(kind: Any, value: object, limits: Mapping[str, Any]) -> bool:
    return any(_fits(one, value, limits) for one in _alternatives(kind))


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _is_number(kind: type, value: Any) -> bool:
    kinds = int if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


def _within(value: float, limits: Mapping[str, Any]) -> bool:
    low, high, above, below = (limits.get(name) for name in ("low", "high", "above", "below"))
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _wanted(kind: Any, limits: Mapping[str, Any]) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"{'one of ' * (len(arguments) > 1)}{', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list, [{_wanted(_alternatives(arguments[0])[0], limits)}, …]"
    if origin is dict or (isinstance(kind, type) and issubclass(kind, Settings)):
        text = "a mapping, {NAME: VALUE, …}"
        if limits.get("names") is not None:
            values = dict.fromkeys(_wanted(one, limits) for one in _alternatives(arguments[1]))
            text += f"; NAME: {limits['names'].words}; VALUE: {' or '.join(values)}"
        return f"{text}; {{}}: none"
    if kind in (int, float):
        text = range_of(limits)
        return f"{'an integer' if kind is int else 'a number'}{f' {text}' if text else ''}"
    text = "text in UTF-8" if limits.get("form") is None else limits["form"].words
    words = {NoneType: "null", bool: "true or false", str: text, Any: "VALUE"}
    return words.get(kind, str(kind))


def range_of(limits: Mapping[str, Any]) -> str:
    """The range of a number in words, such as `≥ 0 and < 1`; empty without bounds."""
    signs = {"low": "≥", "above": ">", "high": "≤", "below": "<"}
    given = {name: limits[name] for name in signs if limits.get(name) is not None}
    shown = {n: str(b) if isinstance(b, int) else f"{b:g}" for n, b in given.items()}
    return " and ".join(f"{signs[name]} {bound}" for name, bound in shown.items())


@dataclass(frozen=True)
class Key:
    """A key of a command's configuration.

    Attributes:
        field: the field that defines it.
        default: value before interpolations are resolved; `???` if the key is required.
        help: description for users.
    """

    field: Field[Any]
    default: Any
    help: str

    @property
    def path(self) -> PathKind | None:
        found: PathKind | None = self.field.metadata.get("path")
        return found

    @property
    def choices(self) -> list[str]:
        """The words that may be the value; empty if other values are allowed, too."""
        kinds = _alternatives(self.field.type)
        words = [
            str(one) for kind in kinds for one in get_args(kind) if get_origin(kind) is Literal
        ]
        return [*words, *(["true", "false"] if bool in kinds else [])]

    @property
    def takes_text_only(self) -> bool:
        """Whether a bare number or `true` on the command line can only mean the text itself."""
        kinds = {*_alternatives(self.field.type)} - {NoneType}
        return all(kind is str or get_origin(kind) is list for kind in kinds) and str in kinds

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) is list for kind in _alternatives(self.field.type))

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping with names chosen by the user."""
        return any(get_origin(kind) is dict for kind in _alternatives(self.field.type))

    @property
    def described(self) -> str:
        """The description of the key, with its choices or range."""
        limits = range_of(self.field.metadata)
        known = " | ".join(self.choices) or limits
        return f"{self.help} ({known})" if known else self.help


def keys(kind: type[Settings], prefix: str = "") -> dict[str, Key]:
    """All keys of a class of settings by dotted name, including every type of a section."""
    found: dict[str, Key] = {}
    said = helps(kind)  # type: ignore[arg-type]  # a class is hashable
    for one in fields(kind):
        for name, inner in _sections(one):
            found |= keys(inner, f"{prefix}{name}.") | found
        if not is_section(one):
            found[f"{prefix}{one.name}"] = Key(one, default_of(one), said[one.name])
    return found


@cache
def helps(kind: type[Settings]) -> dict[str, str]:
    """Field → the docstring below it, in the class or base that defines it; '' without source."""
    found: dict[str, str] = dict.fromkeys((one.name for one in fields(kind)), "")
    for base in reversed(kind.__mro__):
        if issubclass(base, Settings):
            written = _classes(base.__module__).get(base.__qualname__)
            for one, below in pairwise(written.body if written else ()):
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                    found[one.target.id] = _docstring(below) or found[one.target.id]
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Qualified name → class in a module's source, which `inspect` would parse once per class."""
    with suppress(OSError, TypeError, KeyError):  # no source
        return dict(_defined(ast.parse(inspect.getsource(sys.modules[module]))))
    return {}


def _defined(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef):
            yield prefix + child.name, child
            yield from _defined(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield from _defined(child, f"{prefix}{child.name}.<locals>.")


def _docstring(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return " ".join(value.value.split()) if is_text else ""  # type: ignore[union-attr]  # it is


def is_section(one: Field[Any]) -> bool:
    """Whether a field holds another section, or sections by name."""
    return any(True for _ in _sections(one))


def _sections(one: Field[Any]) -> Iterator[tuple[str, type[Settings]]]:
    """(name, class) of every section that the field may hold."""
    group = one.metadata.get("registry")
    if group is not None:
        from d2plm.settings.registry import registered

        by_name = get_origin(one.type) is dict
        for name, entry in registered(group).items():
            yield (f"{one.name}.{name}" if by_name else one.name), entry.settings
    elif isinstance(one.type, type) and issubclass(one.type, Settings):
        yield one.name, one.type


def default_of(one: Field[Any]) -> Any:
    """The default of a field in a composed configuration."""
    if one.metadata.get("composed") is not None:
        return one.metadata["composed"]
    if one.default_factory is not MISSING:
        return one.default_factory()
    return "???" if one.default is MISSING else one.default


def with_defaults(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping `values` completed by the defaults of `kind`, unresolved.

    The type of a section decides its defaults. Unknown keys are kept, and rejected by `build`.
    """
    completed: dict[str, Any] = dict(values)
    for one in fields(kind):
        given = values.get(one.name, MISSING)
        group = one.metadata.get("registry")
        if not is_section(one):
            if given is MISSING:
                completed[one.name] = default_of(one)
        elif given is MISSING or isinstance(given, Mapping):
            own = {} if given is MISSING else given
            if group is not None and get_origin(one.type) is dict:
                completed[one.name] = _named_sections(one, own)
            else:
                if group is not None:
                    own = {"type": default_of(one).type, **own}
                completed[one.name] = with_defaults(_class_of(one, own, one.name), own)
        else:
            raise ConfigError("must be a mapping, {KEY: VALUE, …}", {one.name: given})
    return completed


def _named_sections(one: Field[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    from d2plm.settings.registry import find

    completed: dict[str, Any] = {}
    for name in {**dict.fromkeys(default_of(one)), **given}:
        own, where = given.get(name, {}), f"{one.name}.{name}"
        kind = find(one.metadata["registry"], name, where).settings
        if own is not None and not isinstance(own, Mapping):
            raise ConfigError("must be a mapping, {KEY: VALUE, …}, or null", {where: own})
        completed[name] = None if own is None else with_defaults(kind, own)
    return completed


def _class_of(one: Field[Any], values: Mapping[str, Any], where: str) -> type[Settings]:
    """The class of a section; in a registry its `type` decides."""
    group = one.metadata.get("registry")
    if group is None:
        kind: type[Settings] = one.type  # type: ignore[assignment]  # a section's
        return kind
    from d2plm.settings.registry import find

    return find(group, str(values["type"]), f"{where}.type").settings


def build(kind: type[Kind], values: Mapping[str, Any], where: str = "") -> Kind:
    """Build settings from the nested `values` of a section `where` ('' at the top).

    Raises `ConfigError`, with the full key, if a key is unknown or missing or a value does not fit.
    """
    known, made = {one.name: one for one in fields(kind)}, dict[str, Any]()
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in known:
            near = did_you_mean(f"{prefix}{name}", [prefix + one for one in known])
            raise ConfigError(f"unknown key {prefix + str(name)!r}{near}")
    for name, one in known.items():  # in the fields' order: references follow their targets
        if values.get(name, "???") != "???":
            made[name] = _built(one, values[name], prefix + name)
        elif default_of(one) == "???":
            full = prefix + name
            said = keys(kind)[name].help
            raise ConfigError(f"{full}: is required; set {full}=…: {said}")
    try:
        return kind(**made)
    except ConfigError as error:
        raise error.within(where) from None


def part(kind: type[Kind], settings: Settings) -> Kind:
    """The fields of `kind` taken from other settings that have them, such as a section's."""
    return kind(**{one.name: getattr(settings, one.name) for one in fields(kind)})


def _built(one: Field[Any], value: Any, where: str) -> Any:
    if not is_section(one) or value is None:
        return value
    if not isinstance(value, Mapping):
        raise ConfigError("must be a mapping, {KEY: VALUE, …}", {where: value})
    if one.metadata.get("registry") is not None and get_origin(one.type) is dict:
        from d2plm.settings.registry import find

        made = dict.fromkeys(value)
        for name, inner in value.items():
            if inner is not None:
                entry = find(one.metadata["registry"], name, where)
                made[name] = build(entry.settings, inner, f"{where}.{name}")
        return made
    return build(_class_of(one, value, where), value, where)


def json_schema(*kinds: type[Settings]) -> dict[str, Any]:
    """JSON schema (draft 7) of YAML files that hold some of the keys of these classes.

    Every section may have a list `defaults`, so that `properties` also describes group files.
    """
    found: dict[str, list[dict[str, Any]]] = {"defaults": [{"type": "array"}]}
    for kind in kinds:
        for one in fields(kind):
            schema = {"description": helps(kind)[one.name], **_field_schema(one)}  # type: ignore[arg-type]  # a class is hashable
            if schema not in found.setdefault(one.name, []):
                found[one.name].append(schema)
    properties = {name: _any_of(schemas) for name, schemas in found.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _field_schema(one: Field[Any]) -> dict[str, Any]:
    sections = dict(_sections(one)) if get_origin(one.type) is dict else {}
    if sections:  # by name; your own are not known
        properties = {
            name.rpartition(".")[2]: _any_of([json_schema(kind), {"type": "null"}])
            for name, kind in sections.items()
        }
        return {"type": "object", "properties": properties}
    if is_section(one):
        return json_schema(*(kind for _, kind in _sections(one)))
    kinds = [_value_schema(kind, one.metadata) for kind in _alternatives(one.type)]
    return _any_of([*kinds, {"type": "string", "pattern": r"^\$\{"}] if {} not in kinds else [{}])


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _value_schema(kind: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (list, dict):
        inner = _any_of([_value_schema(one, limits) for one in _alternatives(arguments[-1])])
        name, items = ("array", "items") if origin is list else ("object", "additionalProperties")
        names = {} if limits["names"] is None else {"propertyNames": _pattern(limits["names"])}
        return {"type": name, items: inner, **names}
    if kind in (int, float):
        words = ("minimum", "low"), ("maximum", "high"), ("exclusiveMinimum", "above")
        bounds = {
            word: limits[name]
            for word, name in (*words, ("exclusiveMaximum", "below"))
            if limits[name] is not None
        }
        return {"type": "integer" if kind is int else "number", **bounds}
    simple = {NoneType: "null", bool: "boolean", str: "string"}
    if kind is str and limits["form"] is not None:
        return {"type": "string", **_pattern(limits["form"])}
    return {"type": simple[kind]} if kind in simple else {}


def _pattern(form: Form) -> dict[str, str]:
    return {"pattern": f"^({form.pattern})$"}
