"""Throughput: residues and tokens per second, model FLOP/s and the share spent waiting for data.

Only real tokens count, never padding, and every batch counts. Counts come from the batch on the
host, so measuring forces no synchronisation.
"""

import time
from dataclasses import dataclass, field

from d2plm.model.config import DiTConfig
from d2plm.model.flops import training_flops


@dataclass
class Throughput:
    """Accumulates between two reports.

    Args:
        config: the model, for its FLOP count.
    """

    config: DiTConfig
    tokens: int = 0
    flops: float = 0.0
    waited: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def add(self, segment_lengths: list[int], waited: float) -> None:
        """Count one global batch: its sequences' lengths in tokens, and seconds spent waiting."""
        self.tokens += sum(segment_lengths)
        self.flops += training_flops(self.config, segment_lengths)
        self.waited += waited

    def report(self) -> dict[str, float]:
        """Rates since the last report, which starts the next one."""
        elapsed = max(time.perf_counter() - self.started, 1e-9)
        rates = {
            "tokens_per_second": self.tokens / elapsed,
            "model_tflops_per_second": self.flops / elapsed / 1e12,
            "data_wait_share": self.waited / elapsed,
        }
        self.tokens, self.flops, self.waited = 0, 0.0, 0.0
        self.started = time.perf_counter()
        return rates
