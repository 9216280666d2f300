"""Which sequences are relatives of which: arrays, and what a loader draws from them."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from d2plm.core.batch import PackedBatch
from d2plm.core.errors import DataError
from d2plm.core.vocabulary import PROTEIN, Tokens
from d2plm.data import loader as module
from d2plm.data.loader import Collection, GlobalBatch, PackedLoader, Position
from d2plm.data.relatives import LONGEST_RELATIVE, RelativesIndex, aligned_part
from d2plm.data.store import SequenceStore
from tests.conftest import write_store

MOST = 3


def ring(count: int) -> RelativesIndex:
    """Six followers of each sequence, at identities of 95, 80, 60, 40, 85 and 45 per cent."""
    queries = np.repeat(np.arange(count), 6)
    targets = (queries + np.tile(np.arange(1, 7), count)) % count
    identities = np.tile([0.95, 0.8, 0.6, 0.4, 0.85, 0.45], count)
    return RelativesIndex.of_hits(count, queries, targets, identities, 6)


def loader(store: SequenceStore, **changes: Any) -> PackedLoader:
    settings = {"token_budget": 512, "max_length": 128, "max_relatives": MOST, **changes}
    collections = [Collection(store, relatives=ring(len(store)))]
    return PackedLoader(settings.pop("collections", collections), **settings)


def drawn(batch: PackedBatch) -> dict[int, list[bytes]]:
    """Sequence → its relatives' residues."""
    assert batch.relatives is not None
    found: dict[int, list[bytes]] = {int(i): [] for i in batch.sequence_ids[batch.real()]}
    for number, segment in enumerate(batch.relatives.segments):
        own = slice(*batch.relatives.bounds[number : number + 2])
        sequence = int(batch.sequence_ids[int(segment)])
        found[sequence].append(batch.relatives.tokens[own].tobytes())
    return found


def in_epoch(batches: list[GlobalBatch]) -> dict[int, list[bytes]]:
    every: dict[int, list[bytes]] = {}
    for batch in batches:
        for packed in batch.micro_batches:
            every |= drawn(packed)
    return every


def epoch_of(made: PackedLoader) -> list[GlobalBatch]:
    return list(islice(made.stream(Position()), made.batches_in_epoch(0)))


def test_hits_are_kept_by_query_in_their_order_up_to_a_number_between_two_identities() -> None:
    queries, targets = np.array([2, 2, 0, 2, 2, 2, 0, 2]), np.array([2, 5, 4, 3, 1, 0, 2, 4])
    identities = np.array([1.0, 0.9, 0.5, 0.3, 0.95, 1.0, 0.4, 0.2])  # the first is of itself
    index = RelativesIndex.of_hits(4, queries, targets, identities, 2)
    assert index.bounds.tolist() == [0, 2, 2, 6, 6]
    assert index.targets.tolist() == [4, 2, 5, 3, 1, 4]  # of three from 0.9 on the first two
    assert index.below(2, 0.9).tolist() == [3, 4]  # one of 0.9 is not below
    assert index.below(0, 1.1).tolist() == [4, 2]
    assert len(index) == 4


def test_an_index_is_saved_whole_and_damage_is_reported(tmp_path: Path) -> None:
    index, folder = ring(20), tmp_path / "relatives"
    index.save(folder)
    loaded = RelativesIndex.load(folder)
    assert loaded.digest == index.digest
    assert loaded.below(3, 0.7).tolist() == index.below(3, 0.7).tolist()
    (folder / "targets.npy").write_bytes((folder / "targets.npy").read_bytes()[:-8])
    with pytest.raises(DataError, match=r"targets\.npy"):
        RelativesIndex.load(folder)


def test_an_epoch_draws_relatives_below_an_identity_or_none(tiny_store: SequenceStore) -> None:
    found, index = in_epoch(epoch_of(loader(tiny_store))), ring(len(tiny_store))
    assert sorted(found) == list(range(len(tiny_store)))
    texts = [tokens[:LONGEST_RELATIVE].tobytes() for tokens in tiny_store]
    for sequence, relatives in found.items():
        below = [index.below(sequence, identity) for identity in module.IDENTITIES]
        allowed = [[texts[i] for i in own[:most]] for own in below for most in range(MOST + 1)]
        assert relatives in allowed
    alone = np.mean([not relatives for relatives in found.values()])
    assert abs(alone - module.WITHOUT_RELATIVES) < 4 * (0.2 * 0.8 / len(tiny_store)) ** 0.5
    assert {len(relatives) for relatives in found.values()} == {0, 1, 2, 3}


