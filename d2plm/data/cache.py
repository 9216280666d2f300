"""A disk cache of arrays that take long to compute, so that a killed process resumes."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.files import written_beside
from d2plm.core.locks import locked


@dataclass(frozen=True, slots=True)
class ArrayCache:
    """Arrays in a folder, each under its name and the digest of its origin.

    The folder is created when the first array is written. The archives have checksums: a damaged
    array is computed again.

    Attributes:
        report: called with messages for the user, such as about a damaged array.
    """

    folder: Path
    report: Callable[[str], None]

    def array(self, name: str, origin: Any, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array `name` computed from `origin` (JSON), now or before.

        If several processes request it at once, one computes it and the others wait.
        """
        path = self.folder / f"{name}-{digest_of(origin)[:16]}.npz"
        try:
            return self._read(path)
        except FileNotFoundError:
            pass
        except Exception as error:  # a damaged archive may raise anything
            self.report(f"computing {path} again: it is damaged ({' '.join(str(error).split())})")
        busy = f"another process is computing {path}"
        with locked(path.with_suffix(".lock"), busy):
            with suppress(Exception):
                return self._read(path)
            values = compute()
            with written_beside(path) as partial:
                np.savez(partial, values=values)
        return values

    def _read(self, path: Path) -> NDArray[Any]:
        with np.load(path, allow_pickle=False) as archive:
            values: NDArray[Any] = archive["values"]
        self.report(f"reusing {path}")
        return values

    def keep_only(self, name: str) -> None:
        for path in self.folder.iterdir():
            if not path.name.startswith(f"{name}-"):
                path.unlink()


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
