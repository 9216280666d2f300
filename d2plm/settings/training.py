"""Settings of training: the trainer, the optimizer, its schedule and the parallelism."""

from dataclasses import dataclass
from typing import Literal

from d2plm.core.errors import ConfigError, require
from d2plm.settings.schema import MAX_SEED, Settings, key

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["auto", "bf16", "fp16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(Settings):
    """Length, device and precision of training, and the checkpoints to keep."""

    type: str = key("trainer")
    """registered name of the trainer; your own is a subclass of Trainer"""
    device: Device = key("auto")
    """device; auto: CUDA if there is a GPU"""
    precision: Precision = key("auto")
    """dtype of the matrix products; auto: bf16 if the device is fast at it, else fp32"""
    compile: bool | Literal["auto"] = key("auto")
    """compile blocks; auto: on CUDA, and on a CPU in runs of some minutes"""
    threads: int | None = key(None, low=1)
    """CPU threads of a process; null: OMP_NUM_THREADS, else its share of the cores"""
    deterministic: bool = key(False)
    """bitwise reproducible kernels; slower on CUDA"""
    max_steps: int | None = key(None, low=1)
    """optimizer steps; set this or one of the next two, the others to null"""
    max_epochs: int | None = key(None, low=1)
    """passes over the training sequences"""
    flops_budget: float | None = key(None, above=0)
    """model FLOPs, such as 1e18"""
    global_batch_tokens: int | None = key(None, low=1, composed="${data.token_budget}")
    """tokens of a step, a multiple of data.token_budget; null: a bin per micro-batch and process"""
    gradient_accumulation_steps: int | Literal["auto"] = key("auto", low=1)
    """micro-batches per process; auto: one per bin of token_budget"""
    loss_aggregation: Literal["token_weighted", "rank_average"] = key("token_weighted")
    """token_weighted: tokens count equally; rank_average: mean of the processes' means"""
    max_grad_norm: float | None = key(1.0, above=0)
    """maximum norm of the gradient; null: no clipping"""
    ema_decay: float = key(0.9999, low=0, below=1)
    """decay of the weights' moving average, which is exported"""
    seed: int = key(0, low=0, high=MAX_SEED)
    """seed of initial weights, order, crops, masks and dropout"""
    fast_dev_run: int | None = key(None, low=1)
    """this many steps, a validation, a save and an export in a temporary folder"""
    overfit_batches: int | None = key(None, low=1)
    """train on only this many global batches"""
    max_wait_seconds: float | None = key(None, low=0)
    """seconds to wait for another training in output_dir; null: until it ends; several processes:
    90 % of distributed.timeout_seconds"""
    resume: str = key("auto")
    """auto | none | location of a checkpoint"""
    checkpoints: str | None = key(None, path="any")
    """folder or fsspec URL; null: output_dir/checkpoints"""
    save_total_limit: int = key(3, low=1)
    """number of newest checkpoints to keep"""
    save_top_k: int = key(0, low=0)
    """number of checkpoints of lowest validation bound also kept"""
    on_save_error: Literal["stop", "continue"] = key("stop")
    """action if a checkpoint cannot be written"""
    freeze: list[str] = key([])
    """patterns of parameters not to train, such as [token_embedding.*, blocks.0.*]"""
    lora_rank: int | None = key(None, low=1)
    """rank of LoRA updates of the blocks' matrices, which alone are trained; null: no LoRA"""


@dataclass(frozen=True, kw_only=True)
class Parallelism(Settings):
    """How training is spread over processes; `training.plan` divides them."""

    replicate: int = key(1, low=1)
    """replicas of the sharded model; more than 1 is hybrid sharding (HSDP)"""
    shard: int | Literal["auto"] = key("auto", low=1)
    """processes that share a replica, with rows of their own; auto: all ÷ the other sizes"""
    context: int = key(1, low=1)
    """processes that share the tokens of each row; context × tensor divides the heads"""
    tensor: int = key(1, low=1)
    """processes that share each block's heads and feed-forward width; divides both"""
    pipeline: int = key(1, low=1)
    """processes that share the blocks, each a stage that micro-batches pass through (1F1B)"""
    expert: int = key(1, low=1)
    """processes of a replica that share the experts of each layer; divides both"""
    reshard_after_forward: bool = key(True)
    """free gathered blocks after the forward: less memory, one more all-gather"""
    reshard_between_micro_batches: bool = key(False)
    """also free them after each micro-batch, not only the last"""
    cpu_offload: bool = key(False)
    """shards, optimizer state and EMA in host memory (CUDA)"""
    activation_checkpointing: int = key(0, low=0)
    """recompute every n-th block's activations; 1 every block, 0 none"""
    timeout_seconds: float = key(600, above=0)
    """maximum wait of ranks for each other"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline > 1 and self.reshard_between_micro_batches:
            raise ConfigError(
                f"pipeline={self.pipeline} computes several micro-batches at once and keeps "
                "parameters gathered; set it to false",
                {"reshard_between_micro_batches": True},
            )


@dataclass(frozen=True, kw_only=True)
class DistributedSettings(Parallelism):
    """The processes on this machine, and what they share."""

    processes: int = key(1, low=1)
    """processes that d2plm starts on this machine; several, with torchrun"""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """Settings of every optimizer."""

    type: str = key("")
    """registered name of the optimizer"""
    learning_rate: float = key(4e-4, above=0)
    """peak learning rate, multiplied by the schedule"""
    weight_decay: float = key(0.01, low=0)
    """applies to matrices; norms, biases and embeddings are never decayed"""


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(OptimizerSettings):
    """AdamW (arXiv:1711.05101)."""

    type: str = key("adamw")
    betas: list[float] = key([0.9, 0.98], low=0, below=1)
    """decay rates of AdamW's two moving averages"""
    eps: float = key(1e-8, above=0)
    """added to AdamW's denominator"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.betas) == 2, "betas", self.betas, "two numbers in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamWSettings):
    """Muon (kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for the rest."""

    type: str = key("muon")
    learning_rate: float = key(2e-3, above=0)
    """peak learning rate of both at base_width, multiplied by the schedule"""
    momentum: float = key(0.95, low=0, below=1)
    """momentum of Muon"""
    base_width: int | None = key(64, low=1, high=1 << 20)
    """width to which learning_rate applies, converted for others; null: one rate for all"""


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings(Settings):
    """Settings of every learning-rate schedule: the warm-up."""

    type: str = key("")
    """registered name of the schedule"""
    warmup_ratio: float = key(0.1, low=0, below=1)
    """fraction of the steps in which the rate rises from 0"""
    warmup_steps: int | None = key(None, low=0)
    """the same in steps; takes precedence"""


@dataclass(frozen=True, kw_only=True)
class ConstantSettings(ScheduleSettings):
    """The peak learning rate from the warm-up to the end."""

    type: str = key("constant")


@dataclass(frozen=True, kw_only=True)
class CosineSettings(ScheduleSettings):
    """Half a cosine, or a straight line, from the peak learning rate down to the floor."""

    type: str = key("cosine")
    floor_ratio: float = key(0.0, low=0, high=1)
    """final learning rate as a fraction of the peak"""


@dataclass(frozen=True, kw_only=True)
class WsdSettings(CosineSettings):
    """Warm-up, stable, decay (MiniCPM, arXiv:2404.06395): at the peak until near the end."""

    type: str = key("wsd")
    decay_ratio: float = key(0.1, low=0, below=1)
    """fraction of the steps at the end in which the rate falls"""
    decay_steps: int | None = key(None, low=0)
    """the same in steps; takes precedence"""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = key("linear")
    """shape of the decay (arXiv:2405.18392)"""
