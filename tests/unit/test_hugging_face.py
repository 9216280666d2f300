"""Hugging Face's interfaces on an exported folder: classes, times, pipelines, saving."""

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils.logging import disable_progress_bar

import d2plm.hugging_face
from d2plm.api import load_model
from d2plm.core.errors import ModelError
from d2plm.export.exported_model import load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.hugging_face import DiTForMaskedLM
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm

disable_progress_bar()
PROTEINS = ["MKTA<mask>IAKQR", "GS", "<mask>W<mask>A"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, tiny_dit: Callable[..., Any]) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    lengths = LengthHistogram.of(np.array([10, 40]), 126)
    paradigms: dict[str, Paradigm] = {
        "diffusion": AbsorbingDiffusion(),
        "cosine": MaskFlowMatching(schedule="cosine"),
        "uniform": UniformFlowMatching(),
    }
    for name, paradigm in paradigms.items():
        save_export(folder / name, tiny_dit(), paradigm, lengths, {})
    return folder


@pytest.fixture
def inputs(exports: Path) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(exports / "diffusion")
    return {**tokenizer(PROTEINS, return_tensors="pt", padding=True)}


def printed(program: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return ended.stdout.split()


@pytest.mark.parametrize(
    "imports",
    [
        "import d2plm.hugging_face\nfrom transformers import AutoModelForMaskedLM",
        "from transformers import AutoModelForMaskedLM\nimport d2plm.hugging_face",
    ],
)
def test_one_import_before_or_after_transformers_registers_the_classes(
    imports: str, exports: Path
) -> None:
    load = f"AutoModelForMaskedLM.from_pretrained({str(exports / 'diffusion')!r})"
    assert printed(f"{imports}\nprint(type({load}).__name__)")[-1] == "DiTForMaskedLM"


def test_nothing_else_of_d2plm_changes_what_transformers_loads() -> None:
    program = (
        "import sys; before = list(sys.meta_path)\n"
        "import d2plm; print(sys.meta_path == before, 'torch' in sys.modules)\n"
        "import d2plm.api, d2plm.model.dit; from transformers import AutoConfig\n"
        "try: AutoConfig.for_model(d2plm.model.dit.DiTConfig.model_type)\n"
        "except ValueError: print('unknown')"
    )
    assert printed(program) == ["True", "False", "unknown"]


def test_the_classes_need_no_package_of_commands_or_evaluations() -> None:
    blocked = ("hydra", "jinja2", "mlflow", "pandas", "scipy")
    printed(
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from transformers import AutoModelForMaskedLM\nimport d2plm.hugging_face"
    )


@pytest.mark.parametrize("kind", ["diffusion", "cosine", "uniform"])
def test_without_times_they_are_those_of_the_masks(
    kind: str, exports: Path, inputs: dict[str, torch.Tensor]
) -> None:
    model = AutoModelForMaskedLM.from_pretrained(exports / kind).eval()
    times = model.times_of(inputs["input_ids"], inputs["attention_mask"].bool())
    fraction = model.paradigm.corrupted_fraction(times.double())
    torch.testing.assert_close(
        fraction, torch.tensor([1 / 10, 1 / 2, 2 / 4], dtype=torch.float64), rtol=2e-3, atol=0
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(**inputs).logits, model(**inputs, times=times).logits, rtol=0, atol=0
        )


def test_a_padded_row_is_the_packed_one(exports: Path, inputs: dict[str, torch.Tensor]) -> None:
    model = AutoModelForMaskedLM.from_pretrained(exports / "diffusion").eval()
    plain = load_export(exports / "diffusion").model
    with torch.no_grad():
        logits = model(**inputs).logits
        times = model.times_of(inputs["input_ids"], inputs["attention_mask"].bool())
        for row, time, own in zip(inputs["input_ids"], times, logits, strict=True):
            tokens = row[row != 1]
            packed = tokens, torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens)
            expected = plain(*packed, time[None])
            torch.testing.assert_close(own[: len(tokens)], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(*packed, time[None]), expected)
            named = dict(zip(("tokens", "cu_seqlens", "max_seqlen"), packed, strict=True))
            torch.testing.assert_close(model(**named, times=time[None]), expected)
        torch.testing.assert_close(model(inputs["input_ids"]).logits, logits)


def test_hidden_states_are_the_embeddings(exports: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exports / "diffusion")
    model = AutoModel.from_pretrained(exports / "diffusion").eval()
    ours = load_model(exports / "diffusion", precision="fp32")
    proteins = ["MKTAYIAKQR", "GS"]
    with torch.no_grad():
        padded = tokenizer(proteins, return_tensors="pt", padding=True)
        output = model(**padded, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    for layer, states in enumerate(output.hidden_states):
        for own, expected in zip(states, ours.embed(proteins, layer=layer), strict=True):
            np.testing.assert_allclose(own[1 : len(expected) + 1], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(output.last_hidden_state, output.hidden_states[-1])


def test_the_pipelines_run(exports: Path) -> None:
    found = pipeline("fill-mask", model=str(exports / "diffusion"))("MKTA<mask>IAK", top_k=3)
    assert len(found) == 3
    assert found[0]["sequence"].replace(" ", "").startswith("MKTA")
    vectors = pipeline("feature-extraction", model=str(exports / "diffusion"))("MKTAIAK")
    assert np.array(vectors).shape == (1, 9, 16)


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "in half precision": lambda model, folder: model.bfloat16().save_pretrained(folder),
    "a copy": lambda model, folder: copy.deepcopy(model).save_pretrained(folder),
    "Trainer": lambda model, folder: Trainer(
        model, TrainingArguments(str(folder / "runs"), report_to=[])
    ).save_model(str(folder)),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForMaskedLM])
