"""A biologist's workflow: adapt to an unseen family, compare, generate new members."""

import json
from itertools import islice
from pathlib import Path

import pytest

from d2plm.core.vocabulary import decode
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.evaluation.family_bound import ADAPTED, FAMILY_PROFILE
from d2plm.evaluation.new_members import NATURAL
from d2plm.evaluation.result import GENERATED
from tests.commands import d2plm
from tests.conftest import FASTA

FAMILY = FASTA.with_name("family_abc_importers.fasta.gz")
TRAINED_ON = 2000  # of the shipped proteins, the family's members left out


@pytest.mark.thorough
@pytest.mark.timeout(2700)  # three programs of minutes, longer where cores are shared
def test_a_family_that_the_base_has_not_seen_is_predicted_and_grown(tmp_path: Path) -> None:
    members = {record.tokens.tobytes() for record in read_fasta(FAMILY)}
    others = (r for r in islice(read_fasta(FASTA), TRAINED_ON) if r.tokens.tobytes() not in members)
    write_fasta(tmp_path / "others.fasta", ((one.name, decode(one.tokens)) for one in others))
    of_base = ["experiment=uniprot_20k", f"work_dir={tmp_path / 'base'}", "tracking=none"]
    few = ["trainer.max_steps=200", "callbacks.evaluation=null"]
    for words in (
        ["prepare", str(tmp_path / "others.fasta"), *of_base],
        ["train", *of_base, *few],
        [
            *("adapt", str(FAMILY), f"init_from={tmp_path / 'base' / 'diffusion' / 'model'}"),
            *(f"work_dir={tmp_path / 'abc'}", "tracking=none", "identity=0.7"),
            *("trainer.max_steps=100", "evaluation.masks_per_sequence=4"),
        ],
    ):
        ended = d2plm(*words, seconds=1200)
        assert ended.returncode == 0, ended.stderr
    test = json.loads((tmp_path / "abc" / "adaptation.json").read_text())["test"]
    for baseline in ("unigram", "5-gram", "composition", "composition × 5-gram", FAMILY_PROFILE):
        assert test[baseline]["perplexity"]["value"] > test[ADAPTED]["perplexity"]["value"]
        assert max(test[baseline]["difference"]["interval"]) < 0, baseline
    sets = json.loads((tmp_path / "abc" / "members.members.json").read_text())["sets"]
    rates = [sets[name]["figures"]["members"] for name in (GENERATED, NATURAL)]
    assert rates[0] >= 0.8 * rates[1] > 0
