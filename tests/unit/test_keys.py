"""Checks before torch is imported: values against the types of the defaults, and paths."""

import re
import shlex
from pathlib import Path

import pytest
from d2plm.keys import check_paths, check_values

from d2plm.config import compose, compose_arguments, parse_arguments
from d2plm.core.errors import ConfigError, D2PLMError, DataError
from d2plm.core.files import config_dir
from tests.commands import python_m

ROOTS = sorted(file.stem for file in config_dir().glob("*.yaml"))
CHOICES = [
    f"{folder.name}={file.stem}"
    for folder in sorted(config_dir().iterdir())
    if folder.is_dir() and folder.name not in ("accelerate", "callbacks")
    for file in sorted(folder.glob("*.yaml"))
]


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_file_passes_its_own_check(root: str) -> None:
    values = compose(root, [], complete=False).flat()
    check_values(root, {key: value for key, value in values.items() if value != "???"})


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_of_every_group_passes(choice: str) -> None:
    check_values("pipeline", compose("pipeline", [choice], complete=False).flat())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.max_steps=abc", "trainer.max_steps='abc': must be an integer ≥ 1"),
        ("trainer.max_steps=1.5", "must be an integer"),
        ("trainer.max_epochs=abc", "must be a number ≥ 0"),
        ("trainer.threads=0", "must be a number ≥ 1"),
        ("optimizer.learning_rate=-1", "must be a number ≥ 0"),
        ("optimizer.learning_rate=true", "must be a number"),
        ("data.search_min_seq_id=1.5", "must be a number ≥ 0 and ≤ 1"),
        ("data.search_sensitivity=9", "must be a number ≥ 1 and ≤ 7.5"),
        ("trainer.deterministic=maybe", "must be true or false"),
        ("trainer.freeze=blocks", "must be a list"),
        ("data.on_illegal=dorp", "did you mean 'drop'"),
        ("trainer.compile=fals", "did you mean 'false'"),
        ("trainer.on_save_error=ignore", "must be one of stop, continue"),
        ("trainer.device=gpu", "must be one of auto, cpu, cuda"),
        ("paradigm.time_sampling=unifrom", "did you mean 'uniform'"),
    ],
)
def test_a_value_of_another_type_or_range_is_rejected(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_arguments("train", [word])
    assert str(caught.value).startswith(word.partition("=")[0])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        *("trainer.max_steps=null", "trainer.flops_budget=1e18", "data.exclude_homologs_of=[a]"),
        *("trainer.gradient_accumulation_steps=4", "tracking.system_metrics=0.5"),
        *("experiment=null", "trainer.compile=true", "launcher.cpu=2"),
    ],
)
def test_a_value_that_fits_passes(word: str) -> None:
    compose_arguments("train", [word])


def test_the_last_part_of_a_key_is_enough_where_it_is_the_only_one() -> None:
    words = ["number=5", "--temperature", "0.5", "model_dir=m"]
    config, _ = compose_arguments("generate", words)
    assert config["generation"]["number"] == 5
    assert config["generation"]["temperature"] == 0.5
    config, _ = compose_arguments("train", ["max_steps=7"])
    assert config["trainer"]["max_steps"] == 7
    with pytest.raises(ConfigError, match=r"seed: ambiguous; write .* or .*trainer\.seed"):
        compose_arguments("train", ["seed=3"])
    with pytest.raises(
        ConfigError, match=r"unknown key 'trainer.learning_rate' \(did you mean 'op"
    ):
        compose_arguments("train", ["trainer.learning_rate=1"])
    with pytest.raises(ConfigError, match=r"unknown option '--epochs' \(did you mean '--trainer.m"):
        compose_arguments("train", ["--epochs", "3"])


def test_a_first_word_is_the_value_of_the_obvious_key() -> None:
    assert parse_arguments("score", ["p.fasta"], "input").overrides == ["input='p.fasta'"]
    with pytest.raises(ConfigError, match=r"'q.fasta': input is already 'p.fasta'; give settings"):
        parse_arguments("score", ["p.fasta", "q.fasta"], "input")
    with pytest.raises(ConfigError, match=r"'file.fasta': give settings .* quote spaces"):
        parse_arguments("score", ["input=my", "file.fasta"], "input")
    with pytest.raises(ConfigError, match="without spaces around the ="):
        parse_arguments("score", ["input", "=", "p.fasta"], "input")


