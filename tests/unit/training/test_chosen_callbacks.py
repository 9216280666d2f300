"""The groups callbacks, schedule and optimizer: every file builds, and what the user may change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d2plm.targets import build, build_with

from d2plm.assembly.training_run import build_callbacks, build_optimizer
from d2plm.config import compose, read
from d2plm.core.errors import ConfigError
from d2plm.core.files import config_dir
from d2plm.data.store import SequenceStore
from d2plm.export.export_callback import Export
from d2plm.tracking.runs import Runs
from d2plm.training.callbacks.callback import Callback
from d2plm.training.callbacks.early_stopping import EarlyStopping
from d2plm.training.callbacks.evaluation import Evaluate
from d2plm.training.callbacks.garbage_collection import GarbageCollection
from d2plm.training.callbacks.gradient_health import GradientHealth
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.profiler import Profiler
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.metrics import Metric
from tests.conftest import DiTFactory

DEFAULT = [
    GradientHealth,
    GarbageCollection,
    Profiler,
    MetricLogger,
    ProgressBar,
    Evaluate,
    EarlyStopping,
    SaveCheckpoint,
    Export,
]

Choose = Callable[..., list[Callback]]


def choices(group: str) -> list[str]:
    return sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))


@pytest.fixture
def offered(tiny_store: SequenceStore, tmp_path: Path) -> dict[str, Any]:
    """What the train command has for the callbacks."""
    return {
        "run": Runs(),
        "validation_store": tiny_store,
        "max_length": 64,
        "folder": tmp_path / "model",
        "provenance": {"name": "t", "digests": {}},
    }


@pytest.fixture
def chosen(offered: dict[str, Any]) -> Choose:
    """Overrides → the callbacks."""
    return lambda *words: build_callbacks(compose("train", [*words])["callbacks"], **offered)


def of_class(callbacks: list[Callback], kind: type) -> Any:
    (found,) = [callback for callback in callbacks if isinstance(callback, kind)]
    return found


class Mine(Callback):
    """A callback of the user's."""

    def __init__(self, provenance: dict[str, Any], size: int, folder: Path | None = None) -> None:
        self.provenance, self.size, self.folder = provenance, size, folder


class MyMetric(Metric):
    """A metric of the user's."""


# --- every file --------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", choices("callbacks"))
def test_every_callbacks_file_gives_callbacks(choice: str, chosen: Choose) -> None:
    callbacks = chosen(f"callbacks={choice}")
    assert len(callbacks) == (len(DEFAULT) if choice == "default" else 1)


@pytest.mark.parametrize("choice", choices("schedule"))
def test_every_schedule_file_gives_a_schedule(choice: str) -> None:
    schedule = build(compose("train", [f"schedule={choice}"])["schedule"], "schedule")(1000)
    assert 0 < schedule(0) < schedule(100) == 1
    assert schedule(1000) == (1 if choice == "constant" else 0)


@pytest.mark.parametrize("choice", choices("optimizer"))
def test_every_optimizer_file_gives_an_optimizer(choice: str, tiny_dit: DiTFactory) -> None:
    factory = build(compose("train", [f"optimizer={choice}"])["optimizer"], "optimizer")
    assert isinstance(factory(tiny_dit()), torch.optim.Optimizer)


# --- the choice --------------------------------------------------------------------------------


def test_the_default_ones_come_in_the_order_in_which_they_must_be_called(chosen: Choose) -> None:
    assert [type(callback) for callback in chosen()] == DEFAULT


def test_what_only_the_command_has_is_given_to_those_that_take_it(
    chosen: Choose, offered: dict[str, Any]
) -> None:
    callbacks = chosen()
    assert of_class(callbacks, MetricLogger).run is offered["run"]
    assert of_class(callbacks, Evaluate).max_length == 64
    export = of_class(callbacks, Export)
    assert export.folder == offered["folder"]
    assert export.provenance == offered["provenance"]


