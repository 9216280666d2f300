"""Hugging Face's interfaces on an exported folder, used as scripts for transformers and peft do."""

import logging
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
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils.logging import disable_progress_bar

import d2plm.hugging_face  # noqa: F401  # registers the classes
from d2plm.api import load_model
from d2plm.core.batch import Relatives
from d2plm.core.errors import ConfigError, ModelError
from d2plm.export.exported_model import load_export, save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import MaskFlowMatching, UniformFlowMatching
from d2plm.paradigms.paradigm import Paradigm
from tests.commands import python_c
from tests.conftest import TINY_SIZES, Logged, MonkeyPatch

disable_progress_bar()
PROTEINS = ["MKTA<mask>IAKQR", "GS", "<mask>W<mask>A"]
TO_LEARN = ["MKTAYIAKQRQISFVKSHFSRQ", "GSHMLEDPVAGGLLMKWYNE", "ACDEFGHIKLMNPQRSTVWY"] * 4
VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {"num_experts": 4, "shared_expert_size": 16},
    "relatives": {"relatives_dim": 16},
}
IDS = torch.tensor([[0, 20, 32, 11, 32, 2], [0, 6, 32, 2, 1, 1]])
LABELS = torch.tensor([[-100, -100, 15, -100, 5, -100], [-100, -100, 8, -100, -100, -100]])
BOUNDS = torch.tensor([0, 6, 10], dtype=torch.int32)
PACKED = IDS[IDS != 1], BOUNDS, 6, torch.tensor([0.4, 0.5])
RELATIVES = Relatives.pack([[np.array([20, 15, 11, 5], np.uint8)], [np.array([6, 8], np.uint8)]])


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


def test_one_import_alone_registers_the_classes() -> None:
    alone = (
        "import sys; before = list(sys.meta_path)\n"
        "import d2plm; print(sys.meta_path == before, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "False"]
    program = (
        "import d2plm.api, d2plm.model.dit; from transformers import AutoConfig\n"
        "try: AutoConfig.for_model(d2plm.model.dit.DiTConfig.model_type)\n"
        "except ValueError: print('unknown')\n"
        "import d2plm.hugging_face\n"
        "print(type(AutoConfig.for_model(d2plm.model.dit.DiTConfig.model_type)).__name__)"
    )
    assert python_c(program).stdout.split() == ["unknown", "DiTConfig"]


@pytest.mark.parametrize("kind", ["diffusion", "cosine", "uniform"])
def test_times_follow_the_masks(kind: str, exports: Path, inputs: dict[str, torch.Tensor]) -> None:
    model = AutoModelForMaskedLM.from_pretrained(exports / kind).eval()
    times = model.times_of(inputs["input_ids"], inputs["attention_mask"].bool())
    fraction = model.paradigm.corrupted_fraction(times.double())
    assert fraction.tolist() == pytest.approx([1 / 10, 1 / 2, 2 / 4], rel=2e-3)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(**inputs, times=times).logits)


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
    assert (logits[inputs["input_ids"] == 1] == 0).all()


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
    assert torch.equal(output.last_hidden_state, states)


def test_the_pipelines_run(exports: Path) -> None:
    found = pipeline("fill-mask", model=str(exports / "diffusion"))("MKTA<mask>IAK", top_k=3)
    assert len(found) == 3
    assert found[0]["sequence"].replace(" ", "").startswith("MKTA")
    vectors = pipeline("feature-extraction", model=str(exports / "diffusion"))("MKTAIAK")
    assert np.array(vectors).shape == (1, 9, 16)


WRITERS: dict[str, Callable[[Any, Path], Any]] = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "in half precision": lambda model, folder: model.bfloat16().save_pretrained(folder),
    "Trainer": lambda model, folder: Trainer(
        model, TrainingArguments(str(folder / "runs"), report_to=[])
    ).save_model(str(folder)),
}


