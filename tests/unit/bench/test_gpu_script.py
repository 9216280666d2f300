"""The GPU benchmark: tried whole on a CPU, and where a stage breaks, hangs or comes too late."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from d2plm.bench import gpu
from d2plm.bench.agreement import device_rows, packed_rows
from d2plm.bench.gpu import DONE, FAILED, NEEDS_CUDA, OUT_OF_MEMORY, SKIPPED, Stage, measure
from d2plm.bench.kernels import kernel_shares, kind_of
from d2plm.bench.step import micro_batches_that_fit
from d2plm.bench.workload import workload_of
from d2plm.config import compose
from d2plm.core.errors import BenchError
from d2plm.model.config import DiTConfig
from d2plm.training.forecast import memory_per_rank
from d2plm.training.plan import Plan
from tests.conftest import FASTA, TINY_SIZES

FEW = FASTA.with_name("uniprot_500.fasta.gz")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.sh"


@pytest.mark.slow
def test_the_script_measures_what_a_cpu_can_and_says_what_needs_cuda(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    command = [str(SCRIPT), "--device", "cpu", "--quick", "--proteins", str(FEW)]
    command += ["--only", "device", "ceiling", "step", "attention", "agreement"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    stages = {stage["stage"]: stage for stage in json.loads(output.read_text())["stages"]}
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "device": DONE,
        "ceiling": DONE,
        "step tiny 1,024": DONE,
        "attention": DONE,
        "agreement": NEEDS_CUDA,
    }
    step = stages["step tiny 1,024"]
    found = {row["what"]: row for row in step["rows"]}
    assert found["3 steady steps"]["value"] > 0
    assert found["time of a step with EMA ÷ without"]["goal"] == 1.02
    assert found["recompilations after step 5 of 17"]["met"]
    assert len(step["facts"]["step_seconds"]) == 3
    assert "wrote" in done.stdout and "recompilations" in done.stdout


def test_a_stage_that_breaks_or_hangs_costs_its_own_figures_alone(tmp_path: Path) -> None:
    stages = [
        Stage("broken", "ceiling", 60),
        Stage("hanging", "step", 0.2, {"proteins": "none", "model": {}, "tokens": 1}),
        Stage("cuda", "device", 60, needs_cuda=True),
        Stage("whole", "device", 60),
    ]
    written = measure(stages, tmp_path / "gpu.json", device="cpu")
    status = {stage["stage"]: stage["status"] for stage in written["stages"]}
    expected = {"broken": FAILED, "hanging": FAILED, "cuda": NEEDS_CUDA, "whole": DONE}
    assert status == expected
    assert "model" in written["stages"][0]["error"]
    assert "longer" in written["stages"][1]["error"]
    assert written["stages"][3]["facts"]["torch"] == torch.__version__
    assert json.loads((tmp_path / "gpu.json").read_text()) == written


def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    written = measure([Stage("late", "device", 60)], tmp_path / "a.json", device="cpu", seconds=5)
    assert written["stages"][0]["status"] == SKIPPED


def test_what_does_not_fit_is_tried_again_in_more_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def run(stage: Stage, deadline: float) -> dict[str, Any]:
        tried.append(stage.arguments.get("micro_batches"))
        if len(tried) < 3:
            return {"status": OUT_OF_MEMORY, "micro_batches": tried[-1] or 1}
        return {"status": DONE, "rows": [], "facts": {}}

    monkeypatch.setattr(gpu, "_run", run)
    written = measure([Stage("step", "step", 600)], tmp_path / "gpu.json", device="cuda")
    assert tried == [None, 2, 4]
    assert written["stages"][0]["status"] == DONE


def test_a_stages_processes_end_with_it() -> None:
    # A child that starts one of its own, as a stage starts arms.
    script = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid); p.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-uc", script], stdout=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    gpu._end_group(process)
    while Path(f"/proc/{grandchild}/stat").exists():
        if Path(f"/proc/{grandchild}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.01)
    process.stdout.close()


@pytest.mark.parametrize("name", ["150m", "450m"])
def test_models_are_read_as_hydra_composes_them(name: str) -> None:
    composed = dict(compose("train", [f"model={name}"], complete=False)["model"])
    composed.pop("_target_")
    assert gpu.model_settings(name) == composed


def test_all_stages_fit_into_the_call_and_have_works() -> None:
    for quick in (False, True):
        chosen = gpu.stages("proteins.fasta", "cuda", quick)
        assert {stage.work for stage in chosen} == set(gpu.WORKS)
        assert len({stage.name for stage in chosen}) == len(chosen)
    assert gpu.SECONDS < 600


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": duration, "cat": category}


def test_kernel_shares_are_those_of_the_time_line() -> None:
    events = [
        event("nvjet_tst_128x256", 0, 40),
        event("void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 40, 20),
        event("triton_poi_fused_attention_0", 50, 20),  # 10 of them beside the other
        event("Memcpy HtoD", 90, 10, "gpu_memcpy"),
        event("aten::mm", 0, 1000, "cpu_op"),
        event("forward", 0, 1000, "gpu_user_annotation"),
        {"name": "process_name", "ph": "M"},
    ]
    found = kernel_shares(events)
    assert found["span_seconds"] == pytest.approx(100e-6)
    assert found["busy_share"] == pytest.approx(0.8)
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["kinds"] == pytest.approx(
        {"matrix products": 0.4, "attention": 0.2, "fused by the compiler": 0.2, "copies": 0.1}
    )
    assert found["kernels"][0] == {"name": "nvjet_tst_128x256", "share": 0.4, "calls": 1}


def test_a_trace_without_kernels_is_refused() -> None:
    with pytest.raises(BenchError, match="no kernel"):
        kernel_shares([event("aten::mm", 0, 1, "cpu_op")])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "matrix products"),
        ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer, clipping and EMA"),
        ("triton_red_fused_native_layer_norm_backward_3", "fused by the compiler"),
        ("triton_tem_fused_mm_1", "matrix products"),
        ("vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", "other kernels"),
    ],
)
def test_kernels_are_sorted_by_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_the_fewest_micro_batches_that_fit_are_taken() -> None:
    config = DiTConfig(**TINY_SIZES)
    sizes = {"dtype": torch.bfloat16, "compile": False}
    whole, half, quarter = (
        memory_per_rank(
            config, Plan().resolved(1), tokens=4096 // n, segments=256 // n, **sizes
        ).total
        for n in (1, 2, 4)
    )

    def fewest(memory: float) -> int:
        return micro_batches_that_fit(
            config, tokens=4096, segments=256, memory=int(memory), **sizes
        )

    assert fewest(whole / 0.9) == 1
    assert fewest(0.99 * whole) == 2
    assert fewest(0.99 * half) == 4
    assert quarter < half < whole
    with pytest.raises(BenchError, match="smaller model"):
        fewest(1000)


def test_a_device_is_compared_with_the_cpu_and_packing_with_single_sequences() -> None:
    cpu = torch.device("cpu")
    with workload_of(FEW, TINY_SIZES, token_budget=256, max_length=128) as workload:
        same = device_rows(workload, cpu, torch.float32)
        lower = device_rows(workload, cpu, torch.bfloat16)
        packed = packed_rows(workload)
    assert [row.value for row in same] == [0, 0, 0]
    assert lower[0].value == 0  # the masks do not depend on the precision
    assert all(row.value > 0 for row in lower[1:]) and all(row.met for row in lower)
    assert all(row.met for row in packed)
