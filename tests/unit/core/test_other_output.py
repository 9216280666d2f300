"""An output that would replace a file that is read."""

from pathlib import Path

import pytest

from d2plm.core.errors import ConfigError
from d2plm.core.files import require_other_output


def test_an_output_that_is_read_is_rejected_however_it_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "family.fasta").touch()
    (tmp_path / "linked.fasta").symlink_to("family.fasta")
    for output in ("family.fasta", "./family.fasta", tmp_path / "family.fasta", "linked.fasta"):
        with pytest.raises(ConfigError, match=r"output='[^(]*': .*another file"):
            require_other_output("output", output, [None, "family.fasta"])
    require_other_output("output", "other.fasta", [None, "family.fasta"])
    require_other_output("output", None, ["family.fasta"])
