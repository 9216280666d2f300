"""The step benchmark's profile: parts that add up, found by the operators of the model."""

import math

from benchmarks.step import PARTS, profile_rows
from benchmarks.workload import workload_of
from d2plm.data.loader import Position
from tests.conftest import FASTA, TINY_SIZES


def test_the_parts_of_a_step_add_up_to_all_of_it() -> None:
    proteins = FASTA.with_name("uniprot_500.fasta.gz")
    with workload_of(proteins, TINY_SIZES, token_budget=1024, max_length=512) as workload:
        trainer = workload.trainer(device="cpu", precision="bf16", compile=False)
        rows = profile_rows(trainer, trainer.loader.stream(Position()), 2)
    assert trainer.step == 2
    assert [row.what for row in rows] == [
        *(f"profile: {part}" for part in PARTS),
        "profile: the rest, Python",
    ]
    assert all(row.value > 0 for row in rows)
    assert math.isclose(sum(row.value for row in rows), 100)
