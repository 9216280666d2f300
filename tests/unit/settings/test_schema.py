"""Settings: what a field gives, the checks of values, and paths that are read."""

import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from d2plm.config import check_paths, compose_arguments, parse_arguments, save
from d2plm.core.errors import ConfigError, D2PLMError, DataError
from d2plm.settings.commands import SETTINGS, SHORT_KEYS
from d2plm.settings.launcher import LauncherSettings
from d2plm.settings.schema import Settings, build, key, keys, section, with_defaults
from d2plm.settings.tracking import TrackingSettings
from tests.conftest import MonkeyPatch

REJECTED = """\
trainer.seed=18446744073709551616
trainer.freeze=blocks
launcher.claims={a: /workspace, b: /workspace/}
launcher.claims={a: /dev/shm}
launcher.claims={tmp: /w}
launcher.claims={a: relative}
launcher.claims={a: 1}
launcher.claims={A_b: /w}
launcher.environment={1 A: x}
launcher.environment={A: null}
launcher.node_selector={bad key: x}
launcher.node_selector={gpu: bad value}
launcher.node_selector={gpu: true}"""


@pytest.mark.parametrize("word", REJECTED.splitlines())
def test_what_a_field_or_the_cluster_does_not_take_is_rejected_by_its_key(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_arguments("train", [word])
    assert list(caught.value.settings) == [word.partition("=")[0]]


NO_MODEL = ["lab/kinases", "a:b", "", " x", "it's", "a@b", "a\tb", "..", "a" * 257]
TEXTS = [
    (LauncherSettings, "memory", ["8Gi", "1.5G", "1e9"], ["12Gx", "", "-1", "8 Gi"]),
    (LauncherSettings, "cpu", ["2", "500m", ".5"], ["zero"]),
    (LauncherSettings, "queue", ["team-a.gpu", None], ["Nope_X", "", "a" * 64]),
    (LauncherSettings, "name", ["a-1", None], ["BAD_NAME", "-a", "a" * 64]),
    (TrackingSettings, "registered_model", ["my model-1.0"], NO_MODEL),
    (TrackingSettings, "experiment", ["lab/kinases"], ["", " x", "a\nb", "a" * 501]),
]


def test_texts() -> None:
    for kind, name, right, wrong in TEXTS:
        for value in right:
            assert getattr(kind(**{name: value}), name) == value
        for value in wrong:
            with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}"[:99])):
                kind(**{name: value})


def test_a_mapping_is_set_and_null_is_refused() -> None:
    for name, value in {
        "node_selector": {"kubernetes.io/hostname": "NODE_1", "gpu": "'true'", "a.io/x": "''"},
        "environment": {"NCCL_DEBUG": "INFO", "a.b-c": "1", "B": "true", "D": "''"},
        "claims": {"other": "/workspace", "b": "/workspace/data"},
    }.items():
        written = ", ".join(f"{label}: {text}" for label, text in value.items())
        composed, _ = compose_arguments("train", [f"launcher.{name}={{{written}}}"])
        assert getattr(composed.launcher, name) == yaml.safe_load(f"{{{written}}}")
        with pytest.raises(ConfigError, match=f"launcher.{name}=null"):
            compose_arguments("train", [f"launcher.{name}=null"])


