"""Many GPUs, calculated: memory by size, sharding and budget; traffic against compute.

Nothing is measured here; a step's MFU and the network's rates are assumed.
`python -m benchmarks.scale_out` prints the tables of docs/performance.md, and
`python -m benchmarks.scale_out dimensions` that of docs/training.md.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from benchmarks.workload import model_settings
from d2plm.core.table import Table
from d2plm.data.packing import bin_capacity
from d2plm.model.dit import dit_without_memory
from d2plm.model.dit_config import DiTConfig
from d2plm.model.flops import token_parameters
from d2plm.training.forecast import memory_per_rank
from d2plm.training.metrics import GIB
from d2plm.training.plan import Plan

TYPICAL_TOKENS = 300.0  # of a protein that is cropped to 1,024
SIZES = ("450m", "3b")
# (name, copies, shards of each)
PLANS = (("1", 1, 1), ("8", 1, 8), ("64", 1, 64), ("8 × 8", 8, 8))
BUDGETS = (16_384, 32_768, 65_536)
GPUS = (8, 64, 256, 1024)
PEAK = 989e12  # FLOP/s of an H100's or H200's dense bf16, by its datasheet
RATE = 0.5 * PEAK  # FLOP/s at which compute runs
ATTENDED = 450.0  # tokens that a token attends to, Σl²/Σl of UniRef50 cropped to 1,024
GATHERED, REDUCED = 2, 4  # bytes of a parameter that is gathered (bf16), and of a gradient (fp32)

# For `dimensions_table`: the model, tokens of its row, and tokens that a token attends to.
THREE_B = model_settings("3b")
ESM_15B = {"hidden_size": 5120, "num_hidden_layers": 48, "intermediate_size": 13_824}
CASES = {
    "3 B": (THREE_B, 1024, ATTENDED),
    "15 B": (THREE_B | ESM_15B, 1024, ATTENDED),
    "3 B, 32 k": (THREE_B | {"max_position_embeddings": 32_768}, 32_768, 32_768.0),
}
TOKENS_OF_A_GPU, TOKENS_OF_A_STEP = 16_384, 1 << 22
MEMORY = 0.92 * 141e9 / GIB  # of an H200, less the framework's own


@dataclass(frozen=True)
class Network:
    """Rates of one GPU in bytes per second, in each direction.

    Attributes:
        gpus: number of GPUs per machine.
        inside, between: rate to GPUs of its machine (NVLink 4), and of its adapter to others.
        hop: latency in seconds from a GPU to its neighbour in a ring.
    """

    gpus: int = 8
    inside: float = 450e9
    between: float = 50e9
    hop: float = 3e-6

    def collective_seconds(self, volume: float, ranks: int) -> float:
        """Seconds to gather `volume` bytes on each of `ranks` GPUs, or to reduce-scatter them.

        Each GPU receives the part that it lacks, (n-1)/n of the volume, over NVLink. A machine
        receives the part that all its GPUs lack, (1 - gpus/n) of it, through all its adapters. The
        slower of the two counts, because rings use both at once; the data take n-1 hops.
        """
        own = volume * (ranks - 1) / ranks / self.inside
        outside = max(1 - self.gpus / ranks, 0) * volume / (self.gpus * self.between)
        return max(own, outside) + (ranks - 1) * self.hop

    def exchange_seconds(self, volume: float, ranks: int) -> float:
        """Seconds of an all-to-all in which each of `ranks` GPUs exchanges `volume` bytes.

        Unlike gathered bytes, those from another machine are for one GPU alone.
        """
        own = volume * (ranks - 1) / ranks / self.inside
        outside = max(1 - self.gpus / ranks, 0) * volume / self.between
        return max(own, outside) + self.hop

    def all_reduce_seconds(self, volume: float, machines: int) -> float:
        """Seconds to sum `volume` bytes of each GPU over its counterparts in other machines.

        Every byte is sent twice, except for one rank's part: 2·(r-1)/r of the volume. The depth of
        a tree is log₂ r, and the data go up and down.
        """
        sent = 2 * (machines - 1) / machines * volume / self.between
        return sent + 2 * math.ceil(math.log2(machines)) * self.hop


NETWORK = Network()


class Step(NamedTuple):
    """Traffic and compute of one GPU in a step of one micro-batch."""

    volume: float  # bytes: parameters in bf16, gradients in fp32
    network_seconds: float
    compute_seconds: float
    tokens_to_hide: float  # per GPU, from which compute hides the traffic of every block


def step_of(
    config: DiTConfig, *, shard: int, replicate: int = 1, tokens: int, network: Network = NETWORK
) -> Step:
    """Traffic and compute of FSDP2 as training uses it (`reshard_after_forward`).

    With P parameters over n shards a rank receives (n-1)/n·P bf16 parameters twice, in the forward
    and in the backward, and sends (n-1)/n·P fp32 gradients; with r replicas, each rank sums its
    P/n gradients with its r-1 counterparts.

    Traffic is hidden if the traffic of no block takes longer than the compute that overlaps it. A
    block of B parameters takes 2·B·T FLOPs for T tokens in the forward, while 2·B bytes of the next
    block arrive, and 4·B·T in the backward, while 2·B bytes arrive and 4·B are sent. At F FLOP/s
    and W bytes/s this requires T ≥ F/W and T ≥ 1.5·F/W: the size of the model cancels out, except
    for the hops, which matter more the smaller a block is.

    Args:
        shard, replicate: ranks that share a replica, and number of replicas.
        tokens: tokens of a rank's step, without padding.
    """
    parameters = dit_without_memory(config).num_parameters()
    per_token = flops_per_token(config, ATTENDED)
    # Parameters outside the blocks are counted as part of them.
    layers = config.num_hidden_layers
    gather, reduce = parameter_seconds(parameters, layers, shard, replicate, network)
    sharded = (shard - 1) / shard * (2 * GATHERED + REDUCED) * parameters
    return Step(
        volume=sharded + 2 * (replicate - 1) / replicate * REDUCED * parameters / shard,
        network_seconds=2 * gather + reduce,
        compute_seconds=tokens * per_token / RATE,
        # The larger of forward and backward; all blocks are the same.
        tokens_to_hide=max(3 * gather, 1.5 * (gather + reduce)) * RATE / per_token,
    )


def flops_per_token(config: DiTConfig, attended: float) -> float:
    """FLOPs of forward and backward for a token that attends to `attended` tokens."""
    attention = 12 * config.num_hidden_layers * config.hidden_size * attended
    return 6 * token_parameters(config) + attention


def parameter_seconds(
    parameters: float, blocks: int, shard: int, replicate: int, network: Network
) -> tuple[float, float]:
    """Seconds to gather all parameters, and to reduce their gradients; a collective per block."""
    block = parameters / blocks
    gather = blocks * network.collective_seconds(GATHERED * block, shard)
    reduce = blocks * network.collective_seconds(REDUCED * block, shard)
    if replicate > 1:
        reduce += blocks * network.all_reduce_seconds(REDUCED * block / shard, replicate)
    return gather, reduce


def row_seconds(
    config: DiTConfig,
    *,
    tensor: int = 1,
    context: int = 1,
    tokens: int,
    network: Network = NETWORK,
) -> float:
    """Seconds that the processes wait which share a row of `tokens` tokens; nothing overlaps it.

    Before the first matrices of the attention and of the feed-forward, tensor parallelism gathers
    the tokens of the group, T/context of width D, and behind the last it reduce-scatters as many.
    Context parallelism exchanges queries, keys and values, and then the attention's output, of
    T/context tokens and D/tensor of the width. The forward runs twice, as blocks are recomputed,
    and the backward transposes each of them. The logits, 33 numbers a token, are left out.
    """
    held = tokens / context * config.hidden_size * GATHERED
    passes = 3 * config.num_hidden_layers
    seconds = 0.0
    if tensor > 1:
        seconds += passes * 4 * network.collective_seconds(held, tensor)
    if context > 1:
        # Of a machine's GPUs, as many belong to a context as there are tensor groups.
        across = replace(network, gpus=max(network.gpus // tensor, 1))
        seconds += passes * across.exchange_seconds(3 * held / tensor, context)
        seconds += passes * across.exchange_seconds(held / tensor, context)
    return seconds


def cost_of(
    config: DiTConfig,
    plan: Plan,
    *,
    micro_batches: int = 1,
    tokens: int,
    attended: float,
    network: Network = NETWORK,
) -> tuple[float, float]:
    """GiB of a GPU and the fraction of a step in which it waits, with every block recomputed.

    The traffic of rows is waited for, that of parameters and gradients only as far as it exceeds
    the compute that overlaps it; and a pipeline's stage waits while the pipeline fills and drains
    (Narayanan et al., arXiv:2104.04473, §2.2).

    Args:
        plan: resolved.
        tokens: of a GPU and step.
    """
    layers = config.num_hidden_layers // plan.pipeline
    stage = DiTConfig(**{**config.settings(), "num_hidden_layers": layers})
    row = tokens * plan.tensor * plan.context * plan.pipeline // micro_batches
    held = memory_per_rank(
        config,
        plan,
        tokens=row,
        segments=max(round(row / attended), 1),
        dtype=torch.bfloat16,
        micro_batches=micro_batches,
    )
    parameters = dit_without_memory(stage).num_parameters() / plan.tensor
    compute = tokens * flops_per_token(config, attended) * 4 / 3 / RATE  # forward twice
    spread = replace(network, gpus=max(network.gpus // plan.tensor, 1))
    shards = int(plan.shard) * plan.context
    gather, reduce = parameter_seconds(parameters, layers, shards, plan.replicate, spread)
    waiting = max(gather - compute / 4, 0) + max(gather + reduce - compute * 3 / 4, 0)
    shared = {"tensor": plan.tensor, "context": plan.context}
    waiting += micro_batches * row_seconds(stage, **shared, tokens=row, network=network)
    busy = micro_batches / (micro_batches + plan.pipeline - 1)
    return held.total / GIB, 1 - busy * compute / (compute + waiting)


DIMENSIONS = {  # tensor, context, pipeline
    "data": (1, 1, 1),
    "tensor 2": (2, 1, 1),
    "tensor 8": (8, 1, 1),
    "context 2": (1, 2, 1),
    "context 8": (1, 8, 1),
    "pipeline 4": (1, 1, 4),
}


def dimensions_table() -> str:
    """GiB of a GPU and fraction of the step in which it waits, by case, GPUs and dimension.

    Data parallelism takes what is left: sharded over all, or by machine with copies, whichever
    waits less and fits.
    """
    rows = [
        [case, f"{count:,}", *(_cell(case, count, *chosen) for chosen in DIMENSIONS.values())]
        for case in CASES
        for count in GPUS
    ]
    return Table(["model", "GPUs", *DIMENSIONS], rows).markdown()


def _cell(case: str, count: int, tensor: int, context: int, pipeline: int) -> str:
    settings, needed, attended = CASES[case]
    config = DiTConfig(**settings)
    tokens = min(max(TOKENS_OF_A_GPU, needed), TOKENS_OF_A_STEP // count)
    ranks, rows = (
        count // (tensor * context * pipeline),
        tokens * tensor * context * pipeline // needed,
    )
    if ranks == 0 or rows == 0:
        return "–"
    sizes: dict[str, Any] = {"tokens": tokens, "attended": attended}
    sizes["micro_batches"] = min(4 * pipeline, rows) if pipeline > 1 else 1
    dimensions: dict[str, Any] = {"tensor": tensor, "context": context, "pipeline": pipeline}
    costs = [
        cost_of(
            config,
            Plan(replicate=ranks // shard, shard=shard, activation_checkpointing=1, **dimensions),
            **sizes,
        )
        for shard in {ranks, min(max(NETWORK.gpus // (tensor * context), 1), ranks)}
    ]
    memory, waiting = min(costs, key=lambda cost: (cost[0] > MEMORY, cost[1]))
    return f"{memory:.0f} GiB, {waiting:.1%}"


def memory_table(sizes: Sequence[str] = SIZES, *, checkpointing: int = 0) -> str:
    """GiB of a GPU by size, ranks and tokens of a micro-batch; bf16, compiled; Markdown.

    Args:
        checkpointing: recompute every n-th block; 0 none.
    """

    def gibibytes(config: DiTConfig, replicate: int, shard: int, budget: int) -> str:
        longest = config.max_position_embeddings
        taken = memory_per_rank(
            config,
            Plan(replicate=replicate, shard=shard, activation_checkpointing=checkpointing),
            tokens=budget,
            segments=bin_capacity(budget, TYPICAL_TOKENS, longest)[1],
            dtype=torch.bfloat16,
            compile=not checkpointing,
        )
        return f"{taken.total / GIB:.1f}"

    configs = {size: DiTConfig(**model_settings(size)) for size in sizes}
    rows = [
        [size, name, *(gibibytes(config, copies, shard, budget) for budget in BUDGETS)]
        for size, config in configs.items()
        for name, copies, shard in PLANS
    ]
    heads = ["model", "GPUs", *(f"{budget:,} tokens" for budget in BUDGETS)]
    return Table(heads, rows).markdown()


def traffic_table() -> str:
    """Traffic against compute by size and number of GPUs, sharded over all and by machine."""
    rows, inside = [], NETWORK.gpus
    for size in SIZES:
        config = DiTConfig(**model_settings(size))
        for count in GPUS:
            plans = [("over all", count, 1), ("in a machine", inside, count // inside)]
            for name, shard, replicate in plans[: 1 + (count > inside)]:
                tokens = TOKENS_OF_A_GPU
                step = step_of(config, shard=shard, replicate=replicate, tokens=tokens)
                network, compute = step.network_seconds, step.compute_seconds
                cells = [size, f"{count:,}", name, f"{step.volume / 1e9:.2f} GB"]
                cells += [f"{1e3 * network:.1f} ms", f"{1e3 * compute:.0f} ms"]
                cells += [f"{network / (network + compute):.1%}"]
                rows.append([*cells, f"{step.tokens_to_hide:,.0f} tokens"])
    head = ["model", "GPUs", "sharding", "traffic per GPU and step", "network time", "compute"]
    return Table([*head, "exposed without overlap", "hidden from"], rows).markdown()


if __name__ == "__main__":
    if sys.argv[1:] == ["dimensions"]:
        print(dimensions_table())
    else:
        recomputed = memory_table(["3b"], checkpointing=1)
        print(f"{memory_table()}\n\n{recomputed}\n\n{traffic_table()}")
