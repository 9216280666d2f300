"""Composing configurations with Hydra: files, groups and overrides → one checked `Config`.

Commands read it; the library never does. Unknown keys are rejected before anything starts.
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

# The only places where `+key=value` may put names of the user's own.
FREE_SECTIONS = ("arms", "sizes", "data.mixture", "callbacks", "tracking.tags")


@dataclass(frozen=True)
class Config:
    """A composed configuration.

    Args:
        values: nested plain dictionary, interpolations resolved.
    """

    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        try:
            return self.values[key]
        except KeyError:
            raise ConfigError(f"{key}: the configuration has no such section") from None

    def build(self, key: str, **arguments: Any) -> Any:
        """Instantiate the section's `_target_`, with `arguments` added."""
        return build(self[key], key, **arguments)

    def as_yaml(self) -> str:
        """The configuration as YAML."""
        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    def save(self, file: Path) -> None:
        """Write it where a run's outputs are, readable by its owner alone: it may hold secrets."""
        write_text(file, self.as_yaml(), 0o600)

    def flat(self) -> dict[str, Any]:
        """{"model.hidden_size": 128, …}, for the tracker."""
        return dict(_flatten(self.values))


def compose(
    name: str, overrides: list[str], folder: Path | None = None, *, complete: bool = True
) -> Config:
    """Compose the root file `name` with Hydra overrides.

    Unless it is to be `complete`, values that only the user can give stay `???`.

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
    """What has Hydra look for choices of the groups in `./configs`, too, after its own.

    A choice that both have would be taken from its own: it is refused where the files differ.
    """
    own = Path("configs").resolve()
    if not own.is_dir() or own == root:
        return []
    for word in overrides:
        group, _, choice = word.partition("=")
        mine, same = (folder / group / f"{choice}.yaml" for folder in (own, root))
        if mine.is_file() and same.is_file() and mine.read_bytes() != same.read_bytes():
            raise ConfigError(f"{mine}: would not be read, since there is {same}; rename yours")
    return [f"hydra.searchpath=['file://{own}']"]


@contextmanager
def hydra_over(root: Path) -> Iterator[ConfigLoader]:
    """Hydra, set up for the configurations in `root`."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(root), version_base=None):
        yield GlobalHydra.instance().config_loader()


