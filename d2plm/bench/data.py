"""How fast and how lean the data engine is: ingest, store, packing, loader, and MMseqs2's share.

Sequences are random residues with the lengths of real proteins, so that any number of them can be
made; what depends on homology is measured on the real proteins themselves.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from d2plm.bench.measure import in_new_process, serve
from d2plm.bench.rows import Row
from d2plm.core.alphabet import CANONICAL, decode
from d2plm.core.errors import BenchError
from d2plm.data.fasta import read_fasta
from d2plm.data.ingest import ingest
from d2plm.data.store import SequenceStore

MODULE = "d2plm.bench.data"
READS = 200_000
REPEATS = 3
MAX_LENGTH = 1024  # tokens
HEADER = b">sp|A%08d|A%08d_HUMAN Uncharacterised protein OS=Homo sapiens OX=9606 PE=1 SV=1\n"


def bench_data(
    proteins: Path,
    *,
    sequences: int = 100_000,
    many_sequences: int = 1_000_000,
    planned: int = 60_000_000,
    mmseqs_sizes: Sequence[int] = (),
    temporary_dir: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measure every row.

    Args:
        proteins: FASTA of real proteins, for their lengths and for MMseqs2.
        sequences, many_sequences: sizes of the random collections.
        planned: lengths to plan an epoch for.
        mmseqs_sizes: numbers of real proteins on which clustering and searching are timed.
        temporary_dir: for files of about three times the larger collection's size.
        report: called with one line per stage.
    """
    records = list(read_fasta(proteins))
    lengths = np.array([len(record.tokens) for record in records], dtype=np.int32)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="d2plm-bench-", dir=temporary_dir) as name:
        folder = Path(name)
        np.save(folder / "lengths.npy", lengths)
        report(f"ingesting {sequences:,} and {many_sequences:,} sequences")
        rows += _ingest_rows(folder, lengths, sequences, many_sequences)
        report("reading the store and loading batches")
        rows += _store_rows(folder / "raw_many", folder / "raw")
        rows += _loader_rows(records, folder)
        report(f"planning an epoch of {planned:,} sequences")
        rows += _packing_rows(folder, lengths, planned)
        report("preparing without MMseqs2's own work")
        rows += _prepare_rows(folder, sequences, many_sequences)
        for size in mmseqs_sizes:
            report(f"clustering and searching {size:,} proteins with MMseqs2")
            rows += _mmseqs_rows(folder, proteins, size)
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


def _ingest(folder: Path, name: str) -> Any:
    return in_new_process(
        MODULE,
        "ingest",
        fasta=str(folder / f"random{name}.fasta"),
        output=str(folder / f"raw{name}"),
    )


def _store_rows(path: Path, small: Path) -> list[Row]:
    store = SequenceStore(path)
    disk = sum(file.stat().st_size for file in path.iterdir())
    reads = [
        READS / in_new_process(MODULE, "read", store=str(small)).result for _ in range(REPEATS)
    ]
    return [
        Row("store: random reads", median(reads), "reads/CPU-s", 500_000),
        Row("store: bytes on disk per residue", disk / store.residues, "", 1.1, at_most=True),
    ]


def _loader_rows(records: Sequence[Any], folder: Path) -> list[Row]:
    """Our loader and a tokenizer with a collator, by turns, over the same proteins."""
    fitting = [r for r in records if len(r.tokens) <= MAX_LENGTH - 2]
    from d2plm.data.store import SequenceStoreWriter

    with SequenceStoreWriter(folder / "fitting", kind="raw") as writer:
        for record in fitting:
            writer.append(record.name, record.tokens)
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
    from transformers import DataCollatorForLanguageModeling

    from d2plm.core.alphabet import tokenizer

    encoder = tokenizer(folder)
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
    from d2plm.data.packing import PackingSampler

    rows = []
    for budget, share in ((65_536, 99.6), (8_192, 97.0)):
        plan = PackingSampler(lengths, token_budget=budget, max_length=MAX_LENGTH).plan(0)
        full = 100 * float(plan.tokens.sum(dtype=np.int64)) / (len(plan) * budget)
        made = in_new_process(
            MODULE, "plan", lengths=str(folder / "lengths.npy"), count=planned, budget=budget
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
            MODULE,
            "prepare",
            inputs=str(folder / f"random{name}.fasta"),
            output=str(folder / f"prepared{name}"),
            mmseqs=str(stand_in),
        )
        peaks.append(done.peak_bytes)
        shutil.rmtree(folder / f"prepared{name}")
    return [
        Row(f"prepare of {count:,}: peak memory", peak / 1e6, "MB")
        for count, peak in zip((few, many), peaks, strict=True)
    ] + [Row("prepare: peak memory, many ÷ few", peaks[1] / peaks[0], "", 1.1, at_most=True)]


