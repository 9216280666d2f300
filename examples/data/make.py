"""Makes the text and the nucleotides in this folder from Debian packages.

    apt-get download bible-kjv bible-kjv-text sibelia-examples  # 4.38, 4.38, 3.0.7+dfsg-3
    for package in *.deb; do dpkg-deb -x $package unpacked; done
    (cd unpacked/usr/lib && ../bin/bible -f Gen1:1-Rev22:21) > verses.txt
    pip install pyrodigal==3.7.1
    python examples/data/make.py verses.txt \
        unpacked/usr/share/doc/sibelia/examples/Sibelia/Helicobacter_pylori/*.fasta.gz

Pyrodigal (GPL-3.0) is used by this script only: it predicts the genes.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from d2plm.core.vocabulary import Codons

FOLDER = Path(__file__).parent
BOOKS = (
    "Genesis, Exodus, Leviticus, Numbers, Deuteronomy, Joshua, Judges, Ruth, 1 Samuel, 2 Samuel, "
    "1 Kings, 2 Kings, 1 Chronicles, 2 Chronicles, Ezra, Nehemiah, Esther, Job, Psalms, Proverbs, "
    "Ecclesiastes, Song of Solomon, Isaiah, Jeremiah, Lamentations, Ezekiel, Daniel, Hosea, Joel, "
    "Amos, Obadiah, Jonah, Micah, Nahum, Habakkuk, Zephaniah, Haggai, Zechariah, Malachi, "
    "Matthew, Mark, Luke, John, Acts, Romans, 1 Corinthians, 2 Corinthians, Galatians, Ephesians, "
    "Philippians, Colossians, 1 Thessalonians, 2 Thessalonians, 1 Timothy, 2 Timothy, Titus, "
    "Philemon, Hebrews, James, 1 Peter, 2 Peter, 1 John, 2 John, 3 John, Jude, Revelation"
)
GENOME = "NC_017366.1"
TOKENS = 2000  # of the byte-pair encoding
GENE_LENGTH = 90  # nucleotides of the shortest gene
LOCUS = 10_000  # nucleotides of a record: a chromosome in one would not be split for held-out data
LINE = 80


def chapters(verses: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each chapter, one verse a line, from lines such as `Ge1:1 In the …`."""
    books = iter(BOOKS.split(", "))
    book = abbreviation = number = name = ""
    lines: list[str] = []
    for line in verses.splitlines():
        found = re.match(r"(\w*?[A-Za-z])(\d+):\d+ (.*)", line)
        assert found is not None, line
        if found.group(1, 2) != (abbreviation, number):
            if lines:
                yield name, "\n".join(lines)
            book = next(books) if found[1] != abbreviation else book
            abbreviation, number = found.group(1, 2)
            name, lines = f"{book} {number}", []
        lines.append(found[3])
    yield name, "\n".join(lines)


def byte_pairs(texts: list[str]) -> Tokenizer:
    """A byte-level byte-pair encoding, with which every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=letters, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def genes(genome: str) -> Iterator[tuple[str, str]]:
    """(name with place and strand, sequence) of every complete gene that Pyrodigal predicts."""
    import pyrodigal

    finder = pyrodigal.GeneFinder()
    finder.train(genome.encode())
    for number, gene in enumerate(finder.find_genes(genome.encode()), start=1):
        if not (gene.partial_begin or gene.partial_end):
            yield f"{GENOME}_{number} {gene.begin}-{gene.end} {gene.strand:+d}", gene.sequence()


def fasta(records: list[tuple[str, str]]) -> str:
    wrapped = ((name, "\n".join(re.findall(f".{{1,{LINE}}}", text))) for name, text in records)
    return "".join(f">{name}\n{text}\n" for name, text in wrapped)


def write(name: str, content: str) -> None:
    (FOLDER / name).write_bytes(gzip.compress(content.encode(), compresslevel=9, mtime=0))


def main(verses: str, genomes: str) -> None:
    documents = list(chapters(Path(verses).read_text()))
    assert len(documents) == 1189
    assert documents[-1][0] == "Revelation 22"
    lines = (json.dumps({"name": name, "text": text}) + "\n" for name, text in documents)
    write("king_james_bible.jsonl.gz", "".join(lines))
    byte_pairs([text for _, text in documents]).save(str(FOLDER / "king_james_bible_bpe.json"))

    every = gzip.decompress(Path(genomes).read_bytes()).decode().split(">")[1:]
    header, _, sequence = next(one for one in every if GENOME in one).partition("\n")
    sequence = "".join(sequence.split())
    title = header.rpartition("|")[2].strip()
    loci = [sequence[start : start + LOCUS] for start in range(0, len(sequence), LOCUS)]
    records = [
        (f"{GENOME}:{i * LOCUS + 1}-{i * LOCUS + len(locus)} {title}", locus)
        for i, locus in enumerate(loci)
    ]
    write("helicobacter_pylori.fasta.gz", fasta(records))

    found = list(genes(sequence))
    read = Codons().tokenise([text.encode() for _, text in found])
    assert not read.illegal.any()
    assert all(text[-3:] in ("TAA", "TAG", "TGA") and len(text) >= GENE_LENGTH for _, text in found)
    write("helicobacter_pylori_genes.fasta.gz", fasta(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
