"""Signals to ranks and ranks that fail: all end alike, in time; steps leave nothing behind.

A signal that a rank hears in a step before the last one is agreed on in the step after it: every
rank exits with 143, and the newest checkpoint is of that step. One that comes in the last step or
later finds the training done: every rank exits with 0, and the newest checkpoint is of the last
step.
"""

import gc
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from d2plm.core.errors import LaunchError
from d2plm.core.files import write_text
from d2plm.training.trainer import Trainer
from tests.ranks import Ranks, run
from tests.runs import BUDGET, At, build, checkpoints, newest, progress, rows, train, wait_for

STOPPED = 143


def signal_itself(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


# The signal's moment → (whether it ends the run before its last step, the last step).
MOMENTS: dict[tuple[str, int], tuple[bool, int]] = {
    ("on_train_begin", 0): (True, 2),
    ("on_step_end", 1): (True, 2),
    ("on_save", 2): (True, 3),
    ("on_before_optimizer_step", 3): (False, 4),
    ("on_train_end", 4): (False, 4),
}


def train_and_signal(store: Path, output: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 4, "every": 2}
    for (event, step), (stopped, last) in MOMENTS.items():
        folder = output / f"{event}-{step}"
        own = At(event, step, signal_itself, rank=1)
        trainer = build(store, folder, callbacks=[own], **settings)
        # Writing one again would delete the first before the second has its name.
        saved = mock.patch.object(trainer.saver, "save", wraps=trainer.saver.save)
        code = 0
        try:
            with saved as save:
                trainer.train()
        except SystemExit as left:
            code = int(left.code or 0)
        steps = [call.args[0] for call in save.call_args_list]
        assert steps == sorted({*range(2, last + 1, 2), last}), (event, step)
        assert code == stopped * STOPPED, (event, step)
        assert trainer.step == progress(newest(folder))["step"] == last, (event, step)
        continued = build(store, folder, **settings)
        continued.train()  # or finds it done
        assert progress(newest(folder))["step"] == 4, (event, step)


def test_the_step_at_which_a_signal_stops_the_run(store: Path, tmp_path: Path) -> None:
    run(train_and_signal, store, tmp_path, world_size=2, seconds=120)


def test_a_stopped_run_exits_with_143_whatever_signals_follow(store: Path, tmp_path: Path) -> None:
    ranks = Ranks(train, store, tmp_path, {"max_steps": 100_000, "every": 0})
    process = ranks.processes[0]
    wait_for(lambda: len(rows(tmp_path / "history-0.jsonl")) >= 2)
    os.kill(process.pid, signal.SIGTERM)
    with suppress(ProcessLookupError):  # it has ended
        while process.is_alive():
            time.sleep(0.002)
            os.kill(process.pid, signal.SIGUSR1)
    assert ranks.wait(1) == [STOPPED]
    assert progress(newest(tmp_path))["step"] >= 2


def train_and_measure(store: Path, output: Path, steps: list[int]) -> None:
    """Write down what the process holds after some of the steps, when no save is in progress."""
    found: list[dict[str, int]] = []

    def measure(trainer: Trainer) -> None:
        trainer.saver.finish()
        gc.collect()
        held = {"objects": len(gc.get_objects()), "python_threads": threading.active_count()}
        found.append(held | {n: len(os.listdir(f"/proc/self/{n}")) for n in ("task", "fd")})

    settings = {"every": 30, "max_steps": max(steps), "global_batch_tokens": 2 * BUDGET}
    callbacks = [At("on_step_end", step, measure) for step in steps]
    trainer = build(store, output, callbacks=callbacks, **settings)
    trainer.train()
    (output / f"held-{trainer.process.rank}").write_text(json.dumps(found))


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc here")
def test_later_steps_hold_no_more_than_earlier_ones(store: Path, tmp_path: Path) -> None:
    run(train_and_measure, store, tmp_path, [60, 120, 180], world_size=2)
    for rank in (0, 1):
        first, middle, last = json.loads((tmp_path / f"held-{rank}").read_text())
        for kind in ("task", "python_threads", "fd"):
            assert first[kind] == middle[kind] == last[kind], kind
        assert last["objects"] - first["objects"] <= 20


def fail(_: object) -> None:
    raise ArithmeticError("this rank alone")


def train_and_fail(store: Path, output: Path) -> None:
    """In the fifth step, while the save of the fourth is being written."""
    write = FileSystemWriter.write_data

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.3)
        return write(*arguments)

    FileSystemWriter.write_data = slowly  # type: ignore[method-assign]
    failing = At("on_micro_step_end", 4, fail, rank=1)
    build(store, output, callbacks=[failing], max_steps=8, every=4).train()


def test_where_a_rank_raises_both_end(store: Path, tmp_path: Path) -> None:
    ranks = Ranks(train_and_fail, store, tmp_path, world_size=2)
    assert ranks.wait(60) == [1, 1]
    assert "ArithmeticError: this rank alone" in (tmp_path / "log-1.txt").read_text()
    assert checkpoints(tmp_path)[-1] == newest(tmp_path).name == "step-00000004"


def test_a_rank_that_is_frozen_is_named(store: Path, tmp_path: Path) -> None:
    ranks = Ranks(train_and_freeze, store, tmp_path, world_size=2)
    said = tmp_path / "said.txt"
    wait_for(said.exists, 180)
    ranks.kill()
    # Above 127: the training operator restarts the pod.
    wanted = "138 rank 1 has kept the others waiting for timeout_seconds=2"
    assert said.read_text().startswith(wanted)


def train_and_freeze(store: Path, output: Path) -> None:
    freeze = At("on_micro_step_end", 3, lambda _: os.kill(os.getpid(), signal.SIGSTOP), rank=1)
    try:
        build(store, output, callbacks=[freeze], plan={"timeout_seconds": 2}).train()
    except LaunchError as error:
        write_text(output / "said.txt", f"{error.exit_code} {error}")
