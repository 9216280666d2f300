"""`load_model`: the results of the commands, from Python."""

import csv
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from d2plm import load_model
from d2plm.api import SequenceModel, retrieve_relatives
from d2plm.commands.generate import run as run_generate
from d2plm.commands.score import run as run_score
from d2plm.config import compose
from d2plm.core.errors import ConfigError, D2PLMError, DataError, ModelError
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import read_fasta
from d2plm.tracking import mlflow_run, registry
from tests.conftest import Exports, MonkeyPatch

PROTEINS = {"one": "MKTAYIAKQRQISFVKSHFSRQ", "two": "GSHMLEDPVAXLLK", "unknown": "XXX"}
TABLE = pd.DataFrame({"name": ["a", "b"], "sequence": ["MKTAY", "GSHML"]})
TEMPLATES = {"loop": "MKT____GGLL", "start": "<mask><mask>TAYIAKQR"}


@pytest.fixture(scope="module")
def model(exports: Exports) -> SequenceModel:
    return load_model(exports.masked, device="cpu", precision="fp32")


def command(run: Callable[[Any], object], name: str, *settings: str) -> None:
    run(compose(name, ["device=cpu", "precision=fp32", *settings]))


def sequences_in(file: Path) -> list[str]:
    return [decode(record.tokens) for record in read_fasta(file)]


def fasta(path: Path, records: dict[str, str]) -> Path:
    path.write_text("".join(f">{name}\n{text}\n" for name, text in records.items()))
    return path


def rows(path: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(path.read_text().splitlines())]


GENERATED: list[dict[str, Any]] = [
    {"number": 4, "max_length": 12, "seed": 7},
    {"number": 2, "length": [9, 14]},
    {"number": 1, "length": 20, "sampler": "remdm", "top_k": 4, "temperature": 0.7},
]


def test_it_designs_what_the_command_designs(model: SequenceModel, tmp_path: Path) -> None:
    output = tmp_path / "g.fasta"

    def designed(**given: Any) -> list[str]:
        own = [f"model_dir='{model.exported.folder}'", f"output='{output}'"]
        command(
            run_generate,
            "generate",
            *own,
            *(f"generation.{key}={value}" for key, value in given.items()),
        )
        return sequences_in(output)

    for settings in GENERATED:
        assert model.generate(**settings, steps=4) == designed(**settings, steps=4)
    templates = fasta(tmp_path / "templates.fasta", TEMPLATES)
    sampling: Any = {"number": 2, "seed": 3, "steps": 4}
    designs = model.infill(list(TEMPLATES.values()), **sampling)
    assert designs == designed(templates=f"'{templates}'", **sampling)
    assert all(design[:3] == "MKT" and design[7:] == "GGLL" for design in designs[:2])
    assert [len(design) for design in designs] == [11, 11, 10, 10]


def test_it_scores_as_the_command_scores(model: SequenceModel, tmp_path: Path) -> None:
    proteins, output = fasta(tmp_path / "p.fasta", PROTEINS), tmp_path / "scores.csv"
    own = [f"model_dir='{model.exported.folder}'", f"input='{proteins}'", f"output='{output}'"]
    command(run_score, "score", *own, "evaluation.masks_per_sequence=4", "evaluation.seed=5")
    sequences = list(PROTEINS.values())
    scores = model.score(sequences, masks_per_sequence=4, seed=5)
    pseudo = model.pseudo_log_likelihood(sequences)
    for row, score, one in zip(rows(output), scores, pseudo, strict=True):
        assert int(row["residues"]) == score.residues
        assert float(row["nats"]) == pytest.approx(score.nats, abs=1e-4)
        if score.residues:
            low, high = score.interval
            assert float(row["nats_low"]) == pytest.approx(low, abs=1e-4)
            assert float(row["nats_high"]) == pytest.approx(high, abs=1e-4)
            assert float(row["perplexity"]) == pytest.approx(score.perplexity, abs=1e-4)
            assert math.log(score.perplexity) * score.residues == pytest.approx(score.nats)
        assert float(row["pseudo_log_likelihood"]) == pytest.approx(one, abs=1e-4)
    assert scores[1].residues == len(PROTEINS["two"]) - 1  # X is not scored
    assert math.isnan(scores[2].perplexity)
    assert math.isnan(model.score("MKT", masks_per_sequence=1)[0].nats_low)


