"""Imports go down only, and no command imports another."""

import subprocess
import sys
from pathlib import Path


def test_the_contracts_on_imports_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    found = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Contracts: 3 kept, 0 broken." in found.stdout
