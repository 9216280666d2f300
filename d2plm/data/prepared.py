"""A folder of prepared data: the stores in it, and the account of how they were made."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import nearest_path
from d2plm.data.store import SequenceStore

MANIFEST = "manifest.json"
_RAW = "raw_lmdb"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What `d2plm prepare` left in a folder.

    Attributes:
        path: the folder.
        splits: the stores by the names of their splits: train, validation, test if there is one.
        stores: those, and the raw one that they were made from if it is in the folder, too.
        account: `digests` of the splits, their `origin` with what was dropped and why, and the
            `verification` that no homologs are left between them.
        provenance: what a model that is trained on them says of them: the account, the settings of
            the `search`, and how many sequences, residues and clusters each of the `splits` has.
    """

    path: Path
    splits: dict[str, SequenceStore]
    stores: list[SequenceStore]
    account: dict[str, Any]
    provenance: dict[str, Any]


def is_prepared(path: Path) -> bool:
    """Whether a folder holds prepared data, whole or not, rather than one store or nothing."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == "d2plm.prepared"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The account of prepared data as it was written; None where a folder has none.

    Raises:
        DataError: if it is damaged.
    """
    file = path / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); prepare the data again") from error
    return manifest


def open_prepared(path: Path) -> PreparedData:
    """Open prepared data and the stores in them.

    Raises:
        DataError: something is missing or damaged, or a store is not the one that was prepared.
    """
    if not path.is_dir():
        near = nearest_path(path)
        raise DataError(f"{path}: no prepared data there{near}; run d2plm prepare, or set the path")
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
        account, provenance = _account(manifest), _provenance(manifest)
        digests = {f"{split}_lmdb": digest for split, digest in manifest["digests"].items()}
        if (path / _RAW).exists():
            digests[_RAW] = manifest["raw_digests"]["sequences"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: cannot be read ({error!r}); prepare the data again") from None
    stores = {name: SequenceStore(path / name) for name in digests}
    for name, store in stores.items():
        if store.digest != digests[name]:
            raise DataError(
                f"{store.path}: is not the store that {file} names; prepare the data again"
            )
    splits = {split: stores[f"{split}_lmdb"] for split in manifest["digests"]}
    return PreparedData(path, splits, list(stores.values()), account, provenance)


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
