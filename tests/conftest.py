"""Fixtures: real sequences, a tiny store of them, and a tiny DiT in which no weight is zero."""

import gc
import gzip
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from numpy.typing import NDArray

from d2plm import config
from d2plm.core.files import config_dir
from d2plm.core.machine import usable_cores
from d2plm.core.vocabulary import encode
from d2plm.data.store import SequenceStore
from d2plm.data.store_writer import SequenceStoreWriter
from tests.ranks import share_server

FASTA = Path(__file__).parents[1] / "examples" / "data" / "uniprot_20k.fasta.gz"
TINY_RECORDS = 120

torch.set_num_threads(1)  # these models are so small that threads only wait for each other

Tokens = NDArray[np.uint8]
DiTFactory = Callable[..., torch.nn.Module]
# Fixtures of pytest by names with which most signatures are one line.
Captured = pytest.CaptureFixture[str]
Logged = pytest.LogCaptureFixture
MonkeyPatch = pytest.MonkeyPatch

TINY_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "time_embedding_dim": 8,
    "max_position_embeddings": 128,
}
# The options with which a DiT computes what ESM-2 does.
ESM: dict[str, Any] = {
    "feed_forward": "gelu",
    "linear_bias": True,
    "affine_norm": True,
    "qk_norm": False,
    "token_dropout": True,
    "head": "esm",
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "shared_expert_size": 24, "balance_rate": 0.01}
# Blocks that differ from a DiT's own in all that can be chosen at once; over the time embedding's
# width of the sizes.
LLAMA: dict[str, Any] = {
    "time_embedding_dim": None,
    "norm": "rms",
    "affine_norm": True,
    "qk_norm": False,
    "parallel_residual": True,
    "rope_fraction": 0.5,
}


# Few examples for `make test`, many for `make test-thorough` (--hypothesis-profile=thorough).
settings.register_profile("fast", max_examples=20, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)
settings.load_profile("fast")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or getattr(config.option, "numprocesses", None):
        share_server()


def pytest_collection() -> None:
    gc.disable()  # a fifth of the time of reading the tests


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # what was imported stays, and is not examined after each training
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With many examples, property tests are thorough ones; long files are dealt to the workers."""
    if config.getoption("--hypothesis-profile") == "thorough":
        for item in items:
            if hasattr(getattr(item, "obj", None), "hypothesis"):
                item.add_marker("thorough")
        files = [list(of) for _, of in groupby(items, key=lambda item: item.path)]
        workers = usable_cores() + 1
        dealt = (files[first::workers] for first in range(workers))
        items[:] = chain.from_iterable(chain.from_iterable(dealt))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for their processes, and for each other."""
    return usable_cores() + 1


def shared_folder(
    factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]
) -> Path:
    """A folder that the first worker that asks for it fills, for all workers of this run."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    filled = folder.with_suffix(".filled")
    with FileLock(folder.with_suffix(".lock")):
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder


@pytest.fixture(autouse=True)
def unlocked_logging() -> Iterator[None]:
    """An exception out of a signal's handler can leave logging's lock taken, for ever."""
    yield
    while logging._lock._is_owned():  # type: ignore[attr-defined]
        logging._lock.release()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow leaves the address of the last store in the environment, for whatever comes next."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


# MMseqs2 with its exhaustive prefilter where few residues are compared: a tenth of the time of its
# index of k-mers, the size of which depends on the alphabet alone.
QUICK_MMSEQS = """#!/bin/sh
if [ "$1" = search ] && [ $(($(wc -c <"$2") * $(wc -c <"$3"))) -lt 10000000000 ]; then
    case "$*" in *--search-type*) ;; *) set -- "$@" --prefilter-mode 1 ;; esac
fi
exec '{binary}' "$@"
"""


@pytest.fixture(scope="session", autouse=True)
def quick_mmseqs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Small searches of proteins take no index; `homology.find_mmseqs` finds the wrapper."""
    from d2plm.core.errors import DataError
    from d2plm.data.homology import find_mmseqs

    with pytest.MonkeyPatch.context() as patch:
        with suppress(DataError):
            program = tmp_path_factory.mktemp("quick") / "mmseqs"
            program.write_text(QUICK_MMSEQS.format(binary=find_mmseqs()))
            program.chmod(0o755)
            patch.setenv("MMSEQS_BIN", str(program))
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """The installed YAML files do not change meanwhile: each choice of them is composed once."""
    compose_files, known = config._compose_files, dict[Any, dict[str, Any]]()

    def compose(command: str, name: str | None, root: Path, choices: list[str]) -> dict[str, Any]:
        own = Path("configs").resolve()
        if root != config_dir().resolve() or (own.is_dir() and own != root):
            return compose_files(command, name, root, choices)
        key = command, name, *choices
        if key not in known:
            known[key] = compose_files(command, name, root, choices)
        return deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_compose_files", compose)
        yield


