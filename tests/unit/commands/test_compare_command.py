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
        assert (settings.trainer.seed, settings.trainer.max_steps) == (7, 1000)
        assert settings.output_dir == f"runs/compare/{arm}/seed7"
        assert settings.data.token_budget == config.data.token_budget, "equal budgets"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=compare_losses", "seeds=[]"], "seeds"),
        (["experiment=compare_losses", "seeds=[1,1]"], "seeds"),
        (["experiment=compare_losses", "arms.x.paradigm.losss=mean"], "arms"),
        ([], r"arms.*at least two"),
    ],
)
def test_impossible_settings_start_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run(compose("compare", [*words, f"work_dir={tmp_path}"]))
    assert not any(tmp_path.iterdir())
