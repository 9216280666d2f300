"""D2PLM trains protein language models by discrete diffusion and discrete flow matching."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
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


class _WithTransformers(MetaPathFinder):
    """Registers the models with `AutoModel` when transformers is imported, not before.

    Importing d2plm alone therefore does not import torch.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Spec of the module, extended to register the models after the module has run."""
        if name != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), _register())  # type: ignore[method-assign, assignment, func-returns-value]
        return spec


def _register() -> None:
    if "d2plm.model.dit" not in sys.modules:  # its importers register the models themselves
        from d2plm.export import hugging_face  # noqa: F401


AUTO_CLASSES = "transformers.models.auto.modeling_auto"
if AUTO_CLASSES in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WithTransformers())
