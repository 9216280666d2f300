"""Starting training: torchrun, accelerate launch, signals, and one error for many ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from d2plm.cli import main
from d2plm.training import checkpoint
from tests.commands import d2plm, python_c
from tests.conftest import Captured
from tests.integration.conftest import REPOSITORY, Finished, Prepared, start, steps
from tests.runs import wait_for

ENTRY = [sys.executable, "-m", "d2plm.launch.elastic", "--standalone", "--nproc-per-node=2"]
ENDLESS = ["trainer.max_steps=100000", "callbacks.evaluation=null"]


def training(prepared: Prepared, output: Path, *more: str) -> list[str]:
    return [
        *("train", *prepared.arguments(), "tracking=none"),
        *(f"output_dir={output}", f"model_dir={output / 'model'}"),
        *("trainer.global_batch_tokens=4096", "callbacks.metrics.every=1", *more),
    ]


def workers(parent: int) -> list[int]:
    """The processes that torchrun, `parent`, has started, by rank."""
    ranks = {one.environ().get("RANK", ""): one.pid for one in psutil.Process(parent).children()}
    return [ranks[rank] for rank in sorted(filter(None, ranks))]


def nameless() -> list[str]:
    """What runs a program on a machine whose name does not resolve; nothing where it may not."""
    namespaces = ["--uts"] if os.geteuid() == 0 else ["--uts", "--map-root-user"]
    words = ["unshare", *namespaces, "sh", "-c", 'hostname nosuchhost && exec "$@"', "sh"]
    can = shutil.which("unshare") and not subprocess.run([*words, "true"], check=False).returncode
    return words if can else []


@pytest.mark.thorough  # the daily tests signal workers that import nothing, and trainers apart
@pytest.mark.parametrize("to_one_rank", [False, True])
def test_sigterm_saves_and_exits_with_143(
    to_one_rank: bool, prepared: Prepared, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log"
    endless, entry = ENDLESS, ENTRY
    if not to_one_rank:  # but to `d2plm train`, which starts torchrun itself
        endless = [*ENDLESS, "data.num_workers=1", "distributed.processes=2"]
        entry = [*nameless(), sys.executable]
    process = start([*entry, "-m", "d2plm", *training(prepared, output, *endless)], log)
    try:
        wait_for(lambda: steps(output) > 2)
        os.kill(workers(process.pid)[1] if to_one_rank else process.pid, signal.SIGTERM)
        assert process.wait(180) == 143, log.read_text()
    finally:
        process.kill()
    root = checkpoint.Root(str(output / "checkpoints"))
    newest = checkpoint.newest_whole(root)
    assert newest is not None
    assert checkpoint.step_of(newest) == steps(output) > 2
    assert "Traceback" not in log.read_text()
    assert entry == ENTRY or "host" not in log.read_text(), "no library warns of the name"
    # The same run on one process; its limit, of which the schedule is made, stays as it was.
    again = d2plm(*training(prepared, output, *endless, "--dry-run"))
    assert f"from {root.of(newest)}" in again.stdout, again.stderr


# In place of training, in workers that import nothing.
IN_WORKERS = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

if "RANK" in os.environ:
    sys.modules["d2plm.commands.train"] = SimpleNamespace(run=lambda _: run())
"""
# Each ends by a signal, as training does.
ENDED = """
def run():
    heard = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *received: heard.append(received[0]))
    Path(__file__).with_name("ready-" + os.environ["RANK"]).touch()
    while not heard:
        time.sleep(0.01)
    sys.exit(143)
"""
# One rank fails, and another one as a result.
BROKEN = """
def run():
    failed = Path(__file__).with_name("failed")
    if os.environ["RANK"] == "1":
        failed.touch()
        raise RuntimeError("a rank of its own opinion")
    while not failed.exists():
        time.sleep(0.001)
    time.sleep(0.05)
    raise RuntimeError("connection closed")
"""


