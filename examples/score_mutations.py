"""Score the mutations of a protein: those of a table, or every single one.

    python examples/score_mutations.py wild_type.fasta runs/mutations --model runs/demo/model \
        --variants variants.csv

The table has a column `mutant` (A24G, or A24G:L30P) and, where the effects were measured, one
`DMS_score`, with which Spearman's rank correlation is given. `--variants all` scores every single
substitution. Scores are masked-marginal log-odds: below zero the wild type is likelier.
"""

import argparse
import csv
from pathlib import Path

from scipy.stats import spearmanr

from d2plm import load_model
from d2plm.core.errors import D2PLMError, DataError
from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data.fasta import read_fasta

WILD_TYPE = Path(__file__).parent / "data" / "osteocalcin.fasta"
VARIANTS = WILD_TYPE.with_name("osteocalcin_variants.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description="Score mutations of a protein.")
    parser.add_argument("wild_type", type=Path, nargs="?", default=WILD_TYPE, help="FASTA")
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/mutations"))
    parser.add_argument("--model", default="runs/demo/model", help="folder, or models:/NAME@ALIAS")
    parser.add_argument("--variants", default=VARIANTS, help="CSV file, or all")
    options = parser.parse_args()

    record = next(iter(read_fasta(options.wild_type)))
    wild_type = decode(record.tokens)
    rows = every_single(wild_type) if options.variants == "all" else read(Path(options.variants))
    scores = load_model(options.model).score_mutations(wild_type, [row["mutant"] for row in rows])
    for row, score in zip(rows, scores, strict=True):
        row["d2plm_score"] = f"{score:.4f}"

    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "scores.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    ranked = sorted(rows, key=lambda row: -float(row["d2plm_score"]))
    print(f"{record.name}: the likeliest of {len(rows)} variants")
    for row in ranked[:10]:
        print(f"{row['mutant']:>12}  {float(row['d2plm_score']):+.3f}")
    measured = [
        (float(row["DMS_score"]), float(row["d2plm_score"])) for row in rows if row.get("DMS_score")
    ]
    if len(measured) > 1:
        print(f"Spearman's rho {spearmanr(measured).statistic:.3f} ({len(measured)} variants)")


def read(table: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of variants."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{table}: cannot be read ({error.strerror})") from None
    if not rows or "mutant" not in rows[0]:
        raise DataError(f"{table}: has no rows with a column 'mutant'; give a CSV file with both")
    return rows


def every_single(wild_type: str) -> list[dict[str, str]]:
    """Every substitution of one residue by another of the twenty."""
    return [
        {"mutant": f"{residue}{place}{other}"}
        for place, residue in enumerate(wild_type, start=1)
        if residue in CANONICAL
        for other in sorted(CANONICAL)
        if other != residue
    ]


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
