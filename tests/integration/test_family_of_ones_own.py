"""A biologist's workflow: adapt the shipped model to a family, compare, generate new members."""

import json
from pathlib import Path

import pytest

from d2plm.evaluation.family_bound import ADAPTED, FAMILY_PROFILE
from d2plm.evaluation.new_members import NATURAL
from d2plm.evaluation.result import GENERATED
from tests.commands import d2plm
from tests.conftest import FASTA
from tests.integration.conftest import few_proteins

FAMILY = FASTA.with_name("family_abc_importers.fasta.gz")


@pytest.mark.thorough
def test_a_family_is_predicted_better_than_by_any_baseline_and_grown(tmp_path: Path) -> None:
    shipped = FASTA.parents[1] / "pretrained"
    ended = d2plm(
        *("adapt", str(FAMILY), f"init_from={shipped}", f"work_dir={tmp_path / 'abc'}"),
        *("tracking=none", "identity=0.7", "trainer.max_steps=50"),
        f"general={few_proteins(tmp_path / 'general.fasta')}",
        *("callbacks.evaluation=null", "callbacks.early_stopping=null"),
        "evaluation.masks_per_sequence=4",
    )
    assert ended.returncode == 0, ended.stderr
    test = json.loads((tmp_path / "abc" / "adaptation.json").read_text())["test"]
    for baseline in ("unigram", "5-gram", "composition", "composition × 5-gram", FAMILY_PROFILE):
        assert test[baseline]["perplexity"]["value"] > test[ADAPTED]["perplexity"]["value"]
        assert max(test[baseline]["difference"]["interval"]) < 0, baseline
    sets = json.loads((tmp_path / "abc" / "members.members.json").read_text())["sets"]
    rates = [sets[name]["figures"]["members"] for name in (GENERATED, NATURAL)]
    assert rates[0] >= 0.8 * rates[1] > 0
