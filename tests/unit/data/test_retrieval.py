"""Relatives from a reference collection: which are found, chosen and kept, by a real MMseqs2."""

import csv
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import d2plm
from d2plm.cli import main
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import CANONICAL, decode, encode
from d2plm.data.family import read_families
from d2plm.data.homology import Hits, MMseqs
from d2plm.data.ingest import ingest
from d2plm.data.prepare import prepare
from d2plm.data.retrieval import Relative, held_out_relatives, open_reference, retrieve_relatives
from d2plm.data.store import SequenceStore
from d2plm.settings.data import ClusterSettings, RetrievalSettings, SplitSettings
from tests.conftest import Captured, Exports, MonkeyPatch

Retrieve = Callable[..., list[list[Relative]]]


def mutated(text: str, share: float, seed: int) -> str:
    """A share of the residues replaced by others."""
    letters, drawn = list(text), random.Random(seed)
    for place in drawn.sample(range(len(text)), round(len(text) * share)):
        letters[place] = drawn.choice(CANONICAL.replace(letters[place], ""))
    return "".join(letters)


def unrelated(seed: int, length: int = 110) -> str:
    drawn = random.Random(seed)
    return "".join(drawn.choices(CANONICAL, k=length))


# Two proteins, and what a reference holds around the first: near and remote relatives with a near
# duplicate of one of them, a part of it, and itself.
PROTEIN, OTHER, LONELY = unrelated(1), unrelated(2), unrelated(3)
REMOTE = mutated(PROTEIN, 0.35, 4)
REFERENCE = {
    "itself": PROTEIN,
    "near": mutated(PROTEIN, 0.05, 5),
    "nearer": mutated(PROTEIN, 0.03, 6),
    "remote": REMOTE,
    "remote_again": mutated(REMOTE, 0.03, 7),
    "remoter": mutated(PROTEIN, 0.45, 8),
    "half": mutated(PROTEIN, 0.2, 9)[:55] + unrelated(10, 60),
    "of_other": mutated(OTHER, 0.3, 11),
}
PROTEINS = [encode(text) for text in (PROTEIN, OTHER, LONELY)]


def fasta(path: Path, records: dict[str, str]) -> Path:
    path.write_text("".join(f">{name} described\n{text}\n" for name, text in records.items()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    return fasta(folder / "reference.fasta", REFERENCE)


def names(relatives: list[Relative]) -> list[str]:
    return [one.name for one in relatives]


@pytest.fixture(scope="module")
def retrieve(folder: Path, reference: Path) -> Retrieve:
    kept = folder / "kept"
    return lambda **of: retrieve_relatives(PROTEINS, reference, kept, RetrievalSettings(**of))


def test_relatives_are_diverse_and_the_protein_is_not_one_of_them(retrieve: Retrieve) -> None:
    first, second, lonely = retrieve()
    # "near" is a near duplicate of "nearer", which is like the protein itself; both count as hits.
    assert names(first)[0] == "nearer"
    assert {*names(first)} == {"nearer", "remote", "remoter", "half"}
    assert names(second) == ["of_other"]
    assert lonely == []
    of = {one.name: one for one in first}
    assert decode(of["remote"].tokens) == REMOTE
    # 38 of 110 residues differ, and the ends of a local alignment may be left out.
    assert of["remote"].identity == pytest.approx(72 / 110, abs=0.03)
    assert of["nearer"].coverage == 1
    assert of["half"].coverage == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mutual_identity_below": None}, {*REFERENCE} - {"itself", "of_other"}),
        ({"identity_below": 0.9}, {"remote", "remoter", "half"}),
        ({"max_relatives": 2}, {"nearer", "remote"}),
        ({"min_coverage": 0.8, "max_e_value": 1e-34}, {"nearer", "remote"}),
    ],
)
def test_each_setting_chooses_the_relatives(
    settings: dict[str, Any], expected: set[str], retrieve: Retrieve
) -> None:
    assert {*names(retrieve(**settings)[0])} == expected


def test_distant_relatives_are_found_behind_hundreds_of_near_copies(folder: Path) -> None:
    copies = {f"copy{i}": mutated(PROTEIN, 0.02, 100 + i) for i in range(330)}
    crowded = fasta(folder / "crowded.fasta", {**copies, "remote": REMOTE})
    settings = RetrievalSettings(identity_below=0.8)
    (found,) = retrieve_relatives(PROTEINS[:1], crowded, folder / "crowded", settings)
    assert names(found) == ["remote"]


