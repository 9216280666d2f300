"""d2plm prepare: FASTA or raw store → train and validation stores without homologs between them."""

from pathlib import Path
from typing import Any

from d2plm.config import Config
from d2plm.data.prepare import prepare
from d2plm.errors import require
from d2plm.tracking.runs import Run, tracking_run

SETTINGS = (
    "validation_fraction",
    "cluster_min_seq_id",
    "cluster_coverage",
    "search_min_seq_id",
    "search_coverage",
    "search_sensitivity",
    "search_max_seqs",
    "min_length",
    "on_illegal",
    "threads",
)


def run(config: Config) -> dict[str, Any]:
    """Prepare the data, log them to the tracking run, and return the manifest."""
    data = config["data"]
    require(bool(data["input"]), "data.input", data["input"], "a FASTA file or a raw store")
    manifest = prepare(
        Path(data["input"]),
        Path(data["prepared_dir"]),
        seed=data["split_seed"],
        report=lambda line: print(line, flush=True),
        **{key: data[key] for key in SETTINGS},
    )
    output_dir = Path(config["output_dir"])
    with tracking_run(output_dir, **tracking_arguments(config)) as tracked:
        _log_data(tracked, manifest, Path(data["prepared_dir"]))
    return manifest


def tracking_arguments(config: Config) -> dict[str, Any]:
    """The `tracking` section as arguments of `tracking_run`."""
    return {key: config["tracking"][key] for key in ("tracker", "uri", "experiment", "run_name")}


def _log_data(tracked: Run, manifest: dict[str, Any], prepared_dir: Path) -> None:
    counts = manifest["counts"]
    for split, context in (("train", "training"), ("validation", "evaluation")):
        profile = {key: counts[f"{split}_{key}"] for key in ("sequences", "residues", "clusters")}
        tracked.log_dataset(
            f"{manifest['input']}:{split}", manifest["digests"][split], context, profile
        )
    tracked.set_tags(
        {
            "data.digest": manifest["digests"]["train"],
            "data.leaking_pairs_after": str(manifest["leaking_pairs_after"]),
        }
    )
    tracked.log_metrics({"leaking_pairs_after": manifest["leaking_pairs_after"]})
    tracked.log_file(prepared_dir / "manifest.json", "data")
