"""Imports go down only, and no command imports another."""

import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("d2plm", "pipelines")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of `pyproject.toml` on the packages in `folder`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_imports_go_down_only() -> None:
    found = lint(REPOSITORY)
    assert found.returncode == 0, found.stdout + found.stderr


PLANTED = {
    "d2plm/core/files.py": "d2plm.cli",
    "d2plm/training/trainer.py": "pipelines.steps",
    "d2plm/commands/export.py": "d2plm.commands.train",
}


def test_an_import_that_goes_up_or_across_is_found(tmp_path: Path) -> None:
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    for module, imported in PLANTED.items():
        with (tmp_path / module).open("a") as file:
            file.write(f"\n\ndef planted() -> None:\n    import {imported}  # in a function\n")
    found = lint(tmp_path)
    assert found.returncode == 1, found.stderr
    for module, imported in PLANTED.items():
        path = module.removesuffix(".py").replace("/", ".")
        assert f"{path} -> {imported}" in found.stdout
