"""The text, the nucleotides and the tokenizer in examples/data are what their README says."""

import gzip
import json
from itertools import pairwise

from d2plm.core.vocabulary import Codons, Subwords
from tests.conftest import FASTA

DATA = FASTA.parent


def records_of(name: str) -> list[tuple[str, str]]:
    """(header, sequence) of each record."""
    with gzip.open(DATA / name, "rt") as file:
        parts = (record.partition("\n") for record in file.read().split(">")[1:])
        return [(header, lines.replace("\n", "")) for header, _, lines in parts]


def test_the_bible_has_all_chapters_and_its_tokenizer_writes_every_byte() -> None:
    with gzip.open(DATA / "king_james_bible.jsonl.gz", "rt", encoding="utf-8") as file:
        chapters = [json.loads(line) for line in file]
    texts = {chapter["name"]: chapter["text"] for chapter in chapters}
    assert len(texts) == len(chapters) == 1189
    assert sum(map(len, texts.values())) == 4_136_661
    assert texts["John 11"].splitlines()[34] == "Jesus wept."
    vocabulary = Subwords(DATA / "king_james_bible_bpe.json")
    assert vocabulary.predicted == 2000
    for text in (texts["Psalms 23"], "naïve ☃\n\t\x7f"):
        assert vocabulary.decode(vocabulary.encode(text, "text")) == text


def test_the_chromosome_is_cut_without_gaps_and_its_genes_are_whole() -> None:
    records = records_of("helicobacter_pylori.fasta.gz")
    places = [header.split()[0].partition(":")[2].split("-") for header, _ in records]
    assert all(int(end) + 1 == int(start) for (_, end), (start, _) in pairwise(places))
    chromosome = "".join(sequence for _, sequence in records)
    assert len(chromosome) == int(places[-1][1]) == 1_578_824
    assert set(chromosome) == set("ACGT")
    genes = records_of("helicobacter_pylori_genes.fasta.gz")
    assert len(genes) == 1503
    assert not Codons().tokenise([sequence.encode() for _, sequence in genes]).illegal.any()
    complement = str.maketrans("ACGT", "TGCA")
    for header, sequence in genes:
        _, place, strand = header.split()
        start, end = map(int, place.split("-"))
        there = chromosome[start - 1 : end]
        assert sequence == (there if strand == "+1" else there.translate(complement)[::-1])
        assert sequence[-3:] in ("TAA", "TAG", "TGA")
