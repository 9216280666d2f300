"""Composing configurations with Hydra: files, groups and overrides → one checked `Config`.

Commands read the configuration; the library never does. Unknown keys are rejected before anything
starts.
"""

import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from d2plm.core.errors import ConfigError, did_you_mean, first_line, nearest, require
from d2plm.core.files import config_dir, nearest_path, write_text
from d2plm.core.terminal import CONFIG_OPTIONS, GLOBAL_OPTIONS, MULTIRUN, SWITCHES
from d2plm.keys import check_values, full_key, groups, known_keys
from d2plm.targets import build, require_trusted, trust

log = logging.getLogger(__name__)

# The only sections to which `+key=value` may add keys.
FREE_SECTIONS = ("arms", "sizes", "data.mixture", "callbacks", "tracking.tags")


@dataclass(frozen=True)
class Config:
    """A composed configuration: nested plain dictionaries with interpolations resolved."""

    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        try:
            return self.values[key]
        except KeyError:
            raise ConfigError(f"{key}: not in the configuration") from None

    def build(self, key: str) -> Any:
        return build(self[key], key)

    def as_yaml(self) -> str:
        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    def save(self, file: Path) -> None:
        """Write the YAML file, readable only by its owner because it may contain secrets."""
        write_text(file, self.as_yaml(), 0o600)

    def flat(self) -> dict[str, Any]:
        """{"model.hidden_size": 128, …}."""
        return dict(_flatten(self.values))


