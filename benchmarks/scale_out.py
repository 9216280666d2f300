"""Memory of a GPU among many, calculated: by size of the model, sharding and budget.

Nothing is measured here. `python -m benchmarks.scale_out` prints the tables of docs/performance.md.
"""

from collections.abc import Sequence

import torch

from benchmarks.workload import model_settings
from d2plm.core.table import Table
from d2plm.data.packing import bin_capacity
from d2plm.model.dit_config import DiTConfig
from d2plm.training.forecast import memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.plan import Plan

TYPICAL_TOKENS = 300.0  # of a protein that is cropped to 1,024
SIZES = ("150m", "450m", "3b")
# (name, copies, shards of each)
PLANS = (("1", 1, 1), ("8", 1, 8), ("64", 1, 64), ("8 × 8", 8, 8))
BUDGETS = (16_384, 32_768, 65_536)


def memory_table(
    sizes: Sequence[str] = SIZES, budgets: Sequence[int] = BUDGETS, *, checkpointing: int = 0
) -> str:
    """GiB of a GPU by size, ranks and tokens of a micro-batch; bf16, compiled; Markdown.

    Args:
        checkpointing: recompute every n-th block; 0 none.
    """

    def gibibytes(config: DiTConfig, replicate: int, shard: int, budget: int) -> float:
        plan = Plan(replicate=replicate, shard=shard, activation_checkpointing=checkpointing)
        longest = config.max_position_embeddings
        segments = bin_capacity(budget, TYPICAL_TOKENS, longest)[1]
        taken = memory_per_rank(
            config,
            plan,
            tokens=budget,
            segments=segments,
            dtype=torch.bfloat16,
            compile=not checkpointing,
        )
        return taken.total / GIB

    configs = {size: DiTConfig(**model_settings(size)) for size in sizes}
    rows = [
        [size, name, *(f"{gibibytes(config, copies, shard, budget):.1f}" for budget in budgets)]
        for size, config in configs.items()
        for name, copies, shard in PLANS
    ]
    heads = ["model", "GPUs", *(f"{budget:,} tokens" for budget in budgets)]
    return Table(heads, rows).markdown()


if __name__ == "__main__":
    print(f"{memory_table()}\n\n{memory_table(sizes=('3b',), checkpointing=1)}")
