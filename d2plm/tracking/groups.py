"""The groups in which trackers show metrics, by what stands before the slash of a name.

In `metrics.jsonl`, in callbacks and in a terminal a metric of training has a plain name. All
trackers are told the grouped one, so that their charts come in the same sections. docs/tracking.md
lists them.
"""

from collections.abc import Mapping

TRAIN, VALIDATION = "train", "validation"
GROUPS = {
    "tokens_per_second": "time",
    "model_tflops_per_second": "time",
    "mfu": "time",
    "data_wait_share": "time",
    "peak_memory_gib": "system",
    "peak_memory_allocated_gib": "system",
    "peak_memory_reserved_gib": "system",
}


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of training under the names that trackers are told.

    `validation_x` becomes `validation/x`. Metrics of the user's own are of training, unless their
    name has a slash already.
    """
    return {_grouped(name): value for name, value in metrics.items()}


def _grouped(name: str) -> str:
    if "/" in name:
        return name
    if name.startswith(f"{VALIDATION}_"):
        return f"{VALIDATION}/{name.removeprefix(f'{VALIDATION}_')}"
    return f"{GROUPS.get(name, TRAIN)}/{name}"
