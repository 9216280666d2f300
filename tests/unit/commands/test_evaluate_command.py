"""d2plm evaluate: invalid settings are rejected before any computation; results are reused."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from d2plm.commands import evaluate
from d2plm.config import compose
from d2plm.core.errors import ConfigError, ModelError
from d2plm.data.store import SequenceStore
from d2plm.evaluation.result import Evaluation, read_evaluation
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.paradigms.diffusion import AbsorbingDiffusion
from d2plm.paradigms.flow_matching import UniformFlowMatching
from tests.conftest import Captured, DiTFactory, MonkeyPatch

Export = Callable[..., Path]
Run = Callable[..., Evaluation]
Stores = dict[str, SequenceStore]


@pytest.fixture
def export(tmp_path: Path, tiny_dit: DiTFactory) -> Export:
    def make(name: str = "model", paradigm: Any = None, seed: int = 0, **sizes: Any) -> Path:
        lengths = LengthHistogram.of(np.array([20, 30]), sizes.get("max_position_embeddings", 128))
        model: Any = tiny_dit(seed, **sizes)
        own = paradigm or AbsorbingDiffusion()
        return save_export(tmp_path / name, model, own, lengths, {"step": 1})

    return make


@pytest.fixture
def run(tmp_path: Path, stores_to_evaluate: Stores, monkeypatch: MonkeyPatch) -> Run:
    monkeypatch.setattr(evaluate, "open_stores", lambda config: stores_to_evaluate)
    # The figures are tested elsewhere, and take seconds.
    monkeypatch.setattr(evaluate, "plot", lambda *_: None)
    monkeypatch.setattr("d2plm.export.report_page.draw", lambda *content: defaultdict(str))

    def call(model: Path, *overrides: str) -> Evaluation:
        words = [f"model_dir={model}", f"output_dir={tmp_path / 'out'}", "tracking=none"]
        words += ["evaluation.masks_per_sequence=2", "evaluation.generated=0"]
        words += ["evaluation.nearest_identity=false", *overrides]
        return evaluate.run(compose("evaluate", words))

    return call


def test_figures_are_used_again(export: Export, run: Run, tmp_path: Path, capsys: Captured) -> None:
    model = export()
    first = run(model)
    assert f'value="{first.model.nelbo.value}"' in (tmp_path / "out" / "report.html").read_text()
    assert (first.sequences, first.clusters) == (6, 5)
    assert read_evaluation(model) == first
    capsys.readouterr()
    assert run(model) == first
    assert "reusing" in capsys.readouterr().out
    assert run(model, "evaluation.seed=1").model != first.model
    assert "reusing" not in capsys.readouterr().out


@pytest.fixture
def of_a_demo(tmp_path: Path, run: Run) -> Run:
    """Evaluates a model with the settings of a demo that has a run, which must stay as it is."""
    work = tmp_path / "demo"
    work.mkdir()
    demo = {"config.yaml": f"model_dir: {work / 'model'}\n", "evaluation.json": "{}"}
    for name, text in demo.items():
        (work / name).write_text(text)

    def call(model: object, *overrides: str) -> Evaluation:
        found = run(model, f"output_dir={work}", f"work_dir={work}", *overrides)
        assert {name: (work / name).read_text() for name in demo} == demo
        return found

    return call


@pytest.mark.parametrize("of_a_run", [True, False])
def test_results_on_a_model_of_another_run_are_written_beside_that_model(
    of_a_run: bool, export: Export, of_a_demo: Run, tmp_path: Path
) -> None:
    model, other = export("other/model"), tmp_path / "other"
    if of_a_run:
        (other / "config.yaml").write_text("{}")
    found = of_a_demo(model)
    folder = other if of_a_run else other / "model-evaluation"
    assert read_evaluation(folder) == read_evaluation(model) == found
    assert (folder / "report.html").is_file()


def test_nothing_is_written_to_read_only_folders(
    export: Export, of_a_demo: Run, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: Captured
) -> None:
    model, prepared = export("other/model"), tmp_path / "prepared"
    prepared.mkdir()

    def is_writable(folder: Path) -> bool:
        return not {tmp_path / "other", prepared} & {folder, *folder.parents}

    def identities(*stores: object, **_: Any) -> NDArray[np.float64]:
        caches.append(stores[2])
        return np.zeros(6)

    caches: list[object] = []
    monkeypatch.setattr(evaluate, "is_writable", is_writable)
    monkeypatch.setattr(evaluate, "nearest_identities", identities)
    before = [*(tmp_path / "other").rglob("*")]
    words = f"data.prepared_dir={prepared}", "evaluation.nearest_identity=true"
    found = of_a_demo(model, *words)
    (folder,) = (tmp_path / "demo" / "evaluations").iterdir()
    assert read_evaluation(folder) == found
    assert caches == [folder / "cache" / "nearest"]
    assert [*(tmp_path / "other").rglob("*")] == before
    assert not [*prepared.iterdir()]
    capsys.readouterr()
    assert of_a_demo(model, *words) == found
    assert f"reusing {folder / 'evaluation.json'}" in capsys.readouterr().out
    assert "not the evaluated one" not in (folder / "report.html").read_text()
    export("other/model", seed=5)
    assert of_a_demo(model, *words).model != found.model


def test_rivals_are_scored_on_the_same_masks(export: Export, run: Run) -> None:
    other, uniform = export("other", seed=3), export("uniform", UniformFlowMatching(), seed=3)
    found = run(export(), f"evaluation.compare_with=[{other},{uniform}]")
    alone = run(other)
    assert found.others[str(other)].nelbo.value == pytest.approx(alone.model.nelbo.value)
    difference = found.model.nelbo.value - alone.model.nelbo.value
    assert found.others[str(other)].difference.value == pytest.approx(difference)
    assert found.others[str(uniform)].estimator == "time-reversal bound"
    assert found.others[str(uniform)].perplexity_mlm15 is None
    export("other", seed=4)
    again = run(export(), f"evaluation.compare_with=[{other},{uniform}]")
    assert again.others[str(other)] != found.others[str(other)]


def test_a_short_rival_or_none_is_rejected(export: Export, run: Run, tmp_path: Path) -> None:
    export("short", max_position_embeddings=32)
    (tmp_path / "nothing").mkdir()
    for name in ("short", "nothing"):
        with pytest.raises(ModelError, match=f"{name}: "):
            run(export(), f"evaluation.compare_with=[{tmp_path / name}]")


@pytest.mark.parametrize("override", ["evaluation.split=tset", "generation.sampler=euler"])
def test_what_is_impossible_is_rejected_before_anything_is_computed(
    override: str, export: Export, run: Run, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "fit_baselines", lambda *_, **__: pytest.fail("fitted"))
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        run(export(), "evaluation.generated=5", override)