def test_what_transformers_saves_is_a_model_folder(
    kind: str, auto: Any, exports: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(exports / "cosine", tmp_path / "export")
    model = auto.from_pretrained(tmp_path / "export")
    shutil.rmtree(tmp_path / "export")
    folder.mkdir()
    (folder / "evaluation.json").write_text("{}")  # of the weights before
    WRITERS[kind](model, folder)
    ours, theirs = load_model(folder, precision="fp32"), load_model(exports / "cosine")
    assert "figures in its README.md no longer hold; run 'd2plm evaluate'" in caplog.text
    assert not (folder / "evaluation.json").exists()
    assert ours.exported.paradigm.settings == theirs.exported.paradigm.settings
    assert ours.generate(3, seed=1, steps=2)[0]
    kept = ("README.md", "length_histogram.json", "tokenizer_config.json", "tokenizer.json")
    for name in (*kept, "paradigm_config.json"):
        assert (folder / name).read_text() == (exports / "cosine" / name).read_text()
    AutoTokenizer.from_pretrained(folder)
    again = AutoModelForMaskedLM.from_pretrained(folder)
    assert again.paradigm.settings == model.paradigm.settings


def test_a_tokenizer_that_is_there_stays(exports: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(exports / "cosine", model_max_length=17).save_pretrained(tmp_path)
    AutoModel.from_pretrained(exports / "cosine").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 17


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForMaskedLM])
@pytest.mark.parametrize("size", [33, 261, 20])
def test_a_new_model_is_one_of_absorbing_diffusion(auto: Any, size: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DiTConfig(**sizes, intermediate_size=32, vocab_size=size)
    model = auto.from_config(config).eval()
    ids = torch.tensor([[0, 5, size - 1, 6, size - 1, 2], [0, size - 1, 2, 1, 1, 1]])
    times = model.times_of(ids, ids != 1)
    torch.testing.assert_close(times, torch.tensor([2 / 4, 1.0]))
    with torch.no_grad():
        assert model(ids)[0].shape == (2, 6, size if auto is AutoModelForMaskedLM else 16)
    model.save_pretrained(tmp_path)
    if size == 33:  # another vocabulary is not known from its size
        assert len(load_model(tmp_path).generate(2, seed=1, steps=2)) == 2
    else:
        with pytest.raises(ModelError, match=r"no provenance\.json"):
            load_model(tmp_path)


@pytest.fixture
def cached(exports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with lab/model: diffusion on main, cosine on v2, there also in `sub`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "cache" / "models--lab--model"
    (repository / "refs").mkdir(parents=True)
    for branch, kind, commit in (("main", "diffusion", 40 * "a"), ("v2", "cosine", 40 * "b")):
        shutil.copytree(exports / kind, repository / "snapshots" / commit)
        (repository / "refs" / branch).write_text(commit)
    shutil.copytree(exports / "uniform", repository / "snapshots" / commit / "sub")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ({}, "diffusion"),
        ({"revision": "v2"}, "cosine"),
        ({"revision": 40 * "b"}, "cosine"),
        ({"revision": "v2", "subfolder": "sub"}, "uniform"),
        ({"local_files_only": True, "token": False}, "diffusion"),
    ],
)
def test_every_file_is_of_the_place_that_is_named(
    place: dict[str, Any], kind: str, cached: Path, exports: Path
) -> None:
    model = AutoModelForMaskedLM.from_pretrained("lab/model", cache_dir=cached, **place)
    expected = AutoModelForMaskedLM.from_pretrained(exports / kind)
    assert model.paradigm.settings == expected.paradigm.settings
    assert model.companions == expected.companions
    loaded = load_model("lab/model", cache_dir=cached, **place).exported
    assert loaded.paradigm.settings == expected.paradigm.settings


def test_every_file_is_asked_for_with_the_same_arguments(
    exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"revision": "v2", "token": "t", "cache_dir": "c", "local_files_only": True}
    asked: dict[str, dict[str, Any]] = {}

    def cached_file(name: str, file: str, **arguments: Any) -> str | None:
        asked[file] = arguments
        path = exports / "cosine" / file
        return str(path) if path.is_file() else None

    monkeypatch.setattr(d2plm.hugging_face, "cached_file", cached_file)
    DiTForMaskedLM.from_pretrained(exports / "cosine", **place)
    assert {*asked} > {"paradigm_config.json", "vocabulary.json", "README.md", "provenance.json"}
    assert all(arguments.items() >= place.items() for arguments in asked.values())


def test_what_is_missing_is_said(exports: Path, tmp_path: Path) -> None:
    load_export(exports / "diffusion").model.save_pretrained(tmp_path / "bare")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"has no paradigm_config\.json; pass times"):
        model(torch.tensor([[0, 5, 2]]))
    with pytest.raises(ModelError, match="pass input_ids"):
        model()
    assert model(torch.tensor([[0, 5, 2]]), times=torch.tensor([0.5])).logits.shape == (1, 3, 33)
