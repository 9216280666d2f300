"""The report: its figures are the JSON's, its proteins the FASTA file's, and no name is markup."""

import base64
import json
import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from d2plm.cli import main
from d2plm.core.errors import DataError
from d2plm.core.estimate import Estimate
from d2plm.core.table import Number
from d2plm.core.vocabulary import decode, encode
from d2plm.data.family import Family
from d2plm.data.fasta import write_fasta
from d2plm.data.store import SequenceStore
from d2plm.evaluation import membership
from d2plm.evaluation.likelihood import score_sequences
from d2plm.evaluation.new_members import write_members
from d2plm.evaluation.plots import figures_of
from d2plm.evaluation.result import Evaluation, read_evaluation, write_evaluation
from d2plm.evaluation.summary import HeldOut
from d2plm.evaluation.tables import tables_of
from d2plm.export.designs import write_sampling
from d2plm.export.exported_model import load_export, save_export
from d2plm.export.report_content import Sources, gather
from d2plm.export.report_page import write_report
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from tests import evaluations
from tests.conftest import DiTFactory, MonkeyPatch, Tokens

N = 24
RESIDUES = np.random.default_rng(0).integers(50, 300, N)
EVIL = "<script>alert('x')</script>&\"$m"
ADDRESSES = ("href", "src", "action", "srcset", "data")
PASSWORD = "hunter2"  # noqa: S105  # of nobody


