"""Results of long stages, kept on disk, so that a process that was killed resumes after them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.core.files import written_beside


class Stages:
    """Arrays in a folder, each under its name and the digest of its origin."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder, report

    def array(self, name: str, origin: Any, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array `name` that was computed from `origin` (JSON), now or before."""
        path = self.folder / f"{name}-{digest_of(origin)[:16]}.npy"
        try:
            values = np.load(path, allow_pickle=False)
            self.report(f"reusing {path}")
            return values
        except FileNotFoundError:
            pass
        except (OSError, ValueError, EOFError) as error:
            self.report(f"computing {path} again: it is damaged ({error})")
        values = compute()
        with written_beside(path) as partial:
            np.save(partial, values)
        return values

    def keep_only(self, name: str) -> None:
        """Remove all other arrays."""
        for path in self.folder.iterdir():
            if not path.name.startswith(f"{name}-"):
                path.unlink()


def digest_of(content: Any) -> str:
    """SHA-256 in hex of JSON content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
