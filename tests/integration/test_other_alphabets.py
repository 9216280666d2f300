"""Codons and text from a file to what a model generates; test_followed does it with nucleotides."""

import gzip
import json
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import d2plm.hugging_face  # noqa: F401  # registers the classes of transformers
from d2plm import load_model
from d2plm.cli import main
from d2plm.core.errors import ModelError
from d2plm.core.vocabulary import PROTEIN, open_vocabulary
from d2plm.export.exported_model import load_export
from d2plm.export.model_evaluation import open_rival
from d2plm.serving.service import Service, parse_request

EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
TOKENIZER = EXAMPLES / "king_james_bible_bpe.json"
WINDOW = "data.window=126"  # of max_length=128


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def genes(folder: Path) -> Path:
    """The first real genes, whole codons each."""
    with gzip.open(EXAMPLES / "helicobacter_pylori_genes.fasta.gz", "rt") as source:
        return written(folder, "genes.fasta", ">".join(source.read().split(">")[:80]))


def chapters(folder: Path) -> Path:
    """The beginnings of chapters, as JSON lines."""
    with gzip.open(EXAMPLES / "king_james_bible.jsonl.gz", "rt") as source:
        rows = [json.loads(line) for line in islice(source, 40)]
    cut = "".join(json.dumps({**row, "text": row["text"][:600]}) + "\n" for row in rows)
    return written(folder, "chapters.jsonl", cut)


CASES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "codon": (genes, [WINDOW]),
    "bytes": (chapters, [WINDOW]),
    "tokenizer": (chapters, [WINDOW, f"data.tokenizer={TOKENIZER}"]),
}


@pytest.mark.parametrize(
    "alphabet",
    [
        name if name == "tokenizer" else pytest.param(name, marks=pytest.mark.thorough)
        for name in CASES
    ],
)
def test_prepare_train_evaluate_and_generate(alphabet: str, tmp_path: Path) -> None:
    make, settings = CASES[alphabet]
    words = ["experiment=debug", f"data.input={make(tmp_path)}", f"work_dir={tmp_path / 'run'}"]
    words += [f"data.alphabet={alphabet}", *settings, "tracking=none", "evaluation.generated=2"]
    for command in ("prepare", "train", "evaluate"):
        assert main([command, *words]) == 0
    output_dir = tmp_path / "run" / "diffusion"
    vocabulary = open_vocabulary(output_dir / "model")
    assert vocabulary.name == alphabet
    evaluation = json.loads((output_dir / "evaluation.json").read_text())
    assert 0 < evaluation["model"]["perplexity"]["value"] < 4 * vocabulary.predicted
    uses_the_export(output_dir / "model", tmp_path)
    cuts_long_sequences(output_dir / "model", tmp_path)
    with pytest.raises(ModelError, match="compare_with: "):
        open_rival(output_dir / "model", PROTEIN, 9, torch.device("cpu"))


def cuts_long_sequences(folder: Path, tmp_path: Path) -> None:
    vocabulary = load_export(folder).vocabulary
    text = "In the beginning" if vocabulary.is_text else "AUGUAAGCAUAGGCA"  # two stops inside
    source, scores = tmp_path / "long", tmp_path / "pieces.csv"
    source.write_text(text if vocabulary.is_text else f">a\n{text}\n")
    tokens = len(vocabulary.encode(text, "text"))
    settings = [f"model_dir={folder}", f"input={source}", "window=2"]
    assert main(["score", *settings, f"output={scores}"]) == 0
    table = pd.read_csv(scores)
    assert ("bits_per_byte" in table) == vocabulary.is_text
    found = table[f"{vocabulary.nouns.token}s"].tolist()
    assert (sum(found), len(found)) == (tokens, -(-tokens // 2))
    assert main(["embed", *settings, f"output={tmp_path / 'vectors'}"]) == 0
    vectors = pd.read_parquet(tmp_path / "vectors" / "part-00000.parquet")
    name = "a" if not vocabulary.is_text else vectors["name"][0].rpartition("/")[0]
    assert vectors["name"].tolist() == [f"{name}/{i}" for i in range(1, len(found) + 1)]


def uses_the_export(folder: Path, tmp_path: Path) -> None:
    model, vocabulary = load_model(folder, precision="fp32"), open_vocabulary(folder)
    text = "In the beginning" if vocabulary.is_text else "ATGAAAGCA".replace("T", "U")
    prompted = model.generate(2, length=9, prompt=text[:6], steps=3)
    given = model.exported.vocabulary.encode(text[:6], "prompt")
    assert all(one.startswith(vocabulary.decode(given)) for one in prompted)
    mark = "<mask:2>"
    (filled,) = model.infill(f"{text[:6]}{mark}{text[6:]}", steps=2)
    assert filled.startswith(vocabulary.decode(given))
    (score,) = model.score(text)
    tokens = vocabulary.encode(text, "text")
    assert score.residues == len(tokens)
    (vectors,) = model.embed(text)
    assert vectors.shape == (len(tokens), 32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    masked = AutoModelForMaskedLM.from_pretrained(folder).eval()
    logits = masked(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).logits
    assert logits.shape == (1, len(tokens) + 2, vocabulary.size)
    assert torch.isfinite(logits).all()
    request = parse_request(json.dumps({"inputs": {"sequence": [text]}}).encode())
    (served,) = Service(load_export(folder)).answer(request)
    assert served[f"{vocabulary.nouns.token}s"] == len(tokens)
    if vocabulary.is_text:
        assert served["bits_per_byte"] == pytest.approx(served["nats"] / (math.log(2) * len(text)))
    templates = tmp_path / "templates"
    templates.write_text(f"{text}{mark}\n" if vocabulary.is_text else f">a\n{text}{mark}\n")
    made = tmp_path / ("made.jsonl" if vocabulary.is_text else "made.fasta")
    options = [f"generation.templates={templates}", "generation.number=2", "generation.steps=2"]
    assert main(["generate", f"model_dir={folder}", f"output={made}", *options]) == 0
    lines = made.read_text().splitlines()
    if vocabulary.is_text:
        sequences = [json.loads(line)["text"] for line in lines]
    else:
        sequences = [line for line in lines if not line.startswith(">")]
    assert len(sequences) == 2
    assert all(one.startswith(vocabulary.decode(tokens)) for one in sequences)
