"""Files of other formats: how to recognise them, and how to convert them."""

import re
from codecs import BOM_UTF8
from pathlib import Path

from d2plm.core.errors import DataError

_SEQIO = "convert it with Biopython: SeqIO.convert(FILE, {!r}, 'proteins.fasta', 'fasta')".format
_AS_CSV = "open it there and save it as CSV UTF-8 (File > Save as)"
_AS_TEXT = "save it there as plain text (File > Save as)"
_FETCH = "fetch the file itself, from its download link or the raw view of the page"
_UNPACK = "unpack it and give the file inside"

# (beginning of the file, format, remedy); the first match counts.
FOREIGN: tuple[tuple[bytes, str, str], ...] = (
    (rb"PK\x03\x04(?s:.{0,4000}?)(xl/|opendocument\.spreadsheet)", "a spreadsheet", _AS_CSV),
    (rb"PK\x03\x04(?s:.{0,4000}?)(word/|opendocument\.text)", "a text document", _AS_TEXT),
    (rb"PK\x03\x04(?s:.{0,60})\[Content_Types\]", "an Office document", _AS_CSV),
    (rb"PK\x03\x04|PK\x05\x06", "a zip archive", f"{_UNPACK}: unzip FILE"),
    (rb"\xd0\xcf\x11\xe0", "an old Excel or Word document", _AS_CSV),
    (rb"(?s:.{257})ustar", "a tar archive", f"{_UNPACK}: tar -xf FILE"),
    (rb"7z\xbc\xaf\x27\x1c|Rar!", "an archive", _UNPACK),
    (rb"\x1f\x9d", "a file of compress (.Z)", "unpack it: uncompress FILE"),
    (rb"version https://git-lfs", "a pointer of git LFS, not the file", "fetch it: git lfs pull"),
    (rb"%PDF", "a PDF document", "give the table or the sequences as text"),
    (rb"\{\\rtf", "an RTF document", _AS_TEXT),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0|MM\0\*|BM.{4}\0\0", "an image", "give its text"),
    (rb"\x89HDF", "an HDF5 file", "write its sequences or rows as FASTA or CSV"),
    (rb"SQLite format 3", "an SQLite database", "export the table: sqlite3 -header -csv FILE"),
    (rb"\x93NUMPY", "a NumPy array", "write its rows as FASTA or CSV"),
    (rb"\s*(<!--.{0,200}?-->\s*)?(?i:<!doctype html|<html|<head)", "an HTML page", _FETCH),
    (rb"\s*<\?xml", "an XML document", "fetch it as FASTA or CSV"),
    (rb"\s*(\{\s*[\"}]|\[\s*[\[{\"\]])", "JSON", "write it as CSV, or as JSON lines named .jsonl"),
    (
        rb"(HEADER|TITLE |REMARK|ATOM  |HETATM|MODEL |CRYST1|SEQRES) {1,}\S.*[\r\n]",
        "a structure in PDB format",
        _SEQIO("pdb-seqres") + ", or fetch its FASTA",
    ),
    (
        rb"(#[^\n]*\n\s*)*(data_\S*\s+(#|_|loop_)|loop_\s)",
        "a structure in mmCIF format",
        _SEQIO("cif-seqres") + ", or fetch its FASTA",
    ),
    (rb"LOCUS {3,}.* aa ", "a GenPept file", _SEQIO("genbank")),
    (rb"LOCUS {3,}", "a GenBank file", "fetch its proteins as FASTA (Send to > Coding Sequences)"),
    (rb"ID {3}.* AA\.", "a UniProt flat file", _SEQIO("swiss")),
    (rb"ID {3}.* BP\.", "an EMBL flat file", "fetch its proteins as FASTA"),
    (rb"##gff-version", "a GFF annotation", "write its proteins: gffread -y OUT -g GENOME FILE"),
    (rb"##fileformat=VCF", "a VCF file", "give the changes of the protein as CSV, such as A24G"),
    (rb"@.*\r?\n[A-Za-z.]+\r?\n\+", "a FASTQ file", "convert it: seqtk seq -A FILE"),
    (rb"!!(AA|NA)_MULTIPLE|PileUp", "an MSF alignment", _SEQIO("msf")),
    (rb"\s*\d+\s+\d+\s*[\r\n]", "a PHYLIP alignment", _SEQIO("phylip-relaxed")),
    (rb"#mega", "a MEGA alignment", "export it there as FASTA"),
    (rb"#NEXUS", "a NEXUS file", _SEQIO("nexus")),
    (
        rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]",
        "UTF-16 text",
        "convert it: iconv -f UTF-16 -t UTF-8 FILE",
    ),
)


def refuse_foreign(path: Path, start: bytes) -> None:
    """Raise `DataError` if `start`, the first few thousand bytes, is that of a `FOREIGN` format."""
    for beginning, what, remedy in FOREIGN:
        if re.match(beginning, start.removeprefix(BOM_UTF8)):
            raise DataError(f"{path}: is {what}; {remedy.replace('FILE', path.name)}")
