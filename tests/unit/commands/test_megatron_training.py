"""Training on Megatron corpora in place, and evaluating on their held-out documents."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from d2plm.assembly.training_run import open_stores, training_collections
from d2plm.commands.evaluate import run as evaluate
from d2plm.commands.train import run
from d2plm.config import compose
from d2plm.core.errors import CheckpointError, DataError
from d2plm.core.vocabulary import Bytes
from d2plm.data.megatron import MegatronSequences
from d2plm.settings.commands import TrainSettings


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpora `train` and `validation` of bytes, each document ended by 256."""
    folder = tmp_path_factory.mktemp("corpora")
    random = np.random.default_rng(0)
    for split, number in (("train", 200), ("validation", 20)):
        documents = [
            [*random.integers(97, 123, n).tolist(), 256] for n in random.integers(9, 99, number)
        ]
        lengths = [len(document) for document in documents]
        index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, number, number + 1)
        index += struct.pack(f"<{number}i", *lengths)
        index += struct.pack(f"<{number}q", *(2 * sum(lengths[:i]) for i in range(number)))
        index += struct.pack(f"<{number + 1}q", *range(number + 1))
        (folder / f"{split}.idx").write_bytes(index)
        (folder / f"{split}.bin").write_bytes(
            b"".join(struct.pack(f"<{len(document)}H", *document) for document in documents)
        )
    return folder


def in_place(work_dir: Path, corpora: Path) -> list[str]:
    return [
        *(f"work_dir={work_dir}", f"data.prepared_dir={corpora}", "data.alphabet=bytes"),
        *("data.end_of_document=256", "data.window=48", "tracking=none"),
    ]


def tiny(work_dir: Path, corpora: Path, *more: str) -> TrainSettings:
    return compose(
        "train",
        [
            *(*in_place(work_dir, corpora), "data.token_budget=256"),
            *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_attention_heads=2"),
            *("model.intermediate_size=16", "model.max_position_embeddings=64"),
            *("trainer.max_steps=4", "trainer.compile=false", "callbacks.checkpoint.every=2"),
            *more,
        ],
    )


@pytest.mark.thorough
def test_a_run_does_not_resume_on_a_changed_corpus(tmp_path: Path, corpora: Path) -> None:
    folder = Path(shutil.copytree(corpora, tmp_path / "corpora"))
    run(tiny(tmp_path, folder, "callbacks.export=null", "callbacks.evaluation=null"))
    content = bytearray((folder / "train.bin").read_bytes())
    content[0] ^= 1
    (folder / "train.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"data\.collections\.0\.digest: .*megatron-"):
        run(tiny(tmp_path, folder, "trainer.max_steps=5", "callbacks.export=null"))


def test_a_corpus_may_be_a_member_of_a_mixture(tmp_path: Path, corpora: Path) -> None:
    member = f"{{prepared_dir: {corpora}, weight: 1}}"
    config = tiny(tmp_path, corpora, f"data.mixture={{a: {member}, b: {member}}}")
    stores = open_stores(config)
    assert [*stores] == ["train", "validation"]
    collections = training_collections(config, stores)
    assert [len(collection.sequences) for collection in collections] == [len(stores["train"])] * 2


def test_the_missing_file_of_a_corpus_is_named(tmp_path: Path, corpora: Path) -> None:
    shutil.copy(corpora / "train.idx", tmp_path)
    with pytest.raises(DataError, match=r"train\.bin: no such file; give the prefix of both"):
        open_stores(tiny(tmp_path, tmp_path))


@pytest.mark.thorough
def test_a_model_is_evaluated_on_held_out_documents(tmp_path: Path, corpora: Path) -> None:
    config = tiny(tmp_path, corpora)
    run(config)
    settings = [f"model_dir={config.model_dir}", "evaluation.generated=0"]
    evaluation = evaluate(compose("evaluate", [*in_place(tmp_path, corpora), *settings]))
    documents = MegatronSequences(corpora / "validation", Bytes(), 48, 256)
    counted = {what: getattr(evaluation, what) for what in ("sequences", "residues", "clusters")}
    assert counted == {"sequences": len(documents), "residues": documents.residues, "clusters": 20}
