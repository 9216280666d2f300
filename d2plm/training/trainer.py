"""Trainer: from a store of sequences to a trained model.

The constructor is the list of build steps, each a method that a subclass may override; `train_step`
is one optimizer step. Everything optional is a callback. Every random draw is keyed by seed and
step, so a resumed run is the unbroken one.
"""

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from d2plm.data.loader import Collection, GlobalBatch, PackedLoader, Position
from d2plm.data.prefetch import prefetch
from d2plm.errors import CheckpointError, ConfigError, require, require_number
from d2plm.model.config import DiTConfig
from d2plm.model.dit import DiT
from d2plm.noise import Key
from d2plm.paradigms.base import Denoiser, Paradigm
from d2plm.precision import resolve_precision
from d2plm.spans import span
from d2plm.training import checkpoint
from d2plm.training.callbacks.base import Callback
from d2plm.training.distributed import (
    compile_blocks,
    in_precision,
    setup_process,
)
from d2plm.training.ema import EMA
from d2plm.training.schedule import Schedule

EXIT_TERMINATED = 143  # 128 + SIGTERM

log = logging.getLogger(__name__)


class Trainer:
    """Trains a `DiT` under a paradigm.

    Args:
        model: the architecture, whose weights are drawn from the seed; or a model, whose weights
            training starts from and changes.
        paradigm: corruption and loss.
        collections: prepared training sequences.
        output_dir: where checkpoints go (`checkpoints/`) and callbacks write.
        freeze: patterns of parameter names (`blocks.0.*`); what matches one is not trained.
        optimizer: model → optimizer.
        schedule: number of steps → factor of the learning rate by step.
        token_budget: tokens of a micro-batch.
        max_length: longest segment in tokens; longer sequences are cropped.
        max_steps, max_epochs: the limit; exactly one of them.
        gradient_accumulation_steps: micro-batches of a step.
        max_grad_norm: clip the gradient's norm here; None does not clip.
        ema_decay: cap of the moving average's decay.
        seed: of the initial weights, the order, the crops, the masks and dropout.
        device, precision, compile: see `distributed`.
        num_workers: loader processes.
        prefetch_factor: batches that each of them holds ready.
        async_prefetch: copy the next batch on a side stream (CUDA).
        resume: `auto` goes on from the newest whole checkpoint in `output_dir`, `none` starts anew,
            anything else is the path of a checkpoint.
        save_total_limit: checkpoints kept.
        callbacks: see `callbacks/`.
        identity: the settings (JSON) that make the run what it is; a checkpoint made under others
            is refused.

    Attributes:
        step: optimizer steps done; `first_step` of them before this start.
        skip_update: set by a callback in `on_before_optimizer_step`: this step's gradients are
            dropped, and weights, moments and average stay as they are.
        loss: last step's training loss, a 0-d tensor on the device.
        grad_norm: last step's gradient norm before clipping, likewise.

    Raises:
        ConfigError: on impossible settings, before anything is computed.
    """

    def __init__(
        self,
        *,
        model: DiTConfig | DiT,
        paradigm: Paradigm,
        collections: Sequence[Collection],
        output_dir: Path,
        optimizer: Callable[[nn.Module], Optimizer],
        schedule: Callable[[int], Schedule],
        freeze: Sequence[str] = (),
        token_budget: int = 8192,
        max_length: int = 1024,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = 1.0,
        ema_decay: float = 0.9999,
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        compile: bool | str = "auto",
        num_workers: int = 0,
        prefetch_factor: int = 4,
        async_prefetch: bool = True,
        resume: str = "auto",
        save_total_limit: int = 3,
        callbacks: Sequence[Callback] = (),
        identity: dict[str, Any] | None = None,
    ) -> None:
        if max_grad_norm is not None:
            require_number("trainer.max_grad_norm", max_grad_norm, low=0, low_open=True)
        require_number("trainer.save_total_limit", save_total_limit, integer=True, low=1)
        require_number("trainer.seed", seed, integer=True, low=0)
        longest = (model.config if isinstance(model, DiT) else model).max_position_embeddings
        if max_length > longest:
            raise ConfigError(
                f"data.max_length={max_length}: must be at most model.max_position_embeddings "
                f"({longest})"
            )
        self.paradigm, self.output_dir, self.seed = paradigm, Path(output_dir), seed
        self.max_grad_norm, self.async_prefetch = max_grad_norm, async_prefetch
        self.resume, self.save_total_limit = resume, save_total_limit
        self.step = self.first_step = 0
        self.position = Position()
        self.loss = self.grad_norm = torch.zeros(())
        self.batch: GlobalBatch | None = None
        self.data_wait = 0.0
        self.stop_requested = self._ending = False
        self.skip_update = False
        self.run_id: str | None = None
        self.identity = {"seed": seed} if identity is None else identity

        self.build_process(device)
        self.build_model(model)
        self.freeze(freeze)
        self.build_loader(
            collections,
            token_budget,
            max_length,
            gradient_accumulation_steps,
            num_workers,
            prefetch_factor,
        )
        self.build_limit(max_steps, max_epochs)
        self.parallelise(precision, compile)
        self.build_optimizer(optimizer)
        self.build_schedule(schedule)
        self.build_ema(ema_decay)
        self.build_callbacks(callbacks)

    def build_process(self, device: str) -> None:
        """Rank, world size and device."""
        self.process = setup_process(device)
        self.device = self.process.device

    def build_model(self, model: DiTConfig | DiT) -> None:
        """The model on the device; a new one's parameters are each drawn from (seed, its name)."""
        if isinstance(model, DiT):
            self.model = model
        else:
            self.model = DiT(model)
            self.model.initialise(self.seed)
        self.model.to(self.device).train()

    def freeze(self, patterns: Sequence[str]) -> None:
        """Take the parameters whose name matches one of `patterns` out of training."""
        parameters = dict(self.model.named_parameters())
        for name in names_to_freeze(patterns, list(parameters)):
            parameters[name].requires_grad_(False)
        frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
        if frozen:
            log.info(
                "frozen: %s of %s parameters", f"{frozen:,}", f"{self.model.num_parameters():,}"
            )

    def build_loader(
        self,
        collections: Sequence[Collection],
        token_budget: int,
        max_length: int,
        micro_batches: int,
        num_workers: int,
        prefetch_factor: int,
    ) -> None:
        """The packed training stream of this rank."""
        self.loader = PackedLoader(
            collections,
            token_budget=token_budget,
            max_length=max_length,
            micro_batches=micro_batches,
            rank=self.process.rank,
            world_size=self.process.world_size,
            seed=self.seed,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=self.device.type == "cuda",
        )

    def build_limit(self, max_steps: int | None, max_epochs: int | None) -> None:
        """The number of optimizer steps."""
        if (max_steps is None) == (max_epochs is None):
            raise ConfigError(
                f"trainer.max_steps={max_steps}, trainer.max_epochs={max_epochs}: "
                "set exactly one of them"
            )
        if max_epochs is not None:
            require_number("trainer.max_epochs", max_epochs, integer=True, low=1)
            max_steps = sum(self.loader.batches_in_epoch(epoch) for epoch in range(max_epochs))
        require_number("trainer.max_steps", max_steps, integer=True, low=1)
        assert max_steps is not None
        self.max_steps = max_steps

    def parallelise(self, precision: str, compile: bool | str) -> None:
        """Precision and compilation, applied to the model from outside."""
        self.dtype = resolve_precision(precision, self.device)
        if self.dtype == torch.float64:
            self.model.double()
        self.compiled = compile_blocks(self.model.blocks, compile, self.device)
        self.denoiser = in_precision(self.model, self.dtype)

    def build_optimizer(self, optimizer: Callable[[nn.Module], Optimizer]) -> None:
        """The optimizer over the trainable parameters."""
        self.optimizer = optimizer(self.model)
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]

    def build_schedule(self, schedule: Callable[[int], Schedule]) -> None:
        """The learning rate's factor by step."""
        self.schedule = schedule(self.max_steps)

    def build_ema(self, decay: float) -> None:
        """The moving average of the weights."""
        self.ema = EMA(self.model, decay)

    def build_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Everything optional."""
        self.callbacks: list[Callback] = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Callback) -> None:
        """Have another callback called from here on, after those that are there."""
        self.callbacks.append(callback)
        callback.on_init(self)

    def end_training(self, reason: str) -> None:
        """Have training end after this step as it would at its limit: saved and exported."""
        self._ending = True
        log.info("training ends at step %d: %s", self.step, reason)

    @property
    def is_last_step(self) -> bool:
        """Whether the step just done ends the training."""
        return self._ending or self.step >= self.max_steps

    def train(self) -> None:
        """Train to the limit, from the checkpoint that `resume` names.

        On SIGTERM the step is finished and saved, and the process exits with 143.
        """
        self._resume()
        self.first_step = self.step
        try:
            self.notify("on_train_begin")
            self._train_to_the_limit()
            self.notify("on_train_end")
        finally:
            self.notify("on_stop")

    def _train_to_the_limit(self) -> None:
        batches = prefetch(
            self.loader.stream(self.position), self.device, enabled=self.async_prefetch
        )
        with self._stop_on_sigterm():
            while self.step < self.max_steps:
                waiting_since = time.perf_counter()
                batch = next(batches)
                self.data_wait = time.perf_counter() - waiting_since
                if self.position.bins == 0:
                    self.notify("on_epoch_begin")
                self.train_step(batch)
                if self.position.bins == 0:
                    self.notify("on_epoch_end")
                if self.stop_requested:
                    self.save()
                    raise SystemExit(EXIT_TERMINATED)
                if self._ending:
                    break

    def train_step(self, batch: GlobalBatch) -> None:
        """One optimizer step on a global batch."""
        self.batch, self.skip_update = batch, False
        self.notify("on_step_begin")
        key = Key(self.seed, self.step)
        torch.manual_seed(key.stream(f"dropout {self.process.rank}").as_int() >> 1)
        corrupted = [self.paradigm.corrupt(packed, key) for packed in batch.micro_batches]
        count = self.process.sum(torch.stack([c.count for c in corrupted]).sum()).clamp(min=1)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for packed, noised in zip(batch.micro_batches, corrupted, strict=True):
            self.notify("on_micro_step_begin")
            with span("forward"):
                logits = self.denoiser(
                    noised.tokens, packed.cu_seqlens, packed.max_seqlen, noised.times
                )
                nats, _ = self.paradigm.loss(logits, packed, noised)
            with span("backward"):
                (nats / count.to(nats.dtype)).backward()
            loss += nats.detach()
            self.notify("on_micro_step_end")
        self.loss = self.process.sum(loss) / count
        self.grad_norm = self.clip_gradients()
        self.notify("on_before_optimizer_step")
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * self.schedule(self.step)
        if not self.skip_update:
            with span("optimizer"):
                self.optimizer.step()
            with span("ema"):
                self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.position = self.step + 1, batch.following
        self.notify("on_step_end")

    def clip_gradients(self) -> Tensor:
        """Scale the gradient to `max_grad_norm` where it is longer; returns its norm before."""
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    @contextmanager
    def evaluating(self) -> Iterator[Denoiser]:
        """The model in evaluation mode and the run's precision, inside the block."""
        self.model.eval()
        try:
            yield self.denoiser
        finally:
            self.model.train()

    def log(self, metrics: dict[str, float]) -> None:
        """Report metrics of the present step to every callback."""
        self.notify("on_log", metrics)

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        progress = {
            "step": self.step,
            "epoch": self.position.epoch,
            "bins": self.position.bins,
            "ema_updates": self.ema.state_dict()["updates"],
            "identity": self.identity,
            "run_id": self.run_id,
        }
        folder = checkpoint.save(
            self.output_dir / "checkpoints",
            self.step,
            self._tensors(),
            progress,
            keep=self.save_total_limit,
        )
        self.notify("on_save")
        return folder

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        progress = checkpoint.verify(folder)
        changed = difference(progress["identity"], self.identity)
        if changed is not None:
            raise CheckpointError(
                f"checkpoint {folder} belongs to a run with other settings ({changed}); restore "
                "them, start anew with trainer.resume=none, or choose another output_dir"
            )
        tensors = self._tensors()
        checkpoint.load(folder, tensors)
        self.ema.load_state_dict({**tensors["ema"], "updates": progress["ema_updates"]})
        self.step = progress["step"]
        self.position = Position(progress["epoch"], progress["bins"])
        self.notify("on_load")

    def notify(self, event: str, *arguments: object) -> None:
        """Call `event` of every callback, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def _resume(self) -> None:
        root = self.output_dir / "checkpoints"
        if self.resume == "none":
            checkpoint.set_aside(root)
            return
        folder = checkpoint.newest_whole(root) if self.resume == "auto" else Path(self.resume)
        if folder is not None:
            self.load(folder)
            checkpoint.set_aside(root, beyond=self.step)
            done = self.step >= self.max_steps
            log.info(
                "%s (%s, step %d of %d)",
                "training is complete: reusing its checkpoint" if done else "resumed",
                folder,
                self.step,
                self.max_steps,
            )

    def _tensors(self) -> dict[str, Any]:
        """The live tensors of a checkpoint: model, EMA shadow and optimizer moments, by name."""
        return {
            "model": dict(self.model.named_parameters()),
            "ema": {"shadow": self.ema.state_dict()["shadow"]},
            "optimizer": self._optimizer_tensors(),
        }

    def _optimizer_tensors(self) -> dict[str, dict[str, Tensor]]:
        for parameter in self.model.parameters():
            if parameter.requires_grad and not self.optimizer.state[parameter]:
                self.optimizer.state[parameter].update(
                    step=torch.zeros((), device=parameter.device),
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                )
        return {
            name: self.optimizer.state[parameter]
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @contextmanager
    def _stop_on_sigterm(self) -> Iterator[None]:
        def request(_signal: int, _frame: object) -> None:
            self.stop_requested = True

        previous = signal.signal(signal.SIGTERM, request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, previous)


def names_to_freeze(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of the parameters `names` that match one of `patterns`, case and all.

    Raises:
        ConfigError: for a pattern that matches none, and where they match all.
    """
    wanted = "a list of name patterns, such as [blocks.0.*, token_embedding.*]"
    known = isinstance(patterns, (list, tuple)) and all(isinstance(p, str) for p in patterns)
    require(known, "trainer.freeze", patterns, wanted)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"trainer.freeze: {pattern!r} matches no parameter; there are {_summary(names)}"
            )
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    require(len(found) < len(names), "trainer.freeze", list(patterns), "less than every parameter")
    return found


def _summary(names: Sequence[str]) -> str:
    """Parameter names in one line, those of all blocks as one: `blocks.{0-5}.modulation.bias`."""
    numbers = [int(match[1]) for name in names if (match := re.match(r"blocks\.(\d+)\.", name))]
    every = f"blocks.{{0-{max(numbers, default=0)}}}."
    return ", ".join(dict.fromkeys(re.sub(r"^blocks\.\d+\.", every, name) for name in names))


def difference(before: Any, now: Any, key: str = "") -> str | None:
    """The first setting that differs, as `key: before → now`; None where all agree."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            found = difference(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if before == now else f"{key}: {before} → {now}"
