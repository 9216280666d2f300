"""`load_model`: the results of the commands, from Python."""

import csv
import io
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import d2plm
from d2plm import load_model
from d2plm.api import SequenceModel, retrieve_relatives
from d2plm.commands.generate import run as run_generate
from d2plm.commands.score import run as run_score
from d2plm.config import compose
from d2plm.core.errors import ConfigError, D2PLMError, DataError, ModelError
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import read_fasta
from d2plm.evaluation.scoring import ProteinScore
from d2plm.settings.training import TrainerSettings
from d2plm.tracking import mlflow_run, registry
from tests.conftest import Exports, MonkeyPatch

PROTEINS = {"one": "MKTAYIAKQRQISFVKSHFSRQ", "two": "GSHMLEDPVAXLLK", "unknown": "XXX"}
TABLE = pd.DataFrame({"name": ["a", "b"], "sequence": ["MKTAY", "GSHML"]})
TEMPLATES = {"loop": "MKT____GGLL", "start": "<mask><mask>TAYIAKQR"}


@pytest.fixture(scope="module")
def model(exports: Exports) -> SequenceModel:
    return load_model(exports.masked, device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def uniform(exports: Exports) -> SequenceModel:
    return load_model(exports.uniform, device="cpu", precision="fp32")


def command(name: str, *settings: str) -> None:
    run = {"generate": run_generate, "score": run_score}[name]
    run(compose(name, ["device=cpu", "precision=fp32", *settings]))  # type: ignore[operator]  # either


def sequences_in(file: Path) -> list[str]:
    return [decode(record.tokens) for record in read_fasta(file)]


def fasta(path: Path, records: dict[str, str]) -> Path:
    path.write_text("".join(f">{name}\n{text}\n" for name, text in records.items()))
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (["number=3", "seed=7"], {"number": 3, "seed": 7}),
        (["number=4", "max_length=12"], {"number": 4, "max_length": 12}),
        (["number=2", "length=[9,14]"], {"number": 2, "length": [9, 14]}),
        (
            ["number=1", "length=20", "sampler=remdm", "top_k=4", "temperature=0.7"],
            {"length": 20, "sampler": "remdm", "top_k": 4, "temperature": 0.7},
        ),
    ],
)
def test_it_generates_what_the_command_generates(
    model: SequenceModel, tmp_path: Path, settings: list[str], arguments: dict[str, Any]
) -> None:
    folder, output = model.exported.folder, tmp_path / "g.fasta"
    command(
        "generate",
        f"model_dir='{folder}'",
        f"output='{output}'",
        *(f"generation.{setting}" for setting in [*settings, "steps=4"]),
    )
    assert model.generate(**arguments, steps=4) == sequences_in(output)


def test_it_fills_in_what_the_command_fills_in(model: SequenceModel, tmp_path: Path) -> None:
    templates = fasta(tmp_path / "templates.fasta", TEMPLATES)
    command(
        "generate",
        f"model_dir='{model.exported.folder}'",
        f"output='{tmp_path / 'g.fasta'}'",
        f"generation.templates='{templates}'",
        *("generation.number=2", "generation.seed=3", "generation.steps=4"),
    )
    designs = model.infill(list(TEMPLATES.values()), number=2, seed=3, steps=4)
    assert designs == sequences_in(tmp_path / "g.fasta")
    assert all(design[:3] == "MKT" and design[7:] == "GGLL" for design in designs[:2])
    assert [len(design) for design in designs] == [11, 11, 10, 10]
    alone = model.infill(TEMPLATES["loop"], number=2, seed=3, steps=4)
    assert [len(design) for design in alone] == [11, 11]


