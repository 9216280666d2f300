"""Which module may import which: paradigms stand alone, and `import d2plm` costs nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import d2plm

PACKAGE = Path(d2plm.__file__).parent
PARADIGMS = {"diffusion", "flow_matching"}


def imported_modules(file: Path) -> Iterator[str]:
    """Every module that a file names in an import, relative ones resolved."""
    own = list(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = own[: -node.level] if node.level else []
            module = ".".join([*start, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def loaded_by(statement: str) -> set[str]:
    """The modules in memory after `statement` in a fresh interpreter."""
    code = f"import sys; {statement}; print(*sys.modules, sep='\\n')"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_neither_a_paradigm_nor_what_they_share_imports_a_paradigm() -> None:
    files = sorted((PACKAGE / "paradigms").glob("[!_]*.py"))
    assert {file.stem for file in files} > PARADIGMS
    for file in files:
        named = {part for name in imported_modules(file) for part in name.split(".")}
        assert not named & PARADIGMS, file


def test_importing_the_package_loads_nothing_heavy() -> None:
    roots = {module.split(".")[0] for module in loaded_by("import d2plm")}
    assert "d2plm" in roots
    assert not roots & {"torch", "transformers", "mlflow", "kfp", "kubernetes", "numpy"}


def test_load_model_leaves_the_slow_parts_of_scipy_and_diffusers_until_needed() -> None:
    loaded = loaded_by("import d2plm; d2plm.load_model")
    assert "torch" in loaded
    assert not loaded & {"scipy.stats", "diffusers", "mlflow", "matplotlib"}
