"""The split: no leaks, independent of the input's order, reused by content, robust to bad input."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from d2plm.alphabet import CANONICAL, encode
from d2plm.data import prepare as module
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.data.homology import Hits, MMseqs
from d2plm.data.prepare import ingest, prepare
from d2plm.data.store import SequenceStore
from d2plm.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
PROTEINS = ROOT / "examples" / "data" / "uniprot_20k.fasta.gz"
Records = Sequence[tuple[str, bytes | str]]


def _planted() -> list[tuple[str, bytes | str]]:
    """Twelve families of three: a real protein and two copies with 30 % of residues changed."""
    draw = random.Random(0)
    bases = [r for r in islice(read_fasta(PROTEINS), 100) if 150 < len(r.sequence) < 400][:12]
    records: list[tuple[str, bytes | str]] = []
    for base in bases:
        records.append((base.name, base.sequence))
        for copy in (1, 2):
            letters = bytearray(base.sequence)
            for position in draw.sample(range(len(letters)), int(0.3 * len(letters))):
                letters[position] = ord(draw.choice(CANONICAL))
            records.append((f"{base.name}_{copy}", bytes(letters)))
    return records


def _fasta(folder: Path, records: Records, name: str = "in.fasta") -> Path:
    write_fasta(folder / name, records)
    return folder / name


def _sequences(path: Path) -> set[bytes]:
    return {tokens.tobytes() for tokens in SequenceStore(path)}


def _homologous(one: np.ndarray, two: np.ndarray) -> bool:
    return len(one) == len(two) and bool((one == two).mean() >= 0.5)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    folder = tmp_path_factory.mktemp("planted")
    records = _planted()
    records.append(("duplicate", records[0][1]))
    lines: list[str] = []
    # At 0.95 the clusters are single sequences, so holding out clusters alone would leak.
    manifest = prepare(
        _fasta(folder, records),
        folder / "out",
        validation_fraction=0.2,
        cluster_min_seq_id=0.95,
        threads=1,
        report=lines.append,
    )
    return folder, manifest, lines


def test_nothing_leaks_where_clusters_alone_would(planted: tuple[Path, Any, Any]) -> None:
    folder, manifest, _ = planted
    train = list(SequenceStore(folder / "out" / "train_lmdb"))
    validation = list(SequenceStore(folder / "out" / "validation_lmdb"))
    everything = [encode(sequence) for _, sequence in _planted()]
    left_out = {t.tobytes() for t in everything} - {t.tobytes() for t in train + validation}
    assert len(left_out) == manifest["counts"]["leaking_dropped"] >= 8
    assert all(
        any(_homologous(np.frombuffer(lost, np.uint8), held) for held in validation)
        for lost in left_out
    )
    assert not any(_homologous(one, two) for one in train for two in validation)
    assert manifest["leaking_pairs_found"][0] >= 8
    assert manifest["leaking_pairs_after"] == 0


def test_the_manifest_accounts_for_every_record(planted: tuple[Path, Any, Any]) -> None:
    folder, manifest, _ = planted
    counts = manifest["counts"]
    assert counts["input"] == 37
    assert counts["duplicates"] == 1
    assert counts["clusters"] == counts["distinct"] == 36
    assert counts["validation_sequences"] == counts["validation_clusters"] == 8
    assert counts["train_sequences"] == 36 - 8 - counts["leaking_dropped"]
    assert json.loads((folder / "out" / "manifest.json").read_text()) == manifest
    for kind in ("train", "validation"):
        store = SequenceStore(folder / "out" / f"{kind}_lmdb")
        store.verify()
        assert store.digest == manifest["digests"][kind]
        assert store.residues == counts[f"{kind}_residues"]
        assert store.clusters is not None


def test_only_results_the_log_and_the_lock_are_left(planted: tuple[Path, Any, Any]) -> None:
    folder = planted[0]
    assert sorted(p.name for p in (folder / "out").iterdir()) == [
        *(".lock", "manifest.json", "mmseqs.log", "raw_lmdb", "train_lmdb", "validation_lmdb")
    ]


@pytest.fixture
def fake_mmseqs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for MMseqs2: proteins of one length are homologs; lists the calls."""
    calls: list[str] = []

    def cluster(self: MMseqs, fasta: Path, *settings: float) -> np.ndarray:
        calls.append("cluster")
        lengths = [len(r.sequence) for r in read_fasta(fasta)]
        return np.array([list(dict.fromkeys(lengths)).index(n) for n in lengths], dtype=np.int32)

    def search(self: MMseqs, queries: Path, targets: Path, **settings: float) -> Hits:
        calls.append("search")
        lengths = [[len(r.sequence) for r in read_fasta(path)] for path in (queries, targets)]
        pairs = np.argwhere(np.equal.outer(*map(np.array, lengths)))
        return Hits(pairs[:, 0], pairs[:, 1], np.ones(len(pairs), dtype=np.float32))

    monkeypatch.setattr(MMseqs, "cluster", cluster)
    monkeypatch.setattr(MMseqs, "search", search)
    monkeypatch.setattr(module, "mmseqs_version", lambda binary: "fake")
    return calls


