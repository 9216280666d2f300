"""D2PLM trains protein language models by discrete diffusion and discrete flow matching."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d2plm.api import load_model

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]


def __getattr__(name: str) -> Any:
    # torch is imported on first use only: most commands do not need it.
    if name == "load_model":
        from d2plm.api import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
