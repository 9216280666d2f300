"""Settings of the callbacks of training."""

from dataclasses import dataclass
from typing import Literal

from d2plm.core.errors import require
from d2plm.settings.schema import Settings, key


@dataclass(frozen=True, kw_only=True)
class CallbackSettings(Settings):
    """A callback without settings."""


@dataclass(frozen=True, kw_only=True)
class GradientHealthSettings(CallbackSettings):
    """Skips steps whose gradients are not finite, or stops the run."""

    every: int | None = key(None, low=1)
    """steps between checks; null: 1 on a CPU, on CUDA the steps that log"""
    max_skipped: int = key(0, low=0)
    """steps that may be skipped; 0 stops at the first"""
    counted: Literal["in_a_row", "in_total"] = key("in_a_row")
    """what max_skipped counts"""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = "1 or null with max_skipped: only a step that is checked can be skipped"
        require(not self.max_skipped or self.every in (None, 1), "every", self.every, wanted)


@dataclass(frozen=True, kw_only=True)
class GarbageCollectionSettings(CallbackSettings):
    """Runs Python's garbage collector at fixed steps, the same on every rank."""

    every: int = key(100, low=1)
    """optimizer steps between collections"""
    generation: Literal[0, 1, 2] = key(1)
    """oldest generation to examine"""


@dataclass(frozen=True, kw_only=True)
class ProfilerSettings(CallbackSettings):
    """Writes traces of some steps to output_dir/profile."""

    start: int | None = key(None, low=1)
    """steps of the process before the first traced one; null: no trace"""
    steps: int = key(3, low=1)
    """number of steps to trace"""


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(CallbackSettings):
    """Logs metrics to metrics.jsonl and to the tracking run."""

    every: int = key(20, low=1)
    """optimizer steps between rows"""
    peak_tflops: float | None = key(None, above=0)
    """peak of one device for mfu; null: the datasheet's value, if known"""
    layer_norms: bool = key(False)
    """log norms of each layer's gradient and of the optimizer's state"""
    more: list[str] = key([])
    """registered names of your own metrics"""


@dataclass(frozen=True, kw_only=True)
class EvaluationCallbackSettings(CallbackSettings):
    """Evaluates the bound on some validation sequences during training."""

    every: int = key(500, low=1)
    """optimizer steps between evaluations; also one at the end"""
    sequences: int = key(256, low=1)
    """validation sequences, a fixed random choice"""
    masks_per_sequence: int = key(2, low=1)
    """draws of masks for each sequence"""


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingSettings(CallbackSettings):
    """Stops training when evaluations no longer improve."""

    monitor: str = key("validation_nelbo")
    """metric of the evaluation"""
    patience: int | None = key(None, low=1)
    """consecutive evaluations without an improvement; null: never stops"""
    min_delta: float = key(0.0, low=0)
    """smallest improvement that counts"""
    mode: Literal["min", "max"] = key("min")
    """direction of improvement"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(CallbackSettings):
    """Saves checkpoints, from which a run can resume."""

    every: int = key(500, low=1)
    """optimizer steps between checkpoints; also one at the end"""
