"""Composing configurations with Hydra: files, groups and overrides → one checked `Config`.

Commands read it; the library never does. Unknown keys are refused by name before anything starts.
"""

from collections.abc import Iterator
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

from d2plm.errors import ConfigError, did_you_mean
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

    Raises:
        ConfigError: for anything that is neither a known option nor `key=value`.
    """
    options = {"--config-name": command, "--config-dir": None, "--config-file": None}
    overrides, show_only = [], False
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if word == "--cfg":
            show_only = True
        elif option in options:
            chosen = value if equals else next(remaining, None)
            if not chosen:
                raise ConfigError(f"{option}: needs a value")
            options[option] = chosen
        elif word.startswith("-"):
            raise ConfigError(
                f"unknown option {word!r}{did_you_mean(word, [*options, '--cfg', '--help'])}"
            )
        elif not equals:
            raise ConfigError(f"{word!r}: give settings as key=value; see --help")
        else:
            overrides.append(word)
    file, folder = options["--config-file"], options["--config-dir"]
    if file is not None:
        return read(Path(file), overrides), show_only
    name = options["--config-name"] or command
    return compose(name, overrides, Path(folder) if folder else None), show_only


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