@pytest.mark.parametrize("name", ["a(1).fasta", "a=b.fasta", "a,b.fasta", "~/a.fasta"])
def test_a_name_with_special_characters_is_rejected_with_a_word_that_works(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_arguments("ingest", [f"input={name}", "output=raw"])
    said = str(caught.value).partition("for Hydra: ")[2].partition(";")[0]
    (word,) = shlex.split(said)
    config, _ = compose_arguments("ingest", [word, "output=raw"])
    assert config["input"] == name


def test_a_missing_required_key_is_described() -> None:
    with pytest.raises(ConfigError, match=r"^model_dir: is required; set model_dir=…: an exported"):
        compose_arguments("generate", [])


def test_paths_that_are_read_must_be_there(tmp_path: Path) -> None:
    def message(key: str, path: object, root: str = "score") -> str:
        with pytest.raises(D2PLMError) as caught:
            check_paths(root, {key: str(path)}, [key])
        return str(caught.value)

    fasta, run = tmp_path / "proteins.fasta", tmp_path / "run"
    fasta.write_text(">a\nMK\n")
    (run / "model").mkdir(parents=True)
    (run / "model" / "paradigm_config.json").write_text("{}")
    (tmp_path / "empty.fasta").touch()
    check_paths("score", {"input": str(fasta), "model_dir": str(run / "model")}, ["input"])
    check_paths("score", {"input": "-", "relatives": None}, ["input", "relatives"])
    check_paths("score", {"model_dir": "models:/a@champion"}, ["model_dir"])
    check_paths("ingest", {"input": [str(fasta), f"{tmp_path}/*.fasta"]}, ["input"])
    assert f"did you mean '{fasta}'" in message("input", tmp_path / "protein.fasta")
    assert "an exported model, or models:/" in message("model_dir", tmp_path / "nowhere")
    assert f"did you mean '{run / 'model'}'" in message("model_dir", run)
    assert "is empty" in message("input", tmp_path / "empty.fasta")
    assert "is a file; expected the folder of a store" in message("store", fasta, "data_stats")
    assert "is a file; expected the folder of the stores" in message(
        "data.prepared_dir", fasta, "train"
    )
    (run / "raw").mkdir()
    (run / "raw" / "data.mdb").touch()
    raw = message("data.prepared_dir", run / "raw", "evaluate")
    assert "is a raw store; prepare it" in raw
    saved = run / "checkpoints" / "step-1"
    saved.mkdir(parents=True)
    (saved / "__0_0.distcp").touch()
    remedy = f"d2plm export --config-file {run}/config.yaml trainer.resume={saved}"
    assert remedy in message("model_dir", saved)


@pytest.mark.parametrize(
    "words",
    [
        ["score", "model_dir=nowhere", "input=x.fasta"],
        ["generate", "nowhere"],
        ["train", "trainer.max_steps=abc"],
        ["evaluate", "model_dir=nowhere"],
        ["prepare", "nowhere.fasta"],
    ],
)
def test_wrong_words_are_rejected_before_torch_is_imported(words: list[str]) -> None:
    run = python_m(*words, PYTHONPROFILEIMPORTTIME="1")
    assert run.returncode in (1, 2)
    assert "nowhere" in run.stderr or "'abc'" in run.stderr
    assert not re.search(r"\| +torch$", run.stderr, re.MULTILINE)
    assert "hydra" in run.stderr


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("adapt", ["input=x", "init_from=y", "generation.number=0"]),  # 0: none, as its file says
        ("train", ["data.split_seed=-1"]),
        ("train", ["paradigm._target_=mine.Paradigm", "paradigm.schedule=quintic"]),
    ],
)
def test_what_the_files_allow_and_what_is_not_theirs_passes(root: str, words: list[str]) -> None:
    compose_arguments(root, words)


@pytest.mark.parametrize("path", ["M" * 300, "~nobody/p.fasta", "deep/**/*.fasta"])
def test_odd_paths_are_no_tracebacks(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        check_paths("ingest", {"input": path}, ["input"])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "p.fasta").write_text(">a\nMK\n")
    check_paths("ingest", {"input": "deep/**/*.fasta"}, ["input"])


def test_a_configuration_that_another_command_wrote_is_not_held_to_the_limits_of_this(
    tmp_path: Path,
) -> None:
    words = ["input=x", "init_from=y", "generation.number=0"]
    config, _ = compose_arguments("adapt", words)
    config.save(tmp_path / "config.requested.yaml")
    compose_arguments("train", [f"--config-file={tmp_path / 'config.requested.yaml'}"])