def _mmseqs_rows(folder: Path, proteins: Path, size: int) -> list[Row]:
    rows = []
    for method in ("cluster", "linclust"):
        output = folder / f"mmseqs_{method}_{size}"
        with _disk_peak(output) as peak:
            done = in_new_process(
                MODULE, "split", inputs=str(proteins), output=str(output), count=size, method=method
            )
        seconds = done.result
        rows.append(Row(f"{size:,} proteins: mmseqs {method}", seconds["cluster"], "s"))
        if method == "cluster":
            rows += [
                Row(f"{size:,}: search from held-out, a round", seconds["from_held_out"], "s"),
                Row(f"{size:,}: search from training, a round", seconds["from_training"], "s"),
                Row(f"{size:,}: MMseqs2's peak memory", done.children_peak_bytes / 2**30, "GiB"),
                Row(f"{size:,}: disk, most at once", peak[0] / 1e6, "MB"),
                Row(f"{size:,}: residues", seconds["residues"] / 1e6, "M"),
            ]
    return rows


@contextmanager
def _disk_peak(folder: Path) -> Iterator[list[int]]:
    """The most bytes that a folder held while the block ran, looked at ten times a second."""
    import threading

    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.1):
            total = 0
            for file in folder.rglob("*"):
                try:
                    total += file.stat().st_blocks * 512
                except OSError:
                    continue  # gone in between
            peak[0] = max(peak[0], total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()


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


def _work_ingest(fasta: str, output: str) -> None:
    ingest(fasta, Path(output))


def _work_read(store: str) -> float:
    opened = SequenceStore(Path(store))
    places = np.random.default_rng(0).integers(0, len(opened), READS).tolist()
    for index in places:  # once before, so that the file is in memory
        opened[index]
    began = time.process_time()
    for index in places:
        opened[index]
    return time.process_time() - began


def _work_plan(lengths: str, count: int, budget: int) -> float:
    from d2plm.data.packing import PackingSampler

    drawn = np.random.default_rng(0).choice(np.load(lengths), count)
    sampler = PackingSampler(drawn, token_budget=budget, max_length=MAX_LENGTH)
    began = time.perf_counter()
    sampler.plan(0)
    return time.perf_counter() - began


def _work_prepare(inputs: str, output: str, mmseqs: str) -> None:
    import os

    from d2plm.data.homology import ClusterSettings
    from d2plm.data.prepare import prepare

    os.environ["MMSEQS_BIN"] = mmseqs
    prepare(inputs, Path(output), clustering=ClusterSettings(method="none"))


def _work_split(inputs: str, output: str, count: int, method: str) -> dict[str, float]:
    """Seconds of clustering and of the first search each way, on `count` proteins."""
    from d2plm.data.fasta import write_fasta
    from d2plm.data.homology import ClusterSettings, MMseqs, SearchSettings
    from d2plm.data.prepare import Resources, prepare
    from d2plm.data.split import SplitSettings

    folder = Path(output)
    folder.mkdir()
    fasta = folder / "in.fasta"
    write_fasta(
        fasta, ((r.name, decode(r.tokens)) for r in islice(read_fasta(Path(inputs)), count))
    )
    manifest = prepare(
        fasta,
        folder / "out",
        split=SplitSettings(validation_fraction=0.1, search_directions="from_held_out"),
        clustering=ClusterSettings(method),
        resources=Resources(),
    )
    rounds = sum(1 for one in manifest["searches"])
    seconds = {
        "cluster": manifest["seconds"]["cluster"],
        "from_held_out": manifest["seconds"]["search"] / rounds,
        "residues": manifest["counts"]["train_residues"],
    }
    if method == "cluster":
        from d2plm.core.machine import usable_cores
        from d2plm.data.homology import find_mmseqs
        from d2plm.data.split import write_indexed_fasta

        fastas = {}
        for name in ("train", "validation"):
            store = SequenceStore(folder / "out" / f"{name}_lmdb")
            fastas[name] = folder / f"{name}.fasta"
            write_indexed_fasta(fastas[name], store, np.ones(len(store), dtype=np.bool_))
        mmseqs = MMseqs(find_mmseqs(), usable_cores(), folder / "log", folder)
        began = time.perf_counter()
        mmseqs.search(fastas["train"], fastas["validation"], SearchSettings())
        seconds["from_training"] = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    serve(
        {
            "ingest": _work_ingest,
            "read": _work_read,
            "plan": _work_plan,
            "prepare": _work_prepare,
            "split": _work_split,
        }
    )
