"""The track of docs/speedrun.md: how many CPU seconds a training needs to a bound.

An entry of `entries.yaml` is the demo's training with its own settings. Each is run with its seeds,
one thread each, and scored by the bound on every held-out protein, with the same masks. Only the
CPU seconds of the training's process count: neither the wall clock nor the evaluation. A result is
a line of `results.jsonl`; what is there already is not run again.

    d2plm prepare experiment=demo
    python -m benchmarks.speedrun.run demo-2M --seeds 0 1 2
    python -m benchmarks.speedrun.run --table
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import BenchError, parser, say
from d2plm.config import compose
from d2plm.core.errors import D2PLMError
from d2plm.core.files import write_text
from d2plm.core.locks import locked
from d2plm.core.machine import machine
from d2plm.data.stages import digest_of
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.likelihood import corpus_estimate, score_sequences
from d2plm.export.exported_model import load_export

FOLDER = Path(__file__).parent
ENTRIES, RESULTS = FOLDER / "entries.yaml", FOLDER / "results.jsonl"
SETTINGS = ("data", "model", "paradigm", "trainer", "optimizer", "schedule")
PLACES = ("input", "prepared_dir", "temporary_dir", "threads")  # of the data, not what they are
MASKS = 2  # of each held-out protein, the same for every entry
BASELINE = "composition × 5-gram"  # what counting reaches
Values = np.ndarray[Any, Any]
# Without the parts of a demo that would add CPU seconds: evaluations, checkpoints, tracking.
ALONE = (
    *("experiment=demo", "tracking=none", "callbacks.evaluation=null", "callbacks.progress=null"),
    *("callbacks.checkpoint.every=1000000", "callbacks.metrics.every=100"),
    # A model without relatives: what it learns alone, and no less than the demo's does alone.
    *("model.relatives_dim=null", "data.max_relatives=null", "data.relatives_sensitivity=null"),
)


def train(overrides: Sequence[str], seed: int, prepared: Path, folder: Path) -> tuple[float, float]:
    """Train on one thread; returns the CPU seconds and the seconds of the process."""
    words = [
        *(*ALONE, *overrides, f"trainer.seed={seed}", f"data.prepared_dir={prepared}"),
        f"work_dir={folder}",
    ]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "d2plm", "train", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise BenchError(f"the training failed: d2plm train {' '.join(words)}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began


def bound(model_dir: Path, module: str, prepared: Path) -> tuple[Values, Values, int]:
    """Nats of every held-out protein, their canonical residues, and how many the model takes.

    Args:
        module: where the paradigm's class is; the control's changes the whole process.
    """
    import_module(module)
    exported = load_export(model_dir)
    scores = score_sequences(
        exported.denoiser("auto"),
        exported.paradigm,
        held_out_proteins(prepared, exported.max_residues),
        masks_per_sequence=MASKS,
        max_length=exported.max_length,
    )
    return scores.nats, scores.residues, exported.max_residues


@cache
def counted_nats(prepared: Path, max_residues: int) -> Values:
    """Nats of every held-out protein under `BASELINE`."""
    train = SequenceStore(prepared / "train_lmdb")
    counted = fit_baselines(train, max_residues=max_residues).scorers[BASELINE]
    return np.array([counted(tokens) for tokens in held_out_proteins(prepared, max_residues)])


def held_out_proteins(prepared: Path, max_residues: int) -> list[Values]:
    """What is scored of each held-out protein: its first residues."""
    return [tokens[:max_residues] for tokens in SequenceStore(prepared / "validation_lmdb")]


def settings_digest(overrides: Sequence[str]) -> str:
    """Digest of all settings that the training depends on, the demo's own included."""
    config = compose("train", [*ALONE, *overrides], complete=False)
    chosen = {
        section: {
            # An option that is null is not in use: new ones leave the digests as they are.
            key: value
            for key, value in config[section].items()
            if value is not None and not (section == "data" and key in PLACES)
        }
        for section in SETTINGS
    }
    return digest_of(chosen)


def data_of(overrides: Sequence[str], prepared: Path) -> Path:
    """The prepared data of an entry: its own where it names some."""
    own = [word.partition("=")[2] for word in overrides if word.startswith("data.prepared_dir=")]
    return Path(own[-1]) if own else prepared


