"""All that is worth measuring on one GPU, in one call of under ten minutes; benchmarks/gpu.sh.

Stages run one after another, the most telling first, each in a process of its own with a limit of
time: what fails or hangs costs its own figures alone, and leaves its memory to the next. After each
the JSON file is written anew, so that whatever ends the call leaves what was measured until then.
Needs no more than the trainer itself does: configurations are read without Hydra.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.bench.rows import Row, table
from d2plm.core.errors import D2PLMError
from d2plm.core.files import config_dir, write_text
from d2plm.core.machine import machine

MODULE = "d2plm.bench.gpu"
PROTEINS = "examples/data/uniprot_20k.fasta.gz"
SECONDS = 560.0  # of the whole call
LEAST = 20.0  # seconds that must be left for a stage to begin
TYPICAL_TOKENS = 300.0  # of a protein that is cut to 1,024
OUT_OF_MEMORY = "out of memory"
# What a stage's end is called.
DONE, FAILED, SKIPPED, NEEDS_CUDA = "done", "failed", "skipped", "needs CUDA"

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"intermediate_size": 96, "time_embedding_dim": 16}

# Rows, and what is no row.
Result = tuple[list[Row], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """One thing to measure.

    Attributes:
        name: in the file and on the command line.
        work: which function of `WORKS` does it.
        seconds: that it may take.
        arguments: of the work, JSON.
        needs_cuda: whether it says nothing on a CPU.
    """

    name: str
    work: str
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
    needs_cuda: bool = False


def stages(proteins: str, device: str, quick: bool) -> list[Stage]:
    """The stages in order of importance; `quick` ones use a tiny model and say nothing of speed."""
    common = {"proteins": proteins, "device": device, "precision": "auto"}
    if quick:
        small = {**common, "model": TINY, "max_length": 256}
        few = {"compile": False, "steady_steps": 3, "turns": 2, "steps": 1, "profiled_steps": 1}
        peers = {**small, "token_budget": 1024, "turns": 1, "steps": 1, "compile": False}
        layer = {"heads": 2, "head_size": 32, "token_budget": 1024, "max_length": 256}
        ceiling = {"tokens": 256, "square": 128, "copied_bytes": 1 << 20, "seconds": 0.01}
        return [
            Stage("device", "device", 60),
            Stage("ceiling", "ceiling", 60, {"device": device, "model": TINY, **ceiling}),
            Stage("step tiny 1,024", "step", 120, {**small, **few, "tokens": 1024}),
            Stage("attention", "attention", 120, {**common, **layer, "turns": 2, "steps": 1}),
            Stage("peers tiny", "peers", 120, peers),
            Stage("agreement", "agreement", 60, {**small, "token_budget": 1024}, needs_cuda=True),
        ]
    large, medium = model_settings("450m"), model_settings("150m")
    step = {**common, "max_length": 1024, "compile": True}
    alone = {"turns": 0, "profiled_steps": 0}
    small = {**large, "num_hidden_layers": 2, "initial_gate": 1.0}
    layer = {"heads": large["num_attention_heads"], "head_size": 64, "max_length": 1024}
    peers = {**common, "model": medium, "max_length": 1024, "token_budget": None}
    return [
        Stage("device", "device", 40),
        Stage("ceiling", "ceiling", 45, {"device": device, "model": large, "tokens": 65_536}),
        Stage("step 450m 65,536", "step", 230, {**step, "model": large, "tokens": 65_536}),
        Stage("attention", "attention", 70, {**common, **layer, "token_budget": 65_536}),
        Stage("peers 150m", "peers", 150, {**peers, "turns": 6, "steps": 1}),
        Stage("step 150m 65,536", "step", 90, {**step, **alone, "model": medium, "tokens": 65_536}),
        Stage(
            "step 450m 131,072", "step", 120, {**step, **alone, "model": large, "tokens": 131_072}
        ),
        Stage("step 450m 32,768", "step", 80, {**step, **alone, "model": large, "tokens": 32_768}),
        Stage(
            "agreement",
            "agreement",
            50,
            {**common, "model": small, "token_budget": 2048, "max_length": 1024},
            needs_cuda=True,
        ),
        Stage("step 150m 32,768", "step", 80, {**step, **alone, "model": medium, "tokens": 32_768}),
        Stage(
            "step 150m 131,072", "step", 90, {**step, **alone, "model": medium, "tokens": 131_072}
        ),
    ]


def model_settings(name: str) -> dict[str, Any]:
    """The settings of a `DiTConfig` in configs/model, with those of its defaults below them."""
    import yaml

    settings = yaml.safe_load((config_dir() / "model" / f"{name}.yaml").read_text())
    merged: dict[str, Any] = {}
    for default in settings.pop("defaults", []):
        merged |= model_settings(default)
    merged |= settings
    merged.pop("_target_", None)
    return merged


def measure(
    chosen: Sequence[Stage],
    output: Path,
    *,
    device: str,
    seconds: float = SECONDS,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the stages and write what they give, as it is returned: JSON.

    A stage that does not fit into the GPU's memory is tried again with twice the micro-batches.

    Args:
        device: `cpu` or `cuda`.
        seconds: after which nothing begins any more, and what runs is ended.
        report: told what happens, a line at a time.
    """
    start = time.monotonic()
    results: list[dict[str, Any]] = []
    for stage in chosen:
        began = time.monotonic()
        left = seconds - (began - start)
        if stage.needs_cuda and device == "cpu":
            result: dict[str, Any] = {"status": NEEDS_CUDA}
        elif left < LEAST:
            result = {"status": SKIPPED, "error": f"only {left:.0f} s were left"}
        else:
            report(f"{began - start:5.0f} s  {stage.name}")
            result = _run_to_the_end(stage, began + min(stage.seconds, left))
        result = {"stage": stage.name, "seconds": time.monotonic() - began, **result}
        results.append(result)
        document = _document(results, device, time.monotonic() - start)
        write_text(output, json.dumps(document, indent=1) + "\n")
        report(_in_words(result))
    return document