def all_settings(kind: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("d2plm.settings"):
            yield one
        yield from all_settings(one)


def misfits(kind: Any, limits: Mapping[str, Any]) -> Iterator[object]:
    """Values that a field of this type and these limits does not take."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if Any in kinds or (str in kinds and not {int, float} & {*kinds}):
        return
    if {int, float} & {*kinds}:
        steps = {"low": -1, "high": 1, "above": 0, "below": 0}
        yield from (limits[name] + by for name, by in steps.items() if limits[name] is not None)
        yield math.nan
    if int in kinds and float not in kinds:
        yield 2.5
    if bool not in kinds:
        yield True
    if NoneType not in kinds:
        yield None
    if str not in kinds:
        yield "no such value"


def test_every_field_takes_nothing_beyond_its_type_its_limits_and_its_choices() -> None:
    tried = 0
    for kind in dict.fromkeys(all_settings()):
        known = [one for one in fields(kind) if "above" in one.metadata and one.name != "type"]
        required = [one for one in known if one.default is one.default_factory]
        given = {one.name: 1 if one.type is int else "x" for one in required}
        for one in known:
            for value in misfits(one.type, one.metadata):
                with pytest.raises(ConfigError, match=rf"^{one.name}="):
                    kind(**{**given, one.name: value})
                tried += 1
    assert tried > 500


def test_only_listed_keys_have_a_short_form() -> None:
    words = ["number=5", "--temperature", "0.5", "model_dir=m"]
    config, _ = compose_arguments("generate", words)
    assert (config.generation.number, config.generation.temperature) == (5, 0.5)
    for command, short in SHORT_KEYS.items():
        assert {*short.values()} <= keys(SETTINGS[command]).keys()
        assert not short.keys() & keys(SETTINGS[command]).keys()
    for word in ("warmup_ratio=0", "trainer.learning_rate=1", "--epochs=3"):
        with pytest.raises(ConfigError, match="did you mean"):
            compose_arguments("train", [word])


def test_a_first_word_is_the_value_of_the_obvious_key() -> None:
    assert parse_arguments("score", ["p.fasta"], "input").overrides == ["input='p.fasta'"]
    for words in (["p.fasta", "q.fasta"], ["input=my", "file.fasta"], ["input", "=", "p.fasta"]):
        with pytest.raises(ConfigError):
            parse_arguments("score", words, "input")


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
    assert f"did you mean '{run / 'model'}'" in message("model_dir", run)
    assert "is empty" in message("input", tmp_path / "empty.fasta")
    assert "is a file" in message("store", fasta, "data_stats")
    assert "is a file" in message("data.prepared_dir", fasta, "train")
    (run / "raw").mkdir()
    (run / "raw" / "data.mdb").touch()
    assert "is a raw store" in message("data.prepared_dir", run / "raw", "evaluate")
    saved = run / "checkpoints" / "step-1"
    saved.mkdir(parents=True)
    (saved / "__0_0.distcp").touch()
    remedy = f"d2plm export --config-file {run}/config.yaml trainer.resume={saved}"
    assert remedy in message("model_dir", saved)


def test_odd_paths_are_no_tracebacks(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("M" * 300, "~nobody/p.fasta", "deep/**/*.fasta"):
        with pytest.raises(DataError, match="no such file or folder"):
            check_paths("ingest", {"input": path}, ["input"])
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "p.fasta").write_text(">a\nMK\n")
    check_paths("ingest", {"input": "deep/**/*.fasta"}, ["input"])


def test_a_configuration_that_another_command_wrote_serves_the_training(tmp_path: Path) -> None:
    config, _ = compose_arguments("adapt", ["input=x", "init_from=y", "generation.number=0"])
    save(config, tmp_path / "config.yaml")
    again, _ = compose_arguments("train", [f"--config-file={tmp_path / 'config.yaml'}"])
    assert again.trainer == config.trainer
    assert not hasattr(again, "max_general_loss")


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    size: int = key(3, low=1)
    """number of parts,
    in two lines"""
    mode: Literal["a", "b"] | None = key(None)
    """what is done"""


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    inner: Inner = section(Inner)
    rates: list[float] = key([0.5], above=0)
    """rates, each of a step"""
    place: str = key(path="folder")
    """where results go"""


NO_CHOICE = "must be one of a, b or null (did you mean 'a'?)"


def test_fields_are_keys_with_their_sentences_choices_and_defaults() -> None:
    known = keys(Outer)
    assert list(known) == ["inner.size", "inner.mode", "rates", "place"]
    assert known["inner.size"].described == "number of parts, in two lines (≥ 1)"
    assert known["inner.mode"].choices == ["a", "b"]
    assert (known["place"].path, known["place"].default) == ("folder", "???")
    assert Outer(inner=Inner(size=2), place="x").inner.size == 2
    assert build(Outer, {"inner": {"size": 2}, "place": "x"}).inner == Inner(size=2)
    whole = {"inner": {"size": 3, "mode": "a"}, "rates": [0.5], "place": "x"}
    assert with_defaults(Outer, {"inner": {"mode": "a"}, "place": "x"}) == whole


@pytest.mark.parametrize(
    ("values", "key", "reason"),
    [
        ({"inner": {"size": True}}, "inner.size", "must be an integer ≥ 1"),
        ({"inner": {"mode": "aa"}}, "inner.mode", NO_CHOICE),
        ({"inner": 3}, "inner", "must be a mapping, {KEY: VALUE, …}"),
        ({"rates": [math.nan]}, "rates", "must be a list, [a number > 0, …]"),
    ],
)
def test_an_error_carries_key_and_reason(values: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, {"place": "x", **values})
    assert (list(caught.value.settings), caught.value.reason) == ([key], reason)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), list(again.settings)) == (str(caught.value), [key])


def test_every_key_has_a_sentence() -> None:
    for command, settings in SETTINGS.items():
        assert not [key for key, one in keys(settings).items() if not one.help], command
