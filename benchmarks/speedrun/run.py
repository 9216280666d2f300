"""Benchmark of docs/performance.md: the CPU seconds that training needs to reach a bound.

An entry of `entries.yaml` is uniprot_20k's training with other settings. Each is run with several
seeds, on one thread each, and scored by the bound on every held-out protein, with the same masks.
Only the CPU seconds of the training process count: neither the wall clock nor the evaluation. A
result is a line of `results.jsonl`; existing results are not computed again.

    d2plm prepare experiment=uniprot_20k
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
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from benchmarks.measure import BenchError, parser, run_script, say
from d2plm.config import compose
from d2plm.core.machine import machine
from d2plm.core.table import Table
from d2plm.data.cache import digest_of
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.likelihood import corpus_estimate, score_sequences
from d2plm.export.exported_model import load_export

FOLDER = Path(__file__).parent
ENTRIES, RESULTS = FOLDER / "entries.yaml", FOLDER / "results.jsonl"
SETTINGS = ("data", "model", "paradigm", "trainer", "optimizer", "schedule")
NOT_IN_DIGEST = (  # of the data: places, and what other alphabets use
    *("input", "prepared_dir", "temporary_dir", "threads"),
    *("alphabet", "near_duplicate_similarity", "overlap_share"),
)
MASKS = 2  # draws for each held-out protein, the same for every entry
BASELINE = "composition × 5-gram"
Values = np.ndarray[Any, Any]
Result = dict[str, Any]
Runs = dict[str, list[Result]]
# Without the parts that would add CPU seconds: evaluations, checkpoints, tracking; without
# relatives the model learns no less than the experiment's model does alone.
ALONE = (
    *("experiment=uniprot_20k", "tracking=none", "callbacks.progress=null"),
    *("callbacks.evaluation=null", "callbacks.checkpoint.every=1000000"),
    *("callbacks.metrics.every=100", "model.relatives_dim=null", "data.max_relatives=null"),
    "data.relatives_sensitivity=null",
)


def train(overrides: Sequence[str], seed: int, folder: Path) -> tuple[float, float]:
    """Train on one thread; returns the CPU seconds and the seconds of the process."""
    words = [*ALONE, *overrides, f"trainer.seed={seed}", f"work_dir={folder}"]
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


@cache
def counted_nats(prepared: Path, max_residues: int) -> Values:
    """Nats of every held-out protein under `BASELINE`."""
    counted = fit_baselines(SequenceStore(prepared / "train_lmdb"), max_residues=max_residues)
    proteins = held_out_proteins(prepared, max_residues)
    return np.array([counted.scorers[BASELINE](tokens) for tokens in proteins])


def held_out_proteins(prepared: Path, max_residues: int) -> list[Values]:
    """The first residues of each held-out protein, which are scored."""
    return [tokens[:max_residues] for tokens in SequenceStore(prepared / "validation_lmdb")]


def settings_digest(overrides: Sequence[str]) -> str:
    """Digest of all settings that the training depends on, uniprot_20k's included."""
    config = compose("train", [*ALONE, *overrides])
    chosen = {section: asdict(getattr(config, section)) for section in SETTINGS}
    for key in NOT_IN_DIGEST:
        del chosen["data"][key]
    # Unused options are left out, so new ones leave the digests unchanged.
    return digest_of(
        {
            section: {key: value for key, value in settings.items() if value is not None}
            for section, settings in chosen.items()
        }
    )


def run(name: str, overrides: Sequence[str], seed: int) -> Result:
    """Train once and evaluate every held-out protein; returns a line of the results.

    Raises:
        BenchError: if there are results for different held-out proteins, or the training fails.
    """
    config = compose("train", [*ALONE, *overrides])
    prepared = Path(config.data.prepared_dir)
    held_out = SequenceStore(prepared / "validation_lmdb")
    if any(result["held_out"] != held_out.digest for result in read_results()):
        raise BenchError(f"{RESULTS}: has results for different held-out proteins; remove the old")
    with tempfile.TemporaryDirectory() as folder:
        cpu_seconds, seconds = train(overrides, seed, Path(folder))
        exported = load_export(Path(folder) / config.paradigm.name / "model")
    model, proteins = exported.denoiser("auto"), held_out_proteins(prepared, exported.max_residues)
    scores = score_sequences(
        *(model, exported.paradigm, proteins),
        masks_per_sequence=MASKS,
        max_length=exported.max_length,
    )
    counted = counted_nats(prepared, exported.max_residues)
    within = scores.residues, clusters_of(held_out)
    estimate = corpus_estimate(scores.nats, *within).exp()
    against = corpus_estimate(scores.nats - counted, *within)
    tokens = config.trainer.max_steps * config.trainer.global_batch_tokens
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


def read_results() -> list[Result]:
    """All lines of the results; `BenchError` if one is incomplete."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise BenchError(f"{RESULTS}: remove the incomplete line ({error})") from None


def runs_of(entries: Mapping[str, Sequence[str]]) -> Runs:
    """The results of each entry with its current settings."""
    results, digests = read_results(), {name: settings_digest(entries[name]) for name in entries}
    return {
        name: [r for r in results if (r["entry"], r["settings"]) == (name, digest)]
        for name, digest in digests.items()
    }


def table(runs: Runs) -> str:
    """Results of the entries as a Markdown table, the best last."""
    rows = []
    for name, own in runs.items():
        if own:
            perplexities = sorted(result["perplexity"] for result in own)
            seconds = mean(result["cpu_seconds"] for result in own)
            cells = [name, f"{own[0]['million_tokens']:.1f}", f"{seconds:.0f}"]
            cells += [f"**{mean(perplexities):.3f}**", " ".join(f"{p:.3f}" for p in perplexities)]
            rows.append((mean(perplexities), cells))
    heads = ["entry", "million tokens", "CPU seconds", "perplexity, mean", "each seed"]
    return Table(heads, [cells for _, cells in sorted(rows)[::-1]]).markdown()


def main() -> None:
    """Run the named entries, or print the table."""
    made = parser("speedrun.run", __doc__)
    made.add_argument("entries", nargs="*", help="names in entries.yaml")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--all", action="store_true", help="run every entry")
    made.add_argument("--table", action="store_true", help="print the results")
    options = made.parse_args()
    known = yaml.safe_load(ENTRIES.read_text())
    entries = [*known] if options.all else options.entries
    for name in entries:
        if name not in known:
            raise BenchError(f"there is no entry {name!r}; the entries are {', '.join(known)}")
    for seed in options.seeds:
        for name in entries:
            if any(r["seed"] == seed for r in runs_of({name: known[name]})[name]):
                continue
            result = run(name, known[name], seed)
            with RESULTS.open("a") as file:
                file.write(json.dumps(result) + "\n")
            say(f"{name}, seed {seed}: {result['perplexity']:.3f} in {result['cpu_seconds']:.0f} s")
    if options.table or not entries:
        print(table(runs_of(known)))


if __name__ == "__main__":
    run_script(main)
