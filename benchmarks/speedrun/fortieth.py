"""Prepare a fortieth of the training proteins with the same held-out proteins.

d2plm prepare experiment=uniprot_20k
python -m benchmarks.speedrun.fortieth --prepared runs/uniprot_20k/data --folder runs/fortieth
"""

from pathlib import Path

from benchmarks.measure import parser, say
from d2plm.cli import main as d2plm
from d2plm.core.errors import D2PLMError
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import write_fasta
from d2plm.data.store import SequenceStore

EVERY = 40


def main() -> None:
    """Write the proteins as FASTA, and prepare them with the same split."""
    made = parser("speedrun.fortieth", __doc__)
    made.add_argument("--prepared", type=Path, default=Path("runs/uniprot_20k/data"))
    made.add_argument("--folder", type=Path, default=Path("runs/fortieth"))
    options = made.parse_args()
    if (options.folder / "data" / "manifest.json").exists():
        say(f"{options.folder / 'data'} already exists")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    held_out = SequenceStore(options.prepared / "validation_lmdb")
    train = SequenceStore(options.prepared / "train_lmdb")
    places = (
        *((held_out, number) for number in range(len(held_out))),
        *((train, number) for number in range(0, len(train), EVERY)),
    )
    records = ((store.name(number), decode(store[number])) for store, number in places)
    write_fasta(options.folder / "proteins.fasta", records)
    names = [held_out.name(number) for number in range(len(held_out))]
    (options.folder / "held_out.txt").write_text("\n".join(names) + "\n")
    words = [
        *("experiment=uniprot_20k", "data.relatives_sensitivity=null", "tracking=none"),
        f"data.input={options.folder}/proteins.fasta",
        f"data.validation_ids={options.folder}/held_out.txt",
        f"data.prepared_dir={options.folder}/data",
    ]
    raise SystemExit(d2plm(["prepare", *words]))


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
