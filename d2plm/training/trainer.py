"""Trainer: from a store of sequences to a trained model, on one process or many.

The constructor is the list of build steps, each a method that a subclass may override; `train_step`
is one optimizer step. Everything optional is a callback. Every random number is keyed by seed and
step, so a resumed run equals an uninterrupted one, and the global batch is fixed in tokens, so a
run is the same on any number of processes.
"""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import CheckpointError, require
from d2plm.core.noise import Key
from d2plm.core.precision import resolve_precision
from d2plm.core.processes import handled
from d2plm.core.spans import span
from d2plm.data.loader import Collection, GlobalBatch, PackedDataset, Position
from d2plm.data.prefetch import prefetch, read_ahead
from d2plm.model.alignment import align
from d2plm.model.dit import DiT, dit_without_memory
from d2plm.model.dit_config import DiTConfig
from d2plm.model.lora import add_lora
from d2plm.paradigms.paradigm import Corrupted, Denoiser, Paradigm
from d2plm.settings.data import LoaderSettings
from d2plm.settings.training import TrainerSettings
from d2plm.training import checkpoint, optimizer_state
from d2plm.training.callbacks.callback import Callback
from d2plm.training.context_parallel import apply_context_parallel
from d2plm.training.distributed import Agreement, end_together, setup_process, silent_ranks_named
from d2plm.training.ema import EMA
from d2plm.training.expert_parallel import apply_expert_parallel
from d2plm.training.learning_rate import Schedule, cosine
from d2plm.training.load_balancing import LoadBalancer
from d2plm.training.loss_scale import LossScale
from d2plm.training.optimizer import build_adamw
from d2plm.training.parallelise import (
    checkpoint_activations,
    compile_blocks,
    in_precision,
    reshard,
    shard_model,
    synchronise_gradients,
)
from d2plm.training.pipeline_parallel import Pipeline, Stage
from d2plm.training.plan import Plan, packed_loader
from d2plm.training.shards import LocalParameters, local, norms, own_shard, sharded_like
from d2plm.training.tensor_parallel import splits_of
from d2plm.training.trainer_settings import (
    crop_length,
    difference,
    names_to_freeze,
    require_relatives,
)
from d2plm.training.training_length import flops_per_step, number_of_steps

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Reported by a rank to the others after a step, in ascending priority.
_NOTHING, _SAVE_FAILED, _STOP = 0, 1, 2

log = logging.getLogger(__name__)


