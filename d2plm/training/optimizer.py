"""AdamW with weight decay for matrices only: norms, biases and embeddings are not decayed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW

from d2plm.settings.training import AdamWSettings


def build_adamw(
    model: nn.Module,
    parameters: Mapping[str, Tensor] | None = None,
    settings: AdamWSettings | None = None,
) -> AdamW:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over the trainable parameters of `model`.

    `parameters` are this rank's shards by name, updated instead of the model's.
    """
    decayed, kept = decayed_and_kept(model)
    chosen = parameters or dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [chosen[name] for name in decayed]},
        {"params": [chosen[name] for name in kept], "weight_decay": 0.0},
    ]
    return AdamW(groups, **adamw_keywords(settings or AdamWSettings()))


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


def adamw_keywords(settings: AdamWSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "betas": (settings.betas[0], settings.betas[1]),
        "eps": settings.eps,
        "fused": True,
    }
