"""Arms: what differs is merged into the configuration, and nothing else changes."""

from pathlib import Path

import pytest

from d2plm.commands.compare import run, run_settings
from d2plm.config import compose
from d2plm.core.errors import ConfigError


@pytest.mark.parametrize(
    "experiment, arms",
    [
        ("compare_paradigms", ["diffusion", "flow_matching", "flow_matching_uniform"]),
        ("compare_losses", ["diffusion", "mean", "shift"]),
        ("compare_shuffled", ["diffusion", "shuffled"]),
    ],
)
def test_every_arm_is_a_whole_configuration(experiment: str, arms: list[str]) -> None:
    config = compose("compare", [f"experiment={experiment}"])
    assert list(config.arms) == arms
    for arm in arms:
        settings = run_settings(config, arm, 7)
        assert settings.trainer.seed == 7
        assert settings.output_dir == f"runs/compare/{arm}/seed7"
        assert settings.trainer.max_steps == 1000
    tokens = {run_settings(config, arm, 0).data.token_budget for arm in arms}
    assert len(tokens) == 1, "equal budgets"


@pytest.mark.parametrize("override", ["seeds=[]", "seeds=[1,1]", "arms.x.paradigm.losss=mean"])
def test_impossible_settings_start_nothing(override: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=override[:5].rstrip("=[.")):
        run(compose("compare", ["experiment=compare_losses", override, f"work_dir={tmp_path}"]))
    assert not any(tmp_path.iterdir())


def test_one_arm_is_no_comparison() -> None:
    with pytest.raises(ConfigError, match=r"arms.*at least two"):
        run(compose("compare", []))