@pytest.mark.parametrize(
    ("kind", "auto"), zip(WRITERS, [AutoModel, AutoModelForMaskedLM, AutoModel], strict=True)
)
def test_what_transformers_saves_is_a_model_folder(
    kind: str, auto: Any, exports: Path, tmp_path: Path, caplog: Logged
) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(exports / "cosine", tmp_path / "export")
    model = auto.from_pretrained(tmp_path / "export")
    shutil.rmtree(tmp_path / "export")
    folder.mkdir()
    (folder / "evaluation.json").write_text("{}")  # of the weights before
    WRITERS[kind](model, folder)
    ours, theirs = load_model(folder, precision="fp32"), load_export(exports / "cosine")
    assert "run 'd2plm evaluate'" in caplog.text
    assert not (folder / "evaluation.json").exists()
    assert ours.exported.paradigm.settings == theirs.paradigm.settings
    saved, expected = ours.exported.model.state_dict(), theirs.model.state_dict()
    tolerance = 2**-8 if kind == "in half precision" else 0.0
    torch.testing.assert_close(saved, expected, rtol=tolerance, atol=0.0)
    assert ours.generate(3, seed=1, steps=2)[0]
    kept = ("README.md", "length_histogram.json", "tokenizer_config.json", "tokenizer.json")
    for name in (*kept, "paradigm_config.json"):
        assert (folder / name).read_text() == (exports / "cosine" / name).read_text()
    assert AutoTokenizer.from_pretrained(folder)("mk")["input_ids"] == [0, 20, 15, 2]


def test_a_new_model_is_one_of_absorbing_diffusion(tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_config(DiTConfig(**TINY_SIZES)).eval()
    ids = torch.tensor([[0, 5, 32, 6, 32, 2], [0, 32, 2, 1, 1, 1]])
    times = model.times_of(ids, ids != 1)
    torch.testing.assert_close(times, torch.tensor([2 / 4, 1.0]))
    with torch.no_grad():
        assert model(ids)[0].shape == (2, 6, 33)
    model.save_pretrained(tmp_path)
    assert len(load_model(tmp_path).generate(2, seed=1, steps=2)) == 2
    # Another vocabulary is not known from its size.
    AutoModel.from_config(DiTConfig(**TINY_SIZES, vocab_size=20)).save_pretrained(tmp_path / "20")
    with pytest.raises(ModelError, match=r"no provenance\.json"):
        load_model(tmp_path / "20")


@pytest.fixture
def cached(exports: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
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
        ({"revision": "v2", "subfolder": "sub"}, "uniform"),
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


def test_what_is_missing_is_said(exports: Path, tmp_path: Path) -> None:
    load_export(exports / "diffusion").model.save_pretrained(tmp_path / "bare")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"has no paradigm_config\.json; pass times"):
        model(torch.tensor([[0, 5, 2]]))
    with pytest.raises(ModelError, match="pass input_ids"):
        model()
    assert model(torch.tensor([[0, 5, 2]]), times=torch.tensor([0.5])).logits.shape == (1, 3, 33)


@pytest.fixture
def model(exports: Path) -> Any:
    return AutoModelForMaskedLM.from_pretrained(exports / "diffusion")


def test_a_trainer_trains_the_model(exports: Path, model: Any, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exports / "diffusion")
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=6,
        use_cpu=True,
        bf16=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        gradient_checkpointing=True,
    )
    proteins = [tokenizer(protein, truncation=True) for protein in TO_LEARN]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer = Trainer(model, arguments, collator, proteins, proteins, processing_class=tokenizer)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 3 and np.isfinite(losses).all()
    assert all((weight != before[name]).any() for name, weight in model.named_parameters())
    assert np.isfinite(trainer.evaluate()["eval_loss"])


def test_recomputed_gradients_are_those_without(model: Any) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model.train()(IDS, labels=LABELS).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters()}

    kept = gradients()
    model.gradient_checkpointing_enable()
    calls = []
    hook = model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradients(), kept)
    hook.remove()
    assert len(calls) == 2