@pytest.mark.parametrize("change", [{"num_workers": 2}, {"bins_per_micro_batch": 2}])
def test_workers_and_rows_change_nothing(tiny_store: SequenceStore, change: dict[str, int]) -> None:
    # In rows of several bins sequences change places, and their relatives with them.
    micro_batches = 2 // change.get("bins_per_micro_batch", 1)
    expected = in_epoch(epoch_of(loader(tiny_store, micro_batches=2)))
    assert in_epoch(epoch_of(loader(tiny_store, micro_batches=micro_batches, **change))) == expected


def test_ranks_and_a_resumed_loader_draw_the_same(tiny_store: SequenceStore) -> None:
    whole = epoch_of(loader(tiny_store, micro_batches=2))
    ranks = [epoch_of(loader(tiny_store, rank=rank, world_size=2)) for rank in (0, 1)]
    assert in_epoch(ranks[0]) | in_epoch(ranks[1]) == in_epoch(whole)
    rest = list(islice(loader(tiny_store, micro_batches=2).stream(whole[1].following), 3))
    assert in_epoch(rest) == in_epoch(whole[2:5])


def test_relatives_of_a_mixture_are_its_members(tiny_store: SequenceStore, tmp_path: Path) -> None:
    first, second = list(tiny_store)[:30], list(tiny_store)[30:90]
    stores = [write_store(tmp_path / name, own) for name, own in (("a", first), ("b", second))]
    collections = [Collection(store, 1.0, relatives=ring(len(store))) for store in stores]
    made = loader(tiny_store, collections=collections)
    proteins = [tokens[:LONGEST_RELATIVE].tobytes() for tokens in (*first, *second)]
    related = 0
    for batch in epoch_of(made):
        for sequence, relatives in drawn(batch.micro_batches[0]).items():
            own = proteins[:30] if sequence < 30 else proteins[30:]
            related += len(relatives)
            assert set(relatives) <= set(own)
    assert related > 30


def residues(random: np.random.Generator, length: int) -> Tokens:
    return random.integers(4, 24, length).astype(np.uint8)


def homolog(random: np.random.Generator, protein: Tokens, identity: float) -> Tokens:
    """Residues replaced, and one in fifty deleted or doubled."""
    others = residues(random, len(protein))
    changed = np.where(random.random(len(protein)) < identity, protein, others)
    return np.repeat(changed, random.choice([0, 1, 2], len(protein), p=[0.01, 0.98, 0.01]))


@pytest.mark.parametrize(("length", "identity"), [(150, 0.6), (500, 0.4)])
@pytest.mark.parametrize(("before", "after"), [(0, 4000), (2500, 0), (30000, 2000)])
def test_a_long_relative_is_cut(identity: float, before: int, after: int, length: int) -> None:
    random = np.random.default_rng(0)
    protein = residues(random, length)
    own = homolog(random, protein, identity)
    relative = np.concatenate([residues(random, before), own, residues(random, after)])
    part = aligned_part(relative, protein)
    assert len(part) == LONGEST_RELATIVE
    assert own.tobytes() in part.tobytes()


def test_what_is_cut_of_a_relative_without_a_sign_of_its_place_is_the_end() -> None:
    random = np.random.default_rng(0)
    short = residues(random, LONGEST_RELATIVE)
    assert aligned_part(short, short) is short
    long = np.full(50_000, 4, dtype=np.uint8)  # one residue, over and over
    for protein in (PROTEIN.encode("WWWWHHHH", "w"), long[:300], PROTEIN.encode("M", "m")):
        assert aligned_part(long, protein).tobytes() == long[:LONGEST_RELATIVE].tobytes()
    longer = np.concatenate([residues(random, 9000), short, residues(random, 900)])
    protein = np.concatenate([residues(random, 500), short, residues(random, 500)])
    assert longer[9200:10848].tobytes() in aligned_part(longer, protein).tobytes()
