"""Everything that D2PLM does, from Python, with its own classes and no configuration.

    python examples/without_hydra.py proteins.fasta.gz runs/mine --steps 1000

Prepares the proteins, trains, exports, evaluates the bound beside baselines and generates. Every
step leaves its result in the output folder; one that is there is gone on from.
"""

import argparse
from pathlib import Path

from d2plm import load_model
from d2plm.core.errors import D2PLMError
from d2plm.data.loader import Collection
from d2plm.data.manifest import open_prepared
from d2plm.data.prepare import prepare
from d2plm.evaluation.tables import as_text
from d2plm.export.export_callback import Export
from d2plm.export.exported_model import load_export
from d2plm.export.model_evaluation import evaluate
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.settings.callbacks import CheckpointSettings
from d2plm.settings.data import LoaderSettings, SplitSettings
from d2plm.settings.training import TrainerSettings
from d2plm.training.callbacks.metric_logger import MetricLogger
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.callbacks.save_checkpoint import SaveCheckpoint
from d2plm.training.trainer import Trainer

PROTEINS = Path(__file__).parent / "data" / "uniprot_500.fasta.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description="D2PLM from Python, without Hydra.")
    parser.add_argument("proteins", type=Path, nargs="?", default=PROTEINS, help="FASTA")
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/without_hydra"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--token-budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a protein")
    options = parser.parse_args()

    # Proteins → stores between which MMseqs2 finds no homologs.
    split = SplitSettings(validation_fraction=0.1, search_directions="from_held_out")
    prepare(options.proteins, options.output / "prepared", split=split, report=print)
    prepared = open_prepared(options.output / "prepared")
    train, validation = prepared.splits["train"], prepared.splits["validation"]

    # Stores → the moving average of the weights, in one folder with all that they need.
    trainer = Trainer(
        TrainerSettings(max_steps=options.steps),
        DiTConfig(max_position_embeddings=options.max_length, initial_gate=1.0),
        AbsorbingDiffusion(),
        [Collection(train)],
        options.output,
        loading=LoaderSettings(token_budget=options.token_budget),
        callbacks=[
            MetricLogger(),
            ProgressBar(),
            SaveCheckpoint(CheckpointSettings(every=500)),
            Export(options.output / "model", {"data": [prepared.provenance]}),
        ],
    )
    trainer.train()

    # Model and held-out proteins → the bound beside the baselines, in the folder's model card, too.
    exported = load_export(options.output / "model")
    print(as_text(evaluate(exported, train, validation, masks_per_sequence=4)))

    # Model → proteins.
    model = load_model(options.output / "model")
    proteins = model.generate(3, length=60, steps=32, seed=1)
    for protein, score in zip(proteins, model.score(proteins), strict=True):
        print(f"{protein}  perplexity {score.perplexity:.2f}")


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