@pytest.fixture(scope="session")
def proteins() -> list[Tokens]:
    """Every protein of the example file, residue tokens."""
    with gzip.open(FASTA, "rt") as stream:
        runs = groupby(stream, key=lambda line: line.startswith(">"))
        return [
            encode("".join(line.strip() for line in lines)) for header, lines in runs if not header
        ]


def write_store(
    path: Path, sequences: list[Tokens], clusters: list[int] | None = None
) -> SequenceStore:
    """A finished store of `sequences`, and their homology clusters, at `path`."""
    with SequenceStoreWriter(path, kind="train") as writer:
        names = [b"protein%d" % index for index in range(len(sequences))]
        writer.extend(names, [tokens.tobytes() for tokens in sequences])
        if clusters is not None:
            writer.set_clusters(clusters)
    return SequenceStore(path)


@pytest.fixture(scope="session")
def few_prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 proteins, prepared by the quickest settings once for all workers; to be read only."""
    from d2plm.data.prepare import prepare
    from d2plm.settings.data import ClusterSettings, Resources, SearchSettings, SplitSettings

    def fill(folder: Path) -> None:
        with gzip.open(FASTA.with_name("uniprot_500.fasta.gz"), "rt") as file:
            (folder / "few.fasta").write_text(">".join(file.read().split(">")[:31]))
        prepare(
            folder / "few.fasta",
            folder / "prepared",
            split=SplitSettings(validation_fraction=0.2, search_directions="from_held_out"),
            clustering=ClusterSettings(method="none"),
            search=SearchSettings(sensitivity=1.0),
            resources=Resources(threads=1),
        )

    return shared_folder(tmp_path_factory, "few", fill) / "prepared"


@pytest.fixture(scope="session")
def new_mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs, to copy: making its tables takes seconds."""
    from d2plm.tracking.sqlite_store import create_store

    file = "mlflow.db"
    folder = shared_folder(tmp_path_factory, "mlflow_store", lambda made: create_store(made / file))
    return folder / file


@pytest.fixture
def stores_to_evaluate(tmp_path: Path, proteins: list[Tokens]) -> dict[str, SequenceStore]:
    """Pieces of proteins: 40 to train on, and 6 of 5 clusters."""
    whole = [tokens[:60] for tokens in proteins if len(tokens) > 60]
    return {
        "train": write_store(tmp_path / "train_lmdb", whole[:40], [*range(40)]),
        "validation": write_store(tmp_path / "validation_lmdb", whole[40:46], [0, 0, 1, 2, 3, 4]),
    }


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[[list[Tokens]], SequenceStore]:
    """Residue tokens → a store in the test's own folder."""
    return lambda sequences: write_store(tmp_path / "store", sequences)


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory, proteins: list[Tokens]) -> SequenceStore:
    """The first proteins of the example file, some of them longer than a tiny model's limit."""
    return write_store(tmp_path_factory.mktemp("data") / "tiny", proteins[:TINY_RECORDS])


@pytest.fixture(scope="session")
def tiny_dit() -> DiTFactory:
    """(seed, **config) → a DiT in evaluation mode whose every weight is random, biases too."""
    from d2plm.model.dit import DiT
    from d2plm.model.dit_config import DiTConfig

    def build(seed: int = 0, **changes: Any) -> DiT:
        model = DiT(DiTConfig(**{**TINY_SIZES, **changes}))
        randomise(model, seed)
        return model.eval()

    return build


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Overwrite every parameter; adaLN-Zero's zero gates would make most tests trivially true."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centre = 1.0 if name.endswith("_norm.weight") else 0.0
        parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True)
class Exports:
    """Folders of tiny exports that take 126 residues: of a mask, of no mask, given relatives.

    The proteins of the first two had 10 to 40 residues, those of the third 40 or 50.
    """

    masked: Path
    uniform: Path
    related: Path


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory, tiny_dit: DiTFactory) -> Exports:
    """To be read only."""
    from d2plm.export.exported_model import save_export
    from d2plm.generation.lengths import LengthHistogram
    from d2plm.paradigms.diffusion import AbsorbingDiffusion
    from d2plm.paradigms.flow_matching import UniformFlowMatching

    folder = tmp_path_factory.mktemp("exports")
    lengths = LengthHistogram.of(np.array([10, 12, 12, 40]), 126)
    return Exports(
        save_export(folder / "masked", tiny_dit(), AbsorbingDiffusion(), lengths, {}),
        save_export(folder / "uniform", tiny_dit(), UniformFlowMatching(), lengths, {}),
        save_export(
            folder / "related",
            tiny_dit(relatives_dim=8),
            AbsorbingDiffusion(),
            LengthHistogram.of(np.array([40, 50]), 126),
            {},
        ),
    )
