"""Adapt a model to the largest families of its prepared data, one after another.

A family is a homology cluster of the training proteins. The base model was trained on all members,
including those that `d2plm adapt` tests on; its row without relatives shows how much it remembers.

    d2plm pipeline run experiment=uniprot_20k
    python -m benchmarks.families

Families that already have results are not run again.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import parser, say
from d2plm.core.errors import D2PLMError
from d2plm.core.estimate import Estimate
from d2plm.core.files import write_text
from d2plm.core.table import Table
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import write_fasta
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.family_bound import ADAPTED, BASE, FAMILY_PROFILE

COLUMNS = ("5-gram", "composition × 5-gram", FAMILY_PROFILE, f"{BASE}, alone", BASE, ADAPTED)


def adapt(members: Path, model_dir: Path, work_dir: Path) -> dict[str, Any]:
    """Results of `d2plm adapt` for the family in a FASTA file."""
    words = ["adapt", str(members), f"init_from={model_dir}", f"work_dir={work_dir}"]
    ended = subprocess.run([sys.executable, "-m", "d2plm", *words, "tracking=none"])
    if ended.returncode:  # some families cannot be split; the command has printed the reason
        return {}
    found = json.loads((work_dir / "adaptation.json").read_text())
    return {key: found[key] for key in ("members", "test")}


def row(name: str, found: dict[str, Any]) -> list[str]:
    """Cells of the table: perplexities, and the paired difference from the profile."""
    if not found:
        return [name, "not adapted", *[""] * (len(COLUMNS) + 1)]
    test, counts = found["test"], found["members"]
    profile = test[FAMILY_PROFILE]
    difference = Estimate(**profile["difference"])
    return [
        *(name, f"{counts['train']} / {counts['test']}"),
        *(f"{test[column]['perplexity']['value']:.2f}" for column in COLUMNS),
        f"{difference:+.3f}",
    ]


def main() -> None:
    """Run the families and print the table."""
    made = parser("families", __doc__)
    made.add_argument("--prepared", type=Path, default=Path("runs/uniprot_20k/data"))
    made.add_argument("--model", type=Path, default=Path("runs/uniprot_20k/model"))
    made.add_argument("--number", type=int, default=10, help="number of families, largest first")
    made.add_argument("--work", type=Path, default=Path("runs/families"))
    options = made.parse_args()
    store = SequenceStore(options.prepared / "train_lmdb")
    clusters, kept = clusters_of(store), options.work / "families.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    sizes = np.bincount(clusters)
    for cluster in np.argsort(-sizes, kind="stable")[: options.number].tolist():
        own = np.flatnonzero(clusters == cluster).tolist()
        name = store.name(own[0])
        if name not in results:
            fasta = options.work / f"{cluster}.fasta"
            fasta.parent.mkdir(parents=True, exist_ok=True)
            write_fasta(fasta, ((store.name(i), decode(store[i])) for i in own))
            results[name] = adapt(fasta, options.model, options.work / str(cluster))
            write_text(kept, json.dumps(results, indent=2))
        say(" ".join(row(name, results[name])))
    head = ["family", "training / test", *COLUMNS, "adapted − profile, nats/residue"]
    print(Table(head, [row(name, found) for name, found in results.items()]).markdown())


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
