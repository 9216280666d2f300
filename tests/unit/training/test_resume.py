"""Runs that are killed at any moment, even during a save, resume as if uninterrupted."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint import FileSystemWriter

from d2plm.core.errors import CheckpointError, ConfigError
from d2plm.data.store import SequenceStore
from d2plm.settings.training import CosineSettings
from d2plm.training.checkpoint import MANIFEST, PARTIAL, Root
from d2plm.training.learning_rate import cosine
from d2plm.training.muon import build_muon
from d2plm.training.optimizer import build_adamw
from d2plm.training.replay import Replayed, replay
from d2plm.training.shards import LocalParameters
from tests.ranks import Ranks, run
from tests.runs import (
    SHAREABLE,
    At,
    assert_same_run,
    build,
    checkpoints,
    history,
    interrupt,
    newest,
    progress,
    rows,
    train,
    wait_for,
)

KILLED = 128 + signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(do: Callable[..., Any], now: Callable[[], bool], *arguments: Any) -> Any:
    return die() if now() else do(*arguments)


def after(do: Callable[..., Any], now: Callable[[], bool], *arguments: Any) -> Any:
    done = do(*arguments)
    return die() if now() else done


def in_a_file(write: Callable[..., Any], now: Callable[[], bool], writer: Any, *rest: Any) -> Any:
    written = write(writer, *rest)
    if now():
        for file in Path(writer.path).glob("*.distcp"):
            os.truncate(file, file.stat().st_size // 2)
        die()
    return written


def in_a_text(
    write: Callable[..., Any], now: Callable[[], bool], root: Root, name: str, file: str, text: str
) -> None:
    if now():
        write(root, name, file, text[: len(text) // 2])
        die()
    write(root, name, file, text)


def in_a_removal(
    remove: Callable[..., Any], now: Callable[[], bool], root: Root, name: str
) -> None:
    folder = Path(root.of(name))
    if folder.is_dir() and not name.endswith(PARTIAL) and now():
        (folder / MANIFEST).unlink()
        die()
    remove(root, name)


# The moment → what is called then, and what happens around the call.
MOMENTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "in_a_step": (LocalParameters, "take_gradients", after),
    "before_the_first_file": (FileSystemWriter, "write_data", before),
    "in_the_first_file": (FileSystemWriter, "write_data", in_a_file),
    "after_the_first_file": (FileSystemWriter, "write_data", after),
    "before_the_manifest": (Root, "write", before),
    "in_the_manifest": (Root, "write", in_a_text),
    "after_the_manifest": (Root, "write", after),
    "before_the_rename": (Root, "rename", before),
    "after_the_rename": (Root, "rename", after),
    "in_the_removal_of_an_old_one": (Root, "remove", in_a_removal),
}
ALONE = [moment for moment in MOMENTS if moment != "in_a_step"]
IN_A_SAVE = ALONE[1:-2]  # between its first file and its rename


def train_until(
    store: Path, output: Path, settings: dict[str, Any], moment: str, save: int, rank: int = 0
) -> None:
    if int(os.environ.get("RANK", 0)) == rank:
        owner, method, around = MOMENTS[moment]
        do, calls = getattr(owner, method), count(1)
        setattr(owner, method, lambda *given: around(do, lambda: next(calls) == save, *given))
    train(store, output, settings)


def kill_after(ranks: Ranks, output: Path, steps: int, delay: float) -> None:
    """SIGKILL, `delay` seconds after the process has done so many steps."""
    process = ranks.processes[0]
    file = output / "history-0.jsonl"
    wait_for(lambda: sum(row["pid"] == process.pid for row in rows(file)) >= steps)
    time.sleep(delay)
    process.kill()


def half_written(output: Path) -> list[Path]:
    return list((output / "checkpoints").glob("*" + PARTIAL))


@pytest.mark.parametrize(
    ("steps", "moments"),
    [
        (20, ["before_the_rename", None]),
        pytest.param(36, [*ALONE, None], marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_was_killed_equals_the_uninterrupted_one_bit_for_bit(
    steps: int, moments: list[str | None], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    broken, unbroken, draw = tmp_path / "broken", tmp_path / "unbroken", random.Random(0)
    settings = {"max_steps": steps, "every": 1, "save_total_limit": 2}
    draw.shuffle(moments)
    for moment in moments:
        if moment is None:
            ranks = Ranks(train, tiny_store.path, broken, settings)
            kill_after(ranks, broken, draw.randint(1, 3), draw.uniform(0, 0.05))
        else:
            save = draw.randint(1, 3) + 2 * (moment == "in_the_removal_of_an_old_one")
            ranks = Ranks(train_until, tiny_store.path, broken, settings, moment, save)
        assert ranks.wait() == [KILLED], moment
        assert half_written(broken) or moment not in IN_A_SAVE
    run(train, tiny_store.path, broken, settings)
    run(train, tiny_store.path, unbroken, settings)
    assert_same_run(broken, unbroken)
    epochs: dict[int, list[int]] = {}
    for row in history(broken):
        epochs.setdefault(row["epoch"], []).extend(row["ids"])
    *done, last = epochs.values()
    assert done
    assert all(sorted(ids) == list(range(len(tiny_store))) for ids in done)
    assert len(set(last)) == len(last)
    left = {entry.name for entry in (broken / "checkpoints").iterdir()}
    assert left == set(checkpoints(broken))
    assert len(left) == 2


# The manifest and the rename are rank 0's.
MORE = [("after_the_manifest", 0), ("before_the_rename", 0), ("in_a_step", 0)]
MORE += [("in_the_first_file", 1), ("after_the_first_file", 1)]


@pytest.mark.parametrize(
    "moments",
    [
        [("before_the_manifest", 0), ("in_a_step", 1)],
        pytest.param(MORE, marks=pytest.mark.thorough),
    ],
)
def test_where_one_of_two_ranks_is_killed_the_other_ends_and_both_resume(
    moments: list[tuple[str, int]], store: Path, tmp_path: Path
) -> None:
    broken, unbroken, draw = tmp_path / "broken", tmp_path / "unbroken", random.Random(0)
    settings = {"max_steps": 10, "every": 1, "save_total_limit": 2}
    draw.shuffle(moments)
    for moment, victim in moments:
        arguments = (store, broken, settings, moment, draw.randint(1, 3), victim)
        codes = Ranks(train_until, *arguments, world_size=2).wait(60)
        assert codes[victim] == KILLED, moment
        assert codes[1 - victim] == 1, moment
        if moment in IN_A_SAVE:  # rank 0 clears up where it can
            assert bool(half_written(broken)) == (victim == 0)
    run(train, store, broken, settings, world_size=2)
    run(train, store, unbroken, settings, world_size=2)
    assert_same_run(broken, unbroken)
    assert {e.name for e in (broken / "checkpoints").iterdir()} == set(checkpoints(broken))


def train_a_leg(
    store: Path, output: Path, plan: dict[str, Any], step: int, kind: Callable[..., Any]
) -> None:
    """Up to a step that is `plan`'s last."""
    settings: dict[str, Any] = {"max_steps": 12, "every": 0, "precision": "fp64", "plan": plan}
    settings |= {"sizes": {**SHAREABLE, "num_hidden_layers": 4}, "optimizer": kind}
    settings |= {"gradient_accumulation_steps": 2 if "pipeline" in plan else 1}
    with suppress(KeyboardInterrupt):
        build(store, output, callbacks=[At("on_step_end", step, interrupt)], **settings).train()


