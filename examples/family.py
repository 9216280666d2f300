"""Train a model on a protein family of your own, evaluate it, and generate new members.

    python examples/family.py family.fasta runs/family --steps 2000
    python examples/family.py family.fasta runs/family --start runs/demo/model

The steps are those of `d2plm pipeline run`, called from Python with the same settings. The members
of a family are homologs, so that none could be held out without any: here held-out ones share less
than `--identity` with those that are trained on. With `--start` training goes on from another
model, which helps where the family is small.
"""

import argparse
from pathlib import Path

from d2plm import load_model
from d2plm.commands import evaluate, prepare, train
from d2plm.config import compose
from d2plm.core.errors import D2PLMError
from d2plm.data.fasta import write_fasta

FAMILY = Path(__file__).parent / "data" / "uniprot_500.fasta.gz"  # no family, but it shows the way


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a protein family and generate.")
    parser.add_argument("family", type=Path, nargs="?", default=FAMILY, help="FASTA")
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/family"))
    parser.add_argument("--start", default=None, help="a model to go on from")
    parser.add_argument("--identity", type=float, default=0.7, help="of held-out proteins, at most")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a protein")
    parser.add_argument("--number", type=int, default=5, help="of proteins to generate")
    parser.add_argument("--sampler-steps", type=int, default=None, help="of each protein")
    options = parser.parse_args()

    config = compose(
        "pipeline",
        [
            f"data.input='{options.family}'",
            f"work_dir='{options.output}'",
            "data.validation_fraction=0.1",
            f"data.cluster_min_seq_id={options.identity}",
            f"data.search_min_seq_id={options.identity}",
            # Quicker, and enough at such an identity; below 0.5, leave these three out.
            "data.cluster_method=linclust",
            "data.search_sensitivity=4.0",
            "data.search_directions=from_held_out",
            f"data.max_length={options.max_length}",
            "data.token_budget=4096",
            f"trainer.max_steps={options.steps}",
            "trainer.ema_decay=0.999",
            "init_from=null" if options.start is None else f"init_from='{options.start}'",
            "evaluation.masks_per_sequence=4",
            "evaluation.nearest_identity=false",
            "evaluation.generated=0",
            "tracking=none",  # without it: an MLflow run, in the output folder
        ],
    )
    prepare.run(config)
    train.run(config)
    evaluate.run(config)

    model = load_model(config["model_dir"])
    proteins = model.generate(options.number, steps=options.sampler_steps, seed=1)
    records = []
    for number, (protein, score) in enumerate(
        zip(proteins, model.score(proteins), strict=True), start=1
    ):
        records.append((f"member_{number} perplexity={score.perplexity:.3f}", protein))
        print(f">{records[-1][0]}\n{protein}")
    write_fasta(options.output / "generated.fasta", records)


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
