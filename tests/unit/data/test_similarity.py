"""Splits of nucleotides and texts: nothing alike is left between the stores."""

import json
import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from unittest.mock import Mock

import pytest

from d2plm.core.errors import DataError
from d2plm.core.vocabulary import Vocabulary, vocabulary
from d2plm.data import similarity
from d2plm.data.fasta import write_fasta
from d2plm.data.ingest import ingest
from d2plm.data.manifest import open_prepared
from d2plm.data.prepare import prepare
from d2plm.data.store import SequenceStore
from d2plm.settings.data import (
    ClusterSettings,
    Resources,
    SearchSettings,
    SplitSettings,
    TextSettings,
)
from tests.conftest import MonkeyPatch

TOKENIZER = Path(__file__).parents[3] / "examples" / "data" / "king_james_bible_bpe.json"
COMPLEMENT = str.maketrans("ACGT", "TGCA")
BYTES = vocabulary("bytes")


def _split(inputs: Path, output: Path, of: Vocabulary, **settings: Any) -> dict[str, Any]:
    """The manifest of a split, by default of the identifiers in the file `ids` beside it."""
    split = settings.pop("split", {"validation_ids": str(output.parent / "ids")})
    settings |= {"split": SplitSettings(**split), "resources": Resources(threads=1)}
    return prepare(inputs, output, vocabulary=of, **settings)


def _names(output: Path, split: str) -> set[str]:
    store = SequenceStore(output / f"{split}_lmdb")
    store.verify()
    return {name for index in range(len(store)) for name in store.names(index)}


def _reverse_complement(sequence: str) -> str:
    return sequence[::-1].translate(COMPLEMENT)


def _nucleotides(count: int, length: int) -> dict[str, str]:
    draw = random.Random(0)
    return {f"n{i}": "".join(draw.choices("ACGT", k=length)) for i in range(count)}


def test_strands_and_fragments_of_held_out_nucleotides_are_not_trained_on(tmp_path: Path) -> None:
    records, draw = _nucleotides(12, 600), random.Random(0)
    mutated = "".join(draw.choice([one] * 6 + [*"ACGT"]) for one in records["n3"])
    homologs = {
        "strand": _reverse_complement(records["n0"]),
        "fragment": records["n1"][99:300],
        "fragment_of_strand": _reverse_complement(records["n2"])[99:300],
        "mutated_strand": _reverse_complement(mutated),
    }
    written = {one: text.replace("T", "U") for one, text in (records | homologs).items()}
    write_fasta(tmp_path / "in.fasta", [*written.items()])
    (tmp_path / "ids").write_text("n0\nn1\nn2\nn3\n")
    given = tmp_path / "in.fasta", tmp_path / "out", vocabulary("rna")
    none = ClusterSettings(method="none")
    manifest = _split(*given, clustering=none, search=SearchSettings())
    assert _names(tmp_path / "out", "train") == {*records} - {"n0", "n1", "n2", "n3"}
    assert manifest["counts"]["leaking_dropped"] == 4
    assert manifest["counts"]["leaking_dropped_partial"] == 2
    assert manifest["leaking_pairs_after"] == 0
    assert manifest["alphabet"]["alphabet"] == "rna"


def test_clusters_of_nucleotides_hold_both_strands(tmp_path: Path) -> None:
    records = _nucleotides(12, 600)
    strands = {f"{name}_strand": _reverse_complement(one) for name, one in records.items()}
    write_fasta(tmp_path / "in.fasta", [*records.items(), *strands.items()])
    split = {"validation_fraction": 0.34, "search_directions": "from_held_out"}
    given = tmp_path / "in.fasta", tmp_path / "out", vocabulary("dna")
    clustering, search = ClusterSettings(method="linclust"), SearchSettings(max_seqs=20)
    manifest = _split(*given, split=split, clustering=clustering, search=search)
    assert manifest["counts"]["clusters"] == 12
    assert manifest["counts"]["leaking_dropped"] == 0
    held = _names(tmp_path / "out", "validation")
    assert {name.removesuffix("_strand") for name in held} == {*held} & {*records}


def _texts(count: int) -> dict[str, str]:
    draw = random.Random(0)
    known = ["".join(draw.choices(ascii_lowercase, k=draw.randint(2, 9))) for _ in range(900)]
    return {f"t{i}": " ".join(draw.choices(known, k=150)) for i in range(count)}


def _jsonl(path: Path, texts: dict[str, str]) -> Path:
    path.write_text("".join(f"{json.dumps({'name': n, 'text': t})}\n" for n, t in texts.items()))
    return path


TEXTS = [BYTES, vocabulary("tokenizer", tokenizer=TOKENIZER)]