def compose(
    name: str, overrides: list[str], folder: Path | None = None, *, complete: bool = True
) -> Config:
    """Compose the root file `name` with Hydra overrides.

    Required values that are not set raise an error or, unless `complete`, stay `???`.

    Raises:
        ConfigError: for an unknown file, group, choice or key, or a malformed override.
    """
    root = (folder or config_dir()).resolve()
    if not (root / f"{name}.yaml").is_file():
        known = [file.stem for file in root.glob("*.yaml")]
        raise ConfigError(f"no configuration {name}.yaml in {root}{did_you_mean(name, known)}")
    try:
        with hydra_over(root):
            words = [*_settings(overrides), *_search_path(root, overrides)]
            return _resolved(hydra_compose(name, overrides=words), complete)
    except MissingConfigException as error:
        raise ConfigError(_explain_choice(error)) from error
    except ConfigCompositionException as error:
        raise ConfigError(_explain_key(error, name, root)) from error
    except MissingMandatoryValue as error:
        raise ConfigError(_explain_missing(str(error.full_key), name, root)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(first_line(error)) from error


def _search_path(root: Path, overrides: list[str]) -> list[str]:
    """Override that makes Hydra also look for group choices in `./configs`.

    The package's files come first, so a chosen file that exists in both and differs is rejected.
    """
    own = Path("configs").resolve()
    if not own.is_dir() or own == root:
        return []
    for word in overrides:
        group, _, choice = word.partition("=")
        mine, same = (folder / group / f"{choice}.yaml" for folder in (own, root))
        if mine.is_file() and same.is_file() and mine.read_bytes() != same.read_bytes():
            raise ConfigError(f"{mine}: is ignored in favour of {same}; rename your file")
    return [f"hydra.searchpath=['file://{own}']"]


@contextmanager
def hydra_over(root: Path) -> Iterator[ConfigLoader]:
    """Initialize Hydra with the configurations in `root`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(root), version_base=None):
        yield GlobalHydra.instance().config_loader()


def parse_overrides(words: list[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse Hydra overrides; a `glob` over a group's choices needs the `loader`.

    Raises:
        ConfigError: if an override is malformed.
    """
    try:
        overrides: list[Override] = OverridesParser.create(loader).parse_overrides(words)
    except OverrideParseException as error:
        word = error.override or ""
        raise ConfigError(f"{word!r}: {first_line(error)}{_in_quotes(word)}") from error
    return overrides


def _in_quotes(word: str) -> str:
    """Hint on quoting a setting whose value has special characters."""
    key, equals, value = word.partition("=")
    fits = equals and not {*value} & {*"'\"[{"}
    return f"; quote it for the shell and for Hydra: \"{key}='{value}'\"" if fits else ""


def _settings(overrides: list[str]) -> list[str]:
    """Check that `overrides` set existing keys, because others would be ignored silently.

    `++key=value` becomes `key=value`, which Hydra rejects for an unknown key.
    """
    settings = []
    for word, override in zip(overrides, parse_overrides(overrides), strict=True):
        key = override.key_or_group
        if word == "experiment=null":  # the default, which Hydra does not accept as a choice
            continue
        if (override.package or key).startswith(tuple(f"{name}." for name in FREE_SECTIONS)):
            settings.append(word)
        elif override.is_add() or override.is_delete():
            free = " or ".join(f"{name}.…" for name in FREE_SECTIONS)
            raise ConfigError(
                f"{word!r}: keys can be added or deleted only in {free}; set an existing key with "
                f"{key}=…, or unset it with {key}=null"
            )
        else:
            settings.append(word.removeprefix("++"))
    return settings


def read(file: Path, overrides: list[str], *, own: bool = False) -> Config:
    """Read a complete configuration from a file, with `key=value` changes to existing keys.

    Args:
        own: trust its targets like those on the command line, because this run has written the
            file or nothing is built from it.

    Raises:
        ConfigError: if the file is missing or invalid, an override changes an unknown key or a
            group's choice, or a `_target_` is in a package that is not trusted.
    """
    try:
        config = OmegaConf.load(file)
        assert isinstance(config, DictConfig)
        OmegaConf.set_struct(config, True)
        for word in overrides:
            key, _, value = word.partition("=")
            is_section = isinstance(OmegaConf.select(config, key), DictConfig)
            if is_section and value != "null" and not value.startswith("{"):
                raise ConfigError(
                    f"{file}: {word!r}: {key} is a section, and a complete configuration has no "
                    "alternatives to it; set its keys, or omit --config-file"
                )
        if not own:
            require_trusted(file, config)
        config.merge_with_dotlist(overrides)
        resolved = _resolved(config)
        if own:
            trust(resolved.values)
        return resolved
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such configuration{nearest_path(file)}") from error
    except (OSError, ValueError, AssertionError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: {first_line(error)}") from error


@dataclass(frozen=True)
class Arguments:
    """The parsed arguments of a command.

    Attributes:
        name: name of the root file.
        folder: folder of the root file; None: the installed configurations.
        file: a complete configuration, used instead of `name`.
        overrides: `key=value` settings.
        show_only: whether to print the configuration and exit.
        multirun: whether the overrides describe a sweep.
    """

    name: str
    folder: Path | None = None
    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    show_only: bool = False
    multirun: bool = False

    def compose(self, overrides: list[str] | None = None) -> Config:
        """Compose the configuration; `overrides`, if given, replace its own."""
        overrides = self.overrides if overrides is None else overrides
        if self.file is not None:  # perhaps of another command, whose keys have other limits
            return read(self.file, overrides)
        config = compose(self.name, overrides, self.folder)
        trust(config.values)
        if self.folder is None:
            check_values(self.name, config.flat())
        return config


def parse_arguments(command: str, words: list[str], first_key: str | None = None) -> Arguments:
    """Parse a command's words; `--key value` and `--key=value` mean `key=value`.

    The last part of a key suffices if it is unambiguous: `number=5`.

    Args:
        command: name of its root file.
        words: the words after the command.
        first_key: key that a first word without a key sets.

    Raises:
        ConfigError: if a word is neither a known option nor a setting.
    """
    files: dict[str, str | None] = dict.fromkeys(CONFIG_OPTIONS)
    dashed: dict[str, str] = {}
    overrides: list[str] = []
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
        elif option in CONFIG_OPTIONS:
            files[option] = value if equals or not remaining else remaining.popleft()
            if not files[option]:
                raise ConfigError(f"{option}: needs a value")
        elif option.startswith("--"):
            if not equals and remaining and not re.match("--|.*=", remaining[0]):
                value = remaining.popleft()
            dashed[option] = value
            overrides.append(f"{option.removeprefix('--')}={value}")
        elif word.startswith("-"):
            raise _unknown_option(option)
        elif not option:
            raise ConfigError(f"{word!r}: write key=value without spaces around the =")
        elif equals:
            overrides.append(word)
        elif first_key is not None and not any(o.startswith(f"{first_key}=") for o in overrides):
            overrides.append(f"{first_key}={quoted(word)}")
            said, first_key = f"{first_key} is already {word!r}; ", None
        else:
            raise ConfigError(f"{word!r}: {said}give settings as key=value and quote spaces")
    name, folder, file = files.values()
    arguments = Arguments(
        name or command,
        Path(folder) if folder else None,
        Path(file) if file else None,
        overrides,
        **modes,
    )
    if not overrides:
        return arguments
    known = _known_keys(arguments.name, arguments.folder, arguments.file)
    for option, given in dashed.items():
        key = _in_full(f"{option.removeprefix('--')}=", known).partition(".")[0].rstrip("=")
        if key not in known:
            raise _unknown_option(option, known)
        if not given:
            raise ConfigError(f"{option}: needs a value")
    return replace(arguments, overrides=[_in_full(word, known) for word in overrides])


def _in_full(word: str, known: Iterable[str]) -> str:
    """The setting with its key expanded to the known key that ends in it."""
    short, equals, value = word.partition("=")
    if not short.isidentifier() or short in known or (key := full_key(short, known)) == short:
        return word
    log.info("%s: interpreted as %s", short, key)
    return f"{key}{equals}{value}"


def compose_arguments(command: str, words: list[str]) -> tuple[Config, Arguments]:
    """Parse the arguments of a command that does not support sweeps, and compose them."""
    arguments = parse_arguments(command, words)
    if arguments.multirun:
        raise ConfigError(f"--multirun: not supported by {command}; use d2plm train")
    return arguments.compose(), arguments


def quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _known_keys(name: str, folder: Path | None, file: Path | None = None) -> list[str]:
    """Sections, groups and keys of a root file, or of a complete configuration."""
    if file is not None:
        base = read(file, [])
        return [*base.values, *base.flat()]
    root = (folder or config_dir()).resolve()
    if root == config_dir().resolve() and (root / f"{name}.yaml").is_file():
        known = known_keys(name)
        return [*{key.partition(".")[0]: None for key in known}, *groups(name), *known]
    own = compose(name, [], root, complete=False)
    with hydra_over(root) as loader:
        choices = loader.load_configuration(name, [], RunMode.RUN).hydra.runtime.choices
    chosen = [group for group in choices if not group.startswith("hydra/")]
    return [*own.values, *chosen, *own.flat()]


def _unknown_option(option: str, keys: Iterable[str] = ()) -> ConfigError:
    options = (*CONFIG_OPTIONS, "--cfg", *GLOBAL_OPTIONS, *MULTIRUN, *SWITCHES)
    short = {f"--{key.rpartition('.')[2]}": f"--{key}" for key in keys}
    near = did_you_mean(option, [*options, *short.values()])
    if not near and (last := nearest(option, short)):
        near = f" (did you mean '{short[last]}'?)"
    return ConfigError(f"unknown option {option!r}{near}; see --help")


def _resolved(config: DictConfig, complete: bool = True) -> Config:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=complete)
    assert isinstance(values, dict)
    return Config({str(key): value for key, value in values.items()})


def _explain_choice(error: MissingConfigException) -> str:
    """One-line version of Hydra's error on an unknown choice, with a suggestion."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return first_line(error)
    near = did_you_mean(choice, error.options)
    return f"{group}={choice}: no such choice{near}; choose from {', '.join(error.options)}"


def _explain_key(error: Exception, name: str, root: Path) -> str:
    """One-line version of Hydra's error on a key, with a suggestion."""
    message = first_line(error)
    if message.startswith("Ambiguous value"):
        remedy = f"write a list as [a,b]{_in_quotes(message.split(chr(39))[1])}"
        return f"{message}: {remedy}; d2plm train --multirun sweeps"
    if "Could not override" not in message:
        return message
    key = message.split("'")[1]
    known = _known_keys(name, root)
    if key in known:
        group, of_one, _ = key.partition(".")
        if of_one:
            return f"{key}: the chosen {group} has no such key; --cfg shows its keys"
        return f"{key}: select one of its choices by name, {key}=NAME; --help lists them"
    elsewhere = [one for one in known if one.endswith(f".{key.rpartition('.')[2]}")]
    near = f" (did you mean '{elsewhere[0]}'?)" if len(elsewhere) == 1 else did_you_mean(key, known)
    if key.startswith(tuple(f"{section}." for section in FREE_SECTIONS)):
        return f"unknown key {key!r}{near}; add a new key with +{key}=…"
    return f"unknown key {key!r}{near}; --cfg shows the known keys"


def _explain_missing(key: str, name: str, root: Path) -> str:
    said = known_keys(name).get(key, ("", ""))[1] if root == config_dir().resolve() else ""
    return f"{key}: is required; set {key}=…{f': {said}' if said else ''}"


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