@pytest.mark.parametrize("kind", VARIANTS)
def test_an_adapter_on_any_layer_is_trained(kind: str, tiny_dit: Callable[..., Any]) -> None:
    dit = tiny_dit(**VARIANTS[kind])
    inputs = (*PACKED, RELATIVES) if kind == "relatives" else PACKED
    plain = dit(*inputs).detach()
    names = [n for n, each in dit.named_modules() if isinstance(each, nn.Linear | nn.Embedding)]
    stacked = [n for n, w in dit.named_parameters() if n.endswith(("router.weight", "_weight"))]
    assert {"head.proj", "token_embedding"} < set(names)
    for where in [{"target_modules": [name]} for name in names] + [
        {"target_modules": [], "target_parameters": [name]} for name in stacked
    ]:
        config = LoraConfig(r=2, init_lora_weights=False, **where)
        adapted = get_peft_model(tiny_dit(**VARIANTS[kind]), config).eval()
        logits = adapted(*inputs)
        assert not torch.allclose(logits, plain, atol=1e-3), where
        logits.square().sum().backward()
        trained = [weight.grad for name, weight in adapted.named_parameters() if "lora" in name]
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in trained), where
        merged = adapted.merge_and_unload()(*inputs)
        torch.testing.assert_close(logits, merged, rtol=1e-3, atol=1e-3)


def test_the_loss_is_of_the_labels_at_masks(model: Any, caplog: Logged) -> None:
    output = model(IDS, labels=LABELS)
    at_mask = IDS == 32
    torch.testing.assert_close(output.loss, cross_entropy(output.logits[at_mask], LABELS[at_mask]))
    assert not caplog.records
    more = LABELS.clone()
    more[0, 1], more[1, 1], more[1, 5] = 20, 7, 9
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            torch.testing.assert_close(model(IDS, labels=more).loss, output.loss)
    assert len(caplog.records) == 1
    assert "not <mask> (3 in this batch)" in caplog.text


@pytest.mark.parametrize("labels", [torch.full_like(IDS, -100), IDS.where(IDS != 32, -100)])
def test_labels_of_which_none_is_at_a_mask_are_an_error(model: Any, labels: torch.Tensor) -> None:
    with pytest.raises(ModelError, match=r"labels: none of \d+ is at a <mask>"):
        model(IDS, labels=labels)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"time": 0.5}, TypeError, "'time' .did you mean 'times'"),
        ({"times": float("nan")}, ConfigError, "times"),
        ({"labels": LABELS[:1]}, ConfigError, r"labels.shape.*\(2, 6\)"),
        ({"labels": LABELS + 40}, ConfigError, "labels"),
        ({"attention_mask": torch.ones(2, 5)}, ConfigError, r"attention_mask.shape.*\(2, 6\)"),
        ({"relatives": [["MKV"], []]}, ConfigError, r"Relatives\.pack"),
        ({"relatives": RELATIVES}, ModelError, "without relatives"),
    ],
)
def test_what_forward_does_not_know_is_refused(
    wrong: dict[str, Any], error: type[Exception], message: str, model: Any
) -> None:
    with pytest.raises(error, match=message):
        model(IDS, **wrong)


def test_the_options_of_a_call_are_honoured(exports: Path, model: Any) -> None:
    given = model(IDS, output_hidden_states=True, labels=LABELS)
    assert tuple(given.keys()) == ("loss", "logits", "hidden_states")
    assert [len(one.shape) for one in model(IDS, labels=LABELS, return_dict=False)] == [0, 3]
    with pytest.raises(TypeError, match="AutoModel has no loss"):
        AutoModel.from_pretrained(exports / "diffusion")(IDS, labels=LABELS)


def test_relatives_are_those_of_the_rows(tiny_dit: Callable[..., Any], tmp_path: Path) -> None:
    dit = tiny_dit(relatives_dim=16)
    dit.save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path)
    found = model(IDS, times=PACKED[-1], relatives=RELATIVES).logits
    torch.testing.assert_close(found[IDS != 1], dit(*PACKED, RELATIVES))
    assert not torch.allclose(model(IDS, times=PACKED[-1]).logits, found)
