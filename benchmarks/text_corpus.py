"""Preparing a large text corpus: time and memory, and the digests after kills.

The corpus is synthetic: documents of runs of 4 to 24 bytes from a real text, so that it may have
any size. Of each hundred documents two are copies of another one with eight letters changed, and
one contains three fifths of another one. A preparation that is killed is started again until it
ends.

    python -m benchmarks.text_corpus --gigabytes 1
"""

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import BenchError, Row, in_new_process, parser, publish, say
from d2plm.core.vocabulary import vocabulary
from d2plm.data.prepare import prepare

TEXT = Path(__file__).parents[1] / "examples" / "data" / "king_james_bible.jsonl.gz"
DOCUMENT_BYTES = 4096
HUNDRED = 100
CORPUS, UNBROKEN, KILLED = "corpus.jsonl", "unbroken", "killed"

_ONE = "import sys; from benchmarks.text_corpus import prepared; prepared(*sys.argv[1:])"


def bench_text(folder: Path, given: argparse.Namespace) -> list[Row]:
    """Measure every row."""
    corpus, alphabet, kills = folder / CORPUS, given.alphabet, given.kills
    name = "" if given.tokenizer is None else str(given.tokenizer)
    say(f"writing {corpus}")
    with open(corpus, "w") as file:
        for number, document in enumerate(
            _documents(round(given.gigabytes * 1e9 / DOCUMENT_BYTES))
        ):
            print(json.dumps({"name": f"d{number}", "text": document.decode()}), file=file)
    say("preparing")
    work = {"corpus": corpus, "alphabet": alphabet, "tokenizer": name}
    done = in_new_process(prepared, output=folder / UNBROKEN, **work)
    manifest = done.result
    say(json.dumps(manifest, indent=1))
    draw, seconds = random.Random(given.seed), sum(manifest["seconds"].values())
    command = [sys.executable, "-c", _ONE, str(corpus), str(folder / KILLED), alphabet, name]
    for _ in range(kills):
        process = subprocess.Popen(command)
        moment = draw.uniform(0, seconds)
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            say(f"killed after {moment:.0f} s")
    resumed = in_new_process(prepared, output=folder / KILLED, **work).result
    for key in ("key", "digests", "counts", "searches"):
        if resumed[key] != manifest[key]:
            raise BenchError(f"after {kills} kills: other {key}: {resumed[key]}")
    counts = manifest["counts"]
    return [
        Row("documents", counts["distinct"], ""),
        Row(f"of {alphabet}", corpus.stat().st_size / 1e9, "GB"),
        Row("clusters", counts["clusters"], ""),
        Row("dropped as overlaps", counts["leaking_dropped"], ""),
        *(Row(stage, took, "s") for stage, took in manifest["seconds"].items()),
        Row("together", done.cpu_seconds, "CPU-s"),
        Row("peak memory", done.peak_bytes / 1e6, "MB"),
        Row("killed and resumed: the same digests", kills, "kills"),
    ]


def prepared(corpus: Path, output: Path, alphabet: str, tokenizer: str) -> dict[str, Any]:
    """Prepare the corpus."""
    of = vocabulary(alphabet, tokenizer=Path(tokenizer) if tokenizer else None)
    began = time.perf_counter()
    return prepare(
        str(corpus),
        Path(output),
        vocabulary=of,
        report=lambda line: say(f"{time.perf_counter() - began:6.0f} s  {line}"),
    )


def _documents(count: int) -> Iterator[bytes]:
    """Documents, of every hundred the last three like its first three."""
    draw = np.random.default_rng(0)
    lines = gzip.decompress(TEXT.read_bytes()).splitlines()
    text = np.frombuffer("\n".join(json.loads(line)["text"] for line in lines).encode(), np.uint8)
    runs = DOCUMENT_BYTES // 14
    for _ in range(0, count, HUNDRED):
        hundred = []
        for _ in range(HUNDRED - 3):
            lengths = draw.integers(4, 25, runs)
            starts = draw.integers(0, len(text) - 25, runs)
            places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
            hundred.append(text[places + np.arange(len(places))])
        for original in hundred[:2]:
            copy = original.copy()
            copy[draw.integers(0, len(copy), 8)] = ord("#")
            hundred.append(copy)
        part = hundred[2][: len(hundred[2]) * 3 // 5]
        hundred.append(np.concatenate([hundred[3][: len(hundred[3]) * 2 // 5], part]))
        yield from (document.tobytes() for document in hundred)


def main() -> None:
    """The command line."""
    made = parser("text_corpus", __doc__)
    made.add_argument("--gigabytes", type=float, default=1.0)
    made.add_argument("--alphabet", default="bytes", choices=["bytes", "tokenizer"])
    made.add_argument("--tokenizer", type=Path, help="tokenizer.json")
    made.add_argument("--kills", type=int, default=1, help="at random moments")
    made.add_argument("--seed", type=int, default=0, help="of these moments")
    made.add_argument("--temporary-dir", type=Path, help="for five times the corpus")
    given = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="d2plm-text-", dir=given.temporary_dir) as folder:
        publish(given, bench_text(Path(folder), given))


if __name__ == "__main__":
    main()
