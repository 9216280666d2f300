"""AdamW with decay on matrices alone: norms, biases and embeddings are never decayed."""

from torch import Tensor, nn
from torch.optim import AdamW

from d2plm.errors import require


def build_adamw(
    model: nn.Module,
    *,
    learning_rate: float = 4e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
) -> AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over the trainable parameters of `model`.

    Raises:
        ConfigError: on a value out of range.
    """
    require(learning_rate > 0, "optimizer.learning_rate", learning_rate, "> 0")
    require(weight_decay >= 0, "optimizer.weight_decay", weight_decay, "≥ 0")
    require(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "optimizer.betas",
        list(betas),
        "two numbers in [0, 1)",
    )
    require(eps > 0, "optimizer.eps", eps, "> 0")
    decayed, kept = split_by_decay(model)
    return AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(betas[0], betas[1]),
        eps=eps,
        fused=True,
    )


def split_by_decay(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(decayed, not decayed) trainable parameters; a tied parameter appears once."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else kept).append(parameter)
    return decayed, kept