def parse_overrides(words: list[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Hydra overrides, parsed; a `glob` over a group's choices needs the `loader`.

    Raises:
        ConfigError: for one that is malformed.
    """
    try:
        overrides: list[Override] = OverridesParser.create(loader).parse_overrides(words)
    except OverrideParseException as error:
        word = error.override or ""
        raise ConfigError(f"{word!r}: {first_line(error)}{_in_quotes(word)}") from error
    return overrides


def _in_quotes(word: str) -> str:
    """How to write a setting whose value has special characters, for a shell, too."""
    key, equals, value = word.partition("=")
    fits = equals and not {*value} & {*"'\"[{"}
    return f"; quote it for the shell and for its characters: \"{key}='{value}'\"" if fits else ""


def _settings(overrides: list[str]) -> list[str]:
    """`overrides`, checked to set existing keys: any other would be ignored silently.

    `++key=value` becomes `key=value`, which Hydra rejects for an unknown key.
    """
    settings = []
    for word, override in zip(overrides, parse_overrides(overrides), strict=True):
        key = override.key_or_group
        if word == "experiment=null":  # the default, which Hydra refuses as a choice
            continue
        if (override.package or key).startswith(tuple(f"{name}." for name in FREE_SECTIONS)):
            settings.append(word)
        elif override.is_add() or override.is_delete():
            free = " or ".join(f"{name}.…" for name in FREE_SECTIONS)
            raise ConfigError(
                f"{word!r}: keys are added or deleted in {free} only, since nothing reads others; "
                f"{key}=… sets a key, and {key}=null may switch it off"
            )
        else:
            settings.append(word.removeprefix("++"))
    return settings


def read(file: Path, overrides: list[str], *, own: bool = False) -> Config:
    """A whole configuration from a file, with `key=value` changes to existing keys.

    Args:
        own: whether its targets are as trusted as words of the command line: this very run has
            written it, or nothing is built from it.

    Raises:
        ConfigError: for a file that is none, a change to an unknown key or to a group's choice, or
            a `_target_` in a package that is not trusted.
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
                    f"{file}: {word!r}: {key} is a section, and a whole configuration has no other "
                    "to choose; set its keys, or compose anew without --config-file"
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
    """A command's words, taken apart.

    Attributes:
        name: of the root file.
        folder: where it is; None: in the configurations that are installed.
        file: a whole configuration, in place of `name`.
        overrides: `key=value` settings.
        show_only: whether the configuration is only to be shown.
        multirun: whether the overrides are a sweep.
    """

    name: str
    folder: Path | None = None
    file: Path | None = None
    overrides: list[str] = field(default_factory=list)
    show_only: bool = False
    multirun: bool = False

    def compose(self, overrides: list[str] | None = None) -> Config:
        """The configuration, with these overrides in place of its own where there are any.

        Raises:
            ConfigError: as `compose` and `read`.
        """
        overrides = self.overrides if overrides is None else overrides
        if self.file is not None:
            config = read(self.file, overrides)
        else:
            config = compose(self.name, overrides, self.folder)
            trust(config.values)
        # A whole configuration may be another command's, whose own keys have other limits.
        shipped = self.file is None and self.folder is None
        if shipped and (config_dir() / f"{self.name}.yaml").is_file():
            check_values(self.name, config.flat())
        return config


def parse_arguments(command: str, words: list[str], first_key: str | None = None) -> Arguments:
    """Parse a command's words; `--key value` and `--key=value` are the same as `key=value`.

    The last part of a key is enough where no other key ends in it: `number=5`.

    Args:
        command: its root file.
        words: what follows it.
        first_key: the key that a first word without one is the value of.

    Raises:
        ConfigError: for what is neither a known option nor a setting.
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
            raise ConfigError(f"{word!r}: write key=value without blanks around the =")
        elif equals:
            overrides.append(word)
        elif first_key is not None and not any(o.startswith(f"{first_key}=") for o in overrides):
            overrides.append(f"{first_key}={quoted(word)}")
            said, first_key = f"{word!r} is taken as {first_key}; ", None
        else:
            raise ConfigError(f"{word!r}: {said}give settings as key=value, blanks in quotes")
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
    """A setting whose key, where it is only the last part of a known one, is that one."""
    short, equals, value = word.partition("=")
    if not short.isidentifier() or short in known or (key := full_key(short, known)) == short:
        return word
    log.info("%s: taken for %s", short, key)
    return f"{key}{equals}{value}"


def compose_arguments(command: str, words: list[str]) -> tuple[Config, Arguments]:
    """The configuration of a command that takes no sweep, and its words, taken apart.

    Raises:
        ConfigError: for anything that is neither a known option nor the setting of a known key.
    """
    arguments = parse_arguments(command, words)
    if arguments.multirun:
        raise ConfigError(f"--multirun: only d2plm train takes it, not {command}")
    return arguments.compose(), arguments


def quoted(value: str) -> str:
    """A value as an override may hold it, whatever characters it has."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _known_keys(name: str, folder: Path | None, file: Path | None = None) -> list[str]:
    """The sections, groups and keys of a root file, or of a whole configuration."""
    if file is not None:
        base = read(file, [])
        return [*base.values, *base.flat()]
    root = (folder or config_dir()).resolve()
    if root == config_dir().resolve() and (root / f"{name}.yaml").is_file():
        known = known_keys(name)
        return [*{key.partition(".")[0]: None for key in known}, *groups(name), *known]
    with hydra_over(root) as loader:
        choices = loader.load_configuration(name, [], RunMode.RUN).hydra.runtime.choices
    own = compose(name, [], root, complete=False)
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
    """Hydra's error on a group's choice in one line, with the nearest one."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return first_line(error)
    near = did_you_mean(choice, error.options)
    return f"{group}={choice}: there is no such choice{near}; there are {', '.join(error.options)}"


def _explain_key(error: Exception, name: str, root: Path) -> str:
    """Hydra's error in one line, with the nearest of the keys that the chosen groups have."""
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
            return f"{key}: the {group} that is chosen has no such key; --cfg shows its keys"
        return f"{key}: give one of its choices by name, as {key}=NAME; --help lists them"
    elsewhere = [one for one in known if one.endswith(f".{key.rpartition('.')[2]}")]
    near = f" (did you mean '{elsewhere[0]}'?)" if len(elsewhere) == 1 else did_you_mean(key, known)
    if key.startswith(tuple(f"{section}." for section in FREE_SECTIONS)):
        return f"unknown key {key!r}{near}; +{key}=… adds one of your own"
    return f"unknown key {key!r}{near}; --cfg shows the known ones"


def _explain_missing(key: str, name: str, root: Path) -> str:
    """A required key and its description."""
    said = known_keys(name).get(key, ("", ""))[1] if root == config_dir().resolve() else ""
    return f"{key}: is required; give {key}=…{f': {said}' if said else ''}"


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
