"""Requests with relatives: the same results as in Python, within the service's limits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from d2plm import load_model
from d2plm.api import SequenceModel
from d2plm.export.exported_model import load_export
from d2plm.serving.service import Service
from tests.conftest import Exports
from tests.unit.serving import conftest

FAMILY = ["MKTAYIAKQRLL", "MKSAYLAKQRL", "MRTAFIAKHRLLGG", "MKTGYIAQRL", "MHTAYIARQRLV"]
PROTEINS = ["MKTAYIAKQRLI", "GSHMLVAGG"]
Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def library(exports: Exports) -> SequenceModel:
    return load_model(exports.related)


@pytest.fixture(scope="module")
def ask(exports: Exports) -> Iterator[Ask]:
    """(columns, **params) → (status, document)."""
    with conftest.asking(Service(load_export(exports.related), 65536)) as ask:
        yield lambda columns, **params: ask({"inputs": columns, "params": params})


def rows_of(answer: tuple[int, dict[str, Any]], column: str) -> list[Any]:
    status, document = answer
    assert status == 200, document
    return [row[column] for row in document["predictions"]]


def test_scores_given_relatives_are_those_of_the_library(ask: Ask, library: SequenceModel) -> None:
    given = rows_of(ask({"sequence": PROTEINS}, relatives=FAMILY, max_relatives=2), "nats")
    expected = library.score(PROTEINS, relatives=FAMILY, max_relatives=2)
    assert given == pytest.approx([one.nats for one in expected], rel=1e-6)
    alone = rows_of(ask({"sequence": PROTEINS}), "nats")
    assert alone == pytest.approx([one.nats for one in library.score(PROTEINS)], rel=1e-6)
    assert all(one != pytest.approx(other) for one, other in zip(given, alone, strict=True))
    assert rows_of(ask({"sequence": PROTEINS}, relatives=[]), "nats") == alone
    long = (FAMILY[0] * 200)[:3000]  # is cut
    found = rows_of(ask({"sequence": PROTEINS}, relatives=[long]), "nats")
    expected = library.score(PROTEINS, relatives=[long[:2048]])
    assert found == pytest.approx([one.nats for one in expected], rel=1e-6)


def test_designs_given_relatives_are_those_of_the_library(ask: Ask, library: SequenceModel) -> None:
    settings = {"steps": 4, "seed": 3, "relatives": FAMILY}
    answer = ask({"length": [None]}, task="generate", number=6, **settings)
    found = rows_of(answer, "sequence")
    assert found == library.generate(6, **settings)
    assert {len(text) for text in found} <= {len(text) for text in FAMILY}
    assert all(text.endswith("relatives=5") for text in rows_of(answer, "settings"))
    template = "MKT____KQR__"
    filled = rows_of(ask({"sequence": [template]}, task="infill", number=3, **settings), "sequence")
    assert filled == library.infill(template, 3, **settings)
    assert filled != library.infill(template, 3, steps=4, seed=3)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"relatives": "MKT"}, "params.relatives='MKT': "),
        ({"relatives": ["MKT", "MJT"]}, "relative 1: the sequence holds 'J'"),
        ({"relatives": ["XX"]}, "there are no relatives"),
        ({"relatives": [""] * 250_000}, "params.relatives=['', '', "),
        ({"relatives": FAMILY, "max_relatives": 17}, "params.max_relatives=17: "),
        ({"relatives": ["M" * 40_000] * 2}, "relatives: the request has"),
        ({"max_relatives": 3}, "max_relatives=3: "),
    ],
)
def test_bad_relatives_are_rejected(ask: Ask, params: dict[str, Any], reason: str) -> None:
    status, document = ask({"sequence": ["MKT"]}, **params)
    assert (status, document["error_code"]) == (400, "INVALID_PARAMETER_VALUE")
    assert reason in document["message"]
    assert len(document["message"]) < 600


def test_what_gives_a_protein_away_is_left_out_of_its_relatives(ask: Ask) -> None:
    away = [f"GG{PROTEINS[0]}GG", PROTEINS[0], PROTEINS[0][3:9]]
    columns = {"sequence": PROTEINS[:1]}
    more, fewer = ask(columns, relatives=[*FAMILY, *away]), ask(columns, relatives=FAMILY)
    assert rows_of(more, "nats") == rows_of(fewer, "nats")
    status, document = ask({"sequence": PROTEINS[:1]}, relatives=away)
    assert status == 400
    assert document["message"].startswith("relatives: ")


def test_a_model_that_takes_none_rejects_them(service: Service) -> None:
    with conftest.asking(service) as ask:
        status, document = ask({"inputs": {"sequence": ["MKT"]}, "params": {"relatives": FAMILY}})
    assert status == 400
    assert document["message"].startswith("relatives: not supported")
