"""d2plm checkpoint: list, verify and convert the checkpoints of a run."""

from pathlib import Path
from typing import Any

from d2plm.core.errors import CheckpointError
from d2plm.core.files import nearest_path
from d2plm.core.terminal import done, result
from d2plm.settings.commands import CheckpointsSettings, ConvertSettings
from d2plm.training.checkpoint import Root, manifest, verify
from d2plm.training.conversion import to_safetensors


def run_list(config: CheckpointsSettings) -> list[dict[str, Any]]:
    root = _root(config.root)
    rows = [_row(root, name) for name in root.names()]
    result(f"{'checkpoint':16}{'epoch':>7}{'ranks':>7}{'bound':>10}{'MB':>10}  state")
    for row in rows:
        bound = "" if row["monitored"] is None else f"{row['monitored']:.4f}"
        result(
            f"{row['name']:16}{row['epoch']:>7}{row['world_size']:>7}{bound:>10}"
            f"{row['bytes'] / 1e6:>10.1f}  {row['state']}"
        )
    return rows


def run_verify(config: CheckpointsSettings) -> list[dict[str, Any]]:
    """Compare every checkpoint with its digests; raises `CheckpointError` if any is damaged."""
    root, damaged = _root(config.root), []
    found: list[dict[str, Any]] = []
    for name in root.names():
        try:
            run_state = verify(root, name)
        except CheckpointError as error:
            damaged.append(name)
            result(f"damaged  {error}")
            found.append({"checkpoint": root.of(name), "whole": False, "reason": str(error)})
        else:
            result(f"whole    {root.of(name)} (step {run_state['step']})")
            found.append({"checkpoint": root.of(name), "whole": True, "step": run_state["step"]})
    if damaged:
        refusal = CheckpointError(
            f"{len(damaged)} of {len(root.names())} checkpoints in {root.location} are damaged: "
            f"{', '.join(damaged)}; training skips them, so they may be deleted"
        )
        refusal.document = found
        raise refusal
    return found


def run_convert(config: ConvertSettings) -> dict[str, Any]:
    number = to_safetensors(config.checkpoint, Path(config.output), config.max_shard_bytes)
    done(f"wrote {number} tensors to {config.output}")
    return {"output": config.output, "tensors": number}


def _root(location: str) -> Root:
    inside = Path(location) / "checkpoints"
    root = Root(str(inside) if inside.is_dir() else location)
    if not root.names():
        raise CheckpointError(
            f"root={location}: contains no checkpoint{nearest_path(location)}; give the output_dir "
            "of a training run or its checkpoints folder"
        )
    return root


def _row(root: Root, name: str) -> dict[str, Any]:
    row = {"epoch": "", "world_size": "", "monitored": None}
    try:
        run_state = manifest(root, name)["run_state"]
    except CheckpointError:
        state = "damaged: incomplete manifest"
    else:
        row = {key: run_state[key] for key in row}
        state = f"step {run_state['step']}; not verified"
    return {"name": name, **row, "bytes": root.files.du(name), "state": state}
