"""Composing configurations with Hydra: files, groups and overrides → one checked `Config`.

Commands read it; the library never does. Unknown keys are refused by name before anything starts.
"""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from d2plm.errors import ConfigError, did_you_mean, require
from d2plm.files import write_text


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
        """Write it where a run's outputs are."""
        write_text(file, self.as_yaml())

    def flat(self) -> dict[str, Any]:
        """{"model.hidden_size": 128, …}, for the tracker."""
        return dict(_flatten(self.values))


def build(section: dict[str, Any], key: str, **arguments: Any) -> Any:
    """Instantiate a `_target_` section; an argument that its target lacks is named."""
    try:
        return instantiate(OmegaConf.create(section), _convert_="all", **arguments)
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            raise cause from None
        raise ConfigError(f"{key}: {_one_line(cause)}") from error


def build_with(section: dict[str, Any], key: str, **offered: Any) -> Any:
    """Instantiate a `_target_` section with those of `offered` that its target takes.

    What the section itself says wins.

    Raises:
        ConfigError: where the section has an argument that the target does not take, or lacks one.
    """
    named = isinstance(section, dict) and "_target_" in section
    require(named, key, section, "a section with a _target_, or null")
    factory = build({**section, "_partial_": True}, key)
    try:
        parameters = inspect.signature(factory.func).parameters
    except ValueError:  # of what is written in C
        target = section["_target_"]
        raise ConfigError(f"{key}._target_={target!r}: must be written in Python") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in factory.keywords:
        if name not in parameters and not takes_any:
            raise ConfigError(f"unknown key '{key}.{name}'{did_you_mean(name, parameters)}")
    fitting = {name: value for name, value in offered.items() if name in parameters}
    arguments = {**fitting, **factory.keywords}
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if needed and name not in arguments:
            raise ConfigError(f"{key}.{name}: {section['_target_']} needs a value for it")
    return factory.func(*factory.args, **arguments)


def compose(
    name: str, overrides: list[str], folder: Path | None = None, *, complete: bool = True
) -> Config:
    """Compose the root file `name` with Hydra overrides.

    Unless it is to be `complete`, values that only the user can give stay `???`.

    Raises:
        ConfigError: for an unknown file, group, choice or key, or a malformed override.
    """
    from d2plm.cli import config_dir

    root = (folder or config_dir()).resolve()
    if not (root / f"{name}.yaml").is_file():
        known = [file.stem for file in root.glob("*.yaml")]
        raise ConfigError(f"no configuration {name}.yaml in {root}{did_you_mean(name, known)}")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(root), version_base=None):
            return _resolved(hydra_compose(name, overrides=overrides), complete)
    except ConfigCompositionException as error:
        raise ConfigError(_explain(error, name, root)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def read(file: Path, overrides: list[str]) -> Config:
    """A whole configuration from a file, with `key=value` changes to existing keys."""
    try:
        config = OmegaConf.load(file)
        assert isinstance(config, DictConfig)
        OmegaConf.set_struct(config, True)
        config.merge_with_dotlist(overrides)
        return _resolved(config)
    except (OSError, ValueError, AssertionError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: {_one_line(error)}") from error


def compose_arguments(command: str, words: list[str]) -> tuple[Config, bool]:
    """A command's words → (its configuration, whether it is only to be shown).

    `--key value` and `--key=value` say the same as `key=value`.

    Raises:
        ConfigError: for anything that is neither a known option nor the setting of a known key.
    """
    options = {"--config-name": command, "--config-dir": None, "--config-file": None}
    overrides, show_only = [], False
    dashed: dict[str, str | None] = {}
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if word == "--cfg":
            show_only = True
        elif option in options:
            options[option] = _required(option, value if equals else next(remaining, None))
        elif option.startswith("--"):
            dashed[option] = value if equals else _value(next(remaining, None))
            overrides.append(f"{option.removeprefix('--')}={dashed[option]}")
        elif word.startswith("-"):
            raise _unknown_option(option, options)
        elif not equals:
            raise ConfigError(f"{word!r}: give settings as key=value; see --help")
        else:
            overrides.append(word)
    file, folder = options["--config-file"], options["--config-dir"]
    name, root = options["--config-name"] or command, Path(folder) if folder else None
    if dashed:
        base = read(Path(file), []) if file else compose(name, [], root, complete=False)
        _require_keys(dashed, base, options, [] if file else _groups(root))
    if file is not None:
        return read(Path(file), overrides), show_only
    return compose(name, overrides, root), show_only


def _value(word: str | None) -> str | None:
    """The word after `--key`, unless it is itself an option or a setting, or there is none."""
    return None if word is None or word.startswith("--") or "=" in word else word


def _required(option: str, value: str | None) -> str:
    if not value:
        raise ConfigError(f"{option}: needs a value")
    return value


def _require_keys(
    dashed: dict[str, str | None], base: Config, options: Iterable[str], groups: list[str]
) -> None:
    """Refuse the options that are no key, or have no value.

    Only what stands before the first dot is looked at: a group's keys depend on its choice, and
    Hydra, which knows it, refuses the wrong ones.
    """
    for option, value in dashed.items():
        if option.removeprefix("--").partition(".")[0] not in {*base.values, *groups}:
            keys = [*base.values, *groups, *base.flat()]
            raise _unknown_option(option, [*options, *(f"--{key}" for key in keys)])
        _required(option, value)


def _unknown_option(option: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"unknown option {option!r}{did_you_mean(option, [*known, '--cfg', '--help'])}"
    )


def _groups(folder: Path | None) -> list[str]:
    from d2plm.cli import config_dir

    return [entry.name for entry in (folder or config_dir()).iterdir() if entry.is_dir()]


def _resolved(config: DictConfig, complete: bool = True) -> Config:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=complete)
    assert isinstance(values, dict)
    return Config({str(key): value for key, value in values.items()})


def _explain(error: Exception, name: str, root: Path) -> str:
    """Hydra's refusal in one line, with the nearest key where a key is unknown."""
    message = _one_line(error)
    if "Could not override" not in message:
        return message
    key = message.split("'")[1]
    with initialize_config_dir(str(root), version_base=None):
        known = [k for k, _ in _flatten(OmegaConf.to_container(hydra_compose(name)))]  # type: ignore[arg-type]  # a mapping
    return f"unknown key {key!r}{did_you_mean(key, known)}; --cfg shows the known ones"


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