def test_it_scores_mutations_as_the_command_does(model: SequenceModel, tmp_path: Path) -> None:
    variants = ["A4G", "a4g;K8R", "WT", "M1L:Q22E"]
    table, output = tmp_path / "variants.csv", tmp_path / "scores.csv"
    table.write_text("mutant\n" + "\n".join(variants) + "\n")
    wild_type = fasta(tmp_path / "w.fasta", {"one": PROTEINS["one"]})
    own = [f"model_dir='{model.exported.folder}'", f"input='{wild_type}'"]
    command(run_score, "score", *own, f"mutations='{table}'", f"output='{output}'")
    scores = model.score_mutations(PROTEINS["one"], variants)
    expected = [float(row["d2plm_score"]) for row in rows(output)]
    assert scores == pytest.approx(expected, abs=1e-6)
    assert scores[2] == 0
    assert len(set(scores)) == 4
    shifted = [v.replace("A4", "A28") for v in variants[:1]]
    # Matrix products of a smaller batch round in another order.
    alone = model.score_mutations(PROTEINS["one"], shifted, mutation_offset=24)
    assert alone == pytest.approx(scores[:1], abs=1e-5)


def test_a_model_of_the_uniform_source_generates_and_scores(exports: Exports) -> None:
    uniform = load_model(exports.uniform, device="cpu", precision="fp32")
    assert uniform.generate(1, length=9, steps=3) == uniform.generate(1, length=9, steps=3)
    assert uniform.infill("MK__L", steps=3)[0].startswith("MK")
    assert uniform.score("MKTAY")[0].nats > 0
    with pytest.raises(ModelError, match=r"pseudo_log_likelihood: .* use score"):
        uniform.pseudo_log_likelihood("MKTAY")
    with pytest.raises(ModelError, match="score_mutations: "):
        uniform.score_mutations("MKTAY", "A4G")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate(0), ConfigError, "^number=0"),
        (lambda m: m.generate(stepz=3), ConfigError, "stepz: .*'steps'"),
        (lambda m: m.generate(length=127), ConfigError, "^length=127"),
        (lambda m: m.infill("_" * 127), ModelError, "template 0 has 127 residues"),
        (lambda m: m.score(["MKT", "MK1"]), DataError, "sequence 1: .*'1'"),
        (lambda m: m.score("MKT", seed=-1), ConfigError, "^seed=-1"),
        (
            lambda m: m.score_mutations("MKT", ["M1A", "K1R"], mutation_offset=0),
            *(DataError, "variant 1: K1R"),
        ),
        (lambda m: m.score_mutations(None, "M1A"), DataError, "wild_type: NoneType"),
        (lambda m: m.embed("MKT", pooled="no"), ConfigError, "^pooled='no'"),
        (lambda m: load_model("models:/proteins"), ConfigError, "^location='models:/proteins'"),
        (lambda m: load_model("no/where/at_all"), ModelError, "no such model folder"),
        (lambda m: load_model(m.exported.folder, precision="fp8"), ConfigError, "^precision='fp8'"),
        (lambda m: load_model(m.exported.folder, revision="v2"), ConfigError, "^revision='v2'"),
        (lambda m: load_model("a/b", revison="v2"), ConfigError, "'revision'"),
        (lambda m: SequenceModel(m.exported.folder), ConfigError, "load_model"),
        (lambda m: retrieve_relatives("MKT", reference=[None]), ConfigError, "^reference="),
        (lambda m: retrieve_relatives("MKT", "a.fasta", cache_dir=3), ConfigError, "^cache_dir="),
    ],
)
def test_what_cannot_be_done_is_rejected_by_the_name_of_the_argument(
    model: SequenceModel, call: Any, error: type[D2PLMError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(model)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_is_loaded_from_the_registry(exports: Exports, monkeypatch: MonkeyPatch) -> None:
    download = Mock(return_value=exports.masked)
    monkeypatch.setattr(registry, "download", download)
    monkeypatch.setattr(registry, "version_of", lambda client, name, alias: f"{alias}'s 7")
    monkeypatch.setattr(mlflow_run, "open_client", lambda uri: uri)
    model = load_model("models:/proteins@champion", tracking_uri="sqlite:///a.db", device="cpu")
    download.assert_called_once_with("sqlite:///a.db", "proteins", "champion's 7")
    assert "diffusion" in repr(model)
    assert model.max_residues == 126


NO_TEXT = (None, math.nan, 3, ("MK",), b"MK", Path("a.fasta"), pd.NA)
NO_LISTS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "table": lambda: TABLE,
    "Arrow": lambda: pa.table({"sequence": ["MK"]}),
    "matrix": lambda: np.array([["MK"]]),
    "column with missing values": lambda: pd.Series(["MK", None]),
    "['']": lambda: [""],
    **{f"['MK', {one!r}]": partial(lambda one: ["MK", one], one) for one in NO_TEXT},
}


@pytest.fixture(scope="module")
def related(exports: Exports) -> SequenceModel:
    """A model that takes relatives."""
    return load_model(exports.related, device="cpu", precision="fp32")


def calls_with_a_list(model: SequenceModel) -> dict[str, Callable[[Any], Any]]:
    """Every argument of Python's interface that takes several texts."""
    return {
        "sequence score": lambda given: model.score(given, masks_per_sequence=2),
        "sequence embed": lambda given: np.concatenate(model.embed(given)).tolist(),
        "sequence pseudo": model.pseudo_log_likelihood,
        "sequence relatives": lambda given: retrieve_relatives(given, "none.fasta"),
        "template infill": lambda given: model.infill(given, steps=1),
        "variant score": lambda given: model.score_mutations("MKTAY", given),
        "relative score": lambda given: model.score("MKTAY", relatives=given, masks_per_sequence=2),
        "relative generate": lambda given: model.generate(length=5, relatives=given, steps=1),
        "relative infill": lambda given: model.infill("MK_", relatives=given, steps=1),
        "relative mutations": lambda given: model.score_mutations("MKTAY", "M1A", relatives=given),
        "relative of each": lambda given: model.score("MKTAY", relatives=[given]),
    }


@pytest.mark.parametrize("kind", NO_LISTS)
def test_what_is_no_list_of_texts_is_one_clear_line(related: SequenceModel, kind: str) -> None:
    for name, call in calls_with_a_list(related).items():
        noun = name.split()[0]
        if kind == "None" and noun == "relative" and name != "relative of each":
            continue  # no relatives
        with pytest.raises((ConfigError, DataError), match=rf"^{noun}(s| \d): ") as caught:
            call(NO_LISTS[kind]())
        assert len(str(caught.value).splitlines()) == 1
        if kind in ("table", "Arrow", "matrix"):
            column = "mutant" if noun == "variant" else "sequence"
            assert f"df['{column}']" in str(caught.value)


LISTS: dict[str, Callable[[list[str]], Any]] = {
    "tuple": tuple,
    "generator": lambda texts: (text for text in texts),
    "array": np.array,
    "column": lambda texts: pd.DataFrame({"s": texts}, index=[7] * len(texts))["s"],
    "values": lambda texts: dict(enumerate(texts)).values(),
}


def test_an_ordered_collection_is_a_list(related: SequenceModel) -> None:
    texts = {
        "sequence": ["MKTAYIAKQR", "GSHMLEDPVA"],
        "template": ["MK_", "A__"],
        "variant": ["M1A", "K2A"],
        "relative": ["GSHMLEDPVA", "MKSAFLAKQ"],
    }
    calls = calls_with_a_list(related)
    del calls["sequence relatives"]  # has no reference
    for name, call in calls.items():
        given = texts[name.split()[0]]
        expected = call(given)
        for kind, collected in LISTS.items():
            assert call(collected(given)) == expected, (name, kind)


def test_numbers_of_numpy_are_numbers(related: SequenceModel) -> None:
    def results(integer: Any, real: Any, array: Any) -> list[Any]:
        sampling = {"seed": integer(3), "steps": integer(2), "temperature": real(0.5)}
        return [
            related.generate(integer(1), min_length=integer(50), **sampling),
            related.generate(length=array([5, 7]), **sampling, relatives=["GSHMLEDPVA"]),
            related.score("MKTAY", masks_per_sequence=integer(2), seed=integer(1)),
            related.embed("MKTAY", layer=integer(1), pooled=array([True])[0])[0].tolist(),
            related.score_mutations("MKTAY", "M2A", mutation_offset=integer(1)),
        ]

    expected = results(int, float, list)
    assert results(np.int64, np.float64, np.array) == expected
    assert results(np.uint8, np.float16, pd.Series) == expected
    assert load_model(related.exported.folder, device="cpu", token_budget=np.int64(99))
