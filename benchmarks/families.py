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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measure import parser, run_script, say
from d2plm.core.estimate import Estimate
from d2plm.core.table import Table
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import write_fasta
from d2plm.data.store import SequenceStore, clusters_of
from d2plm.evaluation.family_bound import ADAPTED, BASE, FAMILY_PROFILE

RUN, WORK = Path("runs/uniprot_20k"), Path("runs/families")
FAMILIES = 10
COLUMNS = ("5-gram", "composition × 5-gram", FAMILY_PROFILE, f"{BASE}, alone", BASE, ADAPTED)


def families() -> Iterator[tuple[str, list[str]]]:
    """Name and result of each family: perplexities, and the paired difference from the profile."""
    store = SequenceStore(RUN / "data" / "train_lmdb")
    clusters = clusters_of(store)
    order = np.argsort(-np.bincount(clusters), kind="stable")
    for cluster in order[:FAMILIES].tolist():
        own = np.flatnonzero(clusters == cluster).tolist()
        fasta, work_dir = WORK / f"{cluster}.fasta", WORK / str(cluster)
        result = work_dir / "adaptation.json"
        if not result.exists():
            WORK.mkdir(parents=True, exist_ok=True)
            write_fasta(fasta, ((store.name(i), decode(store[i])) for i in own))
            words = [str(fasta), f"init_from={RUN / 'model'}", f"work_dir={work_dir}"]
            command = [sys.executable, "-m", "d2plm", "adapt", *words, "tracking=none"]
            subprocess.run(command)  # some families cannot be split; it prints the reason
        yield store.name(own[0]), cells(result) if result.exists() else ["not adapted"]


def cells(result: Path) -> list[str]:
    """The results of an adaptation."""
    found = json.loads(result.read_text())
    counts, test = found["members"], found["test"]
    difference = Estimate(**test[FAMILY_PROFILE]["difference"])
    perplexities = (f"{test[column]['perplexity']['value']:.2f}" for column in COLUMNS)
    return [f"{counts['train']} / {counts['test']}", *perplexities, f"{difference:+.3f}"]


def main() -> None:
    """Run the families and print the table."""
    parser("families", __doc__).parse_args()
    head = ["family", "training / test", *COLUMNS, "adapted − profile, nats/residue"]
    rows = []
    for name, values in families():
        rows.append([name, *values, *[""] * (len(head) - 1 - len(values))])
        say(" ".join(rows[-1]))
    print(Table(head, rows).markdown())


if __name__ == "__main__":
    run_script(main)
