"""Speed and memory of the data engine: ingest, store, packing, loader and preparation.

Sequences are random residues with the lengths of real proteins, so that there can be any number of
them. The time of MMseqs2's own work is in the manifest of every preparation. TMPDIR needs 3 GB;
peak memory is read from Linux.

    python -m benchmarks.data
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import PROTEINS, SPAWN, BenchError, Row, measuring_parser, publish, say
from d2plm.core.vocabulary import CANONICAL, ESM2_TOKENS, decode
from d2plm.data.fasta import read_fasta
from d2plm.data.ingest import ingest
from d2plm.data.packing import PackingSampler
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter

READS = 200_000
REPEATS = 3
MAX_LENGTH = 1024  # tokens
HEADER = b">sp|A%08d|A%08d_HUMAN Uncharacterised protein OS=Homo sapiens OX=9606 PE=1 SV=1\n"


class Measured(NamedTuple):
    """Result of a work, CPU seconds and peak memory of the process that did it alone."""

    result: Any
    cpu_seconds: float
    peak_bytes: int


def alone(work: Callable[..., Any], *arguments: Any) -> Measured:
    """Run an importable function in a fresh process, whose peak memory is its own."""
    with ProcessPoolExecutor(1, SPAWN) as process:
        return process.submit(_measured, work, *arguments).result()


def _measured(work: Callable[..., Any], *arguments: Any) -> Measured:
    cpu = time.process_time()
    result = work(*arguments)
    cpu = time.process_time() - cpu
    # ru_maxrss would include the memory of the parent at the moment of the fork.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return Measured(result, cpu, 1024 * int(peak[1]))


def bench_data(given: argparse.Namespace) -> Iterator[Row]:
    """Measure every row, on random collections of the lengths of the real proteins."""
    proteins = [record.tokens for record in read_fasta(PROTEINS)]
    lengths = np.array([len(tokens) for tokens in proteins], dtype=np.int32)
    counts = (given.sequences, given.many_sequences)
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-") as name:
        folder = Path(name)
        for count in counts:
            _write_random_fasta(folder / f"{count}.fasta", lengths, count)
        say("ingesting")
        yield from _ingest_rows(folder, *counts)
        say("reading the store and loading batches")
        yield from _store_rows(folder / f"raw{counts[1]}", folder / f"raw{counts[0]}")
        yield from _loader_rows(proteins, folder)
        say(f"planning an epoch of {given.planned:,} sequences")
        yield from _packing_rows(lengths, given.planned)
        say("preparing without MMseqs2's own work")
        yield from _prepare_rows(folder, *counts)


def _ingest_rows(folder: Path, *counts: int) -> Iterator[Row]:
    peaks = []
    for count in counts:
        words = (folder / f"{count}.fasta", folder / f"raw{count}")
        runs = [alone(_ingest, *words) for _ in range(REPEATS)]
        # The least of several: what a machine's other users and fresh memory cost is not ingest's.
        rate = count / min(run.cpu_seconds for run in runs)
        yield Row(f"ingest of {count:,} from plain FASTA", rate, "sequences/CPU-s", 150_000)
        peaks.append(median(run.peak_bytes for run in runs))
    yield from _memory_rows("ingest", counts, peaks)


def _memory_rows(what: str, counts: tuple[int, ...], peaks: list[float]) -> Iterator[Row]:
    for count, peak in zip(counts, peaks, strict=True):
        yield Row(f"{what} of {count:,}: peak memory", peak / 1e6, "MB")
    yield Row(f"{what}: peak memory, many ÷ few", peaks[1] / peaks[0], "", 1.1, at_most=True)


def _store_rows(path: Path, small: Path) -> Iterator[Row]:
    store = SequenceStore(path)
    disk = sum(file.stat().st_size for file in path.iterdir())
    reads = [READS / alone(_read, small).result for _ in range(REPEATS)]
    yield Row("store: random reads", median(reads), "reads/CPU-s", 500_000)
    yield Row("store: bytes on disk per residue", disk / store.residues, "", 1.1, at_most=True)


def _loader_rows(proteins: list[Any], folder: Path) -> Iterator[Row]:
    """Our loader and a tokenizer with a collator, by turns, over the same proteins."""
    fitting = [tokens for tokens in proteins if len(tokens) <= MAX_LENGTH - 2]
    with SequenceStoreWriter(folder / "fitting", kind="raw") as writer:
        for number, tokens in enumerate(fitting):
            writer.extend([str(number).encode()], [tokens.tobytes()])
    (folder / "vocab.txt").write_text("\n".join(ESM2_TOKENS))
    texts = [decode(tokens) for tokens in fitting[: len(fitting) // 8]]
    for budget in (65_536, 8_192):
        ours, theirs = [], []
        for _ in range(REPEATS):
            rate, made = _our_loader(folder / "fitting", budget)
            their_rate, their_tokens = _tokenizer_and_collator(texts, folder / "vocab.txt")
            if their_tokens != [made[index] for index in range(len(texts))]:
                raise BenchError("the tokenizer and our loader did not make the same tokens")
            ours.append(rate)
            theirs.append(their_rate)
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        yield Row(f"loader, {budget:,} tokens a batch", median(ours) / 1e6, "M tokens/CPU-s")
        yield Row("EsmTokenizer + collator", median(theirs) / 1e6, "M tokens/CPU-s")
        yield Row(f"loader ÷ tokenizer + collator, {budget:,} tokens", ratio, "×", 400)


def _our_loader(path: Path, budget: int) -> tuple[float, dict[int, bytes]]:
    """Tokens per CPU second of three epochs, and the tokens of each protein by its number."""
    # Not above: it imports torch, which would add to the memory of the measured processes.
    from d2plm.data.loader import Collection, PackedLoader, Position

    collection = Collection(SequenceStore(path))
    loader = PackedLoader([collection], token_budget=budget, max_length=MAX_LENGTH)
    stream, count = loader.stream(Position()), loader.batches_in_epoch(0)
    made: dict[int, bytes] = {}
    for batch in islice(stream, count):  # also warms the page cache
        for packed in batch.micro_batches:
            for index, row in zip(packed.sequence_ids.tolist(), packed.split(), strict=False):
                made[index] = row.numpy().tobytes()
    began = time.process_time()
    tokens = sum(sum(batch.segment_lengths) for batch in islice(stream, 3 * count))
    return tokens / (time.process_time() - began), made


def _tokenizer_and_collator(texts: list[str], vocabulary: Path) -> tuple[float, list[bytes]]:
    """Tokens per CPU second, and the tokens of each protein."""
    from transformers import DataCollatorForLanguageModeling, EsmTokenizer

    encoder = EsmTokenizer(str(vocabulary))
    # Without masks: our loader makes none either, they are drawn on the device.
    collate = DataCollatorForLanguageModeling(encoder, mlm=False)
    began = time.process_time()
    batches = [
        collate([encoder(text) for text in texts[first : first + 64]])
        for first in range(0, len(texts), 64)
    ]
    seconds = time.process_time() - began
    tokens = [
        ids[mask.bool()].numpy().astype(np.uint8).tobytes()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return sum(map(len, tokens)) / seconds, tokens


def _packing_rows(lengths: NDArray[np.int32], planned: int) -> Iterator[Row]:
    for budget, share in ((65_536, 99.6), (8_192, 97.0)):
        plan = PackingSampler(lengths, token_budget=budget, max_length=MAX_LENGTH).plan(0)
        full = 100 * float(plan.tokens.sum(dtype=np.int64)) / (len(plan) * budget)
        made = alone(_plan, lengths, planned, budget)
        yield Row(f"packing of the real lengths, {budget:,} tokens", full, "% full", share)
        yield Row(f"plan of {planned:,}, {budget:,} tokens", made.result, "s", 60, at_most=True)
        yield Row("plan: peak memory", made.peak_bytes / 2**30, "GiB", 4, at_most=True)


def _prepare_rows(folder: Path, *counts: int) -> Iterator[Row]:
    """The memory of our own process: MMseqs2 is a stand-in that finds nothing."""
    stand_in = folder / "mmseqs"
    stand_in.write_text('#!/bin/sh\n[ "$1" != convertalis ] || : > "$5"\n')
    stand_in.chmod(0o755)
    inputs = [(folder / f"{count}.fasta", folder / f"prepared{count}") for count in counts]
    peaks: list[float] = [alone(_prepare, *paths, stand_in).peak_bytes for paths in inputs]
    yield from _memory_rows("prepare", counts, peaks)


def _write_random_fasta(path: Path, lengths: NDArray[np.int32], count: int) -> None:
    random = np.random.default_rng(0)
    letters = np.frombuffer(CANONICAL.encode(), dtype=np.uint8)
    with open(path, "wb") as file:
        for number, length in enumerate(random.choice(lengths, count).tolist()):
            text = letters[random.integers(0, 20, length)].tobytes()
            file.write(HEADER % (number, number))
            file.writelines(text[line : line + 60] + b"\n" for line in range(0, length, 60))


def _ingest(fasta: Path, output: Path) -> None:
    ingest(str(fasta), output)


def _read(folder: Path) -> float:
    opened = SequenceStore(folder)
    places = np.random.default_rng(0).integers(0, len(opened), READS).tolist()
    for index in places:  # once before, so that the file is in memory
        opened[index]
    began = time.process_time()
    for index in places:
        opened[index]
    return time.process_time() - began


def _plan(lengths: NDArray[np.int32], count: int, budget: int) -> float:
    drawn = np.random.default_rng(0).choice(lengths, count)
    sampler = PackingSampler(drawn, token_budget=budget, max_length=MAX_LENGTH)
    began = time.perf_counter()
    sampler.plan(0)
    return time.perf_counter() - began


def _prepare(inputs: Path, output: Path, mmseqs: Path) -> None:
    from d2plm.data.homology import ClusterSettings
    from d2plm.data.prepare import prepare

    os.environ["MMSEQS_BIN"] = str(mmseqs)
    prepare(str(inputs), output, clustering=ClusterSettings(method="none"))


if __name__ == "__main__":
    made = measuring_parser("data", __doc__)
    made.add_argument("--sequences", type=int, default=100_000, help="random ones")
    made.add_argument("--many-sequences", type=int, default=1_000_000, help="for their memory")
    made.add_argument("--planned", type=int, default=60_000_000, help="lengths to plan an epoch of")
    given = made.parse_args()
    publish(given, [*bench_data(given)])