# `d2plm` that signals itself once both workers are ready.
SIGNALLED = """
import os, signal, sys, threading
from pathlib import Path
from d2plm.cli import main
from tests.runs import wait_for

def raise_signal():
    wait_for(lambda: len([*Path(sys.argv[-1]).parent.glob("ready-*")]) == 2)
    os.kill(os.getpid(), signal.SIGUSR1)

threading.Thread(target=raise_signal).start()
raise SystemExit(main())
"""


def test_a_signal_reaches_the_workers_and_143_is_returned(
    prepared: Prepared, tmp_path: Path
) -> None:
    (tmp_path / "ended.py").write_text(IN_WORKERS + ENDED)
    words = training(prepared, tmp_path / "run", *ENDLESS, "distributed.processes=2")
    result = python_c(SIGNALLED, *words, "--module", str(tmp_path / "ended.py"))
    assert result.returncode == 143, result.stderr
    assert "Traceback" not in result.stderr


def test_a_worker_that_raises_is_reported_once(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "broken.py").write_text(IN_WORKERS + BROKEN)
    result = d2plm(
        *training(prepared, tmp_path / "run", *ENDLESS, "distributed.processes=2"),
        *("--module", str(tmp_path / "broken.py")),
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert result.returncode == 1
    assert not list((tmp_path / "temporary").iterdir())
    text = result.stdout + result.stderr
    assert text.count("Traceback") == 1, text
    assert text.count("RuntimeError: a rank of its own opinion") == 1, text


@pytest.mark.thorough
def test_accelerate_launch_gives_what_d2plm_train_gives(prepared: Prepared, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    result = d2plm(*training(prepared, ours, "distributed=fsdp2", "trainer.precision=bf16"))
    assert result.returncode == 0, result.stderr
    accelerate = Path(sys.executable).with_name("accelerate")
    process = start(
        [
            *(str(accelerate), "launch", "--num_processes=2", "--config_file"),
            str(REPOSITORY / "configs" / "accelerate" / "fsdp2.yaml"),
            *("-m", "d2plm", *training(prepared, theirs)),
        ],
        tmp_path / "log",
    )
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    losses = [
        [
            row["loss"]
            for line in (folder / "metrics.jsonl").open()
            if "loss" in (row := json.loads(line))
        ]
        for folder in (ours, theirs)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # other threads, in bf16
    assert len(losses[0]) == 10
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (ours, theirs)]
    assert weights[0] == weights[1]
    # A step of two ranks, again on one, whatever the plan was.
    replayed = d2plm("replay", str(ours), "--step", "3", f"output={tmp_path / 'step.json'}")
    assert replayed.returncode == 0, replayed.stderr
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["loss"] == pytest.approx(losses[0][2], rel=1e-2)  # bf16


def test_a_run_is_replayed_and_listed(finished: Finished, tmp_path: Path, capsys: Captured) -> None:
    run = str(finished.output_dir)
    rows = [json.loads(line) for line in (finished.output_dir / "metrics.jsonl").open()]
    logged = next(row for row in rows if row["step"] == 2 and "loss" in row)
    output = tmp_path / "step.json"
    assert main(["replay", run, "--step", "2", f"output={output}"]) == 0
    found = json.loads(output.read_text())["grad_norm"]
    assert found == pytest.approx(logged["grad_norm"], rel=1e-6)
    capsys.readouterr()
    assert main(["checkpoint", "list", run]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == ["step-00000005", "step-00000010"]
    assert main(["checkpoint", "verify", run]) == 0
    source = str(finished.output_dir / "checkpoints" / listed[1])
    assert main(["checkpoint", "convert", source, f"output={tmp_path / 'converted'}"]) == 0
    assert list((tmp_path / "converted").glob("*.safetensors"))
    assert main(["checkpoint", "verify", str(tmp_path / "none")]) == 1


def test_a_short_run_leaves_nothing_behind(finished: Finished, tmp_path: Path) -> None:
    before = {f: f.stat().st_mtime_ns for f in finished.work_dir.rglob("*")}
    words = [*finished.arguments(), "trainer.fast_dev_run=2"]
    result = d2plm("train", *words, TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "succeeded" in result.stderr
    assert {f: f.stat().st_mtime_ns for f in finished.work_dir.rglob("*")} == before
    assert not list(tmp_path.glob("d2plm-*"))
