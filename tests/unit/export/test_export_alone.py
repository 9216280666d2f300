"""The exported folder is self-contained, also for a model that takes relatives."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm import load_model
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.flow_matching import MaskFlowMatching
from tests.commands import python_c

FAMILY = ["MKTAYIAKQRLL", "MKSAYLAKQRL", "MRTAFIAKHRLLGG"]
PROTEINS = ["MKTAYIAKQRLI", "GSHMLVAGG"]
SCRIPT = """
import json, sys
from d2plm import load_model
folder, family, proteins = json.loads(sys.argv[1])
model = load_model(folder, device="cpu", precision="fp32")
given, alone = model.score(proteins, relatives=family), model.score(proteins)
print(json.dumps({
    "given": [one.nats for one in given],
    "alone": [one.nats for one in alone],
    "new": model.generate(3, relatives=family, seed=5, steps=4),
}))
"""


def test_another_process_scores_and_generates_given_relatives_from_the_folder_alone(
    tmp_path: Path, tiny_dit: Callable[..., Any]
) -> None:
    lengths, made_in = LengthHistogram.of(np.array([40, 50]), 126), tmp_path / "run" / "model"
    save_export(made_in, tiny_dit(relatives_dim=8), MaskFlowMatching(), lengths, {})
    model = load_model(made_in, device="cpu", precision="fp32")
    given = [one.nats for one in model.score(PROTEINS, relatives=FAMILY)]
    new = model.generate(3, relatives=FAMILY, seed=5, steps=4)
    folder = tmp_path / "elsewhere" / "copied"
    shutil.copytree(made_in, folder)
    shutil.rmtree(tmp_path / "run")
    argument = json.dumps([str(folder), FAMILY, PROTEINS])
    done = python_c(SCRIPT, argument)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["given"] == pytest.approx(given, rel=1e-5)
    assert found["new"] == new
    assert all(
        one != pytest.approx(other, rel=1e-3)
        for one, other in zip(found["given"], found["alone"], strict=True)
    )
