"""Build a new scaffold around a motif: keep some residues of a protein, fill in all the others.

    python examples/infill_scaffold.py protein.fasta runs/scaffold --model examples/pretrained \
        --keep 60-80 --number 20

Positions count from 1 and the ends belong to them. The designs are written with the likeliest
first, by the model's bound; how likely a sequence is says nothing of whether it folds.
"""

import argparse
from pathlib import Path

from d2plm import load_model
from d2plm.core.errors import D2PLMError, DataError
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import read_fasta, write_fasta

# Osteocalcin of the gilthead seabream; 60 to 80 is most of its calcium-binding helices.
PROTEIN = Path(__file__).parent / "data" / "osteocalcin.fasta"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill in a scaffold around a motif.")
    parser.add_argument("protein", type=Path, nargs="?", default=PROTEIN, help="FASTA, its first")
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/scaffold"))
    parser.add_argument("--model", default="examples/pretrained", help="or models:/NAME@ALIAS")
    parser.add_argument("--keep", default="60-80", help="positions, such as 5-20,31,60-80")
    parser.add_argument("--number", type=int, default=8, help="of designs")
    parser.add_argument("--steps", type=int, help="of the sampler")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    record = next(iter(read_fasta(options.protein)))
    natural = decode(record.tokens)
    template = template_of(natural, options.keep)
    filled = template.count("_")
    print(f"{record.name}: {filled} of {len(natural)} residues are filled in\n{template}")

    model = load_model(options.model)
    designs = model.infill(template, options.number, steps=options.steps, seed=options.seed)
    scores = model.score(designs)
    records = []
    for design, score in sorted(zip(designs, scores, strict=True), key=lambda pair: pair[1].nats):
        identity = sum(map(str.__eq__, design, natural)) / len(natural)
        rank = f"design_{len(records) + 1}"
        records.append(
            (f"{rank} perplexity={score.perplexity:.3f} identity={identity:.2f}", design)
        )
        print(f">{records[-1][0]}\n{design}")
    options.output.mkdir(parents=True, exist_ok=True)
    write_fasta(options.output / "designs.fasta", records)


def template_of(protein: str, keep: str) -> str:
    """`protein` with `_` for every residue that is not at one of the positions `keep`."""
    kept: set[int] = set()
    for part in keep.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise DataError(f"--keep {keep}: {part!r} is no position; write them as in 5-20,31")
        kept.update(range(int(first), int(last or first) + 1))
    if not kept <= set(range(1, len(protein) + 1)):
        raise DataError(f"--keep {keep}: the protein has the positions 1 to {len(protein)}")
    return "".join(x if place in kept else "_" for place, x in enumerate(protein, start=1))


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
