"""AdamW with decay on matrices alone: norms, biases and embeddings are never decayed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from d2plm.core.errors import require, require_number


def build_adamw(
    model: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    learning_rate: float = 4e-4,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
) -> AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over the trainable parameters of `model`.

    Args:
        parameters: what to update in their place, by name: this rank's shards.

    Raises:
        ConfigError: on a value out of range.
    """
    settings = adamw_settings(learning_rate, weight_decay, betas, eps)
    decayed, kept = decayed_and_kept(model)
    chosen = parameters or dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [chosen[name] for name in decayed]},
        {"params": [chosen[name] for name in kept], "weight_decay": 0.0},
    ]
    return AdamW(groups, **settings)


def decayed_and_kept(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the trainable parameters: (matrices, all others); a tied one appears once."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    embeddings = {id(parameter) for table in tables for parameter in table.parameters()}
    decayed: list[str] = []
    kept: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and id(parameter) not in embeddings
            (decayed if is_matrix else kept).append(name)
    return decayed, kept


def adamw_settings(
    learning_rate: float, weight_decay: float, betas: tuple[float, float], eps: float
) -> dict[str, Any]:
    """The checked settings as keywords of torch's `AdamW`."""
    require_number("learning_rate", learning_rate, low=0, low_open=True)
    require_number("weight_decay", weight_decay, low=0)
    fits = len(betas) == 2 and all(isinstance(b, float) and 0 <= b < 1 for b in betas)
    require(fits, "betas", list(betas), "two numbers in [0, 1)")
    require_number("eps", eps, low=0, low_open=True)
    return {
        "lr": learning_rate,
        "weight_decay": weight_decay,
        "betas": (betas[0], betas[1]),
        "eps": eps,
        "fused": True,
    }
