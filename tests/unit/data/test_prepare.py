"""The split: no leaks, independent of the input's order, reused by content, robust to bad input."""

import json
import random
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations, islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from d2plm.core.errors import DataError, SplitError
from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data import homology, similarity
from d2plm.data import prepare as module
from d2plm.data.fasta import read_fasta, write_fasta
from d2plm.data.homology import Hits, MMseqs
from d2plm.data.ingest import ingest
from d2plm.data.leakage import drop_homologs
from d2plm.data.manifest import open_prepared
from d2plm.data.split import choose_clusters, find_ids
from d2plm.data.store import SequenceStore
from d2plm.settings.data import EITHER, ClusterSettings, Resources, SearchSettings, SplitSettings
from tests.conftest import FASTA, Logged, MonkeyPatch, write_store

Calls = list[str]
Records = Sequence[tuple[str, bytes | str]]


def prepare(inputs: Path, output_dir: Path, **given: Any) -> dict[str, Any]:
    """The function under test; what is left over are settings of the split."""
    own = {"clustering", "resources", "keep", "report", "relatives_sensitivity"} & given.keys()
    named: dict[str, Any] = {"resources": Resources(threads=1), "report": lambda _: None}
    named |= {name: given.pop(name) for name in own}
    # Half the time, and enough for planted families.
    search = SearchSettings(coverage_mode=given.pop("coverage_mode", EITHER), sensitivity=4)
    split = SplitSettings(**{"validation_fraction": 0.2, **given})
    return module.prepare(inputs, output_dir, split=split, search=search, **named)


def _records(count: int = 100) -> list[tuple[str, bytes | str]]:
    return [(r.name, decode(r.tokens)) for r in islice(read_fasta(FASTA), count)]


def _planted() -> list[tuple[str, str]]:
    """Twelve families: a real protein and two copies with 30 % of residues changed.

    Then one that contains the first protein, and a part of the second.
    """
    draw = random.Random(0)
    bases = [(n, str(s)) for n, s in _records(100) if 150 < len(s) < 400][:13]
    records: list[tuple[str, str]] = []
    for name, sequence in bases[:12]:
        records.append((name, sequence))
        for copy in (1, 2):
            letters = list(sequence)
            for position in draw.sample(range(len(letters)), int(0.3 * len(letters))):
                letters[position] = draw.choice(CANONICAL)
            records.append((f"{name}_{copy}", "".join(letters)))
    parts = [("longer", bases[12][1] + bases[0][1]), ("fragment", bases[1][1][40:120])]
    return [*records, *parts]


