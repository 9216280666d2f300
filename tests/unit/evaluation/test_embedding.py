"""Embeddings: packed as alone, ESM-2's as Hugging Face computes them, files that are resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file
from transformers import EsmForMaskedLM, EsmModel
from transformers.utils.logging import disable_progress_bar

from d2plm.api import load_model
from d2plm.commands import embed
from d2plm.config import compose
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import encode
from d2plm.data.fasta import write_fasta
from d2plm.evaluation.embedding import embeddings
from d2plm.model.esm import load_esm
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests.conftest import Exports, MonkeyPatch
from tests.unit.model.test_esm import esm_like

disable_progress_bar()
PROTEINS = ["MKTAYIAKQRQISFVK", "GSHM", "MKXLLVAGGWQERTYIPASDFGHKLCVNM", "W", "MKTAYIAKQRQISFVK"]


@pytest.mark.parametrize(("kind", "layer"), [("masked", 0), ("masked", -1), ("uniform", 1)])
def test_a_protein_among_others_is_as_one_alone(kind: str, layer: int, exports: Exports) -> None:
    model = load_model(getattr(exports, kind), precision="fp32")
    together = model.embed(PROTEINS, layer=layer)
    for protein, own in zip(PROTEINS, together, strict=True):
        assert own.shape == (len(protein), 16)
        np.testing.assert_allclose(model.embed(protein, layer=layer)[0], own, rtol=1e-5, atol=1e-5)
    pooled = model.embed(PROTEINS, layer=layer, pooled=True)
    for vector, own in zip(pooled, together, strict=True):
        np.testing.assert_allclose(vector, own.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_those_of_a_converted_esm2_are_hugging_face_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = esm_like(3, 16, 2, 32, max_position_embeddings=130, initializer_range=0.3)
    EsmForMaskedLM(config).save_pretrained(tmp_path / "esm")
    theirs = EsmModel.from_pretrained(tmp_path / "esm", add_pooling_layer=False).eval()
    ours, tokens = load_esm(tmp_path / "esm").eval(), [encode(one) for one in PROTEINS]
    for layer in range(-1, 4):
        found = embeddings(ours, AbsorbingDiffusion(), tokens, layer=layer)
        for own, protein in zip(found, tokens, strict=True):
            ids = torch.tensor([[0, *protein.tolist(), 2]])
            with torch.no_grad():
                states = theirs(ids, output_hidden_states=True).hidden_states[layer]
            np.testing.assert_allclose(own, states[0, 1:-1].numpy(), rtol=1e-4, atol=1e-5)


Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(exports: Exports, tmp_path: Path, monkeypatch: MonkeyPatch) -> Command:
    """Overrides → the result of `d2plm embed` of five proteins, two to a file."""
    write_fasta(tmp_path / "five.fasta", [(f"p{n}", one) for n, one in enumerate(PROTEINS)])
    monkeypatch.setattr(embed, "FILE_BYTES", 20 * 16 * 4)

    def run(*words: str, model: str = "masked") -> dict[str, Any]:
        own = [f"model_dir='{getattr(exports, model)}'", f"input='{tmp_path / 'five.fasta'}'"]
        where = [f"output='{tmp_path / 'out'}'", "precision=fp32", "device=cpu"]
        return embed.run(compose("embed", [*own, *where, *words]))

    return run


@pytest.mark.parametrize(("form", "pooled"), [("parquet", True), ("safetensors", False)])
def test_files_contain_what_the_model_gives_in_the_order_of_the_input(
    form: str, pooled: bool, command: Command, exports: Exports, tmp_path: Path
) -> None:
    result = command(f"format={form}", f"pooled={pooled}", "layer=1")
    assert (result["proteins"], result["complete"], result["layer"]) == (5, True, 1)
    files = sorted((tmp_path / "out").glob(f"part-*.{form}"))
    assert len(files) > 1
    readable = (tmp_path / "out" / "manifest.json").stat().st_mode
    assert {file.stat().st_mode for file in files} == {readable}
    found: list[tuple[str, Any]] = []
    for file in files:
        if form == "parquet":
            found += zip(*pq.read_table(file).to_pydict().values(), strict=True)
        else:
            found += [(f"p{number}", own) for number, own in sorted(load_file(file).items())]
    assert [name for name, _ in found] == ["p0", "p1", "p2", "p3", "p4"]
    expected = load_model(exports.masked, precision="fp32").embed(PROTEINS, layer=1, pooled=pooled)
    for (_, own), other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(own, dtype=np.float32), other, rtol=1e-5, atol=1e-5)


def test_a_stopped_run_writes_only_what_is_missing(command: Command, tmp_path: Path) -> None:
    command()
    first, *_, last = files = sorted((tmp_path / "out").glob("part-*"))
    whole, before = [file.read_bytes() for file in files], first.stat().st_mtime_ns
    last.unlink()
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "complete": False}))
    assert command()["proteins"] == 5
    assert first.stat().st_mtime_ns == before
    assert [file.read_bytes() for file in files] == whole


def test_what_cannot_be_done_is_rejected(command: Command, tmp_path: Path) -> None:
    for key, value in (("format", "'csv'"), ("layer", "3"), ("layer", "-4"), ("pooled", "3")):
        with pytest.raises(ConfigError, match=f"{key}={value}"):
            command(f"{key}={value}")
    with pytest.raises(DataError, match=r"nowhere\.fasta"):
        command("input=nowhere.fasta")
    assert not list(tmp_path.glob("out/part-*"))
    write_fasta(tmp_path / "long.fasta", [("short", "MKTA"), ("titin", "M" * 127)])
    with pytest.raises(DataError, match="titin"):
        command(f"input='{tmp_path / 'long.fasta'}'")
    assert command()["complete"]  # the rejected run leaves no files that break the next one
    for words in ("layer=0", "pooled=false", "format=safetensors"):
        with pytest.raises(DataError, match="contains embeddings"):
            command(words)
