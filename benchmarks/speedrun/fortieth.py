"""Prepare a fortieth of the training proteins of uniprot_20k with the same held-out proteins.

d2plm prepare experiment=uniprot_20k
python -m benchmarks.speedrun.fortieth
"""

from pathlib import Path

from benchmarks.measure import parser, run_script
from d2plm.cli import main as d2plm
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import write_fasta
from d2plm.data.manifest import is_prepared, open_prepared

EVERY = 40
FOLDER = Path("runs/fortieth")


def main() -> None:
    """Write the proteins and prepare them, unless that is done."""
    parser("speedrun.fortieth", __doc__).parse_args()
    if is_prepared(FOLDER / "data"):
        return
    splits = open_prepared(Path("runs/uniprot_20k/data")).splits
    chosen = {"validation": 1, "train": EVERY}
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_fasta(
        FOLDER / "proteins.fasta",
        (
            (splits[split].name(number), decode(splits[split][number]))
            for split, every in chosen.items()
            for number in range(0, len(splits[split]), every)
        ),
    )
    held_out = splits["validation"]
    names = (held_out.name(number) + "\n" for number in range(len(held_out)))
    (FOLDER / "held_out.txt").write_text("".join(names))
    words = [
        *("experiment=uniprot_20k", "data.relatives_sensitivity=null", "tracking=none"),
        f"data.input={FOLDER}/proteins.fasta",
        f"data.validation_ids={FOLDER}/held_out.txt",
        f"data.prepared_dir={FOLDER}/data",
    ]
    raise SystemExit(d2plm(["prepare", *words]))


if __name__ == "__main__":
    run_script(main)