def test_it_scores_as_the_command_scores(model: SequenceModel, tmp_path: Path) -> None:
    proteins, output = fasta(tmp_path / "p.fasta", PROTEINS), tmp_path / "scores.csv"
    command(
        "score",
        f"model_dir='{model.exported.folder}'",
        f"input='{proteins}'",
        f"output='{output}'",
        *("evaluation.masks_per_sequence=4", "evaluation.seed=5"),
    )
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
    command(
        "score",
        f"model_dir='{model.exported.folder}'",
        f"input='{wild_type}'",
        f"mutations='{table}'",
        f"output='{output}'",
    )
    scores = model.score_mutations(PROTEINS["one"], variants)
    expected = [float(row["d2plm_score"]) for row in rows(output)]
    assert scores == pytest.approx(expected, abs=1e-6)
    assert scores[2] == 0
    assert len(set(scores)) == 4
    shifted = [v.replace("A4", "A28") for v in variants[:1]]
    # Alone the variant is in a smaller batch, whose matrix products round in another order.
    alone = model.score_mutations(PROTEINS["one"], shifted, mutation_offset=24)
    assert alone == pytest.approx(scores[:1], abs=1e-5)


def test_a_model_of_the_uniform_source_generates_fills_in_and_scores(
    uniform: SequenceModel,
) -> None:
    assert uniform.generate(2, length=9, steps=3, seed=1) == uniform.generate(
        2, length=9, steps=3, seed=1
    )
    assert uniform.infill("MK__L", steps=3)[0].startswith("MK")
    assert isinstance(uniform.score("MKTAY")[0], ProteinScore)
    with pytest.raises(ModelError, match=r"pseudo_log_likelihood: .* use score"):
        uniform.pseudo_log_likelihood("MKTAY")
    with pytest.raises(ModelError, match="score_mutations: "):
        uniform.score_mutations("MKTAY", "A4G")


