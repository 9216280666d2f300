"""A mixture-of-experts feed-forward: a router sends every token to a few experts.

No token is dropped: tokens are sorted by expert, and each expert multiplies its own rows (Gale et
al., arXiv:2211.15841). Routing, `dispatch`, `Experts` and `combine` are separate. Between them rows
are contiguous by expert, so that an exchange between ranks can be put around `Experts`.

Shape suffixes: T tokens, D hidden, E experts, K experts per token, N = T·K rows.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d2plm.model.dit_config import DiTConfig


class MixtureOfExperts(nn.Module):
    """The sum of a token's experts, weighted by its gates, and of the expert `shared` by all."""

    def __init__(self, config: DiTConfig, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)
        self.num_experts, self.shared_expert = config.num_experts, shared

    def forward(self, x_TD: Tensor, real_T: Tensor) -> Tensor:
        """`real_T` is False at padding, which is computed but not counted."""
        chosen_TK, gates_TK = self.router(x_TD, real_T)
        order_N, back_N, ends_E = sorted_by_expert(chosen_TK, self.num_experts)
        rows_ND = self.experts(dispatch(x_TD, order_N, back_N), ends_E)
        y_TD = combine(rows_ND, gates_TK, order_N, back_N)
        return y_TD if self.shared_expert is None else y_TD + self.shared_expert(x_TD)


