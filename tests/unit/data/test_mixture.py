"""Mixtures of stores: segments come from the right store, and leaking mixtures are rejected."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from d2plm.assembly.training_run import training_collections
from d2plm.config import compose
from d2plm.core.errors import ConfigError, DataError
from d2plm.core.vocabulary import CLS, DNA, EOS, PROTEIN
from d2plm.data.loader import Collection, PackedLoader, Position
from d2plm.data.store import SequenceStore
from tests.conftest import MonkeyPatch, write_store

Stores = dict[str, SequenceStore]
Prepare = Callable[..., Path]


def test_segments_come_from_the_numbered_store(tiny_store: SequenceStore, tmp_path: Path) -> None:
    others = [np.full(n, residue, dtype=np.uint8) for n in (30, 200) for residue in range(4, 24)]
    stores = [tiny_store, write_store(tmp_path / "others", others)]
    mixed = [Collection(stores[0], weight=3), Collection(stores[1], weight=1)]
    loader = PackedLoader(mixed, token_budget=512, max_length=128)
    draws = [0, 0]
    for batch in islice(loader.stream(Position()), loader.batches_in_epoch(0)):
        (packed,) = batch.micro_batches
        for number, row in zip(packed.sequence_ids.tolist(), packed.split(), strict=False):
            which = int(number >= len(tiny_store))
            residues = stores[which][number - which * len(tiny_store)]
            whole = np.array([CLS, *residues, EOS], dtype=np.uint8)
            assert len(row) == min(len(whole), 128)
            assert row.numpy().tobytes() in whole.tobytes()
            draws[which] += 1
    assert draws == [120, 40]  # of 120 + 40 sequences, three quarters and one quarter


@pytest.fixture
def stores(tmp_path: Path, proteins: list[np.ndarray]) -> Stores:
    """What `open_stores` gives: a training store with clusters, and a validation store."""
    return {
        "train": write_store(tmp_path / "train", proteins[:30], [i // 3 for i in range(30)]),
        "validation": write_store(tmp_path / "validation", proteins[30:40]),
    }


@pytest.fixture
def prepare(tmp_path: Path, proteins: list[np.ndarray]) -> Prepare:
    """(name, its own validation digest, excluded digests) → a prepared folder."""

    def make(name: str, validation: str, excluded: list[str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_store(folder / "train_lmdb", proteins[50:60], [i // 2 for i in range(10)])
        manifest = {
            "alphabet": PROTEIN.describe(),
            "digests": {"validation": validation},
            "settings": {"split": {"exclude_homologs_of": excluded}},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


def collections(stores: Stores, *overrides: str) -> list[Collection]:
    return training_collections(compose("train", list(overrides)), stores)


def test_sampling_by_cluster_draws_one_of_each(stores: Stores, tiny_store: SequenceStore) -> None:
    (collection,) = collections(stores, "data.sampling=cluster")
    loader = PackedLoader([collection], token_budget=1024, max_length=1024)
    plan = loader.sampler.plan(0)
    assert sorted(int(i) // 3 for i in plan.order) == list(range(10))
    unclustered = collections({**stores, "train": tiny_store}, "data.sampling=cluster")
    with pytest.raises(DataError, match="has no clusters to sample by; prepare it"):
        PackedLoader(unclustered, token_budget=1024, max_length=1024)


def test_shuffled_proteins_keep_their_composition_alone(stores: Stores) -> None:
    (shuffled,), train = collections(stores, "data.residues=shuffled"), stores["train"]
    assert shuffled.sequences.digest != train.digest
    loader = PackedLoader([shuffled], token_budget=1024, max_length=1024)
    (batch,) = next(loader.stream(Position())).micro_batches
    for index, row in zip(batch.sequence_ids.tolist(), batch.split(), strict=False):
        residues, own = row.tolist()[1:-1], train[index].tolist()
        assert sorted(residues) == sorted(own) and residues != own


def test_a_mixture_is_of_training_stores_with_weights(stores: Stores, prepare: Prepare) -> None:
    digest = stores["validation"].digest
    own, other = prepare("own", digest, []), prepare("other", "another", ["first", digest])
    both = f"a: {{prepared_dir: {own}, weight: 0.7}}, b: {{prepared_dir: {other}, weight: 0.3}}"
    mixed = collections(stores, f"data.mixture={{{both}}}", "data.sampling=cluster")
    assert [(one.weight, one.by_cluster) for one in mixed] == [(0.7, True), (0.3, True)]
    paths = [one.sequences.path for one in mixed if isinstance(one.sequences, SequenceStore)]
    assert paths == [own / "train_lmdb", other / "train_lmdb"]


@pytest.mark.parametrize(
    "member",
    ["{weight: 1}", "{prepared_dir: x, weight: 1, seed: 2}", "{prepared_dir: 5, weight: 1}", "x"],
)
def test_a_member_of_another_form_is_rejected_by_name(stores: Stores, member: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.mixture\.swiss=.*prepared_dir: FOLDER, weight"):
        collections(stores, f"data.mixture={{swiss: {member}}}")


def test_a_member_that_is_not_comparable_is_rejected(
    stores: Stores, prepare: Prepare, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Not searched for homologs of the held-out ones, not prepared, of another alphabet."""
    foreign = prepare("foreign", "another", ["a third"])
    word = "data.mixture={{a: {{prepared_dir: {}, weight: 1}}}}".format
    with pytest.raises(DataError, match=r"homologs of the held-out ones.*exclude_homologs_of=\["):
        collections(stores, word(foreign))
    with pytest.raises(DataError, match="no prepared data there"):
        collections(stores, word(tmp_path))
    for store in stores.values():
        monkeypatch.setattr(store, "vocabulary", DNA)
    with pytest.raises(ConfigError, match=r"mixture\.a: .* has another vocabulary \(protein\)"):
        collections(stores, word(foreign))