def _document(results: Sequence[dict[str, Any]], device: str, seconds: float) -> dict[str, Any]:
    goals = [
        {"stage": result["stage"], **row}
        for result in results
        for row in result.get("rows", [])
        if row["goal"] is not None
    ]
    return {
        "machine": machine(),
        "device": device,
        "seconds": seconds,
        "goals": goals,
        "stages": list(results),
    }


def _in_words(result: dict[str, Any]) -> str:
    rows = [Row.of_json(row) for row in result.get("rows", [])]
    if rows:
        return f"{result['seconds']:.0f} s\n{table(rows)}\n"
    reason = result.get("error", "").strip().splitlines()
    return f"{result['status']}" + (f": {reason[-1]}" if reason else "") + "\n"


def _run_to_the_end(stage: Stage, deadline: float) -> dict[str, Any]:
    """What a stage gives before the deadline (of the monotonic clock)."""
    result = _run(stage, deadline)
    while result["status"] == OUT_OF_MEMORY:
        tried = result["micro_batches"]
        if tried >= 64 or deadline - time.monotonic() < LEAST:
            return {**result, "status": FAILED, "error": f"no memory for {tried} micro-batches"}
        arguments = {**stage.arguments, "micro_batches": 2 * tried}
        result = _run(replace(stage, arguments=arguments), deadline)
    return result


