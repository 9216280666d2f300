"""Compare two paradigms: the same proteins, model, budget and seeds, and the paired difference.

    python examples/compare_paradigms.py proteins.fasta.gz runs/comparison --steps 1000 --seeds 3

Trains diffusion and flow matching once for each seed. What counts as a difference must be one over
the held-out proteins and over the seeds, so that one seed shows nothing. `d2plm compare` does the
same for any settings, several runs at a time.
"""

import argparse
from pathlib import Path

from d2plm.core.errors import D2PLMError
from d2plm.data.loader import Collection
from d2plm.data.manifest import open_prepared
from d2plm.data.prepare import prepare
from d2plm.data.store import SequenceStore
from d2plm.evaluation.comparison import Run, compare, comparison_table, plot_comparison
from d2plm.export.export_callback import Export
from d2plm.export.exported_model import load_export
from d2plm.export.model_evaluation import evaluate, load_scores
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from d2plm.settings.data import LoaderSettings, SplitSettings
from d2plm.settings.training import TrainerSettings
from d2plm.training.callbacks.progress_bar import ProgressBar
from d2plm.training.trainer import Trainer

PROTEINS = Path(__file__).parent / "data" / "uniprot_500.fasta.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two paradigms on the same proteins.")
    parser.add_argument("proteins", type=Path, nargs="?", default=PROTEINS, help="FASTA")
    parser.add_argument("output", type=Path, nargs="?", default=Path("runs/comparison"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--token-budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a protein")
    options = parser.parse_args()

    split = SplitSettings(validation_fraction=0.1, search_directions="from_held_out")
    prepare(options.proteins, options.output / "prepared", split=split, report=print)
    splits = open_prepared(options.output / "prepared").splits
    paradigms: dict[str, Paradigm] = {
        "diffusion": AbsorbingDiffusion(time_sampling="low_variance"),
        "flow_matching": MaskFlowMatching(time_sampling="low_variance"),
    }
    runs: dict[str, dict[int, Run]] = {}
    for name, paradigm in paradigms.items():
        for seed in range(options.seeds):
            print(f"training {name}, seed {seed}")
            folder = options.output / name / f"seed{seed}"
            runs.setdefault(name, {})[seed] = train_and_score(
                splits["train"], splits["validation"], paradigm, folder, seed, options
            )
    comparison = compare(runs)
    plot_comparison(comparison, options.output / "comparison.png")
    (options.output / "comparison.md").write_text(comparison_table(comparison) + "\n", "utf-8")
    print(comparison_table(comparison))


def train_and_score(
    train: SequenceStore,
    held_out: SequenceStore,
    paradigm: Paradigm,
    folder: Path,
    seed: int,
    options: argparse.Namespace,
) -> Run:
    """One run: its bound on each held-out protein, on masks that are the same in every run."""
    Trainer(
        TrainerSettings(max_steps=options.steps, seed=seed),
        DiTConfig(max_position_embeddings=options.max_length, initial_gate=1.0),
        paradigm,
        [Collection(train)],
        folder,
        loading=LoaderSettings(token_budget=options.token_budget),
        callbacks=[ProgressBar(), Export(folder / "model")],
    ).train()
    evaluation = evaluate(load_export(folder / "model"), train, held_out, masks_per_sequence=4)
    _, scores = load_scores(folder / "model")
    return Run(evaluation, **scores)


if __name__ == "__main__":
    try:
        main()
    except D2PLMError as error:
        raise SystemExit(f"error: {error}") from None