def _fasta(folder: Path, records: Records, name: str = "in.fasta") -> Path:
    write_fasta(folder / name, records)
    return folder / name


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The first proteins of eight families are held out: at 0.95 clusters are single sequences."""
    folder = tmp_path_factory.mktemp("planted")
    records = _planted()
    (folder / "ids").write_text("\n".join(name for name, _ in records[:24:3]))
    fasta = _fasta(folder, [*records, ("duplicate", records[0][1])])
    settings = {"validation_ids": str(folder / "ids"), "relatives_sensitivity": 4}
    clustering = ClusterSettings(method="linclust", min_seq_id=0.95)
    manifest = prepare(fasta, folder / "out", clustering=clustering, **settings)
    return folder, manifest


def test_nothing_leaks_where_clusters_alone_would(planted: tuple[Path, Any]) -> None:
    folder, manifest = planted
    train = SequenceStore(folder / "out" / "train_lmdb")
    names = [name for name, _ in _planted()]
    assert {*map(train.name, range(len(train)))} == {*names[24:36]}
    assert manifest["settings"]["search"]["coverage_mode"] == EITHER
    assert manifest["counts"]["leaking_dropped"] == 8 * 2 + 2
    assert manifest["counts"]["leaking_dropped_partial"] == 2
    searches = [(one["direction"], one["pairs"]) for one in manifest["searches"]]
    assert searches[0] == ("from_held_out", 18)
    assert sorted(searches[-2:]) == [("from_held_out", 0), ("from_training", 0)]
    assert manifest["leaking_pairs_after"] == 0


def test_the_manifest_accounts_for_every_record(planted: tuple[Path, Any]) -> None:
    folder, manifest = planted
    counts = manifest["counts"]
    assert (counts["input"], counts["duplicates"]) == (39, 1)
    assert counts["clusters"] == counts["distinct"] == 38
    assert counts["validation_sequences"] == counts["validation_clusters"] == 8
    assert counts["train_sequences"] == 12
    assert json.loads((folder / "out" / "manifest.json").read_text()) == manifest
    records = _planted()
    for kind in ("train", "validation"):
        store = SequenceStore(folder / "out" / f"{kind}_lmdb")
        store.verify()
        assert store.digest == manifest["digests"][kind]
        assert store.residues == counts[f"{kind}_residues"]
        assert store.clusters is not None
        for number, tokens in enumerate(store):
            text = decode(tokens)
            names = ["duplicate"] * (text == records[0][1])
            assert store.names(number) == names + [n for n, s in records if s == text]


@pytest.fixture
def calls(monkeypatch: MonkeyPatch) -> Calls:
    """Stands in for MMseqs2: proteins of one length are homologs; lists the calls."""
    called: Calls = []

    def cluster(self: MMseqs, fasta: Path, count: int, settings: ClusterSettings) -> np.ndarray:
        called.append("cluster")
        lengths = [len(r.tokens) for r in read_fasta(fasta)]
        assert len(lengths) == count
        return np.array([lengths.index(n) for n in lengths], dtype=np.int32)

    def search(self: MMseqs, queries: Path, targets: Path, settings: SearchSettings) -> Hits:
        called.append("search")
        lengths = [[len(r.tokens) for r in read_fasta(path)] for path in (queries, targets)]
        pairs = np.argwhere(np.equal.outer(*map(np.array, lengths)))
        alike = np.ones(len(pairs))
        return Hits(pairs[:, 0], pairs[:, 1], alike.astype(np.float32), alike)

    monkeypatch.setattr(MMseqs, "cluster", cluster)
    monkeypatch.setattr(MMseqs, "search", search)
    monkeypatch.setattr(similarity, "mmseqs_version", lambda binary: "fake")
    return called


def test_only_the_same_setting_and_input_are_reused(tmp_path: Path, calls: Calls) -> None:
    fasta = _fasta(tmp_path, _records())
    raw = tmp_path / "out" / "raw_lmdb"
    first = prepare(fasta, tmp_path / "out")
    inode = raw.stat().st_ino
    calls.clear()
    assert prepare(fasta.rename(tmp_path / "elsewhere.fasta"), tmp_path / "out") == first
    assert (calls, raw.stat().st_ino) == ([], inode)
    fasta = tmp_path / "elsewhere.fasta"
    more: dict[str, Any] = {"validation_fraction": 0.3}
    changes = [more, {**more, "split_seed": 1}, {"split_seed": 1, "coverage_mode": 0}]
    made = [first, *(prepare(fasta, tmp_path / "out", **one) for one in changes)]
    assert calls.count("cluster") == 0
    fasta = _fasta(tmp_path, _records(90))
    made.append(prepare(fasta, tmp_path / "out", validation_fraction=0.3, split_seed=1))
    assert len({manifest["key"] for manifest in made}) == 5
    assert len({manifest["digests"]["validation"] for manifest in made}) == 5
    assert calls.count("cluster") == 1


@pytest.mark.parametrize("file", ["train_lmdb/data.mdb", "manifest.json", "cache/*"])
def test_damaged_data_are_prepared_again(tmp_path: Path, calls: Calls, file: str) -> None:
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    first = prepare(fasta, out)
    (damaged,) = out.glob(file)
    damaged.write_bytes(b"[]" if file == "manifest.json" else damaged.read_bytes()[:-7])
    if file == "cache/*":
        (out / "manifest.json").unlink()
    assert prepare(fasta, out)["digests"] == first["digests"]
    open_prepared(out).splits["train"].verify()


def test_relatives_are_the_members_of_families(tmp_path: Path, planted: tuple[Path, Any]) -> None:
    out = shutil.copytree(planted[0] / "out", tmp_path / "out")
    prepared = open_prepared(out)
    train, index = prepared.splits["train"], prepared.relatives
    assert index is not None
    last = [train.names(number)[-1] for number in range(len(train))]
    families = [name.removesuffix("_1").removesuffix("_2") for name in last]
    assert len({*families}) == 4
    for number, family in enumerate(families):
        own = {other for other, name in enumerate(families) if name == family and other != number}
        hits = slice(*index.bounds[number : number + 2])
        assert {*index.targets[hits][index.identities[hits] > 0.35].tolist()} == own
    identities = index.identities[np.diff(index.bounds).cumsum() - 1]
    assert 0.4 < float(identities.mean()) < 0.8  # 30 % of the residues were drawn anew
    prepared.verify_relatives()
    targets = out / "train_relatives" / "targets.npy"
    np.save(targets, np.load(targets)[::-1])
    with pytest.raises(DataError, match="train_relatives: damaged"):
        open_prepared(out).verify_relatives()


def test_relatives_of_other_data_are_not_opened(tmp_path: Path, calls: Calls) -> None:
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    prepare(fasta, out, relatives_sensitivity=1)
    bounds = out / "train_relatives" / "bounds.npy"
    np.save(bounds, np.load(bounds)[[0, -1]])
    with pytest.raises(DataError, match="other training sequences"):
        open_prepared(out)
    again = prepare(fasta, out, relatives_sensitivity=1)
    assert open_prepared(out).relatives is not None
    assert prepare(fasta, out, relatives_sensitivity=1) == again
    prepare(fasta, out)
    assert not (out / "train_relatives").exists()


def test_a_raw_store_gives_the_split_of_its_fasta(tmp_path: Path, calls: Calls) -> None:
    records = _records()
    ingest(_fasta(tmp_path, random.Random(1).sample(records, len(records))), tmp_path / "raw")
    from_fasta = prepare(_fasta(tmp_path, records), tmp_path / "a")
    from_store = prepare(tmp_path / "raw", tmp_path / "b")
    assert from_fasta["digests"] == from_store["digests"]
    assert len(SequenceStore(tmp_path / "b" / "validation_lmdb")) >= 18
    assert not (tmp_path / "b" / "raw_lmdb").exists()
    with pytest.raises(DataError, match="a train store"):
        prepare(tmp_path / "a" / "train_lmdb", tmp_path / "again")


def test_endless_leaks_are_an_error(tmp_path: Path, calls: Calls, monkeypatch: MonkeyPatch) -> None:
    hits = Hits(np.zeros(1, int), np.zeros(1, int), np.ones(1, np.float32), np.ones(1))
    monkeypatch.setattr(MMseqs, "search", lambda *a, **k: hits)
    with pytest.raises(DataError, match="still finds homologs"):
        prepare(_fasta(tmp_path, _records()), tmp_path / "out")
    assert not (tmp_path / "out" / "train_lmdb").exists()


def _store(folder: Path, count: int) -> SequenceStore:
    """Distinct sequences, as many as wanted."""
    draw = np.random.default_rng(0)
    tokens = [draw.integers(4, 24, 30, dtype=np.uint8) for _ in range(count)]
    return write_store(folder / "store", tokens)


@pytest.mark.parametrize("seed", range(5))
def test_never_more_is_held_out_and_no_cluster_that_fits_is_left(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = draw.permutation(np.repeat(np.arange(40), draw.integers(3, 12, 40)))
    firsts, which = np.unique(labels, return_index=True, return_inverse=True)[1:]
    clusters = firsts[which].astype(np.int32)  # labelled by the first member
    none = np.zeros(len(clusters), dtype=bool)
    wanted = int(np.ceil(0.1 * len(clusters)))
    store = _store(tmp_path, len(clusters))
    one, two = choose_clusters(store, clusters, [wanted, wanted], none, seed)
    assert not (one & two).any()
    rest = ~one
    for held_out in (one, two):
        taken = int(held_out.sum())
        assert not set(clusters[held_out]) & set(clusters[~held_out])
        assert 0 < taken <= wanted
        left = [size for size in np.bincount(clusters[rest & ~held_out]) if size]
        assert min(left) > wanted - taken
        rest &= ~held_out


def test_clusters_in_use_are_not_chosen_and_sequences_keep_places(tmp_path: Path) -> None:
    """The order of the clusters is a hash of their own content."""
    store, none = _store(tmp_path, 60), np.zeros(60, dtype=bool)
    alone = np.arange(60, dtype=np.int32)
    few = np.where(alone < 40, alone, -1).astype(np.int32)
    (chosen_of_all,) = choose_clusters(store, alone, [12], none, 3)
    (chosen_of_few,) = choose_clusters(store, few, [12], none, 3)
    assert set(np.flatnonzero(chosen_of_all[:40])) <= set(np.flatnonzero(chosen_of_few))
    clusters = np.array([0, 0, 2, 2, -1, -1, 6, 6, *[-1] * 52], dtype=np.int32)
    (chosen,) = choose_clusters(store, clusters, [8], np.arange(60) == 0, seed=0)
    assert np.flatnonzero(chosen).tolist() == [2, 3, 6, 7]


def test_nothing_leaks_between_any_two_splits(tmp_path: Path, calls: Calls) -> None:
    fasta, clustering = _fasta(tmp_path, _planted()[:36]), ClusterSettings(method="none")
    shares = {"validation_fraction": 0.25, "test_fraction": 0.25}
    manifest = prepare(fasta, tmp_path / "out", clustering=clustering, **shares)
    stores = {
        name: list(SequenceStore(tmp_path / "out" / f"{name}_lmdb"))
        for name in ("train", "validation", "test")
    }
    for one, other in combinations(stores.values(), 2):
        assert not {*map(len, one)} & {*map(len, other)}
    assert len(stores["test"]) == 9
    assert {one["dropped_from"] for one in manifest["searches"]} == {"validation", "train"}
    counts = manifest["counts"]
    assert sum(map(len, stores.values())) + counts["leaking_dropped"] == counts["distinct"] == 36
    assert counts["test_sequences"] == counts["test_clusters"] == 9
    assert manifest["leaking_pairs_after"] == 0


def test_listed_identifiers_are_held_out(tmp_path: Path, calls: Calls) -> None:
    records = [*_records(40), ("copy", _records(40)[7][1])]
    by_name, by_accession = records[3][0], records[5][0].split("|")[1]
    validation, test = tmp_path / "validation.txt", tmp_path / "test.txt"
    validation.write_text(f"{by_name}\n{by_accession}\n\ncopy\n")
    test.write_text(f"{records[11][0]}\n")
    fasta, out = _fasta(tmp_path, records), tmp_path / "out"
    prepare(fasta, out, validation_ids=str(validation), test_ids=str(test))
    stores = (SequenceStore(out / f"{split}_lmdb") for split in ("train", "validation", "test"))
    train, held, tested = ({*map(decode, store)} for store in stores)
    assert held == {records[i][1] for i in (3, 5, 7)}
    assert tested == {records[11][1]}
    assert not train & (held | tested)
    with pytest.raises(DataError, match="on both lists"):
        prepare(fasta, out, validation_ids=str(test), test_ids=str(test))


def test_identifiers_that_name_nothing_are_rejected(tmp_path: Path) -> None:
    store, ids = _store(tmp_path, 5), tmp_path / "ids.txt"
    everything = np.ones(5, dtype=bool)
    ids.write_text("protein1\n")
    assert find_ids(store, ids, everything).tolist() == [False, True, False, False, False]
    with pytest.raises(DataError, match="length bounds"):
        find_ids(store, ids, ~everything)
    for listed in ("protein1 p9\np8\n", "protein\n", "\n"):
        ids.write_text(listed)
        with pytest.raises(DataError, match=str(ids)):
            find_ids(store, ids, everything)


def test_homologs_of_excluded_ones_are_left_out(tmp_path: Path, calls: Calls) -> None:
    records, out = _records(), tmp_path / "out"
    excluded = _fasta(tmp_path, records[:10], "excluded.fasta")
    prepare(_fasta(tmp_path, records), out, exclude_homologs_of=[str(excluded)])
    lengths = SequenceStore(out / "train_lmdb").lengths.tolist()
    assert not {len(text) for _, text in records[:10]} & {*lengths}


def _stopped(tmp_path: Path, **settings: Any) -> tuple[Path, Path]:
    """(input, output) of a preparation that was stopped after its searches."""
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_write_split", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(fasta, out, **settings)
    return fasta, out


def test_a_stop_keeps_searches_and_no_leftovers(tmp_path: Path, calls: Calls) -> None:
    for leftover in (".scratch/mmseqs-x", "partial.raw_lmdb", "partial.train_lmdb"):
        (tmp_path / "out" / leftover).mkdir(parents=True)
        (tmp_path / "out" / leftover / "data.mdb").write_bytes(b"half")
    fasta, out = _stopped(tmp_path)
    assert calls.count("cluster") == 1
    assert calls.count("search") >= 2
    assert not (out / "manifest.json").exists()
    calls.clear()
    resumed = prepare(fasta, out)
    assert calls == []
    assert {p.name for p in out.iterdir()} - {"mmseqs.log"} == {
        *("cache", "manifest.json", "raw_lmdb", "train_lmdb", "validation_lmdb")
    }
    assert resumed["digests"] == prepare(fasta, tmp_path / "unbroken")["digests"]


def test_scratch_files_go_elsewhere(tmp_path: Path, calls: Calls, monkeypatch: MonkeyPatch) -> None:
    elsewhere, made = tmp_path / "elsewhere", Mock(side_effect=MMseqs)
    monkeypatch.setattr(homology, "MMseqs", made)
    resources = Resources(threads=1, memory_limit="1G", temporary_dir=str(elsewhere))
    prepare(_fasta(tmp_path, _records()), tmp_path / "out", resources=resources)
    (call,) = made.call_args_list
    assert call.kwargs["temporary_folder"].parent == elsewhere
    assert call.kwargs["memory_limit"] == "1G"
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


def test_half_a_split_is_not_opened(tmp_path: Path, calls: Calls, monkeypatch: MonkeyPatch) -> None:
    """Otherwise a new training split would stand beside an old validation split."""
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    prepare(fasta, out)
    assert {*open_prepared(out).splits} == {"train", "validation"}
    write_split = module._write_split

    def killed(path: Path, kind: str, *arguments: Any) -> SequenceStore:
        if kind == "validation":
            raise KeyboardInterrupt
        return write_split(path, kind, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_split", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(fasta, out, split_seed=1)
    for split in ("train", "validation"):
        SequenceStore(out / f"{split}_lmdb").verify()
    with pytest.raises(DataError, match="no prepared data there"):
        open_prepared(out)


def test_searches_of_other_sequences_are_not_taken_for_these(
    tmp_path: Path, calls: Calls, monkeypatch: MonkeyPatch
) -> None:
    """A clustering that was lost and came out otherwise holds out others."""
    fasta, out = _stopped(tmp_path)
    for stage in (out / "cache").glob("clusters-*"):
        stage.unlink()
    monkeypatch.setattr(MMseqs, "cluster", lambda *of: np.arange(of[2], dtype=np.int32))
    calls.clear()
    prepare(fasta, out)
    stores = (SequenceStore(out / f"{split}_lmdb") for split in ("train", "validation"))
    train, held = (set(store.lengths.tolist()) for store in stores)
    assert "search" in calls
    assert not train & held


def test_every_direction_is_searched_on_what_is_left_at_the_end() -> None:
    """Where dropping something lets the other direction find more, it is asked again."""
    hits = {("from_held_out", 6): [(0, 1)], ("from_training", 5): [(1, 0), (1, 1)]}
    hits["from_held_out", 4] = [(0, 0), (0, 0)]
    asked: list[tuple[str, int]] = []

    def search(direction: str, left: np.ndarray) -> np.ndarray:
        asked.append((direction, int(left.sum())))
        return np.array(hits.get(asked[-1], []), dtype=np.int64).reshape(-1, 2)

    leaking, searches = drop_homologs(np.ones(6, dtype=bool), search)
    assert leaking.tolist() == [True, True, True, False, False, False]
    assert asked == [
        *(("from_held_out", 6), ("from_training", 5), ("from_held_out", 4)),
        *(("from_training", 3), ("from_held_out", 3)),
    ]
    assert [one["pairs"] for one in searches] == [1, 2, 2, 0, 0]
    assert [one["sequences"] for one in searches] == [1, 1, 1, 0, 0]
    assert [one["partial"] for one in searches] == [0, 0, 1, 0, 0]
    # A direction that was silent before is asked again, too.
    hits = {("from_training", 6): [(0, 1)], ("from_held_out", 5): [(0, 1)]}
    asked.clear()
    assert drop_homologs(np.ones(6, dtype=bool), search)[0].sum() == 2
    assert asked[:3] == [("from_held_out", 6), ("from_training", 6), ("from_held_out", 5)]


def test_kept_data_are_taken_whatever_they_were_made_from(tmp_path: Path, calls: Calls) -> None:
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    made = prepare(fasta, out, validation_fraction=0.2, keep=True)
    kept = prepare(tmp_path / "absent.fasta", out, validation_fraction=0.3, keep=True)
    assert kept == json.loads((out / "manifest.json").read_text()) == {**made, **kept}
    (out / "train_lmdb" / "manifest.json").unlink()
    with pytest.raises(DataError, match="train_lmdb"):
        prepare(fasta, out, validation_fraction=0.3, keep=True)


@pytest.mark.parametrize("settings", [{}, {"keep": True}, {"validation_fraction": 0.3}])
def test_a_second_preparation_waits(
    settings: dict[str, Any], tmp_path: Path, calls: Calls, caplog: Logged
) -> None:
    fasta, out, begun = _fasta(tmp_path, _records()), tmp_path / "out", list[str]()
    with ThreadPoolExecutor() as pool:

        def meanwhile(line: str) -> None:
            if not seconds:
                seconds.append(pool.submit(prepare, fasta, out, **settings, report=begun.append))
                while f"another preparation is writing to {out}" not in caplog.text:
                    time.sleep(0.01)
            assert not begun

        seconds: list[Future[dict[str, Any]]] = []
        first = prepare(fasta, out, report=meanwhile)
        again = seconds[0].result()
    assert (first["digests"] == again["digests"]) is ("validation_fraction" not in settings)
    SequenceStore(out / "validation_lmdb").verify()


@pytest.mark.parametrize("name", [".lock", "mmseqs.log", "train_lmdb", "manifest.json"])
def test_what_is_in_the_way_is_named(tmp_path: Path, calls: Calls, name: str) -> None:
    fasta, out = _fasta(tmp_path, _records()), tmp_path / "out"
    (out / name / "in the way").mkdir(parents=True)
    with pytest.raises(DataError, match=str(out)):
        prepare(fasta, out)
    assert (out / name).exists()


@pytest.mark.parametrize("texts", [[b"MKV"], [b"MKV", b"MKV"], [b"MKV", b"MKL"]])
def test_too_few_to_split(tmp_path: Path, calls: Calls, texts: list[bytes]) -> None:
    fasta = _fasta(tmp_path, [(f"p{i}", text) for i, text in enumerate(texts)])
    with pytest.raises(SplitError):
        prepare(fasta, tmp_path / "out", validation_fraction=0.5)