def evaluation_of(digests: dict[str, str], *, foreign: bool = False) -> Evaluation:
    """An evaluation; a foreign export's is of one cluster, without identities and rivals."""
    clusters = np.arange(N) % (1 if foreign else 8)
    identities = None if foreign else np.linspace(0, 0.45, N)
    settings = {"split": "validation", "seed": 0, "precision": "fp32", "token_budget": 4096}
    return evaluations.summary(
        evaluations.invented_scores(RESIDUES, 2.85),
        HeldOut(RESIDUES, clusters, evaluations.invented_baselines(RESIDUES), identities),
        {} if foreign else {EVIL: evaluations.invented_scores(RESIDUES, 2.8, 1)},
        given_relatives=evaluations.invented_given_relatives(),
        settings={**settings, "nearest_sensitivity": 4.0, "masks_per_sequence": 4},
        digests=digests,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, few_prepared: Path, tiny_dit: DiTFactory) -> Path:
    """A finished run, of `d2plm report`: an export, an evaluation, prepared data, four proteins."""
    folder = tmp_path_factory.mktemp("run")
    output_dir, data = folder / "diffusion", folder / "data"
    shutil.copytree(few_prepared, data)
    manifest = {**json.loads((data / "manifest.json").read_text()), "input": f"{EVIL}.fasta"}
    (data / "manifest.json").write_text(json.dumps(manifest))
    digests, train = manifest["digests"], SequenceStore(data / "train_lmdb")
    lengths = LengthHistogram.of(np.array([90, 100]), 126)
    provenance = {"step": 40, "name": EVIL, "settings": {"global_batch_tokens": 4096}}
    save_export(output_dir / "model", tiny_dit(), AbsorbingDiffusion(), lengths, provenance)
    for place in (output_dir, output_dir / "model"):
        write_evaluation(place, evaluation_of(digests))
    rows = [{"step": s, "loss": 3 - s / 100, "learning_rate": 1e-3} for s in range(1, 41)]
    rows.append({"step": 40, "validation_perplexity": 17.5})
    (output_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (output_dir / "config.yaml").write_text(
        f"name: '{EVIL.replace(chr(39), '')}'\ntracking: {{uri: postgresql://me:{PASSWORD}@host/x}}\n"
        f"launcher: {{environment: {{HF_TOKEN: {PASSWORD}}}}}\n"
    )
    designs = [
        ("copied", next(one for one in train if len(one) <= 126 and max(one) < 24)),
        (EVIL, encode("MKV")),
        ("unlike", np.random.default_rng(2).integers(4, 24, 90).astype(np.uint8)),
        ("unknown", encode("MKTXXAYIAKQRQISFVKSHFSRQLEER")),
    ]
    records = ((name, decode(tokens)) for name, tokens in designs)
    write_fasta(output_dir / "generated.fasta", records)
    settings = {"paradigm": "diffusion", "steps": 4, "dtype": "float32"}
    write_sampling(output_dir / "generated.fasta", settings)
    assert main(["report", str(output_dir), "device=cpu", "threads=1"]) == 0
    return folder


class Page(HTMLParser):
    """The scripts, the addresses and the text that a browser finds in a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.source, self.text = html, ""
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ADDRESSES]

    def handle_data(self, text: str) -> None:
        if self.cdata_elem == "script":  # type: ignore[attr-defined]  # the element it is in
            self.scripts.append(text)
        elif self.cdata_elem != "style":  # type: ignore[attr-defined]
            self.text += text

    def rows(self, table: str) -> list[list[str]]:
        """The cells of each row but the head, as HTML."""
        (body,) = re.findall(rf'<table id="{table}">(.*?)</table>', self.source, re.S)
        _, *rows = re.findall(r"<tr.*?</tr>", body, re.S)
        return [re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.S) for row in rows]

    def column(self, table: str, place: int) -> list[list[float]]:
        return [figures(row[place]) for row in self.rows(table)]


def text(cell: str) -> str:
    return unescape(re.sub("<[^>]+>", "", cell)).strip()


def figures(cell: str) -> list[float]:
    return [float(value) for value in re.findall('<data value="([^"]+)"', cell)]


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "diffusion" / "report.html").read_text())


def shown(cell: str | Number) -> list[float]:
    """The figures of a cell of a table."""
    if isinstance(cell, str) or cell.value is None:
        return []
    if isinstance(cell.value, Estimate):
        return [cell.value.value, *(cell.value.interval or ())]
    return [cell.value]


def test_the_tables_are_the_evaluations(run: Path, page: Page) -> None:
    evaluation = read_evaluation(run / "diffusion")
    assert evaluation is not None
    for name in ("likelihoods", "calibrations", "identities", "given"):
        rows, expected = page.rows(name), tables_of(evaluation)[name].rows
        assert [[*map(figures, row)] for row in rows] == [[*map(shown, row)] for row in expected]
        assert [text(row[0]) for row in rows] == [row[0] for row in expected]
    numbers = re.findall('<data value="([^"]+)">([^<]*)</data>', page.source)
    assert len(numbers) > 150
    for value, written in numbers:
        decimals = len(written.partition(".")[2].rstrip("%"))
        scale = 100 if written.endswith("%") else 1
        rounded = pytest.approx(scale * float(value), abs=0.5001 * 10**-decimals)
        assert float(written.replace(",", "").rstrip("%")) == rounded


def test_statistics_are_those_of_the_sets_and_data_of_the_manifest(run: Path, page: Page) -> None:
    designs = json.loads((run / "diffusion" / "designs.json").read_text())
    sets = designs["quality"]["sets"]
    assert [*sets] == ["generated", "natural, held out", "composition"]
    found = {text(label): [*map(text, cells)] for label, *cells in page.rows("statistics")}
    assert found["proteins"] == [str(one["sequences"]) for one in sets.values()] == ["4"] * 3
    ngrams = [f"{one['ngram_js']['3']:.4f}" for one in sets.values()]
    assert found["3-grams: JS to training, nats"] == ngrams
    rows = [[*map(text, row)] for row in page.rows("designs")]
    assert rows[0][4].endswith(" a copy") and rows[0][5] == "100.0%"
    assert rows[2][4:] == ["none found", "–"]
    assert [one["in_training"] for one in designs["proteins"]] == [True, False, False, False]
    manifest = json.loads((run / "data" / "manifest.json").read_text())
    for place, what in enumerate(("sequences", "residues", "clusters"), start=1):
        expected = [[manifest["counts"][f"{split}_{what}"]] for split in manifest["digests"]]
        assert page.column("splits", place) == expected
    assert [text(row[4]) for row in page.rows("splits")] == [*manifest["digests"].values()]
    assert page.column("searches", 2) == [[one["pairs"]] for one in manifest["searches"]]


def test_the_generated_proteins_are_the_files_with_their_own_bound(run: Path, page: Page) -> None:
    folder = run / "diffusion"
    records = re.findall(r">(\S+).*\n([^>]*)", (folder / "generated.fasta").read_text())
    sequences = [text.replace("\n", "") for _, text in records]
    assert [*map(text, re.findall('<p class="sequence">(.*?)</p>', page.source))] == sequences
    assert [text(row[0]) for row in page.rows("designs")] == [name for name, _ in records]
    (link,) = [link for link in page.links if link.startswith("data:text")]
    assert base64.b64decode(link.partition(",")[2]) == (folder / "generated.fasta").read_bytes()
    exported = load_export(folder / "model")
    model, paradigm = exported.denoiser("fp32"), exported.paradigm
    limits = {"masks_per_sequence": 16, "max_length": exported.max_length}
    expected = score_sequences(model, paradigm, [*map(encode, sequences)], **limits)
    nelbo = expected.nats / expected.residues
    shown = page.column("designs", 2)
    np.testing.assert_allclose([value for value, _, _ in shown], nelbo, rtol=1e-5)
    assert all(low < value < high for value, low, high in shown)
    np.testing.assert_allclose(np.ravel(page.column("designs", 3)), np.exp(nelbo), rtol=1e-5)
    assert page.column("designs", 1) == [[len(sequence)] for sequence in sequences]


def test_the_page_has_no_outer_address_no_markup_of_names_and_no_passwords(page: Page) -> None:
    html = page.source
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"https?:|//\w+\.\w|@import|<link[^>]*stylesheet|url\([^#]", html)
    assert len(page.scripts) == 1 and "alert" not in page.scripts[0]
    assert "<script>alert" not in html
    # the title, the head, another model (tables, legend), the input, a protein, the configuration
    assert page.text.count("<script>alert(") >= 6
    assert PASSWORD not in html and "postgresql://***@host/x" in html and "HF_TOKEN:" in html


def test_searches_are_not_repeated(run: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    monkeypatch.setenv("MMSEQS_BIN", "/nowhere")
    monkeypatch.setattr("d2plm.commands.report.write_report", lambda sources: None)
    assert main(["report", str(copy / "diffusion"), "device=cpu"]) == 0
    fasta = copy / "diffusion" / "generated.fasta"
    fasta.write_text(fasta.read_text().replace("MKV", "MKW"))
    assert main(["report", str(copy / "diffusion"), "device=cpu"]) == 1


def sources(folder: Path) -> Sources:
    return Sources(folder, folder / "model", folder.parent / "data")


def test_what_is_missing_is_said_with_the_command_that_gives_it(run: Path, tmp_path: Path) -> None:
    """Of an evaluation of a foreign export, in one cluster, and of metrics alone."""
    with pytest.raises(DataError, match=str(tmp_path)):
        gather(sources(tmp_path))
    write_evaluation(tmp_path, evaluation_of({}, foreign=True))
    page = Page(write_report(sources(tmp_path)).read_text())
    tables = {*re.findall(r'<table id="(\w+)">', page.source)}
    assert tables == {"likelihoods", "calibrations", "given"}
    found = [len(values) for values in page.column("likelihoods", 1)]
    assert found == [1] * (len(evaluations.BASELINES) + 1)
    for command in ("d2plm train", "d2plm export", "d2plm evaluate", "d2plm generate"):
        assert command in page.text
    (tmp_path / "curves").mkdir()
    shutil.copy(run / "diffusion" / "metrics.jsonl", tmp_path / "curves")
    page = Page(write_report(sources(tmp_path / "curves")).read_text())
    assert re.findall('<section id="([a-z]+)">', page.source) == ["training", "settings", "missing"]
    assert "17.500" in page.text
    rows = [{"step": step, "loss": 1.0} for step in range(1, 9)]
    figure = Figure()
    figures_of(None, [*rows, {"step": 8, "validation_perplexity": 17.5}], None)["training"](figure)
    held_out, training = (np.asarray(axes.lines[0].get_ydata()) for axes in figure.axes)
    assert training == pytest.approx(np.e), "curves are of perplexity"
    assert held_out.tolist() == [17.5]


def test_new_members_are_of_this_model(
    run: Path, tmp_path: Path, proteins: list[Tokens], monkeypatch: MonkeyPatch
) -> None:
    for number in ("REFERENCES", "SIMULATED"):
        monkeypatch.setattr(membership, number, 12)
    folder = tmp_path / "copy" / "diffusion"
    shutil.copytree(run, folder.parent)
    assert "New members of a family" not in (folder / "report.html").read_text()
    whole = [tokens[:80] for tokens in proteins if len(tokens) > 80][:4]
    given, held_out = Family(whole[:3], 8, [EVIL, "b", "c"]), Family(whole[3:], 8, ["d"])
    described = membership.Judge(given, held_out).describe(whole[:1], ["copied"])
    write_members(described, folder / "generated.fasta")
    assert len(Page(write_report(sources(folder)).read_text()).rows("alignment")) == 1
    write_evaluation(folder, evaluation_of({"train": "another", "validation": "another"}))
    content = gather(sources(folder))
    assert {content[name] for name in ("designs", "manifest", "model", "fasta")} == {None}
    assert {"model", "manifest", "designs"} <= content["missing"].keys()
    write_fasta(folder / "generated.fasta", [("other", "MKV")])
    assert "New members of a family" not in write_report(sources(folder)).read_text()