class Router(nn.Module):
    """The experts of each token and their gates, computed in fp32 or better.

    The scores are s = sigmoid(W·x). A token goes to the K experts with the largest s + bias (ties:
    the first); its gates are their s, divided by the sum (DeepSeek-V3, arXiv:2412.19437, equations
    12 to 16). To balance the loads, the bias, which affects only the choice, is adjusted by the
    load after every optimizer step (Wang et al., arXiv:2408.15664); see
    `d2plm.training.load_balancing`. It is a parameter without a gradient, so that whatever saves,
    averages or distributes parameters includes it.

    Attributes:
        load: int64 [E], the number of tokens of each expert in the last forward in training mode.
        z: 0-d, Σ logsumexp(W·x)² of these tokens (the z-loss of Zoph et al., arXiv:2202.08906).
    """

    load: Tensor
    z: Tensor
    bias: nn.Parameter | None

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.weight = nn.Parameter(torch.zeros(self.num_experts, config.hidden_size))
        bias = nn.Parameter(torch.zeros(self.num_experts), requires_grad=False)
        self.register_parameter("bias", bias if config.balance_rate else None)

    def forward(self, x_TD: Tensor, real_T: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, int64 [T, K], and their gates [T, K], the largest first."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
        scores_TE = logits_TE.sigmoid()
        ranked_TE = scores_TE.detach()
        if self.bias is not None:
            ranked_TE = ranked_TE + self.bias.to(dtype)
        chosen_TK = ranked_TE.sort(dim=-1, descending=True, stable=True).indices
        chosen_TK = chosen_TK[:, : self.experts_per_token]
        gates_TK = scores_TE.gather(1, chosen_TK)
        gates_TK = gates_TK / gates_TK.sum(-1, keepdim=True)
        if self.training:  # assigned, not accumulated, because recomputation repeats it
            self.load = count(chosen_TK, real_T, self.num_experts)
            self.z = torch.where(real_T, logits_TE.detach().logsumexp(-1).square(), 0.0).sum()
        return chosen_TK, gates_TK


class Experts(nn.Module):
    """E SwiGLU feed-forwards, stacked: down(silu(gate(x)) · up(x)), each for its own rows."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        experts, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_weight = nn.Parameter(torch.zeros(experts, 2 * inner, width))
        self.down_weight = nn.Parameter(torch.zeros(experts, width, inner))

    def forward(self, rows_ND: Tensor, ends_E: Tensor) -> Tensor:
        """The experts' outputs [N, D] of rows that are sorted by expert; int32 `ends_E`."""
        inputs: list[Tensor] = [rows_ND, self.gate_up_weight, self.down_weight]
        device = rows_ND.device.type
        # Autocast casts only for torch's own products; meta has none.
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            inputs = [tensor.to(dtype) for tensor in inputs]
        rows_ND, gate_up, down = inputs
        gate, up = GroupedLinear.apply(rows_ND, gate_up, ends_E).chunk(2, dim=-1)
        return GroupedLinear.apply(F.silu(gate) * up, down, ends_E)


def sorted_by_expert(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [N] that sorts the choices by expert, its inverse, int32 [E] end of each expert)."""
    order_N = chosen_TK.flatten().argsort(stable=True)
    everything_T = torch.ones_like(chosen_TK[:, 0])
    ends_E = count(chosen_TK, everything_T, experts).cumsum(0).to(torch.int32)
    return order_N, order_N.argsort(), ends_E


def count(chosen_TK: Tensor, counted_T: Tensor, experts: int) -> Tensor:
    """int64 [E]: the number of `counted_T` tokens that have chosen each expert."""
    each_N = counted_T.long()[:, None].expand_as(chosen_TK).flatten()
    return each_N.new_zeros(experts).scatter_add_(0, chosen_TK.flatten(), each_N)


def dispatch(x_TD: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """[N, D]: a row for each choice of each token, sorted by expert."""
    return Rearrange.apply(x_TD, order_N // (len(order_N) // len(x_TD)), back_N)


def combine(rows_ND: Tensor, gates_TK: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """[T, D]: the sum of each token's rows, weighted by its gates."""
    rows_TKD = Rearrange.apply(rows_ND, back_N, order_N).unflatten(0, gates_TK.shape)
    return (rows_TKD * gates_TK.to(rows_TKD.dtype)[..., None]).sum(1)


class Rearrange(torch.autograd.Function):
    """x[there]; `back` sorts the result by row of x, each row occurring equally often.

    The gradient of a row is therefore a sum of neighbours in a fixed order instead of atomic
    additions, which would round differently in every run on CUDA.
    """

    @staticmethod
    def forward(ctx, x: Tensor, there: Tensor, back: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # torch's API
        ctx.save_for_backward(back)
        ctx.rows = len(x)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]  # torch's API
        (back,) = ctx.saved_tensors
        return grad.index_select(0, back).unflatten(0, (ctx.rows, -1)).sum(1), None, None


class GroupedLinear(torch.autograd.Function):
    """Each group of rows [N, I] times the transpose of its own matrix of [E, O, I] → [N, O]."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, ends_E: Tensor) -> Tensor:  # type: ignore[no-untyped-def]  # torch's API
        ctx.save_for_backward(rows, weights, ends_E)
        return grouped_product(rows, weights.mT, ends_E)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]  # torch's API
        rows, weights, ends_E = ctx.saved_tensors
        grad = grad.contiguous()
        of_weights = grouped_product(grad.mT, rows, ends_E)
        return grouped_product(grad, weights, ends_E), of_weights, None


@torch.library.custom_op("d2plm::grouped_product", mutates_args=())
def grouped_product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """The product of each group; one kernel on CUDA, where sizes must be multiples of 16 bytes.

    [N, I] · [E, I, O] → [N, O], grouped by rows; or [I, N] · [N, O] → [E, I, O], grouped along N.
    """
    if left.device.type != "cpu" and left.dtype != torch.float64:
        return F.grouped_mm(left, right, offs=ends_E)
    out = _new_product(left, right, ends_E)
    for group, (start, stop) in enumerate(pairwise([0, *ends_E.tolist()])):
        if right.ndim == 3:
            torch.mm(left[start:stop], right[group], out=out[start:stop])
        else:
            torch.mm(left[:, start:stop], right[start:stop], out=out[group])
    return out


@grouped_product.register_fake
def _new_product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    groups = () if right.ndim == 3 else (len(ends_E),)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])
