"""The scripts in examples/ as a user runs them, and the model card of a model that one trained."""

import gzip
import importlib.metadata
import json
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from huggingface_hub import ModelCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from d2plm import load_model
from d2plm.core.vocabulary import decode
from d2plm.data.fasta import write_fasta
from d2plm.data.manifest import open_prepared
from d2plm.evaluation.tables import as_markdown
from d2plm.export.exported_model import load_export
from d2plm.export.model_evaluation import load_scores
from tests.conftest import FASTA, Exports, Tokens, shared_folder

EXAMPLES = FASTA.parents[1]
ROOT = EXAMPLES.parent


def run(name: str, *arguments: object) -> None:
    """Run a script in this process, whose imports are done."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, proteins: list[Tokens]) -> Path:
    """The output of without_hydra.py, of 60 short pieces of real proteins."""

    def fill(folder: Path) -> None:
        pieces = (decode(tokens[:80]) for tokens in proteins[:60])
        records = ((f"piece{index}", piece) for index, piece in enumerate(pieces))
        write_fasta(folder / "few.fasta", records)
        small = ["--steps", 3, "--token-budget", 400, "--max-length", 100]
        run("without_hydra.py", folder / "few.fasta", folder, *small)

    return shared_folder(tmp_path_factory, "trained", fill)


def test_without_hydra_leaves_an_evaluated_model_that_knows_its_data(trained: Path) -> None:
    folder = trained / "model"
    exported, prepared = load_export(folder), open_prepared(trained / "prepared")
    assert exported.provenance["step"] == 3
    assert exported.provenance["data"][0]["digests"] == {
        split: store.digest for split, store in prepared.splits.items()
    }
    evaluation, scores = load_scores(folder)
    assert evaluation.sequences == len(prepared.splits["validation"]) == len(scores["nats"])
    assert int(exported.lengths.counts.sum()) == len(prepared.splits["train"])
    card = (folder / "README.md").read_text()
    assert as_markdown(evaluation) in card
    assert all(digest in card for digest in evaluation.digests.values())
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "d2plm"
    assert data.eval_results[0].metric_value == round(evaluation.model.perplexity.value, 4)


def test_a_missing_file_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^error: .*absent\.fasta"):
        run("without_hydra.py", tmp_path / "absent.fasta", tmp_path / "output")


def test_a_card_says_what_is_not_known_and_what_the_model_cannot_do(exports: Exports) -> None:
    folders = exports.masked, exports.uniform
    masked, uniform = ((folder / "README.md").read_text() for folder in folders)
    assert "Not evaluated yet" in masked and "Not evaluated yet" in uniform
    assert "score_mutations(" in masked and "score_mutations(" not in uniform
    exported = load_export(exports.masked)
    known = {**exported.provenance, "data_license": "CC BY 4.0", "residues": "shuffled"}
    card = replace(exported, provenance=known).card()
    assert "CC BY 4.0" in card and "not a model of proteins" in card


@pytest.mark.thorough  # of packages, not of code
def test_the_folder_alone_works_with_the_core_dependencies_as_its_card_says(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "path" / "to" / "this" / "folder"
    shutil.copytree(trained / "model", folder)
    card = (folder / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert [len([line for line in block.splitlines() if line]) for block in blocks] == [7, 5]
    distributions, modules = map(sorted, core())
    job = {"blocks": blocks, "distributions": distributions, "allowed": modules, "root": str(ROOT)}
    words = [sys.executable, "-I", "-c", ALONE, json.dumps(job)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, logits = json.loads(done.stdout.splitlines()[-1])
    generated, designs, *scores, mutations = said.splitlines()
    model = load_model(folder)
    assert generated == str(model.generate(3, seed=1))
    made = model.infill("MKT____GGLL", number=3, seed=1)
    assert designs == str(made)
    assert all(re.fullmatch("MKT[A-Z]{4}GGLL", design) for design in made)
    for line, score in zip(scores, model.score(["MKTAYIAKQR", "GSHMLEDPVA"]), strict=True):
        assert line == f"{score.perplexity} {score.nats} {score.interval}"
    assert json.loads(mutations) == model.score_mutations("MKTAYIAKQR", ["A4G", "A4G:K8R"])
    assert logits == ""


# Only what the core dependencies bring can be imported; all else is as if it were not installed.
ALONE = """
import contextlib, importlib.util, io, json, os, re, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

job = json.loads(sys.argv[1])
allowed = {*job["allowed"], *sys.stdlib_module_names, "d2plm"}
allowed |= {file.partition(".")[0] for file in os.listdir(os.path.dirname(os.__file__))}

class CoreOnly(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        known = path is not None or name in allowed
        return super().find_spec(name, path, target) if known else None

    @classmethod
    def find_distributions(cls, context):
        for found in super().find_distributions(context):
            if re.sub("[-_.]+", "-", found.metadata["Name"]).lower() in job["distributions"]:
                yield found

sys.meta_path = [BuiltinImporter, FrozenImporter, CoreOnly]
sys.path.insert(0, job["root"])
for absent in ("pytest", "kfp", "kubernetes", "tensorboard", "wandb", "pytorch_lightning", "tests"):
    assert importlib.util.find_spec(absent) is None
said = []
for block in job["blocks"]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(block, {})
    said.append(out.getvalue())
print(json.dumps(said))
"""


def core() -> tuple[set[str], set[str]]:
    """The core dependencies with all that those need, and the top-level modules of all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    closure: set[tuple[str, str]] = set()  # (distribution, extra of it)
    wanted = [(text, "") for text in project["dependencies"]]
    while wanted:
        text, extra_of_parent = wanted.pop()
        requirement = Requirement(text)
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        if marker is None or marker.evaluate({"extra": extra_of_parent}):
            for extra in {"", *requirement.extras}:
                if (name, extra) not in closure:
                    closure.add((name, extra))
                    needed = importlib.metadata.requires(name) or []
                    wanted += [(dependency, extra) for dependency in needed]
    distributions = {name for name, _ in closure}
    return distributions, {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if distributions & {canonicalize_name(owner) for owner in owners}
    }


class Harmful:
    """Unpickled by the standard library it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_an_lmdb_of_pickles_is_converted_and_runs_nothing(tmp_path: Path) -> None:
    def store(name: str, values: dict[bytes, object]) -> Path:
        with lmdb.open(str(tmp_path / name)) as environment, environment.begin(write=True) as to:
            for key, value in values.items():
                to.put(key, pickle.dumps(value))
        return tmp_path / name

    rows = {b"0": {"id": "a", "primary": "MK"}, b"1": {b"Seq": b"AC"}, b"2": "WY", b"length": 3}
    output = tmp_path / "proteins.jsonl.gz"
    run("lmdb_of_pickles.py", store("plain", rows), output)
    assert [json.loads(line) for line in gzip.decompress(output.read_bytes()).splitlines()] == [
        {"id": "a", "primary": "MK"},
        {"Seq": "AC"},
        {"id": "2", "sequence": "WY"},
    ]
    harmful = store("harmful", {b"k": {"primary": "MK", "more": Harmful(tmp_path / "harm")}})
    with pytest.raises(SystemExit, match=r"key b'k': names pathlib"):
        run("lmdb_of_pickles.py", harmful, output)
    assert not (tmp_path / "harm").exists()
