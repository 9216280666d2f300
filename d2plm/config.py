"""Composing the settings of a command: defaults, YAML files and overrides → checked dataclasses.

The dataclasses in `d2plm.settings` hold the defaults; the YAML files in `configs/` are choices
(`model=8m`, `experiment=demo`) that hold only what differs, and Hydra composes them. Unknown keys
and impossible values are rejected before anything starts. Commands read the settings; the library
takes them as arguments.
"""

import json
import os
import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from d2plm.core.errors import (
    ConfigError,
    DataError,
    ModelError,
    did_you_mean,
    first_line,
    nearest,
    require,
    require_choice,
)
from d2plm.core.files import RUN_CONFIG, config_dir, is_hub_name, nearest_path, shipped, write_text
from d2plm.core.terminal import CONFIG_OPTIONS, GLOBAL_OPTIONS, MODULE, MULTIRUN, SWITCHES
from d2plm.settings.commands import JOB_KEYS, SETTINGS, SHORT_KEYS, PipelineSettings
from d2plm.settings.registry import load_modules, registered
from d2plm.settings.schema import Key, Settings, build, keys, with_defaults

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override

Kind = TypeVar("Kind", bound=Settings)

PARADIGM_CONFIG = "paradigm_config.json"  # in every exported model
MODEL_CONFIG = "config.json"  # in every model folder, including ESM-2
# A member of a list on the command line, such as [a,'b,c'].
_LISTED = re.compile(r"""\s*(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")\s*(?=,|$)|[^,]+""")
Values = Settings | Mapping[str, Any]


def as_yaml(settings: Values) -> str:
    from omegaconf import OmegaConf

    text = OmegaConf.to_yaml(OmegaConf.create(plain(settings)))
    # PyYAML writes this line end (NEL) unescaped and reads it as a blank; JSON escapes it.
    return text if "\x85" not in text else json.dumps(plain(settings), indent=2) + "\n"


def save(settings: Values, file: Path) -> None:
    """Write the settings as YAML, readable only by its owner because it may contain secrets."""
    write_text(file, as_yaml(settings), 0o600)


def flat(settings: Values) -> dict[str, Any]:
    """Convert nested settings to {"model.hidden_size": 128, …}."""
    return dict(_flatten(plain(settings)))


def plain(settings: Values) -> dict[str, Any]:
    """Convert settings to nested dictionaries."""
    return asdict(settings) if isinstance(settings, Settings) else dict(settings)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def compose(
    command: str, overrides: Iterable[str] = (), name: str | None = None, folder: Path | None = None
) -> Any:
    """Compose the settings of a command.

    Args:
        command: its name in `SETTINGS`.
        overrides: `key=value`, or `group=choice`.
        name: another root file of YAML than the command's own.
        folder: folder of the YAML files; None: the installed ones.

    Raises:
        ConfigError: for an unknown file, group, choice or key, a malformed override, or a value
            that does not fit.
    """
    require_choice("command", command, SETTINGS)
    is_list = isinstance(overrides, Iterable) and not isinstance(overrides, str | Mapping)
    listed: list[Any] = list(overrides) if is_list else [None]
    is_text = all(isinstance(one, str) for one in listed)
    require(is_text, "overrides", overrides, "a list of 'key=value'")
    root, kind = (folder or config_dir()).resolve(), SETTINGS[command]
    choices, changes = _sorted_out(command, listed, root)
    values = _compose_files(command, name, root, choices)
    for dotted, value in changes:
        _set(values, dotted, value)
    return _checked(kind, values)


def defaults_of(command: str) -> dict[str, Any]:
    """Settings without overrides, as {"model.hidden_size": 128, …}; `???` if required."""
    files = _compose_files(command, None, config_dir().resolve(), [])
    return dict(_flatten(_resolved(SETTINGS[command], files)))


