"""d2plm score: the likelihood bound of each protein in a FASTA file."""

import csv
import io
from pathlib import Path

import numpy as np

from d2plm.commands.generate import resolve_model
from d2plm.config import Config
from d2plm.data.fasta import read_fasta
from d2plm.evaluation.likelihood import score_sequences
from d2plm.files import write_text
from d2plm.progress import Progress

COLUMNS = ("name", "residues", "nats", "perplexity")


def run(config: Config) -> None:
    """Score every record and write a CSV row each."""
    records = list(read_fasta(Path(config["input"])))
    exported = resolve_model(config["model_dir"], config["tracking_uri"], config["device"])
    settings = config["evaluation"]
    with Progress("scoring") as progress:
        scores = score_sequences(
            exported.denoiser(config["precision"]),
            exported.paradigm,
            [record.tokens for record in records],
            masks_per_sequence=settings["masks_per_sequence"],
            max_length=exported.max_length,
            seed=settings["seed"],
            token_budget=settings["token_budget"],
            device=exported.model.device,
            progress=progress.update_of,
        )
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record, nats, residues in zip(records, scores.nats, scores.residues, strict=True):
        perplexity = np.exp(nats / residues) if residues else float("nan")
        writer.writerow([record.name, residues, f"{nats:.4f}", f"{perplexity:.4f}"])
    if config["output"] is None:
        print(table.getvalue(), end="")
        return
    write_text(Path(config["output"]), table.getvalue())
