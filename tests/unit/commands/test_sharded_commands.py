"""`shard=i/n` of embed, score and generate: all shards together are one process's result."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from d2plm.assembly import generation
from d2plm.cli import main
from d2plm.commands import embed, score
from d2plm.core.vocabulary import CANONICAL
from tests.conftest import Captured, Exports, MonkeyPatch

RECORDS = 11


@pytest.fixture
def model(exports: Exports) -> Path:
    return exports.masked


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    rng, file = np.random.default_rng(0), tmp_path / "proteins.fasta"
    texts = ["".join(rng.choice([*CANONICAL], size=n)) for n in rng.integers(3, 60, RECORDS)]
    file.write_text("".join(f">p{number}\n{text}\n" for number, text in enumerate(texts)))
    return file


def run(command: str, model: Path, output: Path, *words: str) -> int:
    own = [f"model_dir={model}", f"output={output}", "device=cpu", "precision=fp64"]
    return main([command, *own, *words])


def in_any_order(command: str, model: Path, output: Path, count: int, *words: str) -> None:
    for index in (*range(1, count, 2), *range(0, count, 2)):
        assert not output.exists()
        assert run(command, model, output, *words, f"shard={index}/{count}") == 0
    assert output.exists()


def vectors(folder: Path, form: str) -> tuple[list[str], list[Any]]:
    names, found = list[str](), list[Any]()
    for file in sorted(folder.glob(f"part-*.{form.split()[0]}")):
        if form.startswith("parquet"):
            table = pq.read_table(file)
            names += table["name"].to_pylist()
            found += [np.array(one) for one in table["embedding"].to_pylist()]
        else:
            tensors = load_file(file)
            found += [tensors[key] for key in sorted(tensors, key=int)]
    return names, found


@pytest.mark.parametrize(
    ("form", "count"), [("parquet pooled=true", 3), ("safetensors pooled=false", 13)]
)
def test_embeddings_in_shards_are_those_of_one_process(
    model: Path, fasta: Path, tmp_path: Path, form: str, count: int, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "FILE_BYTES", 4 * 16 * 100)  # several files
    words = [f"input={fasta}", *f"format={form}".split()]
    one, joined = tmp_path / "one", tmp_path / "joined"
    assert run("embed", model, one, *words) == 0
    in_any_order("embed", model, joined, count, *words)
    assert [f.name for f in sorted(joined.iterdir())] == [f.name for f in sorted(one.iterdir())]
    assert len([*one.glob("part-*")]) > 1
    assert (joined / "manifest.json").read_text() == (one / "manifest.json").read_text()
    (names, found), (expected_names, expected) = vectors(joined, form), vectors(one, form)
    assert names == expected_names
    assert len(found) == RECORDS
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def interrupted_at(call: int, function: Callable[..., Any]) -> Mock:
    """The function, whose call of this number is interrupted."""
    effects = [*[DEFAULT] * (call - 1), KeyboardInterrupt, *[DEFAULT] * 99]
    return Mock(side_effect=effects, wraps=function)


def test_a_shard_that_is_killed_continues_after_its_last_file(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "FILE_BYTES", 1)  # a file for each record
    embeddings = interrupted_at(3, embed.embeddings)
    monkeypatch.setattr(embed, "embeddings", embeddings)
    words = ["embed", model, tmp_path / "out", f"input={fasta}", "shard=0/2"]
    assert run(*words) == 130
    assert run(*words) == 0
    assert embeddings.call_count == 1 + (RECORDS + 1) // 2


def test_a_second_joining_that_is_killed_is_repeated(
    model: Path, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "FILE_BYTES", 1)  # a file for each record
    words = ["embed", model, tmp_path / "out", f"input={fasta}", "shard=0/1"]
    assert run(*words) == 0
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setattr(pq, "write_table", interrupted_at(RECORDS + 3, pq.write_table))
    assert run(*words) == 130
    assert run(*words) == 0
    assert len(vectors(tmp_path / "out", "parquet")[0]) == RECORDS


def test_other_files_are_left(model: Path, fasta: Path, tmp_path: Path, capsys: Captured) -> None:
    output = tmp_path / "out"
    (output / "part-a").mkdir(parents=True)
    (output / "part-list.txt").write_text("mine")
    assert run("embed", model, output, f"input={fasta}", "shard=0/1") == 0
    assert (output / "part-list.txt").read_text() == "mine"
    other = tmp_path / "other" / "part-00000.parquet"
    other.parent.mkdir()
    other.write_text("mine")
    assert run("embed", model, other.parent, f"input={fasta}", "shard=0/1") == 1
    assert "contains embeddings of another model" in capsys.readouterr().err
    assert other.read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        "embed input=-",
        "score relatives=-",
        "embed output=/workspace",
        "embed output=/workspace/../e",
    ],
)
def test_pods_lose_nothing(words: str, capsys: Captured) -> None:
    command, wrong = words.split()
    own = ["job", "show", f"command={command}", "shards=2", "launcher.name=mine", "model_dir=m"]
    own += ["input=a", "output=/workspace/e"]
    assert main(own) == 0
    assert main([*own, wrong]) == 2
    assert f"{wrong.split('=')[0]}='" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "score", "generate"])
def test_shards_of_other_precisions_are_not_mixed(
    command: str, model: Path, fasta: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    read = [f"input={fasta}"] if command != "generate" else ["number=2", "steps=2"]
    own = [command, f"model_dir={model}", f"output={tmp_path / 'out'}", "device=cpu", *read]
    for index, dtype in enumerate([torch.float32, torch.bfloat16]):
        for module in (embed, score, generation):
            monkeypatch.setattr(module, "resolve_precision", lambda *_, own=dtype: own)
        assert main([*own, f"shard={index}/2"]) == index


def test_sharded_scores_and_designs_are_the_same(model: Path, fasta: Path, tmp_path: Path) -> None:
    one, joined = tmp_path / "one.csv", tmp_path / "joined.csv"
    words = [f"input={fasta}", "evaluation.masks_per_sequence=2"]
    assert run("score", model, one, *words) == 0
    in_any_order("score", model, joined, 3, *words)
    found, expected = pd.read_csv(joined), pd.read_csv(one)
    assert [*found["name"]] == [f"p{number}" for number in range(RECORDS)]
    pd.testing.assert_frame_equal(found, expected, atol=2e-4, rtol=0)
    one, joined = tmp_path / "one.fasta", tmp_path / "joined.fasta"
    words = ["number=7", "seed=3", "steps=5"]
    assert run("generate", model, one, *words) == 0
    in_any_order("generate", model, joined, 3, *words)
    assert joined.read_text() == one.read_text()
    assert len({*one.read_text().split(">")[1:]}) == 7


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("score input={fasta}", "shard"),
        ("score input={fasta} output=s.csv mutations={fasta}", "shard"),
        ("generate output=g.fasta generation.relatives={fasta}", "shard"),
        *(("score input=- output=s.csv", "input"), ("embed input=- output=e", "input")),
        ("embed input={fasta} output=.", "output"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_key(
    model: Path, fasta: Path, words: str, key: str, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    given = words.format(fasta=fasta).split()
    with fasta.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main([*given, f"model_dir={model}", "shard=0/2"]) == 2
    assert f"{key}='" in capsys.readouterr().err
