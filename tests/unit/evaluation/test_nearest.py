"""Nearest training proteins: planted identities and coverages, and a cache that is validated."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.vocabulary import encode
from d2plm.data.homology import mmseqs_in
from d2plm.data.store import SequenceStore
from d2plm.evaluation import nearest
from d2plm.evaluation.nearest import Nearest, find_nearest, nearest_identities, nearest_search
from d2plm.settings.data import Resources
from tests.conftest import MonkeyPatch, Tokens, write_store

ONE_THREAD = Resources(threads=1)


def substituted(tokens: Tokens, changed: int) -> Tokens:
    """Other residues at `changed` places, evenly spread, so that no end of an alignment is lost."""
    result = tokens.copy()
    places = np.linspace(5, len(tokens) - 6, changed).astype(int)
    result[places] = 4 + (result[places] - 4 + 7) % 20
    return result


def test_identities_are_those_planted_and_coverage_is_of_the_query(tmp_path: Path) -> None:
    random = np.random.default_rng(1)

    def invented(length: int) -> Tokens:
        return random.integers(4, 24, length).astype(np.uint8)

    proteins = [invented(length) for length in (300, 250, 400, 200)]
    train = write_store(tmp_path / "train", proteins)
    domain, gapped = proteins[2][100:250], np.delete(proteins[1], range(120, 130))
    expected = {
        "the same": (proteins[3], 1, 3),
        "two fifths changed": (substituted(proteins[0], 120), 180 / 300, 0),
        "ten residues lost": (gapped, 240 / 250, 1),
        "a domain": (domain, 1, 2),
        "a tenth unknown": (np.where(np.arange(200) % 10 == 5, 32, proteins[3]), 180 / 200, 3),
        "covered by half": (np.concatenate([proteins[0][:100], invented(100)]), 0, -1),
        "without a relative": (invented(300), 0, -1),
        **{f"a peptide of {n}": (proteins[0][:n], 0, -1) for n in range(1, 6)},
    }
    queries = [tokens.astype(np.uint8) for tokens, _, _ in expected.values()]
    queries += [encode("A" * 30), encode("ACGT" * 10)]
    with mmseqs_in(tmp_path / "work", ONE_THREAD) as mmseqs:
        found = find_nearest(queries, train, nearest_search(4), mmseqs)
        assert found.identities.dtype == np.float64
        for place, (name, (_, identity, protein)) in enumerate(expected.items()):
            assert found.identities[place] == pytest.approx(identity, abs=0.0051), name
            assert found.proteins[place] == protein, name
        assert found.identities[-2:].tolist() == [0, 0]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["mmseqs.log"]


Stores = tuple[SequenceStore, SequenceStore]
Calls = Callable[[], list[str]]


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Three held-out and two training proteins."""
    held_out = write_store(tmp_path / "held_out", [encode(x) for x in ("MKV", "ACD", "WWW")])
    return held_out, write_store(tmp_path / "train", [encode("MKVA"), encode("ACDE")])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: MonkeyPatch) -> Calls:
    """A stand-in for MMseqs2 that finds the same hits whatever is searched; its searches so far."""
    program, log = tmp_path / "mmseqs", tmp_path / "calls"
    aligned = "1\\t1\\t3\\t3\\t3\\t4"
    hits = ("0\\t1\\t0.7", "0\\t0\\t0.7", "0\\t1\\t0.301", "2\\t1\\t0.3")
    table = "".join(f"{hit}\\t{aligned}\\n" for hit in hits)
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = search ]; then echo "$*" >> '{log}'; fi
if [ "$1" = convertalis ]; then printf '{table}' > "$5"; fi
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("MMSEQS_BIN", str(program))
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_the_best_hit_counts_and_is_kept(
    tmp_path: Path, stores: Stores, calls: Calls, monkeypatch: MonkeyPatch
) -> None:
    first = nearest_identities(*stores, tmp_path / "new" / "kept")
    assert first.tolist() == [0.7, 0, 0.3]
    monkeypatch.setenv("MMSEQS_BIN", "/nowhere")
    again = nearest_identities(*stores, tmp_path / "new" / "kept")
    np.testing.assert_array_equal(again, first)
    assert len(calls()) == 1
    kept = sorted(path.suffix for path in (tmp_path / "new" / "kept").iterdir())
    assert kept == [".log", ".npz"]


def test_of_equal_hits_the_first_is_nearest(tmp_path: Path, stores: Stores, calls: Calls) -> None:
    with mmseqs_in(tmp_path, ONE_THREAD) as mmseqs:
        found = find_nearest(*stores, nearest_search(), mmseqs)
    assert found.proteins.tolist() == [0, -1, 1]
    assert found.identities.tolist() == [0.7, 0, 0.3]


def test_the_settings_reach_the_search(tmp_path: Path, stores: Stores, calls: Calls) -> None:
    settings = replace(nearest_search(5.5), coverage=0.6, coverage_mode=0, max_seqs=40)
    (tmp_path / "scratch").mkdir()
    resources = Resources(threads=3, memory_limit="2G", temporary_dir=str(tmp_path / "scratch"))
    nearest_identities(*stores, tmp_path, settings, resources=resources)
    (call,) = calls()
    for option in (
        *("--min-seq-id 0.0", "-c 0.6 --cov-mode 0", "-s 5.5", "--max-seqs 40", "-e 0.001"),
        *("--alignment-mode 3", "--threads 3", "--split-memory-limit 2G"),
    ):
        assert option in call
    assert not any((tmp_path / "scratch").iterdir())


def test_what_differs_is_searched_for_again(tmp_path: Path, stores: Stores, calls: Calls) -> None:
    held_out, train = stores
    other = write_store(tmp_path / "other", [encode(x) for x in ("MKV", "ACD", "WWY")])
    searches = [(held_out, train, 7), (other, train, 7), (held_out, other, 7), (held_out, train, 6)]
    for count, (of, among, sensitivity) in enumerate(searches, start=1):
        for _ in range(2):
            nearest_identities(of, among, tmp_path / "kept", nearest_search(sensitivity))
        assert len(calls()) == count


def test_a_kept_result_with_any_byte_wrong_is_made_again(
    tmp_path: Path, stores: Stores, calls: Calls, monkeypatch: MonkeyPatch
) -> None:
    right = nearest_identities(*stores, tmp_path / "kept")
    (path,) = (tmp_path / "kept").glob("*.npz")
    whole = path.read_bytes()
    monkeypatch.setattr(nearest, "find_nearest", lambda *_, **__: Nearest(right, right.astype(int)))
    damaged = [whole[:size] for size in range(0, len(whole), 61)]
    places = range(0, len(whole), 11)
    damaged += [whole[:i] + bytes([whole[i] ^ 255]) + whole[i + 1 :] for i in places]
    for content in damaged:
        path.write_bytes(content)
        lines: list[str] = []
        values = nearest_identities(*stores, tmp_path / "kept", report=lines.append)
        np.testing.assert_array_equal(values, right)
        assert all("\n" not in line for line in lines)
    assert len(calls()) == 1