def test_one_setting_switches_the_optional_ones_on(chosen: Choose) -> None:
    callbacks = chosen()
    assert of_class(callbacks, EarlyStopping).patience is None
    assert of_class(callbacks, Profiler).start is None
    callbacks = chosen("callbacks.early_stopping.patience=3", "callbacks.profiler.start=10")
    assert of_class(callbacks, EarlyStopping).patience == 3
    assert of_class(callbacks, Profiler).start == 10


@pytest.mark.parametrize("name", [name for name in choices("callbacks") if name != "default"])
def test_null_leaves_one_out(name: str, chosen: Choose) -> None:
    left = {type(callback) for callback in chosen(f"callbacks.{name}=null")}
    assert len(left) == len(DEFAULT) - 1
    assert type(chosen(f"callbacks={name}")[0]) not in left


def test_null_leaves_one_out_of_a_written_configuration_too(
    tmp_path: Path, offered: dict[str, Any]
) -> None:
    compose("train", []).save(tmp_path / "config.yaml")
    config = read(tmp_path / "config.yaml", ["callbacks.progress=null"])
    kinds = [type(callback) for callback in build_callbacks(config["callbacks"], **offered)]
    assert kinds == [kind for kind in DEFAULT if kind is not ProgressBar]


def test_a_class_of_the_user_s_is_called_before_anything_is_saved(
    chosen: Choose, offered: dict[str, Any], tmp_path: Path
) -> None:
    callbacks = chosen(
        f"+callbacks.mine._target_={__name__}.Mine",
        "+callbacks.mine.size=3",
        f"+callbacks.mine.folder={tmp_path / 'mine'}",
    )
    last = [type(callback).__name__ for callback in callbacks if callback.called_last]
    assert last == ["SaveCheckpoint", "Export"]
    mine = of_class(callbacks, Mine)
    assert not mine.called_last
    assert mine.provenance is offered["provenance"]
    assert (mine.size, str(mine.folder)) == (3, str(tmp_path / "mine"))  # its own setting wins


def test_a_metric_of_the_user_s_is_measured(chosen: Choose) -> None:
    logger = of_class(
        chosen(f"callbacks.metrics.more=[{{_target_: {__name__}.MyMetric}}]"), MetricLogger
    )
    assert type(logger.metrics[-1]).__name__ == "MyMetric"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["callbacks.evaluation.evry=3"], "did you mean 'callbacks.evaluation.every'"),
        (["callbacks.progres=null"], "unknown key 'callbacks.progres'"),
        (["callbacks.checkpoint.every=0"], "callbacks.checkpoint.every=0"),
        (["+callbacks.checkpoint.evry=3"], "'callbacks.checkpoint.evry' (did you mean 'every'?)"),
        (["callbacks.progress=3"], "callbacks.progress"),
        (
            ["+callbacks.mine.size=3"],
            "callbacks.mine={'size': 3}: must be a section with a _target_",
        ),
        (["+callbacks.mine._target_=nowhere.Mine"], "callbacks.mine"),
        ([f"+callbacks.mine._target_={__name__}.Mine"], "missing a required argument: 'size'"),
        (["+callbacks.mine._target_=builtins.dict"], "callbacks.mine._target_='builtins.dict'"),
        (["+callbacks.mine._target_=fractions.Fraction"], "must be a class derived from d2plm."),
    ],
)
def test_what_cannot_be_built_is_rejected_by_name(
    words: list[str], message: str, chosen: Choose
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.optim.SGDD", "^optimizer: No module named 'torch.optim.SGDD'"),
        ("torch.optim.SGD", "^optimizer: torch.optim.SGD: got an unexpected keyword argument"),
        ("builtins.dict", "^optimizer._target_='builtins.dict': must be written in Python"),
    ],
)
def test_an_optimizer_that_cannot_be_called_so_is_one_clear_error(
    target: str, message: str
) -> None:
    config = compose("train", [f"optimizer._target_={target}"])
    with pytest.raises(ConfigError, match=message):
        build_optimizer(config)(torch.nn.Linear(1, 1), {})


def test_a_section_is_built_with_what_its_target_takes() -> None:
    section = {"_target_": "fractions.Fraction", "numerator": 3}
    assert build_with(section, "share", denominator=4, colour="red") * 4 == 3
