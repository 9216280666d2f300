"""Runs that are killed at any moment, even during a save, resume as if uninterrupted."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from d2plm.data.store import SequenceStore
from d2plm.training.checkpoint import MANIFEST, PARTIAL, Root
from d2plm.training.trainer_settings import difference
from tests.ranks import Ranks, run
from tests.runs import (
    At,
    assert_each_sequence_once_an_epoch,
    assert_same_run,
    build,
    checkpoints,
    history,
    newest,
    progress,
    rows,
    seeded,
    train,
    wait_for,
)

KILLED, STOPPED = 128 + signal.SIGKILL, 143


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# The moment → what is called just before, or has just returned.
BEFORE: dict[str, tuple[type, str]] = {
    "before_the_first_file": (FileSystemWriter, "write_data"),
    "before_the_manifest": (Root, "write"),
    "before_the_rename": (Root, "rename"),
}
AFTER: dict[str, tuple[type, str]] = {
    "after_the_first_file": (FileSystemWriter, "write_data"),
    "after_the_manifest": (Root, "write"),
    "after_the_rename": (Root, "rename"),
}


class Moment:
    """The moments of a save at which `die` can be called; each wraps what happens there.

    Args:
        name: in `BEFORE` or `AFTER`, or of the method of this class that sets it.
        save: in which save of this process.
    """

    def __init__(self, name: str, save: int) -> None:
        self.left = save
        if name in BEFORE:
            self.wrap(*BEFORE[name], lambda do, *a: die() if self.now() else do(*a))
        elif name in AFTER:
            self.wrap(*AFTER[name], lambda do, *a: (do(*a), die() if self.now() else None)[0])
        else:
            getattr(self, name)()

    def now(self) -> bool:
        self.left -= 1
        return self.left == 0

    def wrap(self, owner: type, method: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, method)
        setattr(owner, method, lambda *arguments: around(original, *arguments))

    def in_the_first_file(self) -> None:
        def around(write: Any, writer: Any, *rest: Any) -> Any:
            written = write(writer, *rest)
            if self.now():
                for file in Path(writer.path).glob("*.distcp"):
                    os.truncate(file, file.stat().st_size // 2)
                die()
            return written

        self.wrap(FileSystemWriter, "write_data", around)

    def in_the_manifest(self) -> None:
        def around(write: Any, root: Root, name: str, file: str, text: str) -> None:
            write(root, name, file, text[: len(text) // 2] if self.now() else text)
            if not self.left:
                die()

        self.wrap(Root, "write", around)

    def in_the_removal_of_an_old_one(self) -> None:
        def around(remove: Any, root: Root, name: str) -> None:
            folder = Path(root.of(name))
            if folder.is_dir() and not name.endswith(PARTIAL) and self.now():
                (folder / MANIFEST).unlink()
                die()
            remove(root, name)

        self.wrap(Root, "remove", around)


# Between a save's first file and its rename.
IN_A_SAVE = [
    *("in_the_first_file", "after_the_first_file", "before_the_manifest", "in_the_manifest"),
    *("after_the_manifest", "before_the_rename"),
]
ELSEWHERE = ["before_the_first_file", "after_the_rename", "in_the_removal_of_an_old_one"]


def train_until(
    store: Path, output: Path, settings: dict[str, Any], moment: str, save: int, rank: int = 0
) -> None:
    if int(os.environ.get("RANK", 0)) == rank:
        Moment(moment, save)
    train(store, output, settings)


def kill_after(ranks: Ranks, output: Path, steps: int, delay: float) -> None:
    """SIGKILL, `delay` seconds after the process has done so many steps."""
    process = ranks.processes[0]
    started, file = output / "started-0", output / "history-0.jsonl"
    wait_for(lambda: started.is_file() and started.read_text() == str(process.pid))
    wait_for(lambda: sum(row["pid"] == process.pid for row in rows(file)) >= steps)
    time.sleep(delay)
    process.kill()


def half_written(output: Path) -> list[Path]:
    return list((output / "checkpoints").glob("*" + PARTIAL))


@pytest.mark.parametrize(
    ("steps", "moments"),
    [
        (32, ["before_the_rename", None]),
        pytest.param(60, [*IN_A_SAVE, *ELSEWHERE, *[None] * 3], marks=pytest.mark.thorough),
    ],
    ids=["twice", "twelve times"],
)
def test_a_run_that_was_killed_equals_the_uninterrupted_one_bit_for_bit(
    steps: int, moments: list[str | None], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    broken, unbroken, random = tmp_path / "broken", tmp_path / "unbroken", seeded("kills")
    settings = {"max_steps": steps, "every": 1, "save_total_limit": 2}
    random.shuffle(moments)
    for moment in moments:
        if moment is None:
            ranks = Ranks(train, tiny_store.path, broken, settings)
            kill_after(ranks, broken, random.randint(0, 3), random.uniform(0, 0.05))
        else:
            save = random.randint(1, 3) + 2 * (moment == "in_the_removal_of_an_old_one")
            ranks = Ranks(train_until, tiny_store.path, broken, settings, moment, save)
        assert ranks.wait() == [KILLED], moment
        assert half_written(broken) or moment not in IN_A_SAVE
    run(train, tiny_store.path, broken, settings)
    run(train, tiny_store.path, unbroken, settings)
    assert_same_run(broken, unbroken)
    assert_each_sequence_once_an_epoch(broken, len(tiny_store))
    assert [row["step"] for row in history(broken)] == list(range(1, steps + 1))
    left = {entry.name for entry in (broken / "checkpoints").iterdir()}
    assert left == set(checkpoints(broken))
    assert len(left) == 2


DEBIAN = "/usr/bin/python3.11"


@pytest.mark.thorough
def test_a_run_that_was_killed_resumes_under_a_python_that_pickles_enums_by_name(
    tiny_store: SequenceStore, tmp_path: Path
) -> None:
    # Only such an interpreter pickles in that form, and it takes this one's packages, compiled for
    # 3.11. Both forms are read everywhere: test_metadata_are_read_whichever_python_pickled_them.
    version = "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 11, 4))"
    is_there = Path(DEBIAN).exists() and not subprocess.run([DEBIAN, "-c", version]).returncode
    if sys.version_info[:2] != (3, 11) or not is_there:
        pytest.skip(f"needs Python 3.11, and {DEBIAN} of 3.11.0 to 3.11.3, as in Debian 12")
    packages = [
        path for path in sys.path if not path.endswith((".zip", "lib/python3.11", "lib-dynload"))
    ]
    broken, unbroken, settings = tmp_path / "broken", tmp_path / "unbroken", {"max_steps": 8}

    def run_there(call: str) -> int:
        code = (
            f"from pathlib import Path\nfrom tests.unit.training import test_resume as t\nt.{call}"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(packages),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run([DEBIAN, "-c", code], env=environment, timeout=240).returncode

    both = f"Path({str(tiny_store.path)!r}), Path({str(broken)!r}), {settings}"
    assert run_there(f"train_until({both}, 'after_the_rename', 2)") == -signal.SIGKILL
    assert checkpoints(broken) == ["step-00000002", "step-00000004"]
    assert run_there(f"train({both})") == 0
    assert history(broken)[4]["pid"] != history(broken)[3]["pid"]
    run(train, tiny_store.path, unbroken, settings)
    assert_same_run(broken, unbroken)


# The manifest and the rename are rank 0's.
ON_TWO_RANKS = [
    *((moment, 0) for moment in IN_A_SAVE[1:]),
    *(("in_the_first_file", 1), ("after_the_first_file", 1)),
]


@pytest.mark.parametrize(
    "moments",
    [[("before_the_manifest", 0)], pytest.param(ON_TWO_RANKS, marks=pytest.mark.thorough)],
    ids=["once", "seven times"],
)
def test_where_one_of_two_ranks_is_killed_the_other_ends_and_both_resume(
    moments: list[tuple[str, int]], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    broken, unbroken, random = tmp_path / "broken", tmp_path / "unbroken", seeded("two ranks")
    settings = {"max_steps": 10, "every": 1, "save_total_limit": 2}
    random.shuffle(moments)
    for moment, victim in moments:
        save = random.randint(1, 3)
        ranks = Ranks(
            train_until, tiny_store.path, broken, settings, moment, save, victim, world_size=2
        )
        codes = ranks.wait(60)
        assert codes[victim] == KILLED, moment
        assert codes[1 - victim] == 1, moment
        assert bool(half_written(broken)) == (victim == 0)  # rank 0 clears up where it can
    run(train, tiny_store.path, broken, settings, world_size=2)
    run(train, tiny_store.path, unbroken, settings, world_size=2)
    assert_same_run(broken, unbroken)
    assert {e.name for e in (broken / "checkpoints").iterdir()} == set(checkpoints(broken))


SPREADS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "2 after 1": (1, {}, 2, {}),
    "1 after 4": (4, {}, 1, {}),
    "2x2 after 2": (2, {}, 4, {"replicate": 2}),
    "tensor after context": (2, {"context": 2}, 2, {"tensor": 2}),
    "1 after shard x tensor": (4, {"tensor": 2}, 1, {}),
    "context x tensor after 1": (1, {}, 4, {"context": 2, "tensor": 2}),
}
TWO_HALVES = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
TWO_HALVES["intermediate_size"] = 26


def train_until_stopped(store: Path, output: Path, settings: dict[str, Any], step: int) -> None:
    stop = At("on_step_begin", step, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    build(store, output, callbacks=[stop], **settings).train()


@pytest.mark.parametrize(
    "spread",
    [
        s
        if s in ("2 after 1", "tensor after context")
        else pytest.param(s, marks=pytest.mark.thorough)
        for s in SPREADS
    ],
)
def test_a_run_resumes_on_another_number_of_ranks(
    spread: str, tiny_store: SequenceStore, tmp_path: Path
) -> None:
    before, first_plan, after, second_plan = SPREADS[spread]
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    settings = {"max_steps": 20, "every": 3, "precision": "fp64", "sizes": TWO_HALVES}
    stopped = Ranks(
        train_until_stopped,
        tiny_store.path,
        broken,
        {**settings, "plan": first_plan},
        6,
        world_size=before,
    )
    assert stopped.wait() == [STOPPED] * before
    step = progress(newest(broken))["step"]
    assert 7 <= step <= 9
    run(train, tiny_store.path, broken, {**settings, "plan": second_plan}, world_size=after)
    assert {row["pid"] for row in history(broken)[:step]}.isdisjoint(
        row["pid"] for row in history(broken)[step:]
    )
    run(train, tiny_store.path, unbroken, settings)
    assert_same_run(broken, unbroken, 1e-10)
    assert_each_sequence_once_an_epoch(broken, len(tiny_store))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second"),
    [({"tensor": 2}, {"context": 2}), ({"pipeline": 2}, {"tensor": 2}), ({}, {"pipeline": 2})],
    ids=["context after tensor", "tensor after pipeline", "pipeline after shard"],
)
def test_a_run_whose_ranks_are_killed_at_random_resumes_under_another_plan(
    first: dict[str, Any], second: dict[str, Any], tiny_store: SequenceStore, tmp_path: Path
) -> None:
    broken, unbroken, random = tmp_path / "broken", tmp_path / "unbroken", seeded("plans")
    settings: dict[str, Any] = {"max_steps": 30, "every": 2, "precision": "fp64"}
    settings |= {"sizes": TWO_HALVES, "gradient_accumulation_steps": "auto"}
    ranks = Ranks(train, tiny_store.path, broken, {**settings, "plan": first}, world_size=2)
    wanted = random.randint(4, 15)
    wait_for(lambda: len(rows(broken / "history-0.jsonl")) >= wanted)
    ranks.kill()
    assert wanted <= len(rows(broken / "history-0.jsonl")) < 30
    run(train, tiny_store.path, broken, {**settings, "plan": second}, world_size=2)
    run(train, tiny_store.path, unbroken, settings)
    assert_same_run(broken, unbroken, 1e-10)


def test_of_lists_only_the_value_that_differs_is_named() -> None:
    before, now = ({"data": [{"digest": digest, "weight": 1}]} for digest in "ab")
    assert difference(before, now) == "data.0.digest: a → b"
