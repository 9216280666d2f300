"""The manifest of prepared data: how the stores in a folder were made, and which they are."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import nearest_path, read_json
from d2plm.data.store import SequenceStore

MANIFEST = "manifest.json"
RAW = "raw_lmdb"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The results of `d2plm prepare` in a folder.

    Attributes:
        manifest: its manifest, as `prepare` returned it.
        splits: the stores by the names of their splits: train, validation, test if there is one.
        stores: those, and the raw store that they were made from if it is in the folder, too.
        account: `digests` of the splits, their `origin` with what was dropped and why, and the
            `verification` that no homologs are left between them.
        provenance: the account, the settings of the `search`, and the numbers of sequences,
            residues and clusters of each of the `splits`; saved with models trained on them.
    """

    manifest: dict[str, Any]
    splits: dict[str, SequenceStore]
    stores: list[SequenceStore]
    account: dict[str, Any]
    provenance: dict[str, Any]


def is_prepared(path: Path) -> bool:
    """Whether a folder holds prepared data, whole or not, rather than one store or nothing."""
    try:
        manifest = read_manifest(path)
    except DataError:
        return False
    return manifest is not None and manifest.get("format") == "d2plm.prepared"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the prepared data in a folder; None where there is none.

    Raises:
        DataError: it is damaged.
    """
    return read_json(path / MANIFEST)


def open_prepared(path: Path) -> PreparedData:
    """Open prepared data and the stores in them.

    Raises:
        DataError: something is missing or damaged, or a store is not the one that was prepared.
    """
    if not path.is_dir():
        near = nearest_path(path)
        raise DataError(f"{path}: no prepared data there{near}; run d2plm prepare, or set the path")
    file = path / MANIFEST
    with _reading(path):
        manifest = json.loads(file.read_text())
        account, provenance = _account(manifest), _provenance(manifest)
        digests = {f"{split}_lmdb": digest for split, digest in manifest["digests"].items()}
        if (path / RAW).exists():
            digests[RAW] = manifest["raw_digests"]["sequences"]
    stores = {name: SequenceStore(path / name) for name in digests}
    for name, store in stores.items():
        if store.digest != digests[name]:
            raise DataError(
                f"{store.path}: is not the store that {file} names; prepare the data again"
            )
    splits = {split: stores[f"{split}_lmdb"] for split in manifest["digests"]}
    return PreparedData(manifest, splits, list(stores.values()), account, provenance)


def require_no_homologs_of(held_out: SequenceStore, prepared_dir: Path) -> None:
    """Refuse prepared data whose training sequences were not searched for homologs of `held_out`.

    Raises:
        DataError: if they were not, or the data cannot be read.
    """
    with _reading(prepared_dir):
        manifest = json.loads((prepared_dir / MANIFEST).read_text())
        own = [digest for name, digest in manifest["digests"].items() if name != "train"]
        excluded = manifest["settings"]["split"]["exclude_homologs_of"]
    if held_out.digest not in (*own, *excluded):
        raise DataError(
            f"{prepared_dir}: its training sequences may be homologs of the held-out ones in "
            f"{held_out.path}; prepare it again with exclude_homologs_of=[{held_out.path}]"
        )


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / MANIFEST}: cannot be read ({error!r}); prepare the data again"
        ) from None


def _account(manifest: dict[str, Any]) -> dict[str, Any]:
    counts = manifest["counts"]
    pairs: dict[str, dict[str, list[int]]] = {}
    for search in manifest["searches"]:
        found_in = pairs.setdefault(f"in_{search['dropped_from']}", {})
        found_in.setdefault(f"searched_{search['direction']}", []).append(search["pairs"])
    return {
        "digests": manifest["digests"],
        "origin": {
            "key": manifest["key"],
            "input": manifest["input"],
            "records": counts["input"],
            "duplicates": counts["duplicates"],
            "dropped": {**counts["dropped"], "homologs_of_held_out": counts["leaking_dropped"]},
        },
        "verification": {
            "pairs_found": pairs,
            "leaking_pairs_after": manifest["leaking_pairs_after"],
        },
    }


def _provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    counts, units = manifest["counts"], ("sequences", "residues", "clusters")
    return {
        **_account(manifest),
        "search": manifest["settings"]["search"],
        "splits": {
            split: {unit: counts[f"{split}_{unit}"] for unit in units}
            for split in manifest["digests"]
        },
    }
