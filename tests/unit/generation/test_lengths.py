"""The histogram of training lengths, as an export holds it."""

import json
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import ModelError
from d2plm.generation.lengths import FILE, LengthHistogram


@pytest.mark.parametrize("number", [4 * 10**9, 0, -1, "many"])
def test_a_histogram_of_impossible_lengths_is_rejected(tmp_path: Path, number: object) -> None:
    LengthHistogram.of(np.array([3, 4]), 10).save(tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "max_residues": number}))
    with pytest.raises(ModelError, match=FILE):
        LengthHistogram.load(tmp_path)
