"""The manifest of prepared data: the origin and the digests of the stores in a folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError
from d2plm.core.files import nearest_path, read_json
from d2plm.data.relatives import RelativesIndex
from d2plm.data.store import SequenceStore

MANIFEST = "manifest.json"
RAW = "raw_lmdb"
TRAIN_RELATIVES = "train_relatives"


@dataclass(frozen=True, slots=True)
class PreparedData:
    """The results of `d2plm prepare` in a folder.

    Attributes:
        manifest: the manifest, as returned by `prepare`.
        splits: the stores by split: train, validation, and test if there is one.
        stores: the splits, and the raw store if it is in the folder.
        account: `digests` of the splits, their `origin` with what was dropped and why, and the
            `verification` that no homologs are left between them.
        provenance: the account, the settings of the `search`, and the numbers of sequences,
            residues and clusters of each of the `splits`; saved with models trained on them.
        relatives: relatives of the training sequences in the training set; None if not searched.
    """

    manifest: dict[str, Any]
    splits: dict[str, SequenceStore]
    stores: list[SequenceStore]
    account: dict[str, Any]
    provenance: dict[str, Any]
    relatives: RelativesIndex | None

    def verify_relatives(self) -> None:
        """Raise `DataError` if the relatives do not match their digest."""
        if self.relatives is not None and self.relatives.digest != self.manifest.get("relatives"):
            raise DataError(
                f"{TRAIN_RELATIVES}: damaged, or without a digest; prepare the data again"
            )


def is_prepared(path: Path) -> bool:
    """Whether a folder contains prepared data, complete or not, instead of one store."""
    try:
        manifest = read_manifest(path)
    except DataError:
        return False
    return manifest is not None and manifest.get("format") == "d2plm.prepared"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of prepared data; None if there is none; `DataError` if it is damaged."""
    return read_json(path / MANIFEST)


def open_prepared(path: Path) -> PreparedData:
    """Open prepared data and the stores in them.

    Raises `DataError` if something is missing or damaged, or a store does not match the manifest.
    """
    with _manifest_of(path) as manifest:
        provenance = _provenance(manifest)
        digests = {f"{split}_lmdb": digest for split, digest in manifest["digests"].items()}
        if (path / RAW).exists():
            digests[RAW] = manifest["raw_digests"]["sequences"]
    stores = {name: SequenceStore(path / name) for name in digests}
    for name, store in stores.items():
        if store.digest != digests[name]:
            raise DataError(
                f"{store.path}: is not the store that {path / MANIFEST} names; prepare the data "
                "again"
            )
    splits = {split: stores[f"{split}_lmdb"] for split in manifest["digests"]}
    account = {name: provenance[name] for name in ("digests", "origin", "verification")}
    relatives = None
    if "relatives" in manifest["settings"]:
        relatives = RelativesIndex.load(path / TRAIN_RELATIVES)
        if len(relatives) != len(splits["train"]):
            raise DataError(
                f"{path / TRAIN_RELATIVES}: is of other training sequences than those beside it; "
                "prepare the data again"
            )
    return PreparedData(manifest, splits, list(stores.values()), account, provenance, relatives)


def require_no_homologs_of(held_out: SequenceStore, prepared_dir: Path) -> None:
    """Raise `DataError` unless homologs of `held_out` were removed from the training sequences."""
    with _manifest_of(prepared_dir) as manifest:
        own = [digest for name, digest in manifest["digests"].items() if name != "train"]
        excluded = manifest["settings"]["split"]["exclude_homologs_of"]
        alphabet = manifest["alphabet"]
    comparable = alphabet == held_out.vocabulary.describe()  # others have no homologs there
    if comparable and held_out.digest not in (*own, *excluded):
        raise DataError(
            f"{prepared_dir}: its training sequences may be homologs of the held-out ones in "
            f"{held_out.path}; prepare it again with exclude_homologs_of=[{held_out.path}]"
        )


@contextmanager
def _manifest_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest; a missing key in the block is reported as file damage."""
    manifest = read_manifest(folder)
    if manifest is None:
        near = nearest_path(folder)
        raise DataError(
            f"{folder}: no prepared data there{near}; run d2plm prepare, or set the path"
        )
    try:
        yield manifest
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder / MANIFEST}: cannot be read ({error!r}); prepare the data again"
        ) from None


def _provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    counts, units = manifest["counts"], ("sequences", "residues", "clusters")
    partial = counts["leaking_dropped_partial"]
    like = "overlaps_with" if "ngram" in manifest["settings"]["search"] else "homologs_of"
    leaking = {
        f"{like}_held_out": counts["leaking_dropped"] - partial,
        f"partial_{like}_held_out": partial,
    }
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
            **({"pieces": counts["pieces"]} if "pieces" in counts else {}),
            "duplicates": counts["duplicates"],
            "dropped": {**counts["dropped"], **leaking},
        },
        "verification": {
            "pairs_found": pairs,
            "leaking_pairs_after": manifest["leaking_pairs_after"],
        },
        "search": manifest["settings"]["search"],
        "splits": {
            split: {unit: counts[f"{split}_{unit}"] for unit in units}
            for split in manifest["digests"]
        },
    }
