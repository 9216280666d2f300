"""Instantiating the `_target_`s of a configuration, and checking that they can be trusted.

The command line may name any function or class. A configuration file may come from somebody else,
so its targets are limited to packages that the user trusts.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from d2plm.core.errors import ConfigError, as_keys, did_you_mean, first_line, require

# Packages that configuration files may target; the environment variable adds more.
TRUSTED_PACKAGES = (
    *("d2plm.export.export_callback", "d2plm.model", "d2plm.paradigms", "d2plm.training"),
    "torch.optim",
)
TRUSTED_VARIABLE = "D2PLM_TRUSTED_PACKAGES"
COMPUTED = re.compile(r"\$\{(?![\w.\[\]-]+\})[^}\n]*")  # interpolation, not a plain reference


def build(section: dict[str, Any], key: str) -> Any:
    """Instantiate a `_target_` section; its errors name the keys."""
    try:
        return instantiate(OmegaConf.create(section), _convert_="all")
    except HydraException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ImportError):  # Hydra's wraps the one that names the missing module
            cause = cause.__cause__ or cause
        if isinstance(cause, ConfigError):
            with as_keys(key):
                raise cause from None
        raise ConfigError(f"{key}: {first_line(cause)}") from error


def build_with(section: dict[str, Any], key: str, **offered: Any) -> Any:
    """Instantiate a `_target_` section, adding the values in `offered` that its target accepts.

    The section's own values take precedence.

    Raises:
        ConfigError: if the section has an argument that the target does not accept, or lacks one.
    """
    named = isinstance(section, dict) and "_target_" in section
    require(named, key, section, "a section with a _target_, or null")
    target, factory = section["_target_"], build({**section, "_partial_": True}, key)
    parameters = _signature(factory.func, key, target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in factory.keywords:
        if name not in parameters and not takes_any:
            raise ConfigError(f"unknown key '{key}.{name}'{did_you_mean(name, parameters)}")
    fitting = {name: value for name, value in offered.items() if name in parameters}
    return _call(factory.func, key, target, factory.args, {**fitting, **factory.keywords})


def build_function(
    section: dict[str, Any], key: str, others: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Return the function of a `_partial_` section; errors of its calls name the keys.

    Args:
        others: argument → key, for arguments that are not in the section.
    """
    factory = build(section, key)

    def function(*arguments: Any, **named: Any) -> Any:
        keywords = {**factory.keywords, **named}
        return _call(factory.func, key, section["_target_"], arguments, keywords, others)

    return function


def _call(
    function: Callable[..., Any],
    key: str,
    target: str,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    others: Mapping[str, str] | None = None,
) -> Any:
    """Call the `_target_` of the section `key`; errors name the key."""
    try:
        _signature(function, key, target).bind(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(f"{key}: {target}: {error}") from None
    with as_keys(key, others):
        return function(*arguments, **keywords)


def _signature(function: Callable[..., Any], key: str, target: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a type implemented in C
        raise ConfigError(f"{key}._target_={target!r}: must be written in Python") from None


def require_trusted(file: Path, config: DictConfig) -> None:
    """Reject a file that would run code outside the trusted packages.

    The targeted object must be defined in a trusted package: a dotted name can also reach modules
    that a trusted module imports. Resolver interpolations are rejected because they could compute
    a target, either now or, in a resolved value, when the section is built.
    """
    if computed := COMPUTED.search(OmegaConf.to_yaml(config)):
        raise ConfigError(
            f"{file}: contains the interpolation {computed[0]}…; only references to its own keys "
            "are allowed"
        )
    packages, values = _trusted_packages(), OmegaConf.to_container(config, resolve=True)
    if "${" in str(values):
        raise ConfigError(f"{file}: contains a nested interpolation; write its value instead")
    for target in _targets_in(values):
        if not _is_trusted(target, packages):
            raise ConfigError(
                f"{file}: the target {target!r} is in none of the trusted packages "
                f"({', '.join(packages)}); if you trust it, set {TRUSTED_VARIABLE}={target}"
            )


def _trusted_packages() -> list[str]:
    registered = (point.module.partition(".")[0] for point in entry_points(group="d2plm.paradigms"))
    return [*TRUSTED_PACKAGES, *registered, *_trusted_by_the_user()]


def _trusted_by_the_user() -> list[str]:
    """Packages or single targets that the environment variable lists."""
    words = os.environ.get(TRUSTED_VARIABLE, "").split(",")
    return [word.strip() for word in words if word.strip()]


def _is_trusted(target: str, packages: Sequence[str]) -> bool:
    if target in packages:  # the user has listed the target itself
        return True
    prefixes = tuple(f"{package}." for package in packages)
    if not target.startswith(prefixes):
        return False
    try:
        found = get_object(target)
    except (ImportError, ValueError):
        return True  # nothing to call; building it reports the error
    return f"{getattr(found, '__module__', None)}.".startswith(prefixes)


def _targets_in(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        if "_target_" in values:
            yield str(values["_target_"])
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _targets_in(value)


def trust(values: dict[str, Any]) -> None:
    """Add the targets in `values` to the trusted ones of this process and its children.

    Child processes read the configuration from a file, where these targets would be rejected.
    """
    # Compared by name: resolving the names would import torch for every command.
    prefixes = tuple(f"{package}." for package in _trusted_packages())
    if targets := [name for name in _targets_in(values) if not name.startswith(prefixes)]:
        os.environ[TRUSTED_VARIABLE] = ",".join(sorted({*targets, *_trusted_by_the_user()}))
