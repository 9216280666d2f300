"""Pipeline parallelism: each process holds consecutive blocks of the model, a stage.

Micro-batches pass through the stages one after another, by the schedule 1F1B (Harlap et al.,
arXiv:1806.03377) of `torch.distributed.pipelining`. A stage receives the hidden states and any time
embedding, whose parameters only the first stage has, and computes the layout of the row itself. It
sends little, but waits: of M micro-batches on P processes, a part of (P − 1)/(M + P − 1) of the
time is idle where all stages take equally long.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import ConfigError
from d2plm.model.dit import DiT
from d2plm.paradigms.paradigm import Corrupted, Paradigm
from d2plm.training.context_parallel import ContextParallel
from d2plm.training.distributed import Process


class Stage(nn.Module):
    """Consecutive blocks of a model; of the first stage also the embeddings, of the last the head.

    Args:
        model: the whole model.
        number: number of this stage among `count`.
    """

    def __init__(self, model: DiT, number: int, count: int) -> None:
        super().__init__()
        layers = len(model.blocks)
        blocks = list(model.blocks)[number * layers // count : (number + 1) * layers // count]
        self.number, self.blocks = number, nn.ModuleList(blocks)
        self.embed, self.layout = model.embed, model.layout
        self.token_embedding = model.token_embedding if number == 0 else None
        self.time_embedding = model.time_embedding if number == 0 else None
        self.head = model.head if number == count - 1 else None

    def forward(
        self,
        x_TD: Tensor | None = None,
        time_SC: Tensor | None = None,
        *,
        tokens: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        times: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        """What the next stage receives, or logits, from what the previous one sent.

        Arguments of a row as in `DiT`, in micro-batches [1, …].
        """
        tokens_T, cu_seqlens = tokens[0], cu_seqlens[0]
        if x_TD is None:
            x_TD, time_SC = self.embed(tokens_T, cu_seqlens, times[0])
        layout = self.layout(tokens_T, cu_seqlens, x_TD.dtype)
        for block in self.blocks:
            x_TD = block(x_TD, time_SC, layout, cu_seqlens, max_seqlen)
        if self.head is not None:
            return self.head(x_TD, time_SC, layout)
        # A copy: hooks on the received tensor itself would stay with its buffer.
        return (x_TD,) if time_SC is None else (x_TD, time_SC.clone())


class Pipeline:
    """The stage of this process, and the way of micro-batches through all stages.

    Parameters of other stages are removed from `model`; those that stay keep their names.

    Args:
        rows: how the processes of a stage share rows; None if they do not.
        dtype: dtype of the hidden states.

    Attributes:
        stage: that of this process.
        elsewhere: the names of the parameters that only other processes have.
    """

    def __init__(
        self, model: DiT, process: Process, rows: ContextParallel | None, dtype: torch.dtype
    ) -> None:
        assert process.pipeline_group is not None
        self.group, self.device = process.pipeline_group, process.device
        self.config, self.rows, self.dtype = model.config, rows, dtype
        ranks = self.group.size()
        stages = [Stage(model, number, ranks) for number in range(ranks)]
        _require_trainable(stages)
        self.stage = stages[self.group.rank()]
        names = {name for name, _ in model.named_parameters()}
        kept = {model.blocks, *self.stage.modules()}
        for parent in (model, model.blocks):
            for name, child in list(parent.named_children()):
                if child not in kept:
                    delattr(parent, name)  # not `del`, which would number the blocks anew
        self.elsewhere = names - {name for name, _ in model.named_parameters()}
        self._schedule: Schedule1F1B | None = None
        self._loss: Callable[[Tensor, int], Tensor]  # of the current step

    def step(
        self,
        paradigm: Paradigm,
        batches: Sequence[PackedBatch],
        corrupted: Sequence[Corrupted],
        factor: Tensor,
    ) -> Tensor:
        """Forward and backward of all micro-batches, whose loss is multiplied by `factor`.

        Returns:
            The sum of the losses [nats] on the process with the last stage, 0 on the others.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)

        def loss(logits: Tensor, number: int) -> Tensor:
            nats, _ = paradigm.loss(self._cut(logits), batches[number], corrupted[number])
            total.add_(nats.detach())
            return nats * factor.to(nats.dtype)

        rows = [
            self._padded(noised.tokens, batch.cu_seqlens, batch.max_seqlen, noised.times)
            for batch, noised in zip(batches, corrupted, strict=True)
        ]
        self._loss = loss
        if self._schedule is None:  # all batches of a run have the same shapes
            self._schedule = self._new_schedule(len(rows), rows[0])
        tokens, cu_seqlens, lengths, times = zip(*rows, strict=True)
        self._schedule.step(
            tokens=torch.stack(tokens),
            cu_seqlens=torch.stack(cu_seqlens),
            max_seqlen=lengths[0],
            times=torch.stack(times),
            target=torch.arange(len(rows)),
            return_outputs=False,
        )
        del self._loss  # and the batches that it refers to
        return total

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, cu_seqlens: Tensor, max_seqlen: int, times: Tensor
    ) -> Tensor:
        """Logits as of the whole model, on every process, without gradients."""
        row = self._padded(tokens, cu_seqlens, max_seqlen, times)
        tokens, cu_seqlens, max_seqlen, times = row
        number = self.stage.number
        received = [torch.empty_like(each, device=self.device) for each in self._received(row)]
        for each in received:
            dist.recv(each, group=self.group, group_src=number - 1)
        out = self.stage(
            *received,
            tokens=tokens[None],
            cu_seqlens=cu_seqlens[None],
            max_seqlen=max_seqlen,
            times=times[None],
        )
        if self.stage.head is not None:
            logits = out
        else:
            logits = self._logits(row, self.device)
            for each in out:
                dist.send(each.contiguous(), group=self.group, group_dst=number + 1)
        dist.broadcast(logits, group=self.group, group_src=self.group.size() - 1)
        return self._cut(logits)

    def _padded(self, *row: Any) -> tuple[Any, ...]:
        return row if self.rows is None else self.rows.pad(None, row)

    def _cut(self, logits: Tensor) -> Tensor:
        return logits if self.rows is None else self.rows.cut(None, None, logits)

    def _sent(self, row: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What a stage sends of a row, hidden states and any time embedding, without memory."""
        tokens, _, _, times = row
        own = len(tokens) // (1 if self.rows is None else self.rows.ranks)
        shapes = [(own, self.config.hidden_size)]
        if self.config.time_embedding_dim is not None:
            shapes.append((len(times), self.config.time_embedding_dim))
        settings: dict[str, Any] = {"dtype": self.dtype, "device": "meta", "requires_grad": True}
        return tuple(torch.empty(*shape, **settings) for shape in shapes)

    def _received(self, row: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """What this process's stage receives of a row, without memory."""
        return self._sent(row) if self.stage.number > 0 else ()

    def _logits(self, row: tuple[Any, ...], device: torch.device | str) -> Tensor:
        """Room for the logits of a row, as the last stage returns them."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        return torch.empty((len(row[0]), self.config.vocab_size), dtype=dtype, device=device)

    def _new_schedule(self, micro_batches: int, row: tuple[Any, ...]) -> Schedule1F1B:
        is_last = self.stage.head is not None
        stage = PipelineStage(
            self.stage,
            self.stage.number,
            self.group.size(),
            self.device,
            input_args=self._received(row),
            output_args=(self._logits(row, "meta"),) if is_last else self._sent(row),
            group=self.group,
        )
        return Schedule1F1B(
            stage,
            micro_batches,
            loss_fn=lambda logits, number: self._loss(logits, int(number)),
            scale_grads=False,
        )


def _require_trainable(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise ConfigError(
                f"freeze leaves stage {stage.number} of {len(stages)} of the pipeline nothing to "
                "train; freeze less, or shard over these processes instead"
            )
