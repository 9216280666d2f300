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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from math import exp, log
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from benchmarks.measure import BenchError, parser, say
from benchmarks.speedrun import autoregressive
from d2plm.config import compose
from d2plm.core.errors import D2PLMError
from d2plm.core.estimate import interval_text
from d2plm.core.files import write_text
from d2plm.core.locks import locked
from d2plm.core.machine import machine
from d2plm.core.table import Table
from d2plm.data.cache import digest_of
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.baselines import fit_baselines
from d2plm.evaluation.comparison import seed_interval
from d2plm.evaluation.likelihood import corpus_estimate, score_sequences
from d2plm.export.exported_model import load_export

FOLDER = Path(__file__).parent
OWN_MODULE = autoregressive.__name__  # registers the control's paradigm
ENTRIES, RESULTS = FOLDER / "entries.yaml", FOLDER / "results.jsonl"
SETTINGS = ("data", "model", "paradigm", "trainer", "optimizer", "schedule")
PLACES = ("input", "prepared_dir", "temporary_dir", "threads")  # do not determine the result
OF_OTHER_ALPHABETS = ("alphabet", "near_duplicate_similarity", "overlap_share")
MASKS = 2  # draws for each held-out protein, the same for every entry
BASELINE = "composition × 5-gram"
Values = np.ndarray[Any, Any]
# Without the parts that would add CPU seconds: evaluations, checkpoints, tracking.
ALONE = (
    *("experiment=uniprot_20k", "tracking=none", "callbacks.progress=null"),
    *(
        "callbacks.evaluation=null",
        "callbacks.checkpoint.every=1000000",
        "callbacks.metrics.every=100",
    ),
    # Without relatives the model learns no less than the experiment's model does alone.
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
        [sys.executable, "-m", "d2plm", "train", "--module", OWN_MODULE, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise BenchError(f"the training failed: d2plm train {' '.join(words)}")
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began


def bound(model_dir: Path, prepared: Path) -> tuple[Values, Values, int]:
    """Nats and canonical residues of every held-out protein, and the model's longest input."""
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
    """The first residues of each held-out protein, which are scored."""
    return [tokens[:max_residues] for tokens in SequenceStore(prepared / "validation_lmdb")]


def settings_digest(overrides: Sequence[str]) -> str:
    """Digest of all settings that the training depends on, uniprot_20k's included."""
    config = compose("train", [*ALONE, *overrides])
    chosen = {
        section: {
            # Unused options are left out, so new ones leave the digests unchanged.
            key: value
            for key, value in asdict(getattr(config, section)).items()
            if value is not None
            and not (section == "data" and key in (*PLACES, *OF_OTHER_ALPHABETS))
        }
        for section in SETTINGS
    }
    return digest_of(chosen)


def data_of(overrides: Sequence[str], prepared: Path) -> Path:
    """The prepared data of an entry, which may name its own."""
    own = [word.partition("=")[2] for word in overrides if word.startswith("data.prepared_dir=")]
    return Path(own[-1]) if own else prepared


def run(name: str, overrides: Sequence[str], seed: int, prepared: Path) -> dict[str, Any]:
    """Train once and evaluate every held-out protein; returns a line of the results."""
    held_out = SequenceStore(prepared / "validation_lmdb")
    config = compose("train", [*ALONE, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        cpu_seconds, seconds = train(overrides, seed, prepared, Path(folder))
        model_dir = Path(folder) / config.paradigm.name / "model"
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            nats, residues, longest = alone.submit(bound, model_dir, prepared).result()
    counted = counted_nats(prepared, longest)
    clusters = clusters_of(held_out)
    estimate = corpus_estimate(nats, residues, clusters).exp()
    against = corpus_estimate(nats - counted, residues, clusters)
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


def read_results() -> list[dict[str, Any]]:
    """All lines of the results.

    Raises:
        BenchError: a line is no whole result.
    """
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append({**json.loads(line)})
        except (ValueError, TypeError):
            raise BenchError(f"{RESULTS}, line {number}: incomplete result; remove it") from None
    return results


def require_same_proteins(results: Sequence[dict[str, Any]], held_out: str) -> None:
    """Raise `BenchError` if results are for proteins with another digest than `held_out`."""
    if any(result["held_out"] != held_out for result in results):
        raise BenchError(f"{RESULTS}: has results for different held-out proteins; remove the old")


def is_there(results: Sequence[dict[str, Any]], result: Mapping[str, Any]) -> bool:
    """Whether the results contain the same entry, seed and settings."""
    keys = ("entry", "seed", "settings")
    return any(all(known[key] == result[key] for key in keys) for known in results)


def keep(result: dict[str, Any]) -> None:
    """Add a result, unless another process has added the same one in the meantime."""
    with locked(RESULTS.with_suffix(".lock"), f"{RESULTS}: is being written"):
        results = read_results()
        if not is_there(results, result):
            lines = (json.dumps(each) + "\n" for each in (*results, result))
            write_text(RESULTS, "".join(lines))


def results_of(
    name: str, overrides: Sequence[str], results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The results of an entry with its current settings."""
    settings = settings_digest(overrides)
    return [r for r in results if (r["entry"], r["settings"]) == (name, settings)]


def table(entries: Mapping[str, Sequence[str]], results: Sequence[dict[str, Any]]) -> str:
    """Results of the entries with their current settings as a Markdown table, the best last.

    Raises:
        BenchError: if they are of different held-out proteins.
    """
    rows = []
    require_same_proteins(results, results[0]["held_out"] if results else "")
    for name, overrides in entries.items():
        own = results_of(name, overrides, results)
        if not own:
            continue
        perplexities = sorted(result["perplexity"] for result in own)
        seconds = mean(result["cpu_seconds"] for result in own)
        cells = [name, f"{own[0]['million_tokens']:.1f}", f"{seconds:.0f}"]
        cells += [f"**{mean(perplexities):.3f}**", " ".join(f"{p:.3f}" for p in perplexities)]
        rows.append((mean(perplexities), cells))
    heads = ["entry", "million tokens", "CPU seconds", "perplexity, mean", "each seed"]
    return Table(heads, [cells for _, cells in sorted(rows)[::-1]]).markdown()


def difference(
    entries: Mapping[str, Sequence[str]], results: Sequence[dict[str, Any]], pair: Sequence[str]
) -> str:
    """Mean difference of log perplexity of two entries over their common seeds, in nats.

    The interval is Student's t over the seeds.

    Raises:
        BenchError: if the entries have no seed in common.
    """
    first, second = (
        {r["seed"]: log(r["perplexity"]) for r in results_of(name, entries[name], results)}
        for name in pair
    )
    differences = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
    if not differences:
        raise BenchError(f"{' and '.join(pair)} have no results with the same seed; run them")
    interval = interval_text(seed_interval(differences), "+.3f")
    return f"{' − '.join(pair)}: {mean(differences):+.3f} nats {interval}, {len(differences)} seeds"


def curve(
    entries: Mapping[str, Sequence[str]],
    results: Sequence[dict[str, Any]],
    names: Sequence[str],
    at: Sequence[float],
) -> str:
    """The curve log perplexity = L + a·C^-b through entries, C their CPU seconds, at other C.

    Raises:
        BenchError: fewer than three entries, or one without results.
    """
    own = [results_of(name, entries[name], results) for name in names]
    if len(own) < 3 or not all(own):
        raise BenchError(f"a curve needs results of at least three entries, not {' '.join(names)}")
    seconds = np.array([mean(r["cpu_seconds"] for r in each) for each in own])
    nats = np.log([mean(r["perplexity"] for r in each) for each in own])

    def law(constants: Values, c: Values) -> Values:
        limit, scale, power = constants
        return np.asarray(limit + scale * (c / seconds[0]) ** -power)

    start = np.array([nats.min(), np.ptp(nats), 0.5])
    fit = least_squares(lambda constants: law(constants, seconds) - nats, start, ftol=1e-14).x
    lines = [f"{len(own)} entries: L = {fit[0]:.3f} nats ({exp(fit[0]):.2f}), b = {fit[2]:.2f}"]
    points = [*seconds, *at]
    lines += [
        f"{point:,.0f} CPU seconds: {exp(value):.3f}"
        for point, value in zip(points, law(fit, np.array(points)), strict=True)
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the named entries, or print the table."""
    made = parser("speedrun.run", __doc__)
    made.add_argument("entries", nargs="*", help="names in entries.yaml")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--prepared", type=Path, default=Path("runs/uniprot_20k/data"))
    made.add_argument("--all", action="store_true", help="run every entry")
    made.add_argument("--difference", nargs=2, metavar="ENTRY", help="print the first − the second")
    made.add_argument("--curve", nargs="+", metavar="ENTRY", help="fit bound to CPU seconds")
    made.add_argument("--at", nargs="+", type=float, default=[], help="CPU seconds for --curve")
    made.add_argument("--table", action="store_true", help="print the results")
    options = made.parse_args()
    known = yaml.safe_load(ENTRIES.read_text())
    if options.all:
        options.entries = [*known]
    asked = (options.entries, options.table, options.difference, options.curve)
    if not any(asked):
        made.error("name an entry, or pass --all, --table, --difference or --curve")
    for name in [*options.entries, *(options.difference or ()), *(options.curve or ())]:
        if name not in known:
            raise BenchError(f"there is no entry {name!r}; the entries are {', '.join(known)}")
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
    if options.difference:
        print(difference(known, read_results(), options.difference))
    if options.curve:
        print(curve(known, read_results(), options.curve, options.at))


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
