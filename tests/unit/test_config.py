"""Composing the settings of commands from defaults, YAML files and the command line."""

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from d2plm.assembly.training_run import build_callbacks, model_config
from d2plm.config import (
    changed,
    compose,
    compose_arguments,
    flat,
    parse_arguments,
    parse_overrides,
    quoted,
    read,
    save,
)
from d2plm.core.errors import ConfigError
from d2plm.core.files import config_dir
from d2plm.settings.commands import SETTINGS
from d2plm.settings.schema import Key, Settings, keys
from d2plm.settings.training import AdamWSettings, MuonSettings, WsdSettings
from d2plm.training.callbacks.callback import RunContext
from tests.conftest import MonkeyPatch

GROUPS = {
    group.name: sorted(file.stem for file in group.glob("*.yaml"))
    for group in sorted(config_dir().iterdir())
    if group.is_dir() and group.name not in ("experiment", "accelerate", "model")
}
TEXTS = ["", " ", "true", "null", "~", "on", "1e3", "0x1f", "1:30", "2024_05", "2024-05-03", ".inf"]
TEXTS += ["\x85", "a: b", "- a", "#a", "'a'", '"', "\\", "{a}", "[a", "é\n", "*a", "&a", "%a", "@a"]


def values_of(kind: Any, limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """What fits the type of a field."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*(values_of(one, limits) for one in inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values_of(inner[0], limits), max_size=3)
    if kind in (int, float):
        low, above = limits["low"], limits["above"]
        high, below = limits["high"], limits["below"]
        most = below if high is None else high
        if kind is int:
            return st.integers(low, most)
        return st.floats(
            above if low is None else low,
            most,
            exclude_min=above is not None,
            exclude_max=below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    texts = st.sampled_from(TEXTS) | st.text(st.characters(codec="utf-8", exclude_characters="$?"))
    scalars = {str: texts, bool: st.booleans(), NoneType: st.none()}
    return scalars[kind] if kind in scalars else st.one_of(*scalars.values())  # of `Any`


@cache
def defaults(command: str) -> tuple[Settings, dict[str, Key]]:
    """Settings of a command and those of its keys that a file may give any value of their type."""
    known = keys(SETTINGS[command])
    required = [name for name, one in known.items() if one.default == "???"]
    settings = compose(command, [f"{name}=1" for name in required])
    here = flat(settings)
    return settings, {
        name: one
        for name, one in known.items()
        if name in here and not one.is_mapping and one.field.name != "type"
    }


@given(st.data())
def test_any_settings_that_are_accepted_read_back_from_a_file_as_they_are(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    command = data.draw(st.sampled_from(sorted(SETTINGS)))
    settings, known = defaults(command)
    nested: dict[str, Any] = {}
    for name in data.draw(st.lists(st.sampled_from(sorted(known)), max_size=3, unique=True)):
        field = known[name].field
        *parents, last = name.split(".")
        inner = reduce(lambda values, parent: values.setdefault(parent, {}), parents, nested)
        inner[last] = data.draw(values_of(field.type, field.metadata), label=name)
    try:
        settings = changed(settings, nested, "changes")
    except ConfigError:  # values that exclude each other
        reject()
    file = tmp_path_factory.mktemp("settings") / "config.yaml"
    save(settings, file)
    assert read(command, file) == settings


def test_what_is_not_utf8_is_refused_by_its_key() -> None:
    for value in ("runs/\udcff", ["a", "\ud800"]):
        with pytest.raises(ConfigError, match=r"data\.input=.*must be .*text in UTF-8"):
            changed(compose("prepare", ["data.input=x"]), {"data": {"input": value}}, "changes")


EXPERIMENTS = sorted(file.stem for file in (config_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", [one for one in EXPERIMENTS if not one.startswith("compare_")])
def test_an_experiment_composes(name: str) -> None:
    config = compose("scaling" if name.startswith("scaling") else "train", [f"experiment={name}"])
    work_dir = "/workspace/demo" if name == "cluster" else f"runs/{name}"
    assert config.output_dir == f"{work_dir}/diffusion"
    assert config.tracking.experiment == "d2plm-diffusion"


@pytest.mark.parametrize("place", range(max(map(len, GROUPS.values()))))
def test_every_choice_of_a_group_composes(place: int) -> None:
    words = [f"{group}={choices[place % len(choices)]}" for group, choices in GROUPS.items()]
    compose("pipeline", words)


SIZED = [
    (file.stem, float(found[1]) * {"m": 1e6, "b": 1e9}[found[2]])
    for file in sorted((config_dir() / "model").glob("*.yaml"))
    if (found := re.search(r"(\d+)([mb])", file.stem)) and not file.stem.startswith("esm2")
]


@pytest.mark.parametrize(("name", "parameters"), SIZED)
def test_a_model_composes_and_is_as_large_as_its_name_says(name: str, parameters: float) -> None:
    import torch

    from d2plm.model.dit import DiT

    with torch.device("meta"):
        model = DiT(model_config(compose("pipeline", [f"model={name}"])))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.15)


def test_the_defaults_of_a_section_are_those_of_its_type() -> None:
    config = compose("train", ["+optimizer=muon", "schedule.type=wsd", "tracking.tags.project=x"])
    assert (config.optimizer, config.schedule) == (MuonSettings(), WsdSettings())
    assert config.tracking.tags == {"project": "x"}, "a key that the user has named"
    arm = changed(config, {"optimizer": {"type": "adamw", "eps": 1e-6}}, "arms.a")
    assert arm.optimizer == AdamWSettings(eps=1e-6)
    more = changed(arm, {"optimizer": {"weight_decay": 0.5}}, "arms.a")
    assert more.optimizer == AdamWSettings(eps=1e-6, weight_decay=0.5)
    with pytest.raises(ConfigError, match=r"^arms.a: unknown key 'model.width'"):
        changed(config, {"model": {"width": 3}}, "arms.a")


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        (["optimizer.momentum=0.5", "optimizer=muon"], MuonSettings(momentum=0.5)),
        (["optimizer.type=muon", "optimizer=adamw"], MuonSettings()),
        (["optimizer=muon", "optimizer.type=adamw"], AdamWSettings()),
        (
            ["optimizer={type: muon, momentum: 0.5}", "optimizer={eps: 1e-6}"],
            MuonSettings(momentum=0.5, eps=1e-6),
        ),
        (["optimizer.eps=1e-6", "optimizer.eps=1e-7"], AdamWSettings(eps=1e-7)),
    ],
)
def test_choices_of_files_come_first_then_settings_in_their_order_and_the_type_s_defaults_last(
    words: list[str], optimizer: AdamWSettings
) -> None:
    config = compose("train", [*words, "trainer.max_steps=7", "experiment=debug"])
    assert (config.optimizer, config.trainer.max_steps) == (optimizer, 7)


def test_a_section_without_keys_exists_and_keeps_what_it_has() -> None:
    words = ["callbacks={export: null}", "callbacks.early_stopping={}", "callbacks.metrics=null"]
    config, before = compose("train", [*words, "callbacks.metrics={}"]), compose("train", [])
    assert config.callbacks == {**before.callbacks, "export": None}


WRITTEN = [
    *("20240503", "true", "1e3", "010", "2024-05-03", "nan", "~x", "a=b", "a,b", " a", "a\\b"),
    *("a\\", "it's", "a{1}", "[old].fasta", "#1", "ü", "a?*", "range(1,3)", '"a', "a:b"),
]


def test_a_path_stays_as_it_was_written() -> None:
    for written in WRITTEN:
        config = compose("ingest", [f"input={written}", f"output={written}"])
        assert (config.input, config.output) == (written, written)
    words = "[1e3, true,it's,'a,b',\"c,d\",x=[1]]"
    wanted = ["1e3", "true", "it's", "a,b", "c,d", "x=[1]"]
    assert compose("ingest", [f"input={words}", "output=o"]).input == wanted
    assert compose("data_verify", ["store=null"]).store == "null"
    assert compose("score", ["model_dir=m", "input=x", "output=null"]).output is None


_TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).filter(
    lambda text: text.strip() and "$" not in text and text not in ("null", "???")
)


@given(_TEXT, _TEXT)
def test_a_path_is_the_same_quoted_or_in_a_list(one: str, other: str) -> None:
    words = [f"input=[{quoted(one)}, {quoted(other)}]", f"output={quoted(one)}"]
    config = compose("ingest", words)
    assert (config.input, config.output) == ([one, other], one)
    assert parse_overrides([f"name={quoted(one)}"])[0].value() == one


def test_a_file_of_exactly_that_name_wins(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("[a]", "'q'", "a,b", "a=b"):
        (tmp_path / name).write_text(">p\nMK\n")
        assert compose("ingest", [f"input={name}", "output=o"]).input == name
    assert parse_arguments("data_head", ["a=b"], "store").compose().store == "a=b"
    (tmp_path / "a").touch()
    with pytest.raises(ConfigError, match=r"several values; write a list as \[a,b\]"):
        compose("ingest", ["input=a,a", "output=o"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("optimizer: {_target_: os.system}", "unknown"),
        ("callbacks: {mine: {_target_: pandas.read_pickle}}", "unknown"),
        ("paradigm: {type: os.system}", "unknown"),
        ("trainer: {type: 'builtins:print'}", "unknown"),
        ("callbacks: {metrics: {more: ['os:getcwd']}}", "unknown"),
        ("tracking: {tags: {a: 'x/${oc.env:HOME}'}}", r"tracking\.tags\.a=.*resolver"),
    ],
)
def test_a_configuration_from_a_stranger_names_no_python_object_and_reads_no_environment(
    text: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        config = read("train", file)
        build_callbacks(config, RunContext(None, 8, tmp_path))  # type: ignore[arg-type]  # unused


def test_a_users_configs_folder_is_found(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    file = tmp_path / "configs" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\ndefaults:\n  - override /model: 8m\nname: mine\n")
    monkeypatch.chdir(tmp_path)
    config = compose("train", ["experiment=mine"])
    assert (config.name, config.model.hidden_size) == ("mine", 320)
    same = tmp_path / "configs" / "model" / "8m.yaml"
    same.parent.mkdir()
    same.write_text((config_dir() / "model" / "8m.yaml").read_text())
    assert compose("train", ["model=8m"]).model.hidden_size == 320
    same.write_text("hidden_size: 1\n")
    with pytest.raises(ConfigError, match=r"configs/model/8m\.yaml: is ignored in favour of"):
        compose("train", ["model=8m"])
    compose("train", ["model=nano"])  # other projects' files are ignored


# A command and its words → what its message names.
REFUSED = {
    "train trainer.max_step=1": "did you mean 'trainer.max_steps'",
    "train +trainer.max_stepz=1": "did you mean 'trainer.max_steps'",
    "train modell=8m": "did you mean 'model'",
    "train optimizer=adamw optimizer.momentum=0.9": "'optimizer.momentum'",
    "train trainer.seed=1,2": "--multirun",
    "train debug": "key=value",
    "train --cfg=hydra": "--cfg='hydra'",
    "data_head store=x optimizer=adamw": "'optimizer'",
    "score": "input: is required",
    "score input=x model_dir=": "model_dir: is empty",
    "score --mutationz=v.csv": "did you mean '--mutations'",
    "score --mutations": "--mutations: needs a value",
    "score --mutations output=o.csv": "--mutations: needs a value",
    "score --mutations --cfg": "--mutations: needs a value",
    "score --config-name=nope": "nope.yaml",
}


def test_wrong_words_are_refused() -> None:
    for words, message in REFUSED.items():
        command, *rest = words.split()
        with pytest.raises(ConfigError) as caught:
            compose_arguments(command, rest)
        assert message in str(caught.value), words
    for other in ("trainer.max_steps=3", {"name": "a"}, None, [3]):
        with pytest.raises(ConfigError, match=r"^overrides="):
            compose("train", other)  # type: ignore[arg-type]  # no list of text
        with pytest.raises(ConfigError, match=r"^command="):
            compose(other, [])  # type: ignore[arg-type]


def test_options_say_the_same_as_settings() -> None:
    words = ["--model_dir=x", "--input", "-", "mutations=v.csv", "--mutation_offset", "-1"]
    config, arguments = compose_arguments("score", [*words, "--evaluation.seed", "3", "--cfg"])
    assert (config.model_dir, config.input, config.mutations) == ("x", "-", "v.csv")
    assert (config.mutation_offset, config.evaluation.seed) == (-1, 3)
    assert arguments.show_only


def test_a_written_configuration_is_its_owners_and_reads_back(tmp_path: Path) -> None:
    config, file = compose("pipeline", ["experiment=debug"]), tmp_path / "config.yaml"
    save(config, file)
    assert file.stat().st_mode & 0o777 == 0o600
    again, _ = compose_arguments("train", ["--config-file", str(file), "--trainer.max_steps", "8"])
    assert (again.model, again.trainer.max_steps) == (config.model, 8)
    for word, message in {
        "trainer.max_stepz=7": "max_stepz",
        "--trayner.max_steps=8": "did you mean '--trainer.max_steps'",
        "model=8m": "no alternatives",
    }.items():
        with pytest.raises(ConfigError, match=message):
            compose_arguments("train", [f"--config-file={file}", word])


# What is rejected, and which word is named, before torch is imported.
WRONG = {
    "score none.fasta model_dir=none": "model_dir=none: no such file or folder",
    "score none.fasta model_dir=models:/m@champion": "input=none.fasta",
    "generate models:/m@champion relatives=none.fasta": "generation.relatives=none.fasta",
    "adapt none.fasta init_from=.": "input=none.fasta",
    "embed none.fasta model_dir=.": "model_dir=.: not a model folder",
    "train trainer.max_steps=abc": "trainer.max_steps='abc'",
    "evaluate model_dir=nowhere": "nowhere",
    "prepare nowhere.fasta": "nowhere.fasta",
    "job show command=embed launcher.name=e input=a output=e": "output='e'",
    "job show command=embed shards=501 launcher.name=e input=a output=/workspace/e": "shards=501",
}


def test_wrong_words_are_rejected_before_torch_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from d2plm.cli import main\n"
        "for words in sys.argv[1:]: assert main(words.split()) in (1, 2), words\n"
        "assert 'omegaconf' in sys.modules and 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", program, *WRONG]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("d2plm: error")]
    for line, message in zip(lines, WRONG.values(), strict=True):
        assert message in line