@pytest.mark.parametrize(
    ("optimizer", "legs"),
    [
        (
            build_muon,
            [(2, {"context": 2}), (2, {"pipeline": 2}), (1, {}), (2, {"tensor": 2}), (2, {})],
        ),
        pytest.param(
            build_adamw,
            [(4, {"context": 2, "tensor": 2}), (1, {}), (4, {"replicate": 2}), (2, {})],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_run_of_many_plans_equals_one_process_s(
    optimizer: Callable[..., Any], legs: list[Any], store: Path, tmp_path: Path
) -> None:
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    for number, (ranks, plan) in enumerate(legs, 1):
        run(train_a_leg, store, broken, plan, 2 * number, optimizer, world_size=ranks)
        assert progress(newest(broken))["step"] == 2 * number
    run(train_a_leg, store, unbroken, {}, 2 * len(legs), optimizer)
    assert_same_run(broken, unbroken, 1e-10)
    assert len({row["pid"] for row in history(broken)}) == len(legs)


SETTINGS: dict[str, Any] = {"max_steps": 9, "every": 4, "save_total_limit": 9}


def replayed(store: Path, output: Path, step: int, checkpoint: str | None = None) -> Replayed:
    trainer = build(store, output, **SETTINGS, log=False)
    trainer.callbacks.clear()  # they write the history
    return replay(trainer, step, checkpoint)


def test_replayed_steps_are_the_trained_ones_and_the_run_stays_as_it_was(
    store: Path, tmp_path: Path
) -> None:
    train(store, tmp_path, {**SETTINGS, "log": False})
    factor = cosine(9, settings=CosineSettings(warmup_ratio=0.1))
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    for step in (1, 4, 9):
        found, row = replayed(store, tmp_path, step), history(tmp_path)[step - 1]
        assert (found.loss, found.grad_norm) == (row["loss"], row["grad_norm"])
        assert found.learning_rate == pytest.approx(1e-2 * factor(step - 1))
        assert sorted(one.sequence_id for one in found.sequences) == row["ids"]
        # They make up the step.
        nats = [one.nats for one in found.sequences]
        assert nats == sorted(nats, reverse=True)
        assert all(one.predicted <= one.residues <= 48 for one in found.sequences)
        residues = sum(one.residues for one in found.sequences)  # not tokens
        assert found.loss == pytest.approx(sum(nats) / residues, rel=0.1)
        norm = np.linalg.norm([*found.gradients.values()])
        assert norm == pytest.approx(found.grad_norm, rel=1e-5)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    with pytest.raises(CheckpointError, match="of step 8"):
        replayed(store, tmp_path, 3, str(tmp_path / "checkpoints" / "step-00000008"))
    for step in (0, 10):
        with pytest.raises(ConfigError, match="steps 1 to 9"):
            replayed(store, tmp_path, step)


def test_a_step_of_two_ranks_is_replayed_on_one(store: Path, tmp_path: Path) -> None:
    run(train, store, tmp_path, SETTINGS, world_size=2)
    found = replayed(store, tmp_path, 7)
    row = history(tmp_path)[6]
    expected = [row["loss"], row["grad_norm"]]
    assert [found.loss, found.grad_norm] == pytest.approx(expected, rel=1e-4, abs=1e-5)
