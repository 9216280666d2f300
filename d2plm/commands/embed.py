"""d2plm embed: embeddings of sequences or tokens, in files of bounded size.

Each file is written atomically, so an interrupted run continues after the last one.
`manifest.json` records the model, the input and the settings; embeddings of others are never mixed.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import save

from d2plm.core.batch import of_size
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.files import read_json, require_other_output, write_text, written_beside
from d2plm.core.locks import locked
from d2plm.core.progress import Progress
from d2plm.core.terminal import done
from d2plm.data.fasta import FastaRecord
from d2plm.data.ingest import source_digest
from d2plm.data.sources import read_sequences
from d2plm.evaluation.embedding import embeddings, layer_number
from d2plm.export.exported_model import ExportedModel, weights_digest
from d2plm.settings.commands import EmbedSettings
from d2plm.tracking.locations import open_model

MANIFEST = "manifest.json"
FILE_BYTES = 1 << 28  # bytes of embeddings after which a file is closed


def run(config: EmbedSettings) -> dict[str, Any]:
    """Embed every protein of the input, in its order.

    Raises:
        DataError: if the input is invalid, or the folder contains other embeddings.
    """
    output, source = Path(str(config.output)), str(config.input)
    require_other_output("output", output, [source], is_folder=True)
    exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
    made_of = {
        "model": weights_digest(exported.folder),
        "input": source_digest(source),
        "window": config.window,
        "max_residues": config.max_residues,
        "layer": layer_number(exported.model, config.layer),
        "width": exported.model.config.hidden_size,
        **{key: getattr(config, key) for key in ("pooled", "format", "precision")},
    }
    if made_of["input"] is None:
        raise ConfigError("input=-: must be a file or a folder, because it is read twice")
    records = partial(
        read_sequences, source, exported.vocabulary, config.window, config.max_residues
    )
    # Rejected before hours of work.
    total = sum(len(record.tokens) + 2 for record in exported.all_short_enough(records()))
    with locked(output.with_name(f"{output.name}.lock"), f"another process writes to {output}"):
        known = read_json(output / MANIFEST)
        if known is None or any(known.get(key) != own for key, own in made_of.items()):
            # A run that was killed before its first part leaves only an incomplete manifest.
            if known is not None and (known.get("complete", True) or any(output.glob("part-*"))):
                raise DataError(
                    f"{output}: contains embeddings of another model, input or setting; choose "
                    "another output, or delete it"
                )
            write_text(output / MANIFEST, json.dumps({**made_of, "complete": False}, indent=2))
        written = _embed(config, exported, records, total, output)
        content = {**made_of, "complete": True, "proteins": written}
        write_text(output / MANIFEST, json.dumps(content, indent=2))
    units = f"{exported.vocabulary.nouns.sequence}s"
    done(f"wrote {output} ({written:,} {units}, layer {made_of['layer']})")
    return {"model_dir": config.model_dir, "output": str(output), **content}


def _embed(
    config: EmbedSettings,
    exported: ExportedModel,
    records: Callable[[], Iterable[FastaRecord]],
    total: int,
    output: Path,
) -> int:
    """Write the missing files; returns the number of proteins."""
    width = exported.model.config.hidden_size

    def size(record: FastaRecord) -> int:
        return 4 * width * len(record.tokens)

    model, number = exported.denoiser(config.precision), 0
    with Progress("embedding", total, unit="tokens") as progress:
        # The groups are the same in every run.
        for part, chunk in enumerate(of_size(records(), size, FILE_BYTES)):
            file = output / f"part-{part:05d}.{config.format}"
            if not file.is_file():
                vectors = embeddings(
                    model,  # type: ignore[arg-type]  # an export's denoiser is its model
                    exported.paradigm,
                    [record.tokens for record in chunk],
                    layer=config.layer,
                    pooled=config.pooled,
                    token_budget=config.token_budget,
                    progress=progress.advance,
                )
                with written_beside(file) as unfinished:
                    if config.format == "parquet":
                        pq.write_table(_table(chunk, vectors), unfinished)
                    else:
                        names = json.dumps([record.name for record in chunk])
                        tensors = {str(number + i): one for i, one in enumerate(vectors)}
                        content = save(tensors, {"names": names, "first": str(number)})
                        unfinished.write_bytes(content)  # save_file makes files of mode 0600
            else:
                progress.advance(sum(len(record.tokens) + 2 for record in chunk))
            number += len(chunk)
    return number


def _table(records: list[FastaRecord], vectors: list[NDArray[np.float32]]) -> pa.Table:
    """Table with the columns `name` and `embedding`, a vector or a list of residues' vectors."""
    width = vectors[0].shape[-1]
    values = pa.FixedSizeListArray.from_arrays(
        pa.array(np.concatenate([one.reshape(-1) for one in vectors])), width
    )
    if vectors[0].ndim == 2:
        bounds = np.cumsum([0, *(len(one) for one in vectors)])
        values = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values)
    names = pa.array([record.name for record in records])
    return pa.table({"name": names, "embedding": values})