def test_sequences_are_read_as_from_a_file(model: SequenceModel) -> None:
    assert model.score(" mkt ayia\nkqr* ") == model.score(["MKTAYIAKQR"])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.generate(0), ConfigError, r"^number=0"),
        (lambda m: m.generate(stepz=3), ConfigError, r"stepz: .*did you mean 'steps'"),
        (lambda m: m.generate(steps=0), ConfigError, r"^steps=0"),
        (lambda m: m.generate(length=127), ConfigError, r"^length=127: .* 1 to 126"),
        (lambda m: m.generate(length=[]), ConfigError, r"^length=\[\]"),
        (
            lambda m: m.generate(length=5, min_length=3),
            ConfigError,
            r"^min_length=3: must be 1 with .*length, which leaves nothing to draw",
        ),
        (lambda m: m.generate(sampler="euler"), ConfigError, r"^sampler='euler'"),
        (lambda m: m.infill("MKT"), DataError, "template 0: nothing to fill in"),
        (lambda m: m.infill(["M_", "M_J1"]), DataError, "template 1: illegal letter"),
        (lambda m: m.infill("_" * 127), ModelError, "template 0 has 127 residues.* at most 126"),
        (lambda m: m.score(["MKT", "MK1"]), DataError, "sequence 1: .*'1'"),
        (lambda m: m.score("M" * 127), ModelError, "sequence 0 has 127 residues"),
        (lambda m: m.score("MKT", masks_per_sequence=0), ConfigError, "^masks_per_sequence=0"),
        (lambda m: m.score("MKT", seed=-1), ConfigError, "^seed=-1"),
        (lambda m: m.score("MKT", seed=2**64), ConfigError, "^seed=18446744073709551616: must"),
        (lambda m: m.generate(seed=2**64 + 1), ConfigError, "^seed=18446744073709551617: must"),
        (lambda m: m.infill("M_", seed=2**70), ConfigError, "^seed=1180591620717411303424: must"),
        (
            lambda m: m.score_mutations("MKT", ["M1A", "K1R"], mutation_offset=0),
            DataError,
            "variant 1: K1R: 'the wild type' has M at position 1, not K",
        ),
        (lambda m: m.score_mutations("MKT", "K9R"), ConfigError, "^mutation_offset='auto': 0 of"),
        (lambda m: m.score_mutations("MKT", "M1A", mutation_offset="x"), ConfigError, "^mutation_"),
        (lambda m: m.score_mutations(None, "M1A"), DataError, "wild_type: NoneType is not a str"),
        (lambda m: m.score_mutations("MKT", "M1*"), DataError, "variant 0: 'M1.*': with a stop"),
        (lambda m: m.score_mutations("MKT", "K2"), DataError, "'K2' is not a variant"),
        (lambda m: m.embed("MKT", pooled="no"), ConfigError, "^pooled='no': must be True or False"),
        (lambda m: m.generate(seed=TABLE), ConfigError, "^seed=.*must be an integer"),
        (lambda m: m.generate(sampler=TABLE), ConfigError, "^sampler=.*must be"),
        (
            lambda m: m.score_mutations("MKT", "M1A", mutation_offset=TABLE),
            ConfigError,
            "^mutation",
        ),
        (lambda m: load_model(m.exported.folder, device=TABLE), ConfigError, "^device="),
        (lambda m: load_model(m.exported.folder, revision="v2"), ConfigError, "^revision='v2'"),
        (lambda m: load_model("a/b", revision=2), ConfigError, "^revision=2"),
        (lambda m: load_model("a/b", revison="v2"), ConfigError, "did you mean 'revision'"),
        (lambda m: SequenceModel(m.exported.folder), ConfigError, "load_model takes its folder"),
    ],
)
def test_what_cannot_be_done_is_rejected_by_the_name_of_the_argument(
    model: SequenceModel, call: Any, error: type[D2PLMError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(model)
    assert len(str(caught.value).splitlines()) == 1


def test_a_model_that_cannot_be_loaded_is_rejected(exports: Exports, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"^location='models:/proteins': must be the folder"):
        load_model("models:/proteins")
    with pytest.raises(ConfigError, match=r"^device='tpu'"):
        load_model(exports.masked, device="tpu")
    with pytest.raises(ConfigError, match=r"^precision='fp8'"):
        load_model(exports.masked, precision="fp8")
    with pytest.raises(ConfigError, match=r"^token_budget=0"):
        load_model(exports.masked, token_budget=0)


def test_a_model_is_loaded_from_the_registry(exports: Exports, monkeypatch: MonkeyPatch) -> None:
    asked = []

    def download(client: object, name: str, version: str) -> Path:
        asked.append((client, name, version))
        return exports.masked

    monkeypatch.setattr(registry, "download", download)
    monkeypatch.setattr(registry, "version_of", lambda client, name, alias: f"{alias}'s 7")
    monkeypatch.setattr(mlflow_run, "open_client", lambda uri: uri)
    model = load_model("models:/proteins@champion", tracking_uri="sqlite:///a.db", device="cpu")
    assert asked == [("sqlite:///a.db", "proteins", "champion's 7")]
    assert "diffusion" in repr(model)
    assert model.max_residues == 126


def test_the_results_do_not_depend_on_the_token_budget(exports: Exports) -> None:
    scores, designs = [], []
    for budget in (16384, 20):
        model = load_model(exports.masked, device="cpu", precision="fp64", token_budget=budget)
        scores.append([score.nats for score in model.score(list(PROTEINS.values()))])
        designs.append(model.generate(4, length=[7, 11], steps=4, seed=2))
    assert scores[0] == pytest.approx(scores[1], rel=1e-12)
    assert designs[0] == designs[1]


def test_a_mistyped_name_of_the_package_is_an_error() -> None:
    assert "load_model" in d2plm.__all__
    with pytest.raises(AttributeError, match="has no attribute 'load_modle'"):
        d2plm.load_modle  # noqa: B018  # the attribute is what is asked for


class Letters:
    """Text of another library's class, whose letters are iterated."""

    def __str__(self) -> str:
        return "MKTAY"

    def __repr__(self) -> str:  # without an address, as names of tests must not differ
        return "Letters"

    def __iter__(self) -> Iterator[str]:
        return iter("MKTAY")


NO_TEXT = (
    None,
    math.nan,
    3,
    ("MK",),
    ["MK"],
    {"s": "MK"},
    b"MK",
    Path("a.fasta"),
    pd.NA,
    Letters(),
)
NO_LISTS: dict[str, Callable[[], Any]] = {
    "table": lambda: TABLE,
    "Arrow": lambda: pa.table({"sequence": ["MK"]}),
    "matrix": lambda: np.array([["MK"]]),
    "mapping": lambda: {"a": "MK"},
    "keys": lambda: {"MK": 1}.keys(),
    "set": lambda: {"MK"},
    "bytes": lambda: b"MK",
    "path": lambda: Path("a.fasta"),
    "file": lambda: io.StringIO("MKTAY"),
    "letters": Letters,
    "pairs": lambda: enumerate(["MK"]),
    "scalar": lambda: np.array("MK"),
    "column with missing values": lambda: pd.Series(["MK", None]),
    **{repr(one): partial(lambda one: one, one) for one in (math.nan, 3, np.int64(3), True, len)},
    **{f"[{one!r}]": partial(lambda one: [one], one) for one in (*NO_TEXT, "")},
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


@pytest.mark.parametrize("kind", [*NO_LISTS, "None"])
def test_what_is_no_list_of_texts_is_one_clear_line(related: SequenceModel, kind: str) -> None:
    for name, call in calls_with_a_list(related).items():
        noun = name.split()[0]
        if kind == "None" and noun == "relative" and name != "relative of each":
            continue  # no relatives
        given = None if kind == "None" else NO_LISTS[kind]()
        if name == "relative score" and kind in ("[('MK',)]", "[['MK']]"):
            continue  # of each protein
        with pytest.raises((ConfigError, DataError), match=rf"^{noun}(s| \d): ") as caught:
            call(given)
        assert len(str(caught.value).splitlines()) == 1
        if kind in ("table", "Arrow", "matrix"):
            column = "mutant" if noun == "variant" else "sequence"
            assert f"df['{column}']" in str(caught.value)


LISTS: dict[str, Callable[[list[str]], Any]] = {
    "tuple": tuple,
    "generator": lambda texts: (text for text in texts),
    "array": np.array,
    "objects": lambda texts: np.array(texts, dtype=object),
    "column": lambda texts: pd.DataFrame({"s": texts}, index=[7] * len(texts))["s"],
    "categories": lambda texts: pd.Series(texts, dtype="category"),
    "values": lambda texts: dict(enumerate(texts)).values(),
}


@pytest.mark.parametrize("kind", LISTS)
def test_an_ordered_collection_is_a_list(related: SequenceModel, kind: str) -> None:
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
        assert call(LISTS[kind](given)) == call(given)


def test_numbers_of_numpy_are_numbers(related: SequenceModel, tmp_path: Path) -> None:
    def results(integer: Any, real: Any, array: Any) -> list[Any]:
        model = load_model(related.exported.folder, device="cpu", token_budget=integer(99))
        sampling = {"seed": integer(3), "steps": integer(2), "temperature": real(0.5)}
        others = {"relatives": ["GSHMLEDPVA", "MKSAF"], "max_relatives": integer(1)}
        return [
            model.generate(integer(2), min_length=integer(50), max_length=integer(60), **sampling),
            model.generate(length=integer(5), **sampling),
            model.generate(length=array([5, 7]), **sampling, relatives=others["relatives"]),
            model.infill("MK_", integer(2), **sampling),
            model.score("MKTAY", masks_per_sequence=integer(2), seed=integer(1), **others),
            model.embed("MKTAY", layer=integer(1), pooled=array([True])[0])[0].tolist(),
            model.score_mutations("MKTAY", "M2A", mutation_offset=integer(1)),
        ]

    expected = results(int, float, list)
    for integer, real in ((np.int64, np.float64), (np.uint8, np.float16)):
        assert results(integer, real, np.array) == expected
    assert results(int, float, pd.Series) == results(int, float, tuple) == expected
    settings = TrainerSettings(max_steps=np.int64(3))  # type: ignore[arg-type]  # numpy's
    assert type(settings.max_steps) is int


@pytest.mark.parametrize("argument", ["reference", "cache_dir"])
@pytest.mark.parametrize("given", [3, ("a",), [], [None], math.nan, TABLE])
def test_what_is_no_path_is_one_clear_error(argument: str, given: Any) -> None:
    arguments: dict[str, Any] = {"reference": "reference.fasta", argument: given}
    with pytest.raises(ConfigError, match=f"^{argument}="):
        retrieve_relatives("MKTAYIAKQR", **arguments)
