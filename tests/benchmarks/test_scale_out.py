"""The calculated memory of many GPUs."""

import pytest

from benchmarks.scale_out import memory_table


@pytest.mark.thorough
def test_the_table_of_memory_has_a_line_for_each_case() -> None:
    table = memory_table(["150m"], [1024], checkpointing=1).splitlines()
    assert len(table) == 2 + 4
    alone, eight = (float(line.split("|")[3]) for line in table[2:4])
    assert eight < alone
