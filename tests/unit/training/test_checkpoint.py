"""Checkpoints on disk: complete or rejected, never half loaded, never lost to a failing save."""

import copyreg
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata

from d2plm.core.errors import CheckpointError
from d2plm.training import checkpoint
from d2plm.training.checkpoint import PARTIAL, Root, Saver
from d2plm.training.distributed import Process
from tests.conftest import MonkeyPatch

Tree = dict[str, dict[str, Tensor]]


def tensors(value: float) -> Tree:
    return {
        "model": {"a.weight": torch.full((3, 4), value), "b": torch.full((2,), value * 2)},
        "optimizer": {"step": torch.tensor(value)},
    }


def save(
    root: Path, step: int, tree: Tree, progress: dict[str, Any], keep: int = 3, keep_best: int = 0
) -> Path:
    saver = Saver(Root(str(root)), Process(), keep, keep_best)
    location = saver.save(step, tree, progress)
    saver.wait()
    return Path(location)


def verify(folder: Path) -> dict[str, Any]:
    return checkpoint.verify(*checkpoint.split_location(str(folder)))


def load(folder: Path, tree: Tree) -> None:
    with checkpoint.fitting(str(folder)):
        checkpoint.load(*checkpoint.split_location(str(folder)), tree)


def data_file(folder: Path, rank: int = 0) -> Path:
    return max(folder.glob(f"__{rank}_*.distcp"), key=lambda file: file.stat().st_size)


