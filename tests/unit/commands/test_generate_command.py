"""`d2plm generate`: from an exported model to a FASTA file, and rejected input."""

from collections.abc import Callable
from pathlib import Path

import pytest

from d2plm.commands.generate import run
from d2plm.config import compose
from d2plm.core.errors import ConfigError, D2PLMError, DataError, ModelError
from d2plm.core.vocabulary import CANONICAL, decode
from d2plm.data.fasta import read_fasta
from d2plm.export.designs import read_sampling
from tests.conftest import Exports

Generate = Callable[..., list[str]]


@pytest.fixture
def generate(exports: Exports, tmp_path: Path) -> Generate:
    """(overrides of the generation section, as `key=value`) → the sequences."""

    def of(*settings: str, model: str = "masked", output: Path = tmp_path / "g.fasta") -> list[str]:
        arguments = [f"model_dir='{getattr(exports, model)}'", f"output='{output}'", "device=cpu"]
        return run(compose("generate", [*arguments, *(f"generation.{s}" for s in settings)]))

    return of


def written(output: Path) -> tuple[list[str], list[str]]:
    """The headers, and the sequences as D2PLM reads them back."""
    lines = output.read_text().splitlines()
    headers = [line[1:] for line in lines if line.startswith(">")]
    records = list(read_fasta(output))
    assert [record.name for record in records] == [header.split()[0] for header in headers]
    return headers, [decode(record.tokens) for record in records]


def test_lengths_come_from_the_training_proteins(generate: Generate, tmp_path: Path) -> None:
    sequences = generate("number=20", "steps=2", "max_length=20")
    assert {len(sequence) for sequence in sequences} == {10, 12}
    assert set("".join(sequences)) <= set(CANONICAL)
    headers, read = written(tmp_path / "g.fasta")
    assert read == sequences
    assert headers[3].startswith("d2plm_4 length=1")


@pytest.mark.parametrize("sampler", ["first_hitting", "remdm"])
def test_lengths_and_settings_are_kept(generate: Generate, sampler: str, tmp_path: Path) -> None:
    words = [*([] if sampler == "first_hitting" else ["steps=3"]), f"sampler={sampler}"]
    words += ["temperature=0.8", "top_k=5", "seed=11"]
    sequences = generate("number=2", "length=[5,126,1]", *words)
    expected = {"paradigm": "diffusion", "sampler": sampler, "temperature": 0.8, "top_k": 5}
    kept = read_sampling(tmp_path / "g.fasta") or {}
    assert kept == {**kept, **expected, "seed": 11}
    assert [len(sequence) for sequence in sequences] == [5, 5, 126, 126, 1, 1]


@pytest.mark.parametrize("model", ["masked", "uniform"])
def test_templates_are_filled_in_and_kept(generate: Generate, tmp_path: Path, model: str) -> None:
    templates = tmp_path / "templates.fasta"
    templates.write_text(">one of them\nMK__X\nG<mask>UA\n>two\n_____\n")
    sequences = generate("number=3", f"templates='{templates}'", "steps=3", model=model)
    headers, read = written(tmp_path / "g.fasta")
    assert read == sequences
    assert [h.split()[0] for h in headers] == ["one_1", "one_2", "one_3", "two_1", "two_2", "two_3"]
    for sequence in sequences[:3]:
        assert (sequence[:2], sequence[4:6], sequence[7:]) == ("MK", "XG", "UA")
        assert set(sequence[2:4] + sequence[6]) <= set(CANONICAL)
    assert len(set(sequences[3:])) > 1
    assert len(sequences[3]) == 5


def test_the_same_seed_writes_the_same_file(generate: Generate, tmp_path: Path) -> None:
    output = tmp_path / "new folder" / "g.fasta"
    texts = []
    for seed in (1, 1, 2):
        generate("number=3", "length=20", "steps=3", f"seed={seed}", output=output)
        texts.append(output.read_text())
    assert texts[0] == texts[1] != texts[2]
    assert {path.name for path in output.parent.iterdir()} == {"g.fasta", "g.sampling.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(("length=127", "generation.length=127"), ("length=[10,0]", "generation.length=[10, 0]")),
        *(("length=[]", "generation.length=[]"), ("min_length=41", "generation.min_length=41")),
        ("length=10 max_length=20", "generation.max_length=20"),
        *(
            ("min_length=20 max_length=10", "from 20 to 126"),
            ("sampler=euler", "velocity of a flow"),
        ),
        ("templates=absent.fasta length=5", "generation.length=5"),
    ],
)
def test_what_cannot_be_done(generate: Generate, tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(*words.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "g.fasta").exists()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (">s\nM_\n>t\nMK\nT--__A\n", DataError, "line 3: template t: '-' at position 4"),
        (f">t\n{'_' * 127}\n", ModelError, "template t has 127 residues"),
        (">t\nM_\n>u\nM_\n>t\nK_\n", DataError, "'t' names the record on line 1"),
    ],
)
def test_templates_that_cannot_be_used_are_named(
    generate: Generate, tmp_path: Path, text: str, error: type[D2PLMError], message: str
) -> None:
    (tmp_path / "t.fasta").write_text(text)
    with pytest.raises(error, match=message):
        generate(f"templates='{tmp_path / 't.fasta'}'")


def test_an_output_that_cannot_be_written_is_rejected(generate: Generate, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "g.jsonl", tmp_path / "file" / "g.fasta"):
        with pytest.raises(D2PLMError, match=r"^output=|cannot be written"):
            generate("number=1", output=output)
