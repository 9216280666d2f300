"""The choices of a configuration by name: paradigms, optimizers, schedules, callbacks, trainers.

A configuration contains names and never Python objects, so a stranger's configuration cannot run
code. Built-in names are below. Others are added with `register`, by a module given on the command
line (`d2plm train --module my_paradigm.py …`) or by the module of an installed package's entry
point in the group `d2plm`.
"""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from d2plm.core.errors import ConfigError, did_you_mean, first_line, require
from d2plm.settings import callbacks, paradigm, training
from d2plm.settings.schema import Settings

ENTRY_POINTS = "d2plm"
GROUPS = ("paradigm", "optimizer", "schedule", "callback", "metric", "trainer")

Factory = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A choice: the class of its section, and what builds it, as an object or `module:name`."""

    settings: type[Settings]
    location: Factory | str

    @property
    def factory(self) -> Factory:
        if not isinstance(self.location, str):
            return self.location
        module, _, name = self.location.partition(":")
        found: Factory = getattr(importlib.import_module(module), name)
        return found


_ENTRIES: dict[str, dict[str, Entry]] = {
    "paradigm": {
        "diffusion": Entry(
            paradigm.DiffusionSettings, "d2plm.paradigms.diffusion:AbsorbingDiffusion"
        ),
        "flow_matching": Entry(
            paradigm.FlowMatchingSettings, "d2plm.paradigms.flow_matching:flow_matching"
        ),
    },
    "optimizer": {
        "adamw": Entry(training.AdamWSettings, "d2plm.training.optimizer:build_adamw"),
        "muon": Entry(training.MuonSettings, "d2plm.training.muon:build_muon"),
    },
    "schedule": {
        "cosine": Entry(training.CosineSettings, "d2plm.training.learning_rate:cosine"),
        "linear": Entry(training.CosineSettings, "d2plm.training.learning_rate:linear"),
        "constant": Entry(training.ConstantSettings, "d2plm.training.learning_rate:constant"),
        "wsd": Entry(training.WsdSettings, "d2plm.training.learning_rate:wsd"),
    },
    "callback": {
        "gradient_health": Entry(
            callbacks.GradientHealthSettings,
            "d2plm.training.callbacks.gradient_health:GradientHealth",
        ),
        "garbage_collection": Entry(
            callbacks.GarbageCollectionSettings,
            "d2plm.training.callbacks.garbage_collection:GarbageCollection",
        ),
        "profiler": Entry(callbacks.ProfilerSettings, "d2plm.training.callbacks.profiler:Profiler"),
        "metrics": Entry(
            callbacks.MetricsSettings, "d2plm.training.callbacks.metric_logger:MetricLogger"
        ),
        "progress": Entry(
            callbacks.CallbackSettings, "d2plm.training.callbacks.progress_bar:ProgressBar"
        ),
        "evaluation": Entry(
            callbacks.EvaluationCallbackSettings, "d2plm.training.callbacks.evaluation:Evaluate"
        ),
        "early_stopping": Entry(
            callbacks.EarlyStoppingSettings, "d2plm.training.callbacks.early_stopping:EarlyStopping"
        ),
        "checkpoint": Entry(
            callbacks.CheckpointSettings, "d2plm.training.callbacks.save_checkpoint:SaveCheckpoint"
        ),
        "export": Entry(callbacks.CallbackSettings, "d2plm.export.export_callback:Export"),
    },
    "metric": {},
    "trainer": {"trainer": Entry(training.TrainerSettings, "d2plm.training.trainer:Trainer")},
}


def register(
    group: str, name: str, factory: Factory, settings: type[Settings] | None = None
) -> None:
    """Add a choice; call it in a module that is passed as `--module`.

    Raises `ConfigError` if the group is unknown, or the name has another factory.

    Args:
        group: `paradigm`, `optimizer`, `schedule`, `callback`, `metric` or `trainer`.
        name: its name in configurations and saved models.
        factory: for a paradigm, a function of its settings; for an optimizer, of (model, parameters
            by name, settings=); for a schedule, of (steps, settings=); for a metric, without
            arguments; for a callback or trainer, a class derived from `Callback` or `Trainer`.
        settings: class of its section, with the keys that it adds; None adds none.
    """
    if group not in _ENTRIES:
        raise ConfigError(f"unknown group {group!r}{did_you_mean(group, GROUPS)}")
    require(re.fullmatch(r"[A-Za-z][\w-]*", str(name)) is not None, "name", name, "a word")
    require(callable(factory), "factory", factory, "a class or function")
    known = _ENTRIES[group].get(name)
    if known is not None and _origin(known.location) != _origin(factory):
        raise ConfigError(f"the {group} {name!r} exists already; register another name")
    base = {
        "paradigm": paradigm.ParadigmSettings,
        "callback": callbacks.CallbackSettings,
        "trainer": training.TrainerSettings,
        "optimizer": training.OptimizerSettings,
        "schedule": training.ScheduleSettings,
    }.get(group, Settings)
    kind = settings or base
    is_derived = isinstance(kind, type) and issubclass(kind, base)
    require(is_derived, "settings", settings, f"a class derived from {base.__name__}")
    _ENTRIES[group][name] = Entry(kind, factory)


def _origin(location: Factory | str) -> str:
    if isinstance(location, str):
        return location
    name = getattr(location, "__qualname__", "<")  # of a lambda, or of an object: its identity
    return f"{location.__module__}:{name}" if "<" not in name else str(id(location))


def registered(group: str) -> dict[str, Entry]:
    """The choices of a group by name, including those of installed packages."""
    _load_installed()
    return _ENTRIES[group]


def find(group: str, name: str, where: str = "") -> Entry:
    """The choice called `name`; a `ConfigError` for an unknown one names the key `where`."""
    known = registered(group)
    if name not in known:
        raise ConfigError(
            f"unknown {group}{did_you_mean(name, known)}; known are {', '.join(known)}; one of "
            "your own needs --module FILE, a module that registers it",
            {where or group: name},
        )
    return known[name]


@cache
def _load_installed() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # other packages may raise anything
            raise ConfigError(
                f"the entry point {point.value} of an installed package cannot be loaded: "
                f"{first_line(error)}; remove or repair the package"
            ) from error


_loaded: list[str] = []  # arguments of --module


def load_modules(names: Sequence[str]) -> None:
    """Import modules (names or Python files) that register choices; `ConfigError` if one fails."""
    for name in names:
        file = Path(name).resolve() if name.endswith(".py") or "/" in name else None
        if file is not None and not (file.is_file() and file.suffix == ".py"):
            raise ConfigError(
                f"--module {name}: is no Python file; give FILE.py, or the name of a module"
            )
        if file is not None and str(file.parent) not in sys.path:
            sys.path.insert(0, str(file.parent))
        try:
            module = importlib.import_module(name if file is None else file.stem)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise ConfigError(f"--module {name}: {first_line(error)}") from error
        if file is not None and Path(str(module.__file__)).resolve() != file:
            raise ConfigError(f"--module {name}: {file.stem} is another module; rename the file")
        if name not in _loaded:
            _loaded.append(name)


def loaded_modules() -> list[str]:
    """The arguments of `--module`, as written."""
    return list(_loaded)


def module_words() -> list[str]:
    """The options `--module …` of this process, for the commands that it starts."""
    return [word for name in _loaded for word in ("--module", name)]
