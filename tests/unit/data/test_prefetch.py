"""prefetch: the same batches in the same order, read ahead where there is a GPU to copy to."""

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

import pytest
import torch

from d2plm.core.errors import DataError
from d2plm.data.loader import Collection, GlobalBatch, PackedLoader, Position
from d2plm.data.prefetch import prefetch, read_ahead
from d2plm.data.store import SequenceStore
from tests.conftest import MonkeyPatch
from tests.unit.data.test_loader import content

BATCHES = 20


def stream(store: SequenceStore, **settings: Any) -> Iterator[GlobalBatch]:
    settings = {"token_budget": 512, "max_length": 128, "micro_batches": 2, **settings}
    return islice(PackedLoader([Collection(store)], **settings).stream(Position()), BATCHES)


@pytest.mark.parametrize("enabled", [True, False])
def test_on_a_cpu_the_very_same_batches_pass_through_and_none_is_read_ahead(
    tiny_store: SequenceStore, enabled: bool, monkeypatch: MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("no thread and no stream is needed")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    batches = list(stream(tiny_store))
    source = iter(batches)
    fetched = prefetch(source, torch.device("cpu"), enabled=enabled)
    for batch in batches[:5]:
        assert next(fetched) is batch
    assert next(source) is batches[5]
    assert [id(batch) for batch in fetched] == [id(batch) for batch in batches[6:]]
    # The meta device stands for others: shapes arrive, lists stay on the host.
    copied = list(prefetch(iter(batches), torch.device("meta"), enabled=enabled))
    for ours, theirs in zip(copied, batches, strict=True):
        assert (ours.following, ours.segment_lengths) == (theirs.following, theirs.segment_lengths)
        assert {packed.tokens.device.type for packed in ours.micro_batches} == {"meta"}


def test_a_thread_makes_the_next_batch_while_one_is_used(tiny_store: SequenceStore) -> None:
    asked = [threading.Event() for _ in range(BATCHES)]

    def source() -> Iterator[GlobalBatch]:
        for event, batch in zip(asked, stream(tiny_store), strict=True):
            event.set()
            yield batch
        raise DataError("the store is gone")

    made = read_ahead(source())
    for number, theirs in enumerate(islice(stream(tiny_store), BATCHES - 1)):
        assert content(next(made)) == content(theirs)
        assert asked[number + 1].wait(10)
    next(made)
    with pytest.raises(DataError, match="gone"):
        next(made)
    assert list(read_ahead(islice(stream(tiny_store), 0))) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_on_a_gpu_order_and_content_are_those_of_a_plain_copy(
    tiny_store: SequenceStore, enabled: bool, pin_memory: bool
) -> None:
    device, count = torch.device("cuda"), 0
    fetched = prefetch(stream(tiny_store, pin_memory=pin_memory), device, enabled=enabled)
    for ours, theirs in zip(fetched, stream(tiny_store), strict=True):
        assert all(packed.tokens.is_cuda for packed in ours.micro_batches)
        # Work that frees and takes device memory while the next batch is being copied.
        for packed in ours.micro_batches:
            assert int(packed.tokens.long().sum()) == int(packed.tokens.cpu().long().sum())
        assert content(ours) == content(theirs)
        count += 1
    assert count == BATCHES
    batches = list(stream(tiny_store))
    source = iter(batches)
    assert content(next(prefetch(source, device))) == content(batches[0])
    assert next(source) is batches[2]  # one was read ahead
