"""`d2plm --version`: versions of the libraries in use, without importing them."""

import json
import platform

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
    assert main(["--version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["python"] == platform.python_version()
