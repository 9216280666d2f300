"""Speed and memory of the data engine: ingest, store, packing, loader and preparation.

Sequences are random residues with the lengths of real proteins, so that there can be any number of
them. The time of MMseqs2's own work is in the manifest of every preparation.

    python -m benchmarks.data
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import BenchError, Measured, Row, in_new_process, parser, publish, say
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


def bench_data(given: argparse.Namespace) -> list[Row]:
    """Measure every row, on random collections of the lengths of the real proteins."""
    records = list(read_fasta(given.proteins))
    lengths = np.array([len(record.tokens) for record in records], dtype=np.int32)
    few, many, rows = given.sequences, given.many_sequences, list[Row]()
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-", dir=given.temporary_dir) as name:
        folder = Path(name)
        np.save(folder / "lengths.npy", lengths)
        say(f"ingesting {few:,} and {many:,} sequences")
        rows += _ingest_rows(folder, lengths, few, many)
        say("reading the store and loading batches")
        rows += _store_rows(folder / "raw_many", folder / "raw")
        rows += _loader_rows(records, folder)
        say(f"planning an epoch of {given.planned:,} sequences")
        rows += _packing_rows(folder, lengths, given.planned)
        say("preparing without MMseqs2's own work")
        rows += _prepare_rows(folder, few, many)
    return rows


def _ingest_rows(folder: Path, lengths: NDArray[np.int32], few: int, many: int) -> list[Row]:
    for name, count in (("", few), ("_many", many)):
        _write_random_fasta(folder / f"random{name}.fasta", lengths, count)
    # The least of several: what a machine's other users and fresh memory cost is not ingest's.
    runs, large_runs = ([_ingest(folder, name) for _ in range(REPEATS)] for name in ("", "_many"))
    seconds = min(run.cpu_seconds for run in runs)
    large_seconds = min(run.cpu_seconds for run in large_runs)
    peak = median(run.peak_bytes for run in runs)
    large_peak = median(run.peak_bytes for run in large_runs)
    return [
        Row(f"ingest of {few:,} from plain FASTA", few / seconds, "sequences/CPU-s", 150_000),
        Row(f"ingest of {many:,}", many / large_seconds, "sequences/CPU-s", 150_000),
        Row(f"ingest of {few:,}: peak memory", peak / 1e6, "MB"),
        Row(f"ingest of {many:,}: peak memory", large_peak / 1e6, "MB"),
        Row("ingest: peak memory, many ÷ few", large_peak / peak, "", 1.1, at_most=True),
    ]


def _ingest(folder: Path, name: str) -> Measured:
    return in_new_process(
        _work_ingest, fasta=folder / f"random{name}.fasta", output=folder / f"raw{name}"
    )


def _store_rows(path: Path, small: Path) -> list[Row]:
    store = SequenceStore(path)
    disk = sum(file.stat().st_size for file in path.iterdir())
    reads = [READS / in_new_process(_work_read, folder=small).result for _ in range(REPEATS)]
    return [
        Row("store: random reads", median(reads), "reads/CPU-s", 500_000),
        Row("store: bytes on disk per residue", disk / store.residues, "", 1.1, at_most=True),
    ]


def _loader_rows(records: Sequence[Any], folder: Path) -> list[Row]:
    """Our loader and a tokenizer with a collator, by turns, over the same proteins."""
    fitting = [r for r in records if len(r.tokens) <= MAX_LENGTH - 2]
    with SequenceStoreWriter(folder / "fitting", kind="raw") as writer:
        for record in fitting:
            writer.extend([record.name.encode()], [record.tokens.tobytes()])
    rows = []
    texts = [decode(record.tokens) for record in fitting]
    for budget in (65_536, 8_192):
        ours, theirs = [], []
        for _ in range(REPEATS):
            mine = _our_loader(folder / "fitting", budget)
            peer = _tokenizer_and_collator(texts[: len(texts) // 8], folder)
            if peer["tokens"] != mine["first_tokens"][: len(peer["tokens"])]:
                raise BenchError("the tokenizer and our loader did not make the same tokens")
            ours.append(mine["tokens_per_second"])
            theirs.append(peer["tokens_per_second"])
        ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
        rows += [
            Row(f"loader, {budget:,} tokens a batch", median(ours) / 1e6, "M tokens/CPU-s"),
            Row("EsmTokenizer + collator", median(theirs) / 1e6, "M tokens/CPU-s"),
            Row(f"loader ÷ tokenizer + collator, {budget:,} tokens", ratio, "×", 400),
        ]
    return rows


def _our_loader(path: Path, budget: int) -> dict[str, Any]:
    from d2plm.data.loader import Collection, PackedLoader, Position

    loader = PackedLoader(
        [Collection(SequenceStore(path))], token_budget=budget, max_length=MAX_LENGTH
    )
    stream = loader.stream(Position())
    count = loader.batches_in_epoch(0)
    found: dict[int, bytes] = {}
    for batch in islice(stream, count):  # also warms the page cache
        for packed in batch.micro_batches:
            for index, row in zip(packed.sequence_ids.tolist(), packed.split(), strict=False):
                found[index] = row.numpy().tobytes()
    began, tokens = time.process_time(), 0
    for batch in islice(stream, 3 * count):
        tokens += sum(batch.segment_lengths)
    seconds = time.process_time() - began
    return {
        "tokens_per_second": tokens / seconds,
        "first_tokens": [found[index] for index in range(len(found))],
    }


def _tokenizer_and_collator(texts: list[str], folder: Path) -> dict[str, Any]:
    from transformers import DataCollatorForLanguageModeling, EsmTokenizer

    (folder / "vocab.txt").write_text("\n".join(ESM2_TOKENS))
    encoder = EsmTokenizer(str(folder / "vocab.txt"))
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
    return {"tokens_per_second": sum(map(len, tokens)) / seconds, "tokens": tokens}


def _packing_rows(folder: Path, lengths: NDArray[np.int32], planned: int) -> list[Row]:
    rows = []
    for budget, share in ((65_536, 99.6), (8_192, 97.0)):
        plan = PackingSampler(lengths, token_budget=budget, max_length=MAX_LENGTH).plan(0)
        full = 100 * float(plan.tokens.sum(dtype=np.int64)) / (len(plan) * budget)
        made = in_new_process(
            _work_plan, lengths=folder / "lengths.npy", count=planned, budget=budget
        )
        rows += [
            Row(f"packing of the real lengths, {budget:,} tokens", full, "% full", share),
            Row(f"plan of {planned:,}, {budget:,} tokens", made.result, "s", 60, at_most=True),
            Row("plan: peak memory", made.peak_bytes / 2**30, "GiB", 4, at_most=True),
        ]
    return rows


def _prepare_rows(folder: Path, few: int, many: int) -> list[Row]:
    """The memory of our own process: MMseqs2 is a stand-in that finds nothing."""
    stand_in = folder / "mmseqs"
    stand_in.write_text('#!/bin/sh\n[ "$1" != convertalis ] || : > "$5"\n')
    stand_in.chmod(0o755)
    peaks = []
    for name in ("", "_many"):
        done = in_new_process(
            _work_prepare,
            inputs=folder / f"random{name}.fasta",
            output=folder / f"prepared{name}",
            mmseqs=stand_in,
        )
        peaks.append(done.peak_bytes)
        shutil.rmtree(folder / f"prepared{name}")
    return [
        Row(f"prepare of {count:,}: peak memory", peak / 1e6, "MB")
        for count, peak in zip((few, many), peaks, strict=True)
    ] + [Row("prepare: peak memory, many ÷ few", peaks[1] / peaks[0], "", 1.1, at_most=True)]


def _write_random_fasta(path: Path, lengths: NDArray[np.int32], count: int) -> None:
    random = np.random.default_rng(0)
    letters = np.frombuffer(CANONICAL.encode(), dtype=np.uint8)
    with open(path, "wb") as file:
        for first in range(0, count, 4096):
            chosen = random.choice(lengths, min(4096, count - first))
            text = letters[random.integers(0, 20, int(chosen.sum()))].tobytes()
            ends = np.cumsum(chosen).tolist()
            for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False), first):
                file.write(HEADER % (number, number))
                file.writelines(
                    text[line : min(line + 60, stop)] + b"\n" for line in range(start, stop, 60)
                )


def _work_ingest(fasta: Path, output: Path) -> None:
    ingest(str(fasta), output)


def _work_read(folder: Path) -> float:
    opened = SequenceStore(folder)
    places = np.random.default_rng(0).integers(0, len(opened), READS).tolist()
    for index in places:  # once before, so that the file is in memory
        opened[index]
    began = time.process_time()
    for index in places:
        opened[index]
    return time.process_time() - began


def _work_plan(lengths: Path, count: int, budget: int) -> float:
    drawn = np.random.default_rng(0).choice(np.load(lengths), count)
    sampler = PackingSampler(drawn, token_budget=budget, max_length=MAX_LENGTH)
    began = time.perf_counter()
    sampler.plan(0)
    return time.perf_counter() - began


def _work_prepare(inputs: Path, output: Path, mmseqs: Path) -> None:
    from d2plm.data.homology import ClusterSettings
    from d2plm.data.prepare import prepare

    os.environ["MMSEQS_BIN"] = str(mmseqs)
    prepare(str(inputs), output, clustering=ClusterSettings(method="none"))


def main() -> None:
    """The command line."""
    made = parser("data", __doc__)
    made.add_argument("--sequences", type=int, default=100_000, help="random ones")
    made.add_argument("--many-sequences", type=int, default=1_000_000, help="for their memory")
    made.add_argument("--planned", type=int, default=60_000_000, help="lengths to plan an epoch of")
    made.add_argument("--temporary-dir", type=Path, help="for some 2 GB")
    given = made.parse_args()
    publish(given, bench_data(given))


if __name__ == "__main__":
    main()
