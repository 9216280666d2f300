"""D2PLM trains protein language models by discrete diffusion and discrete flow matching."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d2plm.api import load_model, retrieve_relatives

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "retrieve_relatives"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because most commands do not need torch.
    if name in ("load_model", "retrieve_relatives"):
        from d2plm import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
