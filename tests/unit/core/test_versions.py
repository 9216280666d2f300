"""`d2plm --version`: versions of the libraries in use, without importing them."""

import json
import platform
import subprocess
import sys

import pytest

from d2plm import __version__
from d2plm.cli import main


def test_the_versions_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import transformers

    assert main(["--version"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["d2plm"].startswith(__version__)
    assert rows["python"] == platform.python_version()
    assert rows["torch"].startswith(torch.__version__)
    assert rows["transformers"] == transformers.__version__


def test_the_versions_are_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["python"] == platform.python_version()


def test_nothing_is_imported_to_know_its_version() -> None:
    code = (
        "import sys; from d2plm.cli import main; main(['--version']);"
        "sys.exit(len({'torch', 'transformers', 'mlflow', 'kfp'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
