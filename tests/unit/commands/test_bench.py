"""d2plm bench: the figures of a training step, and rejected settings."""

import json

import pytest

from d2plm.commands import bench
from d2plm.config import compose
from d2plm.core.errors import ConfigError

TINY = ["model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"]
TINY += ["model.intermediate_size=16", "token_budget=512", "device=cpu", "precision=fp32"]
TINY += ["max_length=128", "compile=false", "steps=4", "tokens=1e6"]


def test_it_reports_a_step_and_forecasts_a_training(capsys: pytest.CaptureFixture[str]) -> None:
    figures = bench.run(compose("bench", TINY))
    assert json.loads(json.dumps(figures)) == figures
    assert figures["expected_seconds"] == pytest.approx(1e6 / figures["tokens_per_second"])
    low, middle, high = figures["step_seconds"]
    assert 0 < low <= middle <= high
    # All but the padding of a step of 512 tokens.
    assert 0.5 * 512 < figures["tokens_per_second"] * middle < 2 * 512
    assert figures["peak_memory_gib"] > 2**-10
    assert "time for 1,000,000 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["steps=0", "token_budget=0", "tokens=0", "mean_length=x"])
def test_an_impossible_setting_is_rejected_by_name(change: str) -> None:
    with pytest.raises(ConfigError, match=f"^{change.partition('=')[0]}="):
        bench.run(compose("bench", [*TINY, change]))