def flip_a_bit(folder: Path, rank: int = 0) -> Path:
    file = data_file(folder, rank)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)
    return file


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_a_bit,
    "truncated file": lambda folder: os.truncate(data_file(folder), 10),
    "missing file": lambda folder: data_file(folder).unlink(),
    "missing metadata": lambda folder: (folder / ".metadata").unlink(),
    "missing manifest": lambda folder: (folder / "manifest.json").unlink(),
    "truncated manifest": lambda folder: (folder / "manifest.json").write_text('{"files": {'),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
    "half written": lambda folder: folder.rename(folder.with_name(folder.name + PARTIAL)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_one_before_is_taken(damage: str, tmp_path: Path) -> None:
    older = save(tmp_path, 1, tensors(1.0), {"step": 1})
    newer = save(tmp_path, 2, tensors(2.0), {"step": 2})
    root = Root(str(tmp_path))
    assert checkpoint.newest_whole(root) == newer.name
    DAMAGE[damage](newer)
    with pytest.raises(CheckpointError, match="step-00000002"):
        verify(newer)
    assert checkpoint.newest_whole(root) == older.name
    flip_a_bit(older)
    assert checkpoint.newest_whole(root) is None


def test_the_newest_and_the_best_are_kept_and_the_same_step_is_replaced(tmp_path: Path) -> None:
    root = Root(str(tmp_path))
    for step, bound in ((1, 2.0), (2, 1.0), (3, None), (20, 3.0), (100, 2.5)):
        save(tmp_path, step, tensors(step), {"monitored": bound}, keep=1, keep_best=2)
    assert root.names() == ["step-00000001", "step-00000002", "step-00000100"]
    save(tmp_path, 100, tensors(7.0), {"step": -1}, keep=2)
    assert verify(tmp_path / "step-00000100") == {"step": -1}
    assert root.names() == ["step-00000002", "step-00000100"]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_changes_during_a_save_is_not_saved(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    changed, write = threading.Event(), checkpoint.dcp.save

    def write_later(*arguments: Any, **options: Any) -> None:
        assert changed.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(checkpoint.dcp, "save", write_later)
    saver, live, rows = Saver(Root(str(tmp_path)), Process()), tensors(1.0), [1]
    location = saver.save(1, live, {"callbacks": {"rows": rows}})
    live["model"]["a.weight"].fill_(9.0)
    rows.append(2)
    changed.set()
    saver.wait()
    assert verify(Path(location)) == {"callbacks": {"rows": [1]}}
    found = tensors(0.0)
    load(Path(location), found)
    assert torch.equal(found["model"]["a.weight"], torch.ones(3, 4))


def test_an_fsspec_url_contains_checkpoints_as_a_folder_does() -> None:
    root = Root("memory://bucket/run/checkpoints")
    saver = Saver(root, Process(), keep=2)
    for step in (1, 2, 3):
        saver.save(step, tensors(step), {"step": step})
    saver.wait()
    assert root.names() == ["step-00000002", "step-00000003"]
    newest = checkpoint.newest_whole(root)
    assert newest == "step-00000003"
    found = tensors(0.0)
    checkpoint.load(root, newest, found)
    assert torch.equal(found["model"]["b"], torch.full((2,), 6.0))
    root.write("step-00000003", "__0_0.distcp", "damage")
    assert checkpoint.newest_whole(root) == "step-00000002"
    checkpoint.set_aside(root, beyond=2)
    assert root.names() == ["step-00000002"]
    with pytest.raises(CheckpointError, match="nosuch://there"):
        Root("nosuch://there")


def test_what_cannot_be_listed_or_removed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """It is no empty place, and what is saved again no folder in a folder."""
    before, root = save(tmp_path, 1, tensors(1.0), {}), Root(str(tmp_path))
    with monkeypatch.context() as patch:
        denied = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
        patch.setattr(type(root.files), "ls", denied)
        with pytest.raises(CheckpointError, match="Permission denied"):
            checkpoint.newest_whole(root)
    assert checkpoint.newest_whole(root) == "step-00000001"
    assert Root(str(tmp_path / "nothing")).names() == []
    monkeypatch.setattr(type(root.files), "rm", mock.Mock(side_effect=ValueError("no right")))
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        save(tmp_path, 1, tensors(2.0), {})
    assert not list(before.glob("step-*"))


def test_setting_aside_moves_later_steps_and_deletes_what_is_half_written(tmp_path: Path) -> None:
    root = Root(str(tmp_path / "checkpoints"))
    for step in (1, 2, 3):
        save(Path(root.location), step, tensors(step), {"step": step})
    half = Path(root.of("step-00000004" + PARTIAL))
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    checkpoint.set_aside(root, beyond=2)
    kept = sorted(entry.name for entry in Path(root.location).iterdir())
    assert kept == ["step-00000001", "step-00000002"]
    assert verify(tmp_path / "checkpoints.old" / "step-00000003") == {"step": 3}
    save(Path(root.location), 3, tensors(7.0), {"step": 3, "again": True})
    checkpoint.set_aside(root)
    assert root.names() == []
    assert verify(tmp_path / "checkpoints.old" / "step-00000003") == {"step": 3, "again": True}


class Called:
    """What a function returns when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.call


def test_metadata_are_read_of_python_3_11_0_to_3_11_3(tmp_path: Path) -> None:
    def attribute(member: Any) -> Any:
        return getattr, (type(member), member.name)

    folder = save(tmp_path, 3, tensors(1.5), {})
    with (folder / ".metadata").open("rb+") as file:
        content = pickle.load(file)
        file.seek(0)
        pickler = pickle.Pickler(file)
        pickler.dispatch_table = {**copyreg.dispatch_table, _MEM_FORMAT_ENCODING: attribute}
        pickler.dump(content)
        file.truncate()
    found = tensors(0.0)
    load(folder, found)
    assert torch.equal(found["model"]["b"], torch.full((2,), 3.0))


# Entries of a checkpoint's metadata that unpickling would run, or that PyTorch would unpickle.
HOSTILE: dict[str, Callable[[Path], object]] = {
    "a function": lambda made: Called(Path.touch, made),
    "another class's attribute": lambda _: Called(getattr, Path, "touch"),
    "an Enum's attribute that is no member": lambda _: Called(getattr, _MEM_FORMAT_ENCODING, "mro"),
    "a module's attribute": lambda _: Called(
        getattr, Called(getattr, torch.Size, "__init__"), "__globals__"
    ),
    "bytes": lambda _: BytesStorageMetadata(),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_metadata_that_would_run_code_are_rejected(hostile: str, tmp_path: Path) -> None:
    folder, made = save(tmp_path / "root", 3, tensors(1.0), {}), tmp_path / "made"
    content = pickle.loads((folder / ".metadata").read_bytes())
    content.state_dict_metadata["model.b"] = HOSTILE[hostile](made)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"which is refused|KeyError\('mro'"):
        load(folder, tensors(0.0))
    assert not made.exists()