def run(name: str, overrides: Sequence[str], seed: int, prepared: Path) -> dict[str, Any]:
    """One training and its bound on every held-out protein, as a line of the results."""
    held_out = SequenceStore(prepared / "validation_lmdb")
    config = compose("train", [*ALONE, *overrides], complete=False)
    with tempfile.TemporaryDirectory() as folder:
        cpu_seconds, seconds = train(overrides, seed, prepared, Path(folder))
        model_dir = Path(folder) / config["paradigm"]["name"] / "model"
        module = config["paradigm"]["_target_"].rpartition(".")[0]
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            nats, residues, longest = alone.submit(bound, model_dir, module, prepared).result()
    counted = counted_nats(prepared, longest)
    clusters = clusters_of(held_out)
    estimate = corpus_estimate(nats, residues, clusters).exp()
    against = corpus_estimate(nats - counted, residues, clusters)
    tokens = config["trainer"]["max_steps"] * int(config["trainer"]["global_batch_tokens"])
    return {
        "entry": name,
        "seed": seed,
        "settings": settings_digest(overrides),
        "million_tokens": round(tokens / 1e6, 3),
        "cpu_seconds": round(cpu_seconds, 1),
        "seconds": round(seconds, 1),
        "perplexity": round(estimate.value, 4),
        "interval": [round(value, 4) for value in estimate.interval or ()],
        "against": BASELINE,
        "nats_difference": round(against.value, 4),
        "nats_difference_interval": [round(value, 4) for value in against.interval or ()],
        "held_out": held_out.digest,
        "machine": machine(),
    }


def read_results() -> list[dict[str, Any]]:
    """Every line of the results.

    Raises:
        BenchError: a line is no whole result.
    """
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append({**json.loads(line)})
        except (ValueError, TypeError):
            raise BenchError(f"{RESULTS}, line {number}: no whole result; remove it") from None
    return results


def require_same_proteins(results: Sequence[dict[str, Any]], held_out: str) -> None:
    """Raise `BenchError` if results are of other proteins than those of the digest `held_out`."""
    if any(result["held_out"] != held_out for result in results):
        raise BenchError(f"{RESULTS}: holds results on different held-out proteins; remove the old")


def is_there(results: Sequence[dict[str, Any]], result: Mapping[str, Any]) -> bool:
    """Whether one of the results is of the same entry, seed and settings."""
    keys = ("entry", "seed", "settings")
    return any(all(known[key] == result[key] for key in keys) for known in results)


def keep(result: dict[str, Any]) -> None:
    """Add a result, unless another process has added the same meanwhile."""
    with locked(RESULTS.with_suffix(".lock"), f"{RESULTS}: is being written", waiting=say):
        results = read_results()
        if not is_there(results, result):
            lines = (json.dumps(each) + "\n" for each in (*results, result))
            write_text(RESULTS, "".join(lines))


def table(entries: Mapping[str, Sequence[str]], results: Sequence[dict[str, Any]]) -> str:
    """The results of the entries, as their settings are now, as a Markdown table, the best last.

    Raises:
        BenchError: if they are of different held-out proteins.
    """
    rows = []
    require_same_proteins(results, results[0]["held_out"] if results else "")
    for name, overrides in entries.items():
        settings = settings_digest(overrides)
        own = [r for r in results if (r["entry"], r["settings"]) == (name, settings)]
        if not own:
            continue
        perplexities = sorted(result["perplexity"] for result in own)
        rows.append(
            (
                mean(perplexities),
                f"| {name} | {own[0]['million_tokens']:.1f} | "
                f"{mean(result['cpu_seconds'] for result in own):.0f} | "
                f"**{mean(perplexities):.3f}** | {' '.join(f'{p:.3f}' for p in perplexities)} |",
            )
        )
    head = "| entry | million tokens | CPU seconds | perplexity, mean | each seed |"
    return "\n".join([head, "|---|---:|---:|---:|---|", *(row for _, row in sorted(rows)[::-1])])


def main() -> None:
    """Run the entries that are named, or print the table."""
    made = parser("speedrun.run", __doc__)
    made.add_argument("entries", nargs="*", help="names in entries.yaml")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--prepared", type=Path, default=Path("runs/demo/data"))
    made.add_argument("--all", action="store_true", help="run every entry")
    made.add_argument("--table", action="store_true", help="print the results")
    options = made.parse_args()
    known = yaml.safe_load(ENTRIES.read_text())
    if options.all:
        options.entries = [*known]
    if not options.entries and not options.table:
        made.error("name an entry, or give --all or --table")
    for name in options.entries:
        if name not in known:
            raise BenchError(f"there is no entry {name!r}; there are {', '.join(known)}")
    digests = {name: settings_digest(known[name]) for name in options.entries}
    for seed in options.seeds:
        for name in options.entries:
            of_this = {"entry": name, "seed": seed, "settings": digests[name]}
            results = read_results()
            if is_there(results, of_this):
                continue
            prepared = data_of(known[name], options.prepared)
            held_out = SequenceStore(prepared / "validation_lmdb")
            require_same_proteins(results, held_out.digest)
            result = run(name, known[name], seed, prepared)
            keep(result)
            say(f"{name}, seed {seed}: {result['perplexity']:.3f} in {result['cpu_seconds']:.0f} s")
    if options.table:
        print(table(known, read_results()))


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
