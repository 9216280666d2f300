"""Which records a shard has, how its form is read, and that joining is their inverse."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2plm.core import shards
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.shards import Shard, format_indices, in_shards, interleaved, parse_indices
from d2plm.settings.commands import EmbedSettings
from tests.conftest import MonkeyPatch


@given(st.integers(0, 40), st.integers(1, 9))
def test_shards_have_every_record_once_and_are_joined_in_order(records: int, count: int) -> None:
    shards = [Shard(index, count) for index in range(count)]
    parts = [[*shard.of_all(range(records))] for shard in shards]
    assert [*interleaved(parts)] == [*range(records)]
    for shard, part in zip(shards, parts, strict=True):
        assert [*shard.numbers(0, len(part))] == part
        assert [*shard.numbers(1, len(part))] == part[1:]


@given(st.sets(st.integers(0, 60)))
def test_numbers_are_read_as_they_are_written(numbers: set[int]) -> None:
    assert parse_indices(format_indices(sorted(numbers))) == sorted(numbers)
    assert format_indices([1, 3, 4, 5, 7]) == "1,3-5,7", "as Kubernetes writes those of a Job"


@pytest.mark.parametrize(
    "text", [*("4/4", "0/0", "a/b", "3", "/4", "-1/4", "1/2/3", "2-1/4", "0-3/4", "0/501", "0,1/4")]
)
def test_what_is_no_shard_is_refused_by_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^shard='{text}': must be "):
        EmbedSettings(model_dir="model", input="proteins.fasta", shard=text)


def test_the_pods_of_a_job_take_turns(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    assert Shard.of("0,4-7/64") == Shard(5, 64)
    assert Shard.of("3/64") == Shard(3, 64), "given by hand, or the only one that is missing"
    assert Shard.of(None) == Shard(0, 1)
    with pytest.raises(ConfigError, match="only an Indexed Job's pods"):
        Shard.of("1-2/64")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "all.txt"


def compute(output: Path, index: int, setting: Any = 1, text: str = "own") -> list[int]:
    return in_shards(
        output,
        Shard(index, 3),
        {"setting": setting},
        lambda part: part.write_text(f"{text} {index}"),
        lambda parts: output.write_text(" ".join(part.read_text() for part in parts)),
    )


def test_a_shard_is_computed_once_and_its_parts_are_removed_when_joined(output: Path) -> None:
    assert [compute(output, index) for index in (1, 0)] == [[0, 2], [2]]
    assert compute(output, 1, text="other") == [2], "a repeated shard only looks"
    assert not output.exists()
    assert compute(output, 2) == [], "whichever is last joins all"
    assert compute(output, 1, text="other") == []
    assert output.read_text() == "own 0 own 1 own 2"
    assert [file.name for file in output.with_name("all.txt.shards").iterdir()] == ["manifest.json"]
    output.unlink()
    assert compute(output, 1, text="again") == [0, 2], "the output was deleted to make it again"
    output.write_text("of another model, in one process")
    assert compute(output, 2) == [0], "whoever wrote it, it is not what the shards joined"


@pytest.mark.parametrize("joined", [False, True])
def test_a_kill_loses_no_part(joined: bool, output: Path, monkeypatch: MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for index in (0, 1):
        compute(output, index)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if joined:
            patch.setattr(shards.shutil, "rmtree", killed)
            compute(output, 2)
        in_shards(output, Shard(2, 3), {"setting": 1}, lambda p: p.write_text("own 2"), killed)
    assert compute(output, 2, text="other") == []
    assert output.read_text() == "own 0 own 1 own 2"
    assert [file.name for file in output.with_name("all.txt.shards").iterdir()] == ["manifest.json"]


def test_two_settings_at_once_are_not_mixed(output: Path, monkeypatch: MonkeyPatch) -> None:
    both, read = threading.Barrier(2), shards.read_json

    def slow(file: Path) -> Any:
        found = read(file)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return found

    def begun(index: int) -> bool:
        with suppress(DataError):
            return bool(compute(output, index, setting=index))
        return False

    monkeypatch.setattr(shards, "read_json", slow)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(begun, [0, 1])) == [False, True]