def _run(stage: Stage, deadline: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="d2plm-gpu-") as folder:
        file = Path(folder, "result.json")
        arguments = {**stage.arguments, "temporary_dir": folder}
        command = [sys.executable, "-m", MODULE, "--stage", stage.work]
        command += ["--arguments", json.dumps(arguments), "--output", str(file)]
        # A group of its own: its arms are processes, too, and end with it.
        process = subprocess.Popen(command, stdout=sys.stderr, process_group=0)
        try:
            code = process.wait(timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            return {"status": FAILED, "error": "it took longer than it may"}
        finally:
            _end_group(process)
        if not file.exists():
            return {"status": FAILED, "error": f"it ended with code {code} and left nothing"}
        return dict(json.loads(file.read_text()))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _do_stage(work: str, arguments: dict[str, Any], output: Path) -> None:
    """The side of a stage's process: do the work and leave its result in a file."""
    try:
        rows, facts = WORKS[work](**arguments)
        result: dict[str, Any] = {
            "status": DONE,
            "rows": [row.as_json() for row in rows],
            "facts": facts,
        }
    except _DeviceMemoryError as error:
        result = {"status": OUT_OF_MEMORY, "micro_batches": error.micro_batches}
    except D2PLMError as error:
        result = {"status": FAILED, "error": str(error)}
    except Exception:  # whatever breaks here must not cost the other stages
        result = {"status": FAILED, "error": traceback.format_exc()}
    write_text(output, json.dumps(result) + "\n")


class _DeviceMemoryError(Exception):
    """The GPU's memory was exhausted."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__(f"out of memory with {micro_batches} micro-batches")
        self.micro_batches = micro_batches


def _say(line: str) -> None:
    print(f"         {line}", file=sys.stderr, flush=True)


def _work_device(temporary_dir: str) -> Result:
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        # The compiler needs one to link what it makes for the GPU's launches.
        "c_compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        "threads": torch.get_num_threads(),
    }
    if not torch.cuda.is_available():
        return [], facts
    properties = torch.cuda.get_device_properties(0)
    facts |= {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "cudnn": torch.backends.cudnn.version(),
        "nvidia_smi": _nvidia_smi(),
    }
    return [Row("memory", properties.total_memory / 2**30, "GiB")], facts


def _nvidia_smi() -> dict[str, str] | str:
    """What the driver says of the first GPU; nothing is changed."""
    keys = [
        "name",
        "driver_version",
        "power.limit",
        "power.draw",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "temperature.gpu",
    ]
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}"
    return dict(zip(keys, (value.strip() for value in done.stdout.split(",")), strict=False))


def _work_ceiling(
    model: dict[str, Any], device: str, temporary_dir: str, **settings: Any
) -> Result:
    import torch

    from d2plm.bench.ceiling import bench_ceiling
    from d2plm.core.precision import resolve_device, resolve_precision
    from d2plm.model.config import DiTConfig

    place = torch.device(resolve_device(device))
    dtype = resolve_precision("auto", place)
    rows = bench_ceiling(DiTConfig(**model), device=place, dtype=dtype, **settings)
    return rows, {"dtype": str(dtype), "nvidia_smi": _nvidia_smi()}


def _work_attention(proteins: str, temporary_dir: str, **settings: Any) -> Result:
    from d2plm.bench.attention import bench_attention

    rows, timings = bench_attention(
        Path(proteins), temporary_dir=Path(temporary_dir), report=_say, **settings
    )
    return rows, {"timings": [asdict(timing) for timing in timings]}


def _work_step(
    proteins: str,
    temporary_dir: str,
    model: dict[str, Any],
    tokens: int,
    micro_batches: int | None = None,
    **settings: Any,
) -> Result:
    import torch

    from d2plm.bench.step import bench_step, micro_batches_that_fit
    from d2plm.core.precision import resolve_device, resolve_precision
    from d2plm.data.packing import bin_capacity
    from d2plm.model.config import DiTConfig

    place = torch.device(resolve_device(settings["device"]))
    if micro_batches is None:
        micro_batches = 1
        if place.type == "cuda":
            micro_batches = micro_batches_that_fit(
                DiTConfig(**model),
                tokens=tokens,
                segments=bin_capacity(tokens, TYPICAL_TOKENS, settings["max_length"])[1],
                dtype=resolve_precision(settings["precision"], place),
                memory=torch.cuda.get_device_properties(0).total_memory,
                compile=settings["compile"],
            )
            _say(f"micro-batches of a step: {micro_batches}")
    try:
        return bench_step(
            Path(proteins),
            model,
            tokens=tokens,
            micro_batches=micro_batches,
            temporary_dir=Path(temporary_dir),
            report=_say,
            **settings,
        )
    except torch.OutOfMemoryError as error:
        _say(str(error).splitlines()[0])
        raise _DeviceMemoryError(micro_batches) from error


def _work_agreement(
    proteins: str,
    temporary_dir: str,
    model: dict[str, Any],
    device: str,
    precision: str,
    **sizes: int,
) -> Result:
    import torch

    from d2plm.bench.agreement import device_rows
    from d2plm.bench.workload import workload_of
    from d2plm.core.precision import resolve_device, resolve_precision

    place = torch.device(resolve_device(device))
    dtype = resolve_precision(precision, place)
    with workload_of(Path(proteins), model, **sizes, temporary_dir=Path(temporary_dir)) as workload:
        return device_rows(workload, place, dtype), {}


def _work_peers(
    proteins: str,
    temporary_dir: str,
    model: dict[str, Any],
    token_budget: int | None,
    **settings: Any,
) -> Result:
    import torch

    from d2plm.bench.peers import bench_peers

    if token_budget is None and settings["device"] == "cpu":
        token_budget = 4096
    elif token_budget is None:
        # All arms hold their memory at once, and those that pad to 1,024 hold 3.5 slots a token.
        memory = torch.cuda.get_device_properties(0).total_memory
        token_budget = 8192 if memory > 120e9 else 4096
    rows, timings = bench_peers(
        Path(proteins),
        model,
        token_budget=token_budget,
        threads=None,
        pinned=False,
        esm=None,
        temporary_dir=Path(temporary_dir),
        report=_say,
        **settings,
    )
    facts = {"token_budget": token_budget, "timings": [asdict(timing) for timing in timings]}
    return rows, facts


WORKS: dict[str, Callable[..., Result]] = {
    "device": _work_device,
    "ceiling": _work_ceiling,
    "attention": _work_attention,
    "step": _work_step,
    "agreement": _work_agreement,
    "peers": _work_peers,
}


def main() -> None:
    """The command line; see benchmarks/gpu.sh."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the script alone")
    parser.add_argument("--proteins", default=str(config_dir().parent / PROTEINS), help="FASTA")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole call")
    parser.add_argument(
        "--only", nargs="*", default=None, help="stages whose name has one of these"
    )
    parser.add_argument("--stage", choices=WORKS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage is not None:
        _do_stage(given.stage, given.arguments, given.output)
        return
    chosen = [
        stage
        for stage in stages(given.proteins, given.device, given.quick)
        if given.only is None or any(word in stage.name for word in given.only)
    ]
    if not chosen:
        parser.error(f"--only {' '.join(given.only)}: no stage has such a name")
    report = partial(print, file=sys.stderr, flush=True)
    document = measure(
        chosen, given.output, device=given.device, seconds=given.seconds, report=report
    )
    for goal in document["goals"]:
        print(
            f"{'met   ' if goal['met'] else 'missed'}  {goal['stage']}: {goal['what']} = "
            f"{goal['value']:.4g} {goal['unit']} "
            f"({'at most' if goal['at_most'] else 'at least'} {goal['goal']:g})"
        )
    print(f"wrote {given.output}")
    if all(result["status"] != DONE for result in document["stages"]):
        raise SystemExit("nothing could be measured, see above")


if __name__ == "__main__":
    main()
