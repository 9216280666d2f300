"""The configured vocabulary reaches the model, the paradigm, the identity and the export."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from d2plm.assembly import training_run
from d2plm.assembly.preparation import build_vocabulary, require_fitting_window
from d2plm.assembly.training_run import build_trainer, open_stores, training_stores
from d2plm.config import compose
from d2plm.core.errors import ConfigError, ModelError
from d2plm.core.vocabulary import DNA, PROTEIN, Codons, Vocabulary
from d2plm.data.synthetic import SyntheticSequences, plausible_lengths
from d2plm.export.exported_model import load_export
from d2plm.settings.commands import TrainSettings
from d2plm.training.trainer import Trainer
from tests.conftest import MonkeyPatch


def configuration(folder: Path, *overrides: str) -> TrainSettings:
    words = ["experiment=debug", "data.residues=random", f"work_dir={folder}", "tracking=none"]
    config: TrainSettings = compose("train", [*words, *overrides])
    return config


def built(config: TrainSettings) -> Trainer:
    return build_trainer(config, training_stores(config))


def test_a_run_of_codons_is_exported_with_its_vocabulary(tmp_path: Path) -> None:
    words = ["data.alphabet=codon", "trainer.max_steps=1", "callbacks.evaluation=null"]
    config = configuration(tmp_path, *words)
    trainer = built(config)
    assert trainer.identity["data"]["vocabulary"] == Codons().describe()
    trainer.train()
    exported = load_export(config.model_dir)
    assert exported.vocabulary == Codons()
    assert exported.model.config.vocab_size == Codons().size
    with pytest.raises(ModelError, match=r"init_from=.*\(codon\)"):
        built(configuration(tmp_path / "other", f"init_from={config.model_dir}"))
    built(configuration(tmp_path / "again", *words, f"init_from={config.model_dir}"))


def prepared(monkeypatch: MonkeyPatch, vocabulary: Vocabulary) -> None:
    store = SyntheticSequences(plausible_lengths(9), vocabulary=vocabulary)
    data = SimpleNamespace(splits={"train": store})
    monkeypatch.setattr(training_run, "open_prepared", lambda folder: data)


@pytest.mark.parametrize(
    ("vocabulary", "configured", "prepared_as"),
    [(DNA, "protein", "dna"), (PROTEIN, "rna", "protein"), (Codons(), "dna", "codon")],
)
def test_data_of_another_vocabulary_are_refused(
    vocabulary: Vocabulary,
    configured: str,
    prepared_as: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
) -> None:
    prepared(monkeypatch, vocabulary)
    words = f"data.alphabet='{configured}': .*data.alphabet={prepared_as};"
    with pytest.raises(ConfigError, match=words):
        open_stores(configuration(tmp_path, f"data.alphabet={configured}"))


def test_prepared_data_contain_their_tokenizer(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    config = configuration(tmp_path, "data.alphabet=tokenizer")
    file = "examples/data/king_james_bible_bpe.json"
    own = build_vocabulary(replace(config.data, tokenizer=file))
    prepared(monkeypatch, own)
    assert open_stores(config)["train"].vocabulary == own
    other = Path(file).read_text().replace('"truncation": null', '"truncation" : null')
    (tmp_path / "other.json").write_text(other)
    with pytest.raises(ConfigError, match=r"with data\.alphabet=tokenizer and another"):
        open_stores(
            configuration(
                tmp_path, "data.alphabet=tokenizer", f"data.tokenizer={tmp_path / 'other.json'}"
            )
        )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data.window=127"], "data.window=127: must be at most data.max_length"),
        (["data.window=127", "data.max_length=null"], "data.window=127: must be at most model."),
        (["data.alphabet=tokenizer"], "data.tokenizer=null"),
        (["data.alphabet=dna", "model.relatives_dim=8"], "model.relatives_dim=8"),
    ],
)
def test_impossible_settings(words: list[str], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        built(configuration(tmp_path, *words))
    require_fitting_window(configuration(tmp_path, "data.window=126"))