def changed(config: Kind, changes: Mapping[str, Any], where: str) -> Kind:
    """The settings with nested `changes`, which are the value of the key `where`.

    A section for which `changes` name a `type` takes the defaults of that type.

    Raises:
        ConfigError: if an unknown key is changed, or a value does not fit.
    """
    try:
        found: Kind = _checked(type(config), _merged(asdict(config), changes))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return found


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for name, change in changes.items():
        own = values.get(name)
        if isinstance(own, dict) and isinstance(change, Mapping) and "type" not in change:
            values[name] = _merged(own, change)
        else:
            values[name] = change
    return values


def _checked(kind: type[Settings], values: Mapping[str, Any]) -> Any:
    return build(kind, _resolved(kind, values))


def _resolved(kind: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Add defaults and replace references; required keys are `???`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.create(with_defaults(kind, values))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(first_line(error)) from error
    assert isinstance(resolved, dict)
    return {str(name): value for name, value in resolved.items()}


def _compose_files(
    command: str, name: str | None, root: Path, choices: list[str]
) -> dict[str, Any]:
    """Compose the YAML files without resolving references."""
    if name is not None and not (root / f"{name}.yaml").is_file():
        known = [file.stem for file in root.glob("*.yaml")]
        raise ConfigError(f"no configuration {name}.yaml in {root}{did_you_mean(name, known)}")
    if name is None:
        name = command if (root / f"{command}.yaml").is_file() else None
        if name is None and issubclass(SETTINGS[command], PipelineSettings):
            name = "pipeline"
    if name is None:
        return {}
    from hydra import compose as hydra_compose
    from omegaconf import OmegaConf

    shown = f"{root / name}.yaml{''.join(f' with {choice}' for choice in choices)}"
    searched = _search_path(root, choices)
    with _readable(shown), hydra_over(root):
        values = OmegaConf.to_container(hydra_compose(name, overrides=[*choices, *searched]))
    assert isinstance(values, dict)
    if isinstance(values.get("experiment"), dict):
        raise ConfigError(f"{shown}: an experiment's file begins with '# @package _global_'")
    return {str(name): value for name, value in values.items()}


@contextmanager
def _readable(file: object) -> Iterator[None]:
    """Report invalid YAML and failed compositions in one line that names the file."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except FileNotFoundError as error:
        near = nearest_path(str(file)) or "; check the path; an emptied volume: submit again"
        raise ConfigError(f"{file}: no such configuration{near}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: refers to itself; write the values instead") from error
    except YAMLError as error:
        raise ConfigError(f"{file}: is not valid YAML: {' '.join(str(error).split())}") from error
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(f"{file}: {first_line(error)}") from error


def _search_path(root: Path, choices: Iterable[str]) -> list[str]:
    """Override that makes Hydra also look for group choices in `./configs`.

    The package's files come first, so a chosen file that exists in both and differs is rejected.
    """
    own = Path("configs").resolve()
    if not own.is_dir() or own == root:
        return []
    for word in choices:
        group, _, choice = word.partition("=")
        mine, same = (folder / group / f"{choice}.yaml" for folder in (own, root))
        if mine.is_file() and same.is_file() and mine.read_bytes() != same.read_bytes():
            raise ConfigError(f"{mine}: is ignored in favour of {same}; rename your file")
    return [f"hydra.searchpath=['file://{own}']"]


@contextmanager
def hydra_over(root: Path) -> Iterator["ConfigLoader"]:
    """Initialize Hydra with the configurations in `root`."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(root), version_base=None):
        yield GlobalHydra.instance().config_loader()


def choices_of(group: str, root: Path | None = None) -> list[str]:
    """The choices of a group: YAML files here and in `./configs`, and registered names."""
    folders = (root or config_dir()) / group, Path("configs") / group
    names = {file.stem for folder in folders for file in folder.glob("*.yaml")}
    kind = keys(PipelineSettings).get(f"{group}.type")
    return sorted({*names, *(registered(group) if kind is not None else ())})


@cache
def default_choice(group: str) -> str:
    import yaml

    defaults = yaml.safe_load((config_dir() / "pipeline.yaml").read_text())["defaults"]
    return next((str(one[group] or "null") for one in defaults if group in one), "null")


def groups(root: Path | None = None) -> set[str]:
    """Groups whose choices can be selected on the command line, such as `model`."""
    folders = (root or config_dir()), Path("configs")
    found = (child for folder in folders if folder.is_dir() for child in folder.iterdir())
    return {child.name for child in found if any(child.glob("*.yaml"))} - {"accelerate"}


def parse_overrides(words: list[str], loader: "ConfigLoader | None" = None) -> list["Override"]:
    """Parse Hydra overrides; `ConfigError` if malformed. A `glob` over choices needs a `loader`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        overrides: list[Override] = OverridesParser.create(loader).parse_overrides(words)
    except OverrideParseException as error:
        word = error.override or ""
        raise ConfigError(f"{word!r}: {first_line(error)}{_in_quotes(word)}") from error
    return overrides


def _in_quotes(word: str) -> str:
    """Hint on quoting a setting whose value has special characters."""
    name, equals, value = word.partition("=")
    if not equals or value[:1] in ("'", '"', "[", "{"):
        return ""
    full = f"{name}={quoted(value)}"
    full = shlex.quote(full) if {*full} & {*'"$`!\\'} else f'"{full}"'
    return f"; quote it for the shell and for Hydra: {full}"


def _sorted_out(
    command: str, words: list[str], root: Path
) -> tuple[list[str], list[tuple[str, Any]]]:
    """Sort words into groups' choices, for Hydra, and (key, value); `+` and `++` are ignored."""
    known, selectable = keys(SETTINGS[command]), groups(root)
    names = [_name_of(word) for word in words]
    for word, name in zip(words, names, strict=True):
        _require_known(word, name, known, selectable, command)
    choices, changes = [], list[tuple[str, Any]]()
    for word, name in zip(words, names, strict=True):
        if name in known and known[name].path and "=" in word:
            changes.append((name, _path(known[name], word)))
            continue
        override = parse_overrides([word])[0]
        if override.is_sweep_override():
            raise _several_values(word)
        value = override.value()
        if "???" in str(value):
            raise ConfigError(f"{word!r}: needs a value")
        if name not in selectable or value is None or isinstance(value, dict):
            if isinstance(value, dict) and name not in known:  # a section keeps its other keys
                changes.append((f"{name}.", value))
            elif (name, value) != ("experiment", None):  # the default
                changes.append((name, _as_written(known.get(name), value, word)))
        elif any((folder / name / f"{value}.yaml").is_file() for folder in (root, Path("configs"))):
            choices.append(f"{name}={value}")
        else:
            possible = choices_of(name, root)
            if value not in possible:
                near = did_you_mean(str(value), possible)
                raise ConfigError(
                    f"{name}={value}: no such choice{near}; choose from {', '.join(possible)}"
                )
            changes.append((f"{name}.type", value))
    return choices, changes


def _name_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _as_written(known: Key | None, value: Any, word: str) -> Any:
    """Keep text as it was written if YAML would convert it to a number or a truth value."""
    is_text = known is not None and known.takes_text_only and isinstance(value, bool | int | float)
    return word.partition("=")[2] if is_text else value


def _path(known: Key, word: str) -> str | list[str] | None:
    """Parse the value of a path key, in which only `null`, [a,b] and quotes are special.

    An existing file of exactly this name takes precedence, except over `null`.
    """
    name, text = _name_of(word), word.partition("=")[2]
    if text == "null" and known.default is None:
        return None
    if not text.strip() or text == "???":
        otherwise = ", or null for none" if known.default is None else ""
        raise ConfigError(f"{name}: is empty; give a path{otherwise}")
    if os.path.lexists(text):
        return text
    if known.is_list and text[0] + text[-1] == "[]":
        return [_unquoted(one.strip()) for one in _LISTED.findall(text[1:-1]) if one.strip()]
    if "," in text and all(map(os.path.lexists, text.split(","))):
        raise _several_values(word)
    return _unquoted(text)


def _unquoted(text: str) -> str:
    """Invert `quoted`, for either quotation mark; other text is returned unchanged."""
    mark = text[:1]
    if len(text) < 2 or mark not in "'\"" or text[-1] != mark:
        return text
    return re.sub(
        rf"(\\+)({mark}|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], text[1:-1]
    )


def _several_values(word: str) -> ConfigError:
    return ConfigError(
        f"{word!r}: has several values; write a list as [a,b]{_in_quotes(word)}; "
        "d2plm train --multirun sweeps"
    )


def _require_known(
    word: str, name: str, known: Mapping[str, Key], selectable: set[str], command: str
) -> None:
    if word.startswith("~"):
        raise ConfigError(f"{word!r}: keys cannot be deleted; unset a key with KEY=null")
    sections = {parent for full in known for parent in _parents(full)}
    if not issubclass(SETTINGS[command], PipelineSettings):
        selectable = selectable & sections
    if name in {*known, *sections, *selectable} or _parents(name) & _mappings(command):
        return
    last = name.rpartition(".")[2]
    elsewhere = [one for one in known if one.rpartition(".")[2] == last]
    near = f" (did you mean {' or '.join(map(repr, elsewhere))}?)" if elsewhere else ""
    near = near or did_you_mean(name, [*known, *selectable])
    raise ConfigError(f"unknown key {name!r}{near}; --cfg shows the known keys")


def _parents(name: str) -> set[str]:
    """`a` and `a.b` of `a.b.c`."""
    return {name[: match.start()] for match in re.finditer(r"\.", name)}


@cache
def _mappings(command: str) -> set[str]:
    """Keys whose values are mappings with the user's own names."""
    found = {name for name, one in keys(SETTINGS[command]).items() if one.is_mapping}
    return found | {"callbacks"}


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key or, if it ends with a dot, some keys of a section."""
    *parents, last = dotted.split(".")
    for parent in parents:
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    if last:
        values[last] = value
    else:
        _merged(values, value)


def read(command: str, file: Path, overrides: Iterable[str] = ()) -> Any:
    """Read a complete configuration from a file, with `key=value` changes to existing keys.

    Keys of another command are left out, because a run's configuration serves several.

    Raises:
        ConfigError: if the file is missing or invalid, or an override selects a group's choice.
    """
    from omegaconf import OmegaConf

    with _readable(file):
        container = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(container, dict):
        raise ConfigError(f"{file}: must contain sections, KEY: VALUE")
    values = {str(name): value for name, value in container.items()}
    for name, value in _flatten(values):
        wanted = "without a resolver, which could read the environment"
        require(not re.search(r"\$\{[^}]*:", str(value)), name, value, wanted)
    own = {name.partition(".")[0] for name in keys(SETTINGS[command])}
    others = {name.partition(".")[0] for kind in SETTINGS.values() for name in keys(kind)}
    values = {name: value for name, value in values.items() if name in own or name not in others}
    choices, changes = _sorted_out(command, list(overrides), config_dir().resolve())
    if choices:
        raise ConfigError(
            f"{file}: {choices[0]!r}: a complete configuration has no alternatives to a section; "
            "set its keys, or omit --config-file"
        )
    for dotted, value in changes:
        _set(values, dotted, value)
    return _checked(SETTINGS[command], values)


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of a command.

    Attributes:
        command: its name in `SETTINGS`.
        name: another root file; None: the command's own.
        folder: folder of the root file; None: the installed configurations.
        file: a complete configuration, used instead.
        overrides: `key=value` settings.
        show_only: whether to print the configuration and exit.
        multirun: whether the overrides describe a sweep.
    """

    command: str
    name: str | None = None
    folder: Path | None = None
    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    show_only: bool = False
    multirun: bool = False

    def compose(self, overrides: list[str] | None = None) -> Any:
        """Compose the settings; `overrides`, if given, replace its own."""
        overrides = self.overrides if overrides is None else overrides
        if self.file is not None:
            return read(self.command, self.file, overrides)
        if self.command.startswith("job_"):
            own, _ = words_of_job(overrides)
            overrides = overrides if compose(self.command, own).command == "train" else own
        composed = compose(self.command, overrides, self.name, self.folder)
        if self.command == "export" and self.name is None and self.folder is None:
            return _of_its_run(composed, overrides)
        return composed


def words_of_job(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Divide settings of `d2plm job` into those of the job and those of its pods' command."""
    own = {True: list[str](), False: list[str]()}
    for word in words:
        own[_name_of(word).partition(".")[0] in JOB_KEYS].append(word)
    return own[True], own[False]


def _of_its_run(composed: PipelineSettings, overrides: list[str]) -> Any:
    """Read the configuration of the run in `output_dir`, if it exists and no group is chosen."""
    output_dir = Path(composed.output_dir)
    file, choices = output_dir / RUN_CONFIG, _sorted_out("export", overrides, config_dir())[0]
    if choices or not file.is_file():
        return composed
    run = read("export", file)
    words = ["trainer.resume=auto", f"output_dir={quoted(composed.output_dir)}"]
    if Path(run.model_dir) == Path(run.output_dir) / "model":  # also if the run was moved
        words.append(f"model_dir={quoted(str(output_dir / 'model'))}")
    return read("export", file, [*words, *overrides])


def parse_arguments(command: str, words: list[str], first_key: str | None = None) -> Arguments:
    """Parse a command's words; `--key value` and `--key=value` mean `key=value`.

    Modules that `--module` names are imported, so that their parts are registered. A first word
    without a key sets `first_key`.

    Raises:
        ConfigError: if a word is neither a known option nor a setting.
    """
    files: dict[str, str | None] = dict.fromkeys(CONFIG_OPTIONS)
    overrides, modules, dashed = list[str](), list[str](), dict[str, str]()
    modes = {"show_only": False, "multirun": False}
    said = ""
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        option, equals, value = word.partition("=")
        if word in MULTIRUN:
            modes["multirun"] = True
        elif word in SWITCHES:
            overrides.append(SWITCHES[word])
        elif option == "--cfg":
            modes["show_only"] = True
            if not equals and list(remaining)[:1] == ["job"]:
                remaining.popleft()
            require(value in ("", "job"), "--cfg", value, "job, the command's configuration")
        elif option in (*CONFIG_OPTIONS, MODULE):
            given = value if equals or not remaining else remaining.popleft()
            if not given:
                raise ConfigError(f"{option}: needs a value")
            if option == MODULE:
                modules.append(given)
            else:
                files[option] = given
        elif option.startswith("--"):
            if not equals and remaining and not re.match(r"--|[+\w.]+=", remaining[0]):
                value = remaining.popleft()
            dashed[option] = value
            overrides.append(f"{option.removeprefix('--')}={value}")
        elif word.startswith("-"):
            raise _unknown_option(option)
        elif not option:
            raise ConfigError(f"{word!r}: write key=value without spaces around the =")
        elif equals and "/" not in option and not (first_key and os.path.lexists(word)):
            overrides.append(word)
        elif first_key is not None and not any(o.startswith(f"{first_key}=") for o in overrides):
            overrides.append(f"{first_key}={quoted(word)}")
            said, first_key = f"{first_key} is already {word!r}; ", None
        else:
            raise ConfigError(f"{word!r}: {said}give settings as key=value and quote spaces")
    load_modules(modules)
    known = keys(SETTINGS[command])
    short = SHORT_KEYS.get(command, {})
    for option, value in dashed.items():
        name = short.get(option.removeprefix("--"), option.removeprefix("--"))
        if name not in known and name not in groups():
            raise _unknown_option(option, known)
        if not value:
            raise ConfigError(f"{option}: needs a value")
    root, folder, file = files.values()
    if file and (root or folder):
        raise ConfigError("--config-file: is complete; omit --config-name and --config-dir")
    return Arguments(
        command,
        root,
        Path(folder) if folder else None,
        Path(file) if file else None,
        [_in_full(word, short) for word in overrides],
        **modes,
    )


def _in_full(word: str, short: Mapping[str, str]) -> str:
    name, equals, value = word.partition("=")
    return f"{short.get(name, name)}{equals}{value}"


def compose_arguments(command: str, words: list[str]) -> tuple[Any, Arguments]:
    """Parse the arguments of a command that does not support sweeps, and compose them."""
    arguments = parse_arguments(command, words)
    if arguments.multirun:
        raise ConfigError(f"--multirun: not supported by {command}; use d2plm train")
    return arguments.compose(), arguments


def quoted(value: str) -> str:
    """Quote text for Hydra; backslashes are doubled only before a quotation mark."""
    return "'" + re.sub(r"(\\*)('|$)", r"\1\1\2", value).replace("'", "\\'") + "'"


def _unknown_option(option: str, known: Iterable[str] = ()) -> ConfigError:
    options = (*CONFIG_OPTIONS, MODULE, "--cfg", *GLOBAL_OPTIONS, *MULTIRUN, *SWITCHES)
    short = {f"--{one.rpartition('.')[2]}": f"--{one}" for one in known}
    near = did_you_mean(option, [*options, *short.values()])
    if not near and (last := nearest(option, short)):
        near = f" (did you mean '{short[last]}'?)"
    return ConfigError(f"unknown option {option!r}{near}; see --help")


def check_paths(command: str, settings: Values, names: Iterable[str]) -> None:
    """Reject input paths that do not exist; URLs, registered models and `-` are not checked.

    Raises:
        DataError: if a path does not exist or is not of the expected kind.
        ModelError: if a model does not exist or model_dir is not an exported model.
    """
    known, values = keys(SETTINGS[command]), flat(settings)
    for name in names:
        value = values.get(name)
        for one in value if isinstance(value, list) else [value]:
            text = "" if one is None else str(one)
            if name == "data.prepared_dir" and values.get("data.residues") == "random":
                continue
            if text in ("", "-") or re.match(r"\w+:/", text) or "\0" in text:
                continue
            is_model = known[name].path == "model"
            if is_model and is_hub_name(text):
                continue
            place = Path(os.path.expanduser(shipped(text)))
            if not os.path.exists(place) and not glob(str(place), recursive=True):
                error = ModelError if is_model else DataError
                raise error(
                    f"{name}={text}: no such file or folder{nearest_path(text)}; check the path "
                    f"({name.rpartition('.')[2]}: {known[name].help})"
                )
            if name == "model_dir":
                _require_export(place)
            if name == "data.prepared_dir" and (place / "data.mdb").exists():
                raise DataError(f"{name}={text}: is a raw store; prepare it with d2plm prepare")
            is_file = os.path.isfile(place)
            if is_file and known[name].path == "folder":
                raise DataError(f"{name}={text}: is a file; expected the {known[name].help}")
            if is_file and not os.path.getsize(place):
                raise DataError(f"{name}={text}: is empty; give another file")


def _require_export(folder: Path) -> None:
    """Reject a path that is not an exported model; suggest a model inside it."""
    if not (folder / MODEL_CONFIG).exists():
        inside = sorted(one.parent for one in folder.glob(f"**/{PARADIGM_CONFIG}"))
        near = f" (did you mean '{inside[0]}'?)" if inside else ""
        if any(folder.glob("*.distcp")):
            of = f"--config-file {folder.absolute().parents[1]}/config.yaml trainer.resume={folder}"
            near = f", but a checkpoint; export it with d2plm export {of}"
        raise ModelError(f"model_dir={folder}: not a model folder (no {MODEL_CONFIG}){near}")
