"""d2plm embed: embeddings of sequences or tokens, in files of bounded size.

Each file is written atomically, so an interrupted run continues after the last one. `manifest.json`
records the model, the input and the settings, so that embeddings of different ones are never mixed.
Shards write the same files for their own records, and are joined in the order of the input.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from d2plm.core.batch import of_size
from d2plm.core.errors import DataError, require
from d2plm.core.files import read_json, require_other_output, write_text, written_beside
from d2plm.core.locks import locked
from d2plm.core.precision import resolve_precision
from d2plm.core.progress import Progress
from d2plm.core.shards import Shard, in_shards, interleaved
from d2plm.core.terminal import done
from d2plm.data.fasta import FastaRecord
from d2plm.data.ingest import digest_of_files
from d2plm.data.sources import read_sequences
from d2plm.evaluation.embedding import embeddings, layer_number
from d2plm.export.exported_model import weights_digest
from d2plm.settings.commands import EmbedSettings
from d2plm.tracking.locations import open_model

MANIFEST = "manifest.json"
PART = "part-[0-9]*"
FILE_BYTES = 1 << 28  # bytes of embeddings after which a file is closed
BUFFER_BYTES = 1 << 20  # read buffer per shard while they are joined

Vectors = Callable[..., list[NDArray[np.float32]]]  # arguments: sequences, progress


def run(config: EmbedSettings) -> dict[str, Any]:
    """Embed every protein of the input, in its order.

    Raises:
        DataError: if the input is invalid, or the folder contains other embeddings.
    """
    shard = Shard.of(config.shard)
    output, source = Path(str(config.output)), str(config.input)
    require_other_output("output", output, [source], is_folder=True)
    wanted = "a folder with a name, because files are written beside it"
    require(output.name not in ("", ".."), "output", config.output, wanted)
    exported = open_model(config.model_dir, config.device, config.tracking_uri, key="model_dir")
    made_of = {
        "model": weights_digest(exported.folder),
        "input": digest_of_files("input", source),
        "window": config.window,
        "max_residues": config.max_residues,
        "layer": layer_number(exported.model, config.layer),
        "width": exported.model.config.hidden_size,
        **{key: getattr(config, key) for key in ("pooled", "format")},
        "precision": str(resolve_precision(config.precision, exported.model.device)),
    }
    records = partial(
        read_sequences, source, exported.vocabulary, config.window, config.max_residues
    )

    # Rejected before hours of work.
    own = exported.all_short_enough(shard.of_all(records()))
    total = sum(len(record.tokens) + 2 for record in own)
    vectors_of = partial(
        embeddings,
        exported.denoiser(config.precision),  # type: ignore[arg-type]  # an export's is its model
        exported.paradigm,
        layer=config.layer,
        pooled=config.pooled,
        token_budget=config.token_budget,
    )
    write = partial(_write, config, made_of)
    if config.shard is None:
        content = write(output, records, total, vectors_of)
    else:
        _known(output, made_of)

        def compute(part: Path) -> None:
            unfinished = part.with_name(f"unfinished.{part.name}")
            write(unfinished, lambda: shard.of_all(records()), total, vectors_of)
            os.replace(unfinished, part)

        def join(parts: list[Path]) -> None:
            stored = interleaved(_stored(part, config.format) for part in parts)
            _known(output, made_of)
            for file in output.glob(f"{PART}.{config.format}"):  # left by a kill while joining
                file.unlink()
            write(output, records, None, lambda chunk, progress: [*islice(stored, len(chunk))])

        def is_complete() -> bool:
            return bool((_known(output, made_of) or {}).get("complete"))

        if missing := in_shards(output, shard, made_of, compute, join, is_complete):
            return {"output": str(output), "shard": str(shard), "missing": missing}
        content = read_json(output / MANIFEST) or {}
    units = f"{exported.vocabulary.nouns.sequence}s"
    done(f"wrote {output} ({content['proteins']:,} {units}, layer {made_of['layer']})")
    return {"model_dir": config.model_dir, "output": str(output), **content}


def _known(output: Path, made_of: dict[str, Any]) -> dict[str, Any] | None:
    """Manifest of the same embeddings, if begun; `DataError` if the folder contains others."""
    known = read_json(output / MANIFEST)
    if known is not None and all(known.get(key) == own for key, own in made_of.items()):
        return known
    # A run that was killed before its first part leaves only an incomplete manifest.
    if (known or {"complete": False}).get("complete", True) or any(output.glob(PART)):
        raise DataError(
            f"{output}: contains embeddings of another model, input or setting; choose another "
            "output, or delete it"
        )
    return None


def _write(
    config: EmbedSettings,
    made_of: dict[str, Any],
    output: Path,
    records: Callable[[], Iterable[FastaRecord]],
    total: int | None,
    vectors_of: Vectors,
) -> dict[str, Any]:
    """Write the missing files of a folder and its manifest, which is returned."""
    width = made_of["width"]

    def size(record: FastaRecord) -> int:
        return 4 * width * len(record.tokens)

    number = 0
    with (
        locked(output.with_name(f"{output.name}.lock"), f"another process writes to {output}"),
        Progress("embedding", total, unit="tokens") as progress,
    ):
        if _known(output, made_of) is None:
            write_text(output / MANIFEST, json.dumps({**made_of, "complete": False}, indent=2))
        # The chunks are the same in every run.
        for part, chunk in enumerate(of_size(records(), size, FILE_BYTES)):
            file = output / f"part-{part:05d}.{config.format}"
            if not file.is_file():
                sequences = [record.tokens for record in chunk]
                vectors = vectors_of(sequences, progress=progress.advance)
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
        manifest = {**made_of, "complete": True, "proteins": number}
        write_text(output / MANIFEST, json.dumps(manifest, indent=2))
    return manifest


def _stored(folder: Path, format_: str) -> Iterator[NDArray[np.float32]]:
    """Yield the vectors in the files of a folder, in order, with few in memory at a time."""
    for file in sorted(folder.glob(f"{PART}.{format_}")):
        if format_ == "safetensors":
            with safe_open(file, "np") as tensors:
                yield from map(tensors.get_tensor, sorted(tensors.keys(), key=int))
            continue
        with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as table:
            for batch in table.iter_batches(64, columns=["embedding"]):
                for row in batch.column(0):
                    yield np.stack(row.values.to_numpy(zero_copy_only=False))


def _table(records: list[FastaRecord], vectors: list[NDArray[np.float32]]) -> pa.Table:
    """Build a table with `name` and `embedding`: a vector, or a list of vectors of residues."""
    width = vectors[0].shape[-1]
    values = pa.FixedSizeListArray.from_arrays(
        pa.array(np.concatenate([one.reshape(-1) for one in vectors])), width
    )
    if vectors[0].ndim == 2:
        bounds = np.cumsum([0, *(len(one) for one in vectors)])
        values = pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values)
    names = pa.array([record.name for record in records])
    return pa.table({"name": names, "embedding": values})