class Trainer:
    """Trains a `DiT` under a paradigm.

    Args:
        settings: length and precision of training, and what to keep.
        model: the architecture, with initial weights keyed by the seed; or a model, which is
            trained in place.
        paradigm: corruption and loss.
        collections: prepared training sequences.
        output_dir: folder of `checkpoints/` and the callbacks' output.
        loading: how batches are packed and loaded.
        plan: distribution over the processes.
        optimizer: (model, this rank's parameters by name) → optimizer of these.
        schedule: number of steps → factor of the learning rate by step.
        callbacks: see `callbacks/`.
        identity: the settings (JSON) that define the run; checkpoints with others are rejected.

    Attributes:
        step: number of optimizer steps done.
        first_step: number of steps done before this start.
        num_parameters: parameters of the whole model; `model` has only this rank's stage.
        parameters: this rank's shards, plain tensors by name.
        splits: parameters that are split over a tensor group.
        history: the newest 10,000 rows of logged metrics, evaluations included, with their `step`.
        skip_update: if set by a callback in `on_before_optimizer_step`, this step's gradients are
            dropped; weights, optimizer state and average do not change.
        loss: last step's training loss, a 0-d tensor on the device.
        grad_norm: last step's gradient norm before clipping, on the device.

    Raises:
        ConfigError: if the settings are invalid, before anything is computed.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        model: DiTConfig | DiT,
        paradigm: Paradigm,
        collections: Sequence[Collection],
        output_dir: str | Path,
        *,
        loading: LoaderSettings | None = None,
        plan: Plan | None = None,
        optimizer: Callable[..., Optimizer] = build_adamw,
        schedule: Callable[[int], Schedule] = cosine,
        callbacks: Sequence[Callback] = (),
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.settings, self.loading = settings, loading or LoaderSettings()
        self.paradigm, self.output_dir, self.seed = paradigm, Path(output_dir), settings.seed
        self.step = self.first_step = 0
        self.position = Position()
        self.loss = self.grad_norm = torch.zeros(())
        self.batch: GlobalBatch | None = None
        self.data_wait, self.history = 0.0, deque[dict[str, float]](maxlen=10_000)
        self.stop_requested = self.skip_update = self._ending = False
        self.pipeline: Pipeline | None = None
        self.run_id: str | None = None
        self.identity = {"seed": self.seed} if identity is None else identity
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._saved_step = -1

        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self.build_process(plan or Plan())
        self.build_model(model)
        require_relatives(self.loading.max_relatives, self.model.config, paradigm)
        self.add_adapter(settings.lora_rank)
        self.freeze(settings.freeze)
        self.build_dataset(collections)
        self.build_collate()
        self.build_loader()
        self.build_limit()
        self.build_precision()
        self.parallelise()
        self.materialise()
        self.build_optimizer(optimizer)
        self.build_schedule(schedule)
        self.build_ema()
        self.build_load_balancing()
        self.build_checkpoints()
        self.build_callbacks(callbacks)

    def build_process(self, plan: Plan) -> None:
        """Rank, world size, mesh and device."""
        if self.settings.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.process = setup_process(self.settings.device, plan)
        self.plan = plan.resolved(self.process.world_size)
        self.device = self.process.device

    def build_model(self, model: DiTConfig | DiT) -> None:
        """The model; a new one has no memory until `materialise`."""
        self.model = model if isinstance(model, DiT) else dit_without_memory(model)
        self.plan.require_fits(self.model.config)
        self.model.train()

    def add_adapter(self, rank: int | None) -> None:
        """Train low-rank adapters instead of the model's weights, if requested."""
        self.lora_rank = rank
        self.plan.require_adapters(rank)
        if rank is None:
            return
        given = not any(parameter.is_meta for parameter in self.model.parameters())
        require(given, "lora_rank", rank, "null without init_from: there are no weights to change")
        add_lora(self.model, rank, self.seed)

    def freeze(self, patterns: Sequence[str]) -> None:
        """Freeze the parameters whose names match one of `patterns`."""
        parameters = dict(self.model.named_parameters())
        matching = names_to_freeze(patterns, list(parameters))
        for name in matching:
            parameters[name].requires_grad_(False)
        frozen = sum(p.numel() for p in parameters.values() if not p.requires_grad)
        if matching or self.lora_rank:
            log.info(
                "frozen: %s of %s parameters", f"{frozen:,}", f"{self.model.num_parameters():,}"
            )

    def build_dataset(self, collections: Sequence[Collection]) -> None:
        self.collections = tuple(collections)

    def build_collate(self) -> None:
        """The class that lays out the sequences of planned bins as a `PackedBatch`."""
        self.collate = PackedDataset

    def build_loader(self) -> None:
        """This rank's part of each global batch."""
        longest = crop_length(self.loading.max_length, self.model.config.max_position_embeddings)
        self.loader = packed_loader(
            self.collections,
            self.settings,
            self.loading,
            longest,
            rank=self.process.data_rank,
            ranks=self.process.data_ranks,
            pin_memory=self.device.type == "cuda",
            collate=self.collate,
        )
        self.plan.require_micro_batches(self.loader.micro_batches)
        self.global_batch_tokens = self.loader.bins_per_batch * self.loading.token_budget
        self.identity = {**self.identity, "global_batch_tokens": self.global_batch_tokens}

    def build_limit(self) -> None:
        self.max_steps = number_of_steps(self.loader, self.model.config, self.settings)

    def build_precision(self) -> None:
        """The dtype of the matrix products, and the loss scale for fp16."""
        self.dtype = resolve_precision(self.settings.precision, self.device)
        self.loss_scale = LossScale(self.device) if self.dtype == torch.float16 else None

    def parallelise(self) -> None:
        """Compilation, recomputation and sharding, applied to the model from outside."""
        compile = self.settings.compile
        if self.dtype == torch.float64:
            self.model.double()
        self.num_parameters = self.model.num_parameters()
        by_row = self.process.row_mesh
        rows = None if by_row is None else apply_context_parallel(self.model, by_row)
        if self.process.expert_ranks is not None:
            apply_expert_parallel(self.model, self.process.expert_ranks)
            if compile is True:
                log.warning("compile: running uncompiled, as experts are on several processes")
            compile = False  # their shards are gathered inside a block
        flops = self.max_steps * flops_per_step(self.loader, self.model.config)
        self.compiled = compile_blocks(self.model.blocks, compile, self.device, flops)
        checkpoint_activations(self.model.blocks, self.plan.activation_checkpointing)
        if self.plan.pipeline > 1:
            self.pipeline = Pipeline(self.model, self.process, rows, self.dtype)
        self.unit: DiT | Stage = self.model if self.pipeline is None else self.pipeline.stage
        if self.process.mesh is not None:
            shard_model(self.unit, self.unit.blocks, self.process, self.plan, self.dtype)

    def materialise(self) -> None:
        """Allocate this rank's shards, with a new model's weights or the given ones."""
        home = torch.device("cpu") if self.plan.cpu_offload else self.device
        is_new = any(parameter.is_meta for parameter in self.model.parameters())
        # The unit of FSDP; else uneven shards would be replaced later.
        self.unit.to_empty(device=home) if is_new else self.unit.to(home)
        if is_new:
            self.draw_weights()
        self.denoiser = self.pipeline or in_precision(self.model, self.dtype)
        self._shards = LocalParameters(self.model)
        self.parameters, self.splits = self._shards.local, self._shards.splits

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Draw each parameter from (seed, its name) and keep this rank's shard of it."""
        splits = splits_of(self.model)
        for name, parameter in self.model.named_parameters():
            split = splits.get(name)
            shape = parameter.shape if split is None else split.whole_shape(parameter.shape)
            full = self.model.initial_value(name, shape, self.seed)
            full = full if split is None else split.of(full)
            local(parameter).copy_(own_shard(full.to(parameter.device), parameter))

    def build_optimizer(self, optimizer: Callable[..., Optimizer]) -> None:
        self.optimizer = optimizer(self.model, self.parameters)
        if self.loss_scale is not None:
            self.loss_scale.require_skipping(self.optimizer)
        self.peak_rates = [group["lr"] for group in self.optimizer.param_groups]

    def build_schedule(self, schedule: Callable[[int], Schedule]) -> None:
        self.schedule = schedule(self.max_steps)

    def build_ema(self) -> None:
        self.ema = EMA(self.parameters, self.settings.ema_decay)

    def build_load_balancing(self) -> None:
        self.experts = LoadBalancer(self.model, self.parameters, self.process)

    def build_checkpoints(self) -> None:
        settings = self.settings
        root = checkpoint.Root(settings.checkpoints or str(self.output_dir / "checkpoints"))
        self.saver = checkpoint.Saver(
            root, self.process, settings.save_total_limit, settings.save_top_k
        )

    def build_callbacks(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks: list[Callback] = []
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: Callback) -> None:
        """Add a callback, called after those added before it.

        Callbacks that save (`Callback.called_last`) are called last, so that a step at which
        another callback ends the training is saved.
        """
        last = sum(known.called_last for known in self.callbacks)
        at = len(self.callbacks) - (0 if callback.called_last else last)
        self.callbacks.insert(at, callback)
        callback.on_init(self)

    def end_training(self, reason: str) -> None:
        """End training after this step as at its limit; call on every rank at the same step."""
        self._ending = True
        log.info("training ends at step %d: %s", self.step, reason)

    @property
    def is_last_step(self) -> bool:
        """Whether the step just done ends the training."""
        return self._ending or self.step >= self.max_steps

    def train(self) -> None:
        """Train to the limit, from the checkpoint given by `resume`.

        On SIGTERM or SIGUSR1 to any rank, the step is finished and saved, and every process exits
        with 143. Otherwise all ranks return together.
        """
        with handled(self._request_stop, *STOP_SIGNALS, kept_on_exit=True):
            with silent_ranks_named(self.process, lambda: self.step):
                self._resume()
            self.first_step = self.step
            try:
                # Silent ranks are named before `finish` waits for the last save.
                with silent_ranks_named(self.process, lambda: self.step):
                    self.notify("on_train_begin")
                    self._train_to_the_limit()
                    self._settle_save()
                    self.notify("on_train_end")
            finally:
                self.saver.finish()
                self.notify("on_stop")
            end_together(self.process)

    def _train_to_the_limit(self) -> None:
        batches = self.batches()
        agreement = Agreement(self.process)
        while not self.is_last_step:
            waiting_since = time.perf_counter()
            with span("load"):
                batch = next(batches)
            self.data_wait = time.perf_counter() - waiting_since
            if self.position.bins == 0:
                self.notify("on_epoch_begin")
            self.train_step(batch)
            if self.step == self.first_step + 1:  # reject unsupported state before the first save
                optimizer_state.collect(self.optimizer, self.parameters)
            failed = _SAVE_FAILED if self.saver.failed else _NOTHING
            agreed = agreement.exchange(_STOP if self.stop_requested else failed)
            if agreed == _STOP:
                self._stop_here()
            elif agreed == _SAVE_FAILED:
                self._settle_save()
        agreement.finish()

    def batches(self) -> Iterator[GlobalBatch]:
        stream = self.loader.stream(self.position)
        if self.loading.max_relatives is not None and self.device.type == "cuda":
            # In the step, the alignment would have to wait for the device.
            steps = enumerate(stream, self.step)
            stream = read_ahead(self.with_aligned_relatives(batch, step) for step, batch in steps)
        return prefetch(stream, self.device, enabled=self.loading.async_prefetch)

    def with_aligned_relatives(self, batch: GlobalBatch, step: int) -> GlobalBatch:
        """The batch of a step, its relatives aligned on the host to residues that stay visible."""

        def aligned(packed: PackedBatch) -> PackedBatch:
            if packed.relatives is None:
                return packed
            tokens = self.paradigm.corrupt(packed, Key(self.seed, step)).tokens
            alignment = align(tokens, packed.cu_seqlens, packed.relatives)
            if self.loader.pin_memory:
                alignment = alignment.map(torch.Tensor.pin_memory)
            return replace(packed, relatives=replace(packed.relatives, alignment=alignment))

        return replace(batch, micro_batches=[aligned(packed) for packed in batch.micro_batches])

    def train_step(self, batch: GlobalBatch) -> None:
        self.batch, self.skip_update = batch, False
        self.notify("on_step_begin")
        key = Key(self.seed, self.step)
        self._seed_dropout(key)
        corrupted = [self.paradigm.corrupt(packed, key) for packed in batch.micro_batches]
        factor, count = self.loss_normaliser([c.count for c in corrupted])
        self.experts.begin_step()
        if self.pipeline is None:
            loss = self.accumulate_gradients(batch.micro_batches, corrupted, factor)
        else:
            loss = self.pipeline.step(self.paradigm, batch.micro_batches, corrupted, factor)
        self.experts.end_step()
        self.loss = self.process.sum(self.process.sum_stages(loss) / count)
        self.grad_norm = self.clip_gradients()
        self.notify("on_before_optimizer_step", self.loss, self.grad_norm)
        for group, peak in zip(self.optimizer.param_groups, self.peak_rates, strict=True):
            group["lr"] = peak * self.schedule(self.step)
        if not self.skip_update:
            with span("optimizer"):
                if self.loss_scale is None:
                    self.optimizer.step()
                else:
                    self.loss_scale.step(self.optimizer)
            self.experts.move()
            with span("ema"):
                self.ema.update()
        self._shards.drop_gradients()
        self.step, self.position = self.step + 1, batch.following
        if self.position.bins == 0:
            self.notify("on_epoch_end")
        self.notify("on_step_end", self.loss, self.grad_norm)

    def accumulate_gradients(
        self, batches: Sequence[PackedBatch], corrupted: Sequence[Corrupted], factor: Tensor
    ) -> Tensor:
        """Forward and backward of each micro-batch; returns the sum of their losses [nats]."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, (packed, noised) in enumerate(zip(batches, corrupted, strict=True)):
            self.notify("on_micro_step_begin")
            synchronise_gradients(self.model, number + 1 == len(corrupted), self.plan)
            with span("forward"):
                whole = self.process.row_mesh is not None
                nats = self.paradigm.model_loss(self.denoiser, packed, noised, whole_logits=whole)
                self.experts.see()
            with span("backward"):
                (nats * factor.to(nats.dtype)).backward()
            loss += nats.detach()
            self.notify("on_micro_step_end")
        return loss

    def _seed_dropout(self, key: Key) -> None:
        """Like `torch.manual_seed`, which formats a stack trace for each kind of absent device."""
        seed = key.stream(f"dropout {self.process.rank}").as_int() >> 1
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)

    def loss_normaliser(self, counts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(factor of this rank's summed loss in the backward, its divisor in the reported loss).

        Gradients are averaged over the ranks of a mesh; the factor compensates for their number.
        """
        count = torch.stack(list(counts)).sum().double()
        if self.settings.loss_aggregation == "rank_average":
            count = count.clamp(min=1) * self.process.data_ranks
        else:
            count = self.process.sum(count).clamp(min=1)
        factor = self.process.gradient_ranks / count
        return factor if self.loss_scale is None else factor * self.loss_scale.scale, count

    def clip_gradients(self) -> Tensor:
        """Scale the gradient down to `max_grad_norm`; returns its norm before scaling."""
        gradients = self._shards.take_gradients()
        norm = norms([gradients], self.process, self.splits)[0]
        factor = torch.ones((), device=self.device)
        if self.loss_scale is not None:
            factor = 1 / self.loss_scale.scale
            norm = norm * factor
            self.loss_scale.update(norm)
        if self.settings.max_grad_norm is not None:
            clipped = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            # A non-finite norm must not spread to finite gradients.
            factor = factor * torch.where(torch.isfinite(norm), clipped, 1.0)
        if gradients:
            own = list(gradients.values())
            torch._foreach_mul_(own, factor.to(own[0].device, own[0].dtype))
        return norm

    @contextmanager
    def evaluating(self) -> Iterator[Denoiser]:
        """Context manager: the model in evaluation mode and the run's precision."""
        self.model.eval()
        try:
            yield self.denoiser
        finally:
            reshard(self.unit)
            self.model.train()

    def log(self, metrics: dict[str, float]) -> None:
        """Report metrics of the current step to every callback."""
        self.history.append({"step": self.step, **metrics})
        self.notify("on_log", metrics)

    def report_evaluation(self, metrics: dict[str, float]) -> None:
        """Report a validation to every callback; its `validation_nelbo` ranks the checkpoint."""
        self._evaluated = (self.step, metrics)
        self.history.append({"step": self.step, **metrics})
        self.notify("on_evaluate", metrics)

    def save(self) -> str:
        """Start writing a checkpoint of the current step; returns its location."""
        self._settle_save()
        location = self.saver.save(self.step, *self._state())
        self._saved_step = self.step
        self.notify("on_save", location)
        return location

    def load(self, location: str, verified: bool = False) -> None:
        """Continue from a checkpoint written by any number of processes.

        Args:
            verified: skip the comparison of digests, which were just compared.

        Raises:
            CheckpointError: if it is damaged, or of a run with another identity.
        """
        root, name = checkpoint.split_location(location)
        saved = self.process.on_main(
            lambda: (
                checkpoint.manifest(root, name)["run_state"]
                if verified
                else checkpoint.verify(root, name)
            )
        )
        changed = difference(saved["identity"], self.identity)
        if changed is not None:
            raise CheckpointError(
                f"checkpoint {location} belongs to a run with other settings or data ({changed}); "
                "restore them (data: prepare the earlier input again, or set data.prepared_dir to "
                "its data), start anew with resume=none, or choose another output_dir, where "
                "init_from=… with this run's exported model trains it further"
            )
        with checkpoint.fitting(location):
            elsewhere = set() if self.pipeline is None else self.pipeline.elsewhere
            layout = [one for one in checkpoint.layout(root, name) if one[0][1] not in elsewhere]
            moments = optimizer_state.allocate(layout, self.parameters)
            checkpoint.load(root, name, self._tensors(moments))
            optimizer_state.restore(self.optimizer, self.parameters, moments, saved["optimizer"])
        self.ema.updates = saved["ema_updates"]
        self.step = saved["step"]
        self.position = Position(saved["epoch"], saved["bins"])
        for kind, callback in self._named_callbacks().items():
            if kind in saved["callbacks"]:
                callback.load_state_dict(saved["callbacks"][kind])
        self.notify("on_load", location)

    def notify(self, event: str, *arguments: object) -> None:
        """Call `event` of every callback, in order."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def _resume(self) -> None:
        root, resume = self.saver.root, self.settings.resume
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            resume = "auto"  # restarted by torchrun: `resume` applies to the first start
        location = None if resume == "none" else resume
        if resume == "auto":
            name = self.process.on_main(lambda: checkpoint.newest_whole(root))
            location = None if name is None else root.of(name)
        if location is not None:
            self.load(location, verified=resume == "auto")
        beyond = -1 if location is None else self.step
        self.process.on_main(lambda: checkpoint.set_aside(root, beyond))
        if location is not None:
            complete = "training is complete: reusing its checkpoint"
            what = complete if self.step >= self.max_steps else "resumed"
            log.info("%s (%s, step %d of %d)", what, location, self.step, self.max_steps)

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the live tensors, everything else that a checkpoint stores)."""
        moments, optimizer = optimizer_state.collect(self.optimizer, self.parameters)
        if self.pipeline is not None:
            numbers = self.process.on_all(lambda: optimizer["numbers"])
            optimizer["numbers"] = {name: kinds for part in numbers for name, kinds in part.items()}
        step, metrics = self._evaluated
        return self._tensors(moments), {
            "step": self.step,
            "epoch": self.position.epoch,
            "bins": self.position.bins,
            "ema_updates": self.ema.updates,
            "optimizer": optimizer,
            "identity": self.identity,
            "run_id": self.run_id,
            "world_size": self.process.world_size,
            "monitored": metrics.get("validation_nelbo") if step == self.step else None,
            "callbacks": {
                name: state
                for name, callback in self._named_callbacks().items()
                if (state := callback.state_dict())
            },
        }

    def _named_callbacks(self) -> dict[str, Callback]:
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            number = sum(type(known) is type(callback) for known in named.values())
            named[f"{kind} {number + 1}" if number else kind] = callback
        return named

    def _tensors(self, moments: optimizer_state.State) -> dict[str, Any]:
        like = self._shards.stored()
        tensors = {
            "model": like,
            "ema": {name: sharded_like(t, like[name]) for name, t in self.ema.shadow.items()},
            optimizer_state.SECTION: {
                name: {
                    kind: sharded_like(tensor, like[name]) if tensor.ndim else tensor
                    for kind, tensor in state.items()
                }
                for name, state in moments.items()
            },
        }
        if self.loss_scale is not None:
            tensors["loss_scale"] = self.loss_scale.tensors()
        return tensors

    def _settle_save(self) -> None:
        """Wait for the save in progress; a failure ends training or is logged."""
        try:
            self.saver.wait()
        except CheckpointError as error:
            if self.settings.on_save_error == "stop":
                raise
            log.error("%s; training continues, as on_save_error=continue", error)

    def _stop_here(self) -> None:
        if self._saved_step != self.step:
            self.save()
        self._settle_save()
        log.info("stopped by a signal at step %d; the same command continues", self.step)
        end_together(self.process)
        raise SystemExit(128 + signal.SIGTERM)

    def _request_stop(self, _signal: int, _frame: object) -> None:
        self.stop_requested = True