def test_a_result_is_kept_for_the_same_reference_and_settings_alone(
    reference: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    searches: list[Any] = []
    search = MMseqs.alignments

    def counted(mmseqs: MMseqs, queries: Path, targets: Path, *settings: Any) -> Any:
        searches.append(settings)
        is_new = targets.read_text().count(">") > len(REFERENCE)
        return iter(()) if is_new else search(mmseqs, queries, targets, *settings)

    monkeypatch.setattr(MMseqs, "alignments", counted)

    def call(reference: Path = reference, count: int = 3, **settings: Any) -> list[list[str]]:
        wanted = RetrievalSettings(**settings)
        return [*map(names, retrieve_relatives(PROTEINS[:count], reference, tmp_path, wanted))]

    once = call()
    assert call() == once and len(searches) == 1
    assert call(identity_below=0.5) != once and len(searches) == 2
    larger = fasta(tmp_path / "other.fasta", {**REFERENCE, "more": LONELY})
    assert call(larger) == [[], [], []] and len(searches) == 3
    assert call(larger, count=2) == [[], []] and len(searches) == 4


def test_a_store_is_searched_as_the_fasta_is_and_of_prepared_data_the_training_set(
    reference: Path, tmp_path: Path, retrieve: Retrieve, monkeypatch: MonkeyPatch
) -> None:
    ingest(reference, tmp_path / "raw")
    from_store = retrieve_relatives(PROTEINS, tmp_path / "raw", tmp_path)
    assert [names(one) for one in from_store] == [names(one) for one in retrieve()]
    none = Hits(*(np.empty(0, dtype=kind) for kind in (int, int, np.float32, float)))
    monkeypatch.setattr(MMseqs, "search", lambda *_: none)
    clustering, prepared = ClusterSettings(method="none"), tmp_path / "prepared"
    split = SplitSettings(validation_fraction=0.2)
    prepare(tmp_path / "raw", prepared, split=split, clustering=clustering)
    trained = SequenceStore(prepared / "train_lmdb")
    assert open_reference(prepared, tmp_path).digest == trained.digest
    assert len(trained) < len(REFERENCE)


def test_scores_given_own_relatives(exports: Exports, reference: Path, folder: Path) -> None:
    of_names = {"first": PROTEIN, "second": OTHER, "lonely": LONELY}
    texts, proteins = [*of_names.values()], fasta(folder / "proteins.fasta", of_names)
    relatives = d2plm.retrieve_relatives(texts, reference, cache_dir=folder / "kept")
    assert [len(own) for own in relatives] == [4, 1, 0]
    assert d2plm.retrieve_relatives([], reference) == []
    with pytest.raises(ConfigError, match="identity_below"):
        d2plm.retrieve_relatives(texts, reference, identity_belw=0.9)
    model = d2plm.load_model(exports.related, device="cpu", precision="fp32")
    invalid: list[Any] = [[], [PROTEIN], [[PROTEIN], []], [[OTHER]], [OTHER, [OTHER]]]
    for wrong in invalid:
        with pytest.raises((DataError, ConfigError), match="relative"):
            model.score([PROTEIN, PROTEIN], relatives=wrong)
    settings: dict[str, Any] = {"masks_per_sequence": 2}
    given = [one.nats for one in model.score(texts, relatives=relatives, **settings)]
    alone = [one.nats for one in model.score(texts, **settings)]
    second = model.score(texts, relatives=[[], relatives[1], []], **settings)
    expected = [alone[0], given[1], alone[2]]  # as by itself, in its place
    assert [one.nats for one in second] == pytest.approx(expected, rel=1e-5)
    same = [own == pytest.approx(other, rel=1e-6) for own, other in zip(given, alone, strict=True)]
    assert same == [False, False, True]
    table = folder / "table.tsv"
    found = [f"input={proteins}", f"reference={reference}", f"cache_dir={folder / 'kept'}"]
    assert main(["relatives", *found, f"output={table}"]) == 0
    words = [f"model_dir={exports.related}", f"input={proteins}", "device=cpu"]
    words += [f"relatives={table}", f"output={folder / 'scores.csv'}"]
    words += ["precision=fp32", "pseudo_log_likelihood=false", "evaluation.masks_per_sequence=2"]
    assert main(["score", *words]) == 0
    rows = list(csv.DictReader((folder / "scores.csv").open(newline="")))
    assert [float(row["nats"]) for row in rows] == pytest.approx(given, rel=1e-4)
    rows = list(csv.DictReader(table.open(newline=""), delimiter="\t"))
    assert list(rows[0]) == ["protein", "relative", "identity", "coverage", "sequence"]
    assert 0.9 < float(rows[0]["identity"]) < 1
    lonely, first = read_families(table, 3, ["lonely", "first"], proteins)
    assert len(first.draw(0, protein=encode(PROTEIN))) == 3
    assert lonely.members == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("MKT\n", "columns"),
        ("protein\tidentity\nfirst\t0.5\n", "columns"),
        ("query\ttarget\tsequence\nfirst\tx\tMK\n", "protein"),
        ("protein\tsequence\n", "has no rows"),
        ("protein\tsequence\nfirst\tMK1\n", "line 2: record 'first'"),
        ("protein\tsequence\nx\tMKT\nfirst\tMKRTL...KQHPS\n", "line 3: .*'first'"),
        ("protein,sequence\nfirst,NA\nsecond,Sequence unavailable\n", "has no rows"),
    ],
)
def test_a_wrong_table_is_rejected(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text(text)
    with pytest.raises(DataError, match=said):
        read_families(tmp_path / "t.tsv", 8, ["first"], "in.fasta")


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ("reference=none.fasta", 1, "none.fasta"),
        ("reference=itself.fasta", 1, "no relatives of any protein"),
        ("input=twice.fasta", 1, "'first'"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    change: str, code: int, named: str, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    fasta(Path("itself.fasta"), {"first": PROTEIN})
    Path("twice.fasta").write_text(f">first\n{PROTEIN}\n>first\n{OTHER}\n")
    words = ["input=itself.fasta", "reference=itself.fasta"]
    key = change.partition("=")[0]
    assert main(["relatives", *(w for w in words if not w.startswith(key)), change]) == code
    assert named in capsys.readouterr().err
    assert not Path("relatives.tsv").exists()


def test_the_relatives_of_chosen_proteins_are_those_of_a_search_for_all(tmp_path: Path) -> None:
    ingest(fasta(tmp_path / "reference.fasta", REFERENCE), tmp_path / "store")
    store, chosen = SequenceStore(tmp_path / "store"), [1, 4, 6]
    whole = held_out_relatives(store, tmp_path / "relatives")
    own = held_out_relatives(store, tmp_path / "relatives", chosen=chosen)
    assert sum(len(whole.below(number, 1.1)) for number in chosen) > 0
    for number in range(len(store)):
        expected = whole.below(number, 1.1) if number in chosen else []
        assert own.below(number, 1.1).tolist() == [*expected]