def _proteins(count: int = 100) -> Records:
    return [(r.name, r.sequence) for r in islice(read_fasta(PROTEINS), count)]


def test_the_split_does_not_depend_on_the_order_of_the_input(
    tmp_path: Path, fake_mmseqs: list[str]
) -> None:
    records = _proteins()
    shuffled = random.Random(1).sample(records, len(records))
    for name, order in (("a", records), ("b", shuffled)):
        prepare(_fasta(tmp_path, order, name), tmp_path / f"{name}_out", validation_fraction=0.2)
    for folder in ("train_lmdb", "validation_lmdb"):
        assert _sequences(tmp_path / "a_out" / folder) == _sequences(tmp_path / "b_out" / folder)
    assert len(SequenceStore(tmp_path / "a_out" / "validation_lmdb")) >= 18


def test_another_seed_holds_out_others(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    fasta = _fasta(tmp_path, _proteins())
    for seed in (0, 1):
        prepare(fasta, tmp_path / str(seed), validation_fraction=0.2, seed=seed)
    assert _sequences(tmp_path / "0" / "validation_lmdb") != _sequences(
        tmp_path / "1" / "validation_lmdb"
    )


def test_the_first_of_duplicates_keeps_its_name(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    records = [(f"p{i}", b"MK" + b"A" * i) for i in range(1, 9)]
    fasta = _fasta(tmp_path, [*records, *((f"again{name}", s) for name, s in records)])
    counts = prepare(fasta, tmp_path / "out", validation_fraction=0.25)["counts"]
    assert counts["duplicates"] == 8
    names = {
        store.name(i)
        for store in map(SequenceStore, (tmp_path / "out").glob("[tv]*_lmdb"))
        for i in range(len(store))
    }
    assert names == {f"p{i}" for i in range(1, 9)}


def test_prepared_data_are_reused_and_said_to_be(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    fasta, lines = _fasta(tmp_path, _proteins()), list[str]()
    first = prepare(fasta, tmp_path / "out", validation_fraction=0.2)
    fake_mmseqs.clear()
    moved = fasta.rename(tmp_path / "elsewhere.fasta")
    again = prepare(moved, tmp_path / "out", validation_fraction=0.2, report=lines.append)
    assert again == first
    assert fake_mmseqs == []
    assert len(lines) == 1
    assert lines[0].startswith("reusing prepared data")


def test_other_settings_or_another_input_are_not_reused(
    tmp_path: Path, fake_mmseqs: list[str]
) -> None:
    fasta = _fasta(tmp_path, _proteins())
    keys = [prepare(fasta, tmp_path / "out", validation_fraction=0.2)["key"]]
    keys.append(prepare(fasta, tmp_path / "out", validation_fraction=0.3)["key"])
    keys.append(prepare(fasta, tmp_path / "out", validation_fraction=0.3, seed=1)["key"])
    _fasta(tmp_path, _proteins(90))
    keys.append(prepare(fasta, tmp_path / "out", validation_fraction=0.3, seed=1)["key"])
    assert len(set(keys)) == 4
    assert fake_mmseqs.count("cluster") == 4


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest"])
def test_damaged_prepared_data_are_prepared_again(
    tmp_path: Path, fake_mmseqs: list[str], damage: str
) -> None:
    fasta, out, lines = _fasta(tmp_path, _proteins()), tmp_path / "out", list[str]()
    first = prepare(fasta, out, validation_fraction=0.2)
    if damage == "truncate":
        (out / "train_lmdb" / "data.mdb").write_bytes(b"x")
    elif damage == "remove":
        (out / "validation_lmdb" / "manifest.json").unlink()
        for file in (out / "validation_lmdb").iterdir():
            file.unlink()
    else:
        (out / "manifest.json").write_text("[]")
    again = prepare(fasta, out, validation_fraction=0.2, report=lines.append)
    assert again["digests"] == first["digests"]
    assert "it is damaged" in lines[0]


def test_a_run_that_was_killed_is_done_again(
    tmp_path: Path, fake_mmseqs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fasta, out = _fasta(tmp_path, _proteins()), tmp_path / "out"
    for leftover in (".scratch/mmseqs-x", "raw_lmdb.partial", "train_lmdb.partial"):
        (out / leftover).mkdir(parents=True)
        (out / leftover / "data.mdb").write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_manifest", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(fasta, out, validation_fraction=0.2)
    assert not (out / "manifest.json").exists()
    prepare(fasta, out, validation_fraction=0.2)
    assert {p.name for p in out.iterdir()} - {"mmseqs.log", ".lock"} == {
        *("manifest.json", "raw_lmdb", "train_lmdb", "validation_lmdb")
    }


def test_a_raw_store_gives_the_split_of_its_fasta(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    fasta = _fasta(tmp_path, _proteins())
    ingest(fasta, tmp_path / "raw")
    from_fasta = prepare(fasta, tmp_path / "a", validation_fraction=0.2)
    from_store = prepare(tmp_path / "raw", tmp_path / "b", validation_fraction=0.2)
    assert from_fasta["digests"] == from_store["digests"]
    assert not (tmp_path / "b" / "raw_lmdb").exists()


def test_leaks_that_a_search_cannot_end_are_an_error(
    tmp_path: Path, fake_mmseqs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = np.zeros(1, dtype=np.int64)
    monkeypatch.setattr(MMseqs, "search", lambda *a, **k: Hits(one, one, np.ones(1, np.float32)))
    with pytest.raises(DataError, match=r"still finds homologs.*raise search_max_seqs"):
        prepare(_fasta(tmp_path, _proteins()), tmp_path / "out", validation_fraction=0.2)
    assert not (tmp_path / "out" / "train_lmdb").exists()


def test_ingest_counts_what_it_drops(tmp_path: Path) -> None:
    fasta = _fasta(tmp_path, [("a", "MKV"), ("b", "M"), ("c", "M1K"), ("d", "MKVLAC"), ("e", "")])
    manifest = ingest(fasta, tmp_path / "raw", min_length=2, max_length=5, on_illegal="drop")
    assert manifest["sequences"] == 1
    assert manifest["kind"] == "raw"
    assert manifest["provenance"]["dropped"] == {
        "shorter than 2": 1,
        "longer than 5": 1,
        "illegal letter": 1,
        "no sequence": 1,
    }


def test_bad_fasta_leaves_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'1'"):
        ingest(_fasta(tmp_path, [("a", "MK"), ("c", "M1K")]), tmp_path / "raw")
    assert [p.name for p in tmp_path.iterdir()] == ["in.fasta"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("validation_fraction", 0), ("validation_fraction", 1), ("cluster_min_seq_id", 30)),
        *(("cluster_coverage", -0.1), ("search_min_seq_id", 1.1), ("search_coverage", 80)),
        *(("search_sensitivity", 9), ("search_max_seqs", 0), ("min_length", 0)),
        *(("threads", 0), ("on_illegal", "skip")),
        *(("validation_fraction", "abc"), ("validation_fraction", None)),
        *(("validation_fraction", float("nan")), ("cluster_min_seq_id", "0.3")),
        *(("search_sensitivity", [7]), ("search_max_seqs", 300.5), ("search_max_seqs", True)),
        *(("min_length", "1"), ("threads", "all"), ("on_illegal", None)),
    ],
)
def test_impossible_settings_are_named_as_in_the_configuration(
    tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.{key}="):
        prepare(tmp_path / "none", tmp_path / "out", **{key: value})


@pytest.mark.parametrize("seed", ["x", 0.5, None])
def test_a_seed_that_is_no_integer_is_named_as_in_the_configuration(
    tmp_path: Path, seed: Any
) -> None:
    with pytest.raises(ConfigError, match=r"^data\.split_seed="):
        prepare(tmp_path / "none", tmp_path / "out", seed=seed)


@pytest.mark.parametrize(
    ("key", "value"),
    [("min_length", 0), ("min_length", "abc"), ("max_length", 0), ("max_length", "abc")],
)
def test_impossible_lengths_are_named_when_ingesting(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        ingest(tmp_path / "none", tmp_path / "raw", **{key: value})


@pytest.mark.parametrize("seed", range(20))
def test_never_more_is_held_out_than_wanted_and_no_cluster_that_fits_is_left(seed: int) -> None:
    draw = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(40, dtype=np.int32), draw.integers(3, 12, 40))
    draw.shuffle(clusters)
    digests = [i.to_bytes(16, "big") for i in range(len(clusters))]
    held_out = module._hold_out(clusters, digests, 0.1, seed)
    wanted, taken = int(np.ceil(0.1 * len(clusters))), int(held_out.sum())
    chosen = set(clusters[held_out].tolist())
    assert not chosen & set(clusters[~held_out].tolist())
    assert 0 < taken <= wanted
    left = [size for size in np.bincount(clusters[~held_out]) if size]
    assert min(left) > wanted - taken


def test_the_wanted_number_is_held_out_exactly_where_single_sequences_fill_it_up() -> None:
    clusters = np.array([0] * 9 + [1] * 9 + list(range(2, 84)), dtype=np.int32)
    digests = [i.to_bytes(16, "big") for i in range(100)]
    for seed in range(20):
        assert module._hold_out(clusters, digests, 0.1, seed).sum() == 10


def test_a_second_preparation_of_the_same_folder_is_refused_and_disturbs_nothing(
    tmp_path: Path, fake_mmseqs: list[str]
) -> None:
    fasta, out = _fasta(tmp_path, _proteins()), tmp_path / "out"
    refusals: list[str] = []

    def meanwhile(line: str) -> None:
        with pytest.raises(DataError, match="another preparation is writing to") as caught:
            prepare(fasta, out, validation_fraction=0.3)
        refusals.append(str(caught.value))

    prepare(fasta, out, validation_fraction=0.2, report=meanwhile)
    assert len(refusals) > 5
    assert not any("\n" in line for line in refusals)
    SequenceStore(out / "validation_lmdb").verify()
    prepare(fasta, out, validation_fraction=0.3)


def test_a_file_system_without_locks_is_said_once_and_used(
    tmp_path: Path, fake_mmseqs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(95, "Operation not supported")))
    lines: list[str] = []
    fasta = _fasta(tmp_path, _proteins())
    prepare(fasta, tmp_path / "out", validation_fraction=0.2, report=lines.append)
    assert [line for line in lines if "without locks" in line] == lines[:1]


def test_a_system_that_does_not_tell_the_cpus_of_a_process(
    tmp_path: Path, fake_mmseqs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    mmseqs = Mock(side_effect=MMseqs)
    monkeypatch.setattr(module, "MMseqs", mmseqs)
    prepare(_fasta(tmp_path, _proteins()), tmp_path / "out", validation_fraction=0.2)
    assert mmseqs.call_args.kwargs["threads"] == 1


def test_missing_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        prepare(tmp_path / "none.fasta", tmp_path / "out")


def test_a_folder_that_is_no_store_as_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sequence store"):
        prepare(tmp_path, tmp_path / "out")


def test_names_that_no_file_system_takes(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        prepare(tmp_path / ("x" * 300), tmp_path / "out")
    with pytest.raises(DataError, match="cannot be written"):
        prepare(_fasta(tmp_path, _proteins(3)), tmp_path / ("x" * 300))


def test_an_output_that_cannot_be_written(tmp_path: Path, fake_mmseqs: list[str]) -> None:
    fasta = _fasta(tmp_path, _proteins(3))
    with pytest.raises(DataError, match="cannot be written"):
        prepare(fasta, fasta / "out")


@pytest.mark.parametrize(
    "name", [".lock", ".scratch", "mmseqs.log", "raw_lmdb", "train_lmdb", "manifest.json"]
)
def test_whatever_is_in_the_way_of_an_output_is_named(
    tmp_path: Path, fake_mmseqs: list[str], name: str
) -> None:
    fasta, out = _fasta(tmp_path, _proteins()), tmp_path / "out"
    in_the_way = out / name
    if name == ".scratch":
        out.mkdir()
        in_the_way.write_text("in the way")
    else:
        (in_the_way / "in the way").mkdir(parents=True)
    with pytest.raises(DataError, match=f"{out}.*(cannot be |not over)written") as caught:
        prepare(fasta, out, validation_fraction=0.2)
    assert "\n" not in str(caught.value)
    assert in_the_way.exists()


@pytest.mark.parametrize(
    "records",
    [[("a", b"MKV")], [("a", b"MKV"), ("b", b"MKV")], [("a", b"MKV"), ("b", b"MKL")]],
)
def test_too_few_to_split(tmp_path: Path, fake_mmseqs: list[str], records: Records) -> None:
    with pytest.raises(DataError, match="too few"):
        prepare(_fasta(tmp_path, records), tmp_path / "out", validation_fraction=0.5)


def test_the_data_modules_need_no_torch() -> None:
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'mlflow', 'hydra'): sys.modules[name] = None\n"
        "import d2plm.data.fasta, d2plm.data.store, d2plm.data.homology, d2plm.data.prepare\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
