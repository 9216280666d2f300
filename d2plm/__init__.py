"""D2PLM trains protein language models by discrete diffusion and discrete flow matching."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
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

    Importing d2plm alone therefore does not import torch. The model imports transformers, so the
    models are registered after whichever of the two was imported first.
    """

    def __init__(self) -> None:
        self.awaited, self.running = {AUTO_CLASSES, MODEL}, set[str]()

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Spec of the module, extended to register the models after the module has run."""
        if name not in self.awaited:
            return None
        self.awaited.remove(name)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _run(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self.running.add(module.__name__)
        try:
            execute(module)
        except BaseException:
            self.awaited.add(module.__name__)  # of the next attempt
            raise
        finally:
            self.running.remove(module.__name__)
        if not self.running and AUTO_CLASSES in sys.modules:
            _register()


def _register() -> None:
    from d2plm.export import hugging_face  # noqa: F401


AUTO_CLASSES, MODEL = "transformers.models.auto.modeling_auto", "d2plm.model.dit"
if AUTO_CLASSES in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WithTransformers())
