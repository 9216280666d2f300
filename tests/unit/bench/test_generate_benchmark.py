"""The generation benchmark: its plain loop is the samplers' own law, and it refuses other work."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from d2plm.bench import generate
from d2plm.bench.arms import Timings
from d2plm.bench.generate import CASES, PACKED, PLAIN, bench_generate, plain_loop
from d2plm.core.alphabet import MASK, decode
from d2plm.core.errors import BenchError, ConfigError
from d2plm.generation.samplers import sample
from d2plm.generation.settings import Sampling
from d2plm.model.dit import DiT
from d2plm.paradigms.base import Paradigm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "time_embedding_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path, random = tmp_path / "proteins.fasta", np.random.default_rng(0)
    lengths = [30, 21, 40, 25, 500]
    letters = [decode(random.integers(4, 24, size=n, dtype=np.uint8)) for n in lengths]
    path.write_text("".join(f">p{n}\n{text}\n" for n, text in enumerate(letters)))
    return path


@pytest.mark.parametrize(
    ("paradigm", "options"),
    [
        (AbsorbingDiffusion(), {"sampler": "ancestral", "steps": 30}),
        (AbsorbingDiffusion(shift=True), {"sampler": "ancestral", "steps": 5, "top_p": 0.8}),
        (MaskFlowMatching("cubic"), {"sampler": "ancestral", "steps": 5, "temperature": 0.7}),
        (AbsorbingDiffusion(), {"sampler": "first_hitting"}),
        (MaskFlowMatching(), {"sampler": "first_hitting", "top_k": 5}),
    ],
)
def test_the_sampler_gives_what_the_plain_loop_gives_of_a_real_model(
    tiny_dit: Any, paradigm: Paradigm, options: dict[str, Any]
) -> None:
    model: DiT = tiny_dit().double()
    random = np.random.default_rng(1)
    templates = [random.integers(4, 27, size=n, dtype=np.uint8) for n in (9, 30, 1, 30, 17, 22)]
    for template, share in zip(templates, itertools.cycle((1.0, 0.2, 0.6)), strict=False):
        template[random.random(len(template)) < share] = MASK
    sampling = Sampling(seed=2, **options)
    with torch.inference_mode():
        expected = plain_loop(model, paradigm, templates, sampling)
    for budget in (40, 1000):
        found = sample(model, paradigm, templates, sampling, max_length=64, token_budget=budget)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_case_is_measured_and_ours_computes_no_more_tokens(fasta: Path) -> None:
    rows, timings = bench_generate(fasta, TINY, number=3, steps=12, turns=2, token_budget=64)
    names = [f"{case}, {arm}" for case in CASES for arm in (PACKED, PLAIN)]
    assert [timing.name for timing in timings] == names
    assert all(len(timing.cpu) == 2 and len(timing.losses) == 4 for timing in timings)
    by_name = {row.what: row for row in rows}
    for case in CASES:
        assert by_name[f"{case}, {PACKED}"].value > 0
        assert by_name[f"time of {case}, plain loop ÷ packed"].spread is not None
        assert by_name[f"{case}: tokens computed, plain loop ÷ packed"].value >= 1
    # The lengths are 21, 25, 30 and 40, the longest being left out, of which three are taken.
    first_hitting = timings[3].counts["tokens"] / 4
    assert first_hitting == sum(n * (n + 2) for n in (21, 30, 40))
    assert timings[5].counts["tokens"] / 4 == 12 * sum(n + 2 for n in (21, 30, 40))


def test_arms_with_other_sequences_are_refused(
    fasta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_turns(arms: list[Any], **_: Any) -> dict[str, Timings]:
        return {
            arm.name: Timings(arm.name, cpu=[1.0], losses=[digest, 5.0, 5.0])
            for arm, digest in zip(arms, (3.0, 4.0), strict=True)
        }

    monkeypatch.setattr(generate, "take_turns", take_turns)
    with pytest.raises(BenchError, match=r"ancestral: .* other sequences in fp64 .* no ratio"):
        bench_generate(fasta, TINY, turns=1)


def test_an_unknown_case_is_refused_with_the_nearest(fasta: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'infilling'"):
        bench_generate(fasta, TINY, cases=["infiling"])


def test_a_model_without_masks_is_refused(fasta: Path, tmp_path: Path) -> None:
    from d2plm.paradigms.flow_matching import UniformFlowMatching

    UniformFlowMatching().save_config(tmp_path / "export")
    with pytest.raises(BenchError, match="flow_matching_uniform has no masks"):
        bench_generate(fasta, TINY, model_dir=tmp_path / "export")
