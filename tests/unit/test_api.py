"""`load_model`: the results of the commands, from Python."""

import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
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
from d2plm.tracking import mlflow_run, registry
from tests.conftest import Exports

PROTEINS = {"one": "MKTAYIAKQRQISFVKSHFSRQ", "two": "GSHMLEDPVAXLLK", "unknown": "XXX"}
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
        (lambda m: m.score_mutations("MKT", ["M1A", None]), DataError, "variant 1: None is not"),
        (lambda m: m.score_mutations("MKT", [math.nan]), DataError, "variant 0: nan is not text"),
        (lambda m: m.score_mutations("MKT", [("M1A", "K2A")]), DataError, "variant 0: .* not text"),
        (lambda m: m.score_mutations("MKT", None), ConfigError, "variants: must be a string or a"),
        (lambda m: m.score_mutations(None, "M1A"), DataError, "wild_type: NoneType is not a str"),
        (lambda m: m.score(None), ConfigError, "sequences: must be a string or a"),
        (lambda m: m.score_mutations("MKT", "M1*"), DataError, "variant 0: 'M1.*': with a stop"),
        (lambda m: m.score_mutations("MKT", "K2"), DataError, "'K2' is not a variant"),
    ],
)
def test_what_cannot_be_done_is_rejected_by_the_name_of_the_argument(
    model: SequenceModel, call: Any, error: type[D2PLMError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model)


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


def test_a_model_is_loaded_from_the_registry(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_importing_the_package_imports_no_torch() -> None:
    assert "load_model" in d2plm.__all__
    code = "import d2plm, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'load_modle'"):
        d2plm.load_modle  # noqa: B018  # the attribute is what is asked for


def test_loading_a_model_imports_no_statistics() -> None:
    program = "from d2plm import load_model; import sys; print('scipy.stats' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["False"]


NO_SEQUENCES = (None, float("nan"), 3, True, b"MK", {"a": "MK"}, {"MK"}, np.array("MK"), object())
NO_SEQUENCE = (None, float("nan"), 3, ("MK",), b"MK", "")


@pytest.mark.parametrize("given", [*NO_SEQUENCES, *([one] for one in NO_SEQUENCE), ("MK", None)])
def test_what_is_no_sequence_is_one_clear_error(model: SequenceModel, given: Any) -> None:
    def relatives_of(given: Any) -> object:
        return retrieve_relatives(given, "reference.fasta")

    for call in (model.score, model.embed, model.infill, relatives_of):
        with pytest.raises((ConfigError, DataError), match=r"^(sequence|template)(s| \d): "):
            call(given)
    if given not in (None, [None]):  # no relatives
        with pytest.raises(D2PLMError, match=r"^relatives: "):
            model.score("MKTAYIAKQR", relatives=given)


@pytest.mark.parametrize("argument", ["reference", "cache_dir"])
@pytest.mark.parametrize("given", [3, ("a",), [None], float("nan")])
def test_what_is_no_path_is_one_clear_error(argument: str, given: Any) -> None:
    arguments: dict[str, Any] = {"reference": "reference.fasta", argument: given}
    with pytest.raises(ConfigError, match=f"^{argument}="):
        retrieve_relatives("MKTAYIAKQR", **arguments)