@pytest.mark.parametrize("of", TEXTS, ids=lambda of: of.name)
def test_texts_that_overlap_with_held_out_ones_are_not_trained_on(
    tmp_path: Path, of: Vocabulary, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "find_mmseqs", Mock(side_effect=DataError("not installed")))
    texts, other = _texts(30), [*_texts(40).values()][30:]
    beginnings = " ".join(texts[f"t{i}"][:200] for i in range(3))
    planted = {
        "near": texts["t0"].replace(" a", " the a", 3),
        "longer": f"{other[0]} {texts['t1']} {other[1]}",
        "part": texts["t2"][200:600],
        "of_three": f"{other[2][:300]} {beginnings}",
        "quotes": f"{other[3]} {texts['t0'][300:420]}",
    }
    corpus = _jsonl(tmp_path / "in.jsonl", texts | planted)
    (tmp_path / "ids").write_text("t0\nt1\nt2\n")
    manifest = _split(corpus, tmp_path / "out", of)
    expected = {*texts, "quotes"} - {"t0", "t1", "t2"}
    assert _names(tmp_path / "out", "train") == expected
    counts = manifest["counts"]
    assert counts["leaking_dropped"] == 4
    assert counts["leaking_dropped_partial"] == 3
    assert [one["sequences"] for one in manifest["searches"]] == [4, 0]
    assert {one["direction"] for one in manifest["searches"]} == {"from_training"}
    assert manifest["leaking_pairs_after"] == 0
    assert "mmseqs_version" not in manifest
    assert open_prepared(tmp_path / "out").provenance["search"] == manifest["settings"]["search"]
    # As of GPT-3: any shared n-gram.
    every = _split(corpus, tmp_path / "out", of, text=TextSettings(overlap_share=1e-9))
    assert "quotes" not in _names(tmp_path / "out", "train")
    assert every["key"] != manifest["key"]


def test_near_duplicates_are_held_out_together_and_reused_by_content(tmp_path: Path) -> None:
    texts = _texts(20)
    copies = {f"{name}_copy": f"{text} end" for name, text in texts.items()}
    corpus = _jsonl(tmp_path / "in.jsonl", texts | copies)
    lines, split = list[str](), {"validation_fraction": 0.2}
    manifest = _split(corpus, tmp_path / "out", BYTES, split=split)
    assert manifest["counts"]["clusters"] == 20
    assert manifest["counts"]["leaking_dropped"] == 0
    held = _names(tmp_path / "out", "validation")
    assert len(held) == 8
    assert {name.removesuffix("_copy") for name in held} == {*held} & {*texts}
    raw = tmp_path / "out" / "raw_lmdb"
    again = _split(raw, tmp_path / "out", BYTES, split=split, report=lines.append)
    assert again == manifest
    assert "reusing prepared data" in lines[-1]
    without = TextSettings(near_duplicate_similarity=None)
    alone = _split(raw, tmp_path / "b", BYTES, split=split, text=without)
    assert alone["counts"]["clusters"] == 40
    assert alone["counts"]["leaking_dropped"] > 0


def test_a_record_that_was_cut_is_never_split_between_the_stores(tmp_path: Path) -> None:
    texts = _texts(12)
    corpus = _jsonl(tmp_path / "in.jsonl", texts)
    split = {"validation_fraction": 0.3}
    manifest = _split(corpus, tmp_path / "out", BYTES, window=100, split=split)
    assert manifest["counts"]["clusters"] == 12
    assert manifest["window"] == 100
    assert manifest["counts"]["pieces"] > manifest["counts"]["input"]
    origin = open_prepared(tmp_path / "out").account["origin"]
    assert origin["pieces"] == manifest["counts"]["pieces"]
    assert "overlaps_with_held_out" in origin["dropped"]
    with pytest.raises(DataError, match="not cut at a window of 99"):
        _split(tmp_path / "out" / "raw_lmdb", tmp_path / "b", BYTES, window=99)
    held, train = (
        {name.rpartition("/")[0] for name in _names(tmp_path / "out", split)}
        for split in ("validation", "train")
    )
    assert held
    assert held | train == {*texts}
    assert not held & train
    for identifier in ("t7", "t7/2"):
        (tmp_path / "ids").write_text(identifier)
        _split(corpus, tmp_path / "out", BYTES, window=100)
        held = {name.rpartition("/")[0] for name in _names(tmp_path / "out", "validation")}
        assert held == {"t7"}


def test_what_overlaps_with_excluded_texts_is_not_trained_on(tmp_path: Path) -> None:
    texts = _texts(20)
    excluded = {"other": f"{texts['t4']} {texts['t5'][::-1]}"}
    ingest(_jsonl(tmp_path / "x.jsonl", excluded), tmp_path / "excluded", vocabulary=BYTES)
    split = {"validation_fraction": 0.1, "exclude_homologs_of": [str(tmp_path / "excluded")]}
    _split(_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "out", BYTES, split=split)
    assert "t4" not in _names(tmp_path / "out", "train")
    assert "t5" in _names(tmp_path / "out", "train") | _names(tmp_path / "out", "validation")


def test_a_store_of_another_alphabet_is_rejected(tmp_path: Path) -> None:
    write_fasta(tmp_path / "in.fasta", [*_nucleotides(3, 30).items()])
    ingest(tmp_path / "in.fasta", tmp_path / "raw", vocabulary=vocabulary("dna"))
    with pytest.raises(DataError, match="of the alphabet dna, where bytes is wanted"):
        _split(tmp_path / "raw", tmp_path / "out", BYTES)
    split = {"validation_fraction": 0.5, "exclude_homologs_of": [str(tmp_path / "raw")]}
    with pytest.raises(DataError, match="of the alphabet dna, where bytes is wanted"):
        _split(_jsonl(tmp_path / "in.jsonl", _texts(4)), tmp_path / "out", BYTES, split=split)
