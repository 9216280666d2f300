"""The Markdown description of a run: model and data, result, how to load it, and its files.

Every pipeline step rewrites it from the files that exist at that time.
"""

from pathlib import Path
from typing import Any

from d2plm.evaluation.result import Evaluation
from d2plm.evaluation.tables import as_markdown
from d2plm.evaluation.terms import PROTEINS, Terms

LIMIT = 8000  # maximum number of characters of a tag in MLflow
LOAD = """### Load
```python
from d2plm import load_model
model = load_model("{folder}")
model.generate(5, seed=1)
```"""
REGISTERED = (
    "Registered as [{name} version {number}](#/models/{name}/versions/{number}): "
    '`mlflow.pyfunc.load_model("models:/{name}/{number}")`.'
)
RESUME = """### Resume
The following command resumes from the newest complete checkpoint, in this run:
```
d2plm train --config-file {folder}/config.yaml
```"""
FILES = "### Files\nIn `{folder}`: `config.yaml`, `metrics.jsonl`, `checkpoints/`, "
EVALUATED = "`model/` (sufficient to load the model), `evaluation.json`, `evaluation.png`."
TRAINED = "`model/` after training has ended."


def description(
    *,
    name: str,
    paradigm: str,
    output_dir: Path,
    model_dir: Path,
    manifest: dict[str, Any] | None = None,
    parameters: int | None = None,
    step: int | None = None,
    evaluation: Evaluation | None = None,
    terms: Terms = PROTEINS,
    version: tuple[str, str] | None = None,
) -> str:
    """Write the description of a run.

    Args:
        name: name of the experiment.
        model_dir: folder of the export, which may not exist yet.
        parameters: number of parameters, once the model is exported.
        terms: what things are called before an evaluation records it.
        version: (name, number) in the registry.
    """
    terms = terms if evaluation is None else evaluation.terms
    parts = [_opening(name, paradigm, manifest, parameters, step, terms)]
    if evaluation is not None:
        parts.append(as_markdown(evaluation))
    if step is not None:
        parts.append(LOAD.format(folder=model_dir.resolve()))
    if step is not None and version is not None:
        parts.append(REGISTERED.format(name=version[0], number=version[1]))
    parts.append(RESUME.format(folder=output_dir.resolve()))
    files = TRAINED if evaluation is None else EVALUATED
    parts.append(FILES.format(folder=output_dir.resolve()) + files)
    return shortened("\n\n".join(parts), LIMIT, "the rest is in evaluation.json")


def shortened(text: str, limit: int, rest: str) -> str:
    """Shorten `text` to `limit` characters at the end of a paragraph, and add the note `rest`."""
    if len(text) <= limit:
        return text
    end = f"\n\n… {rest}"
    kept = text[: limit - len(end) - 4].rpartition("\n\n")[0]
    if kept.count("```") % 2:  # a code block was cut
        end = f"\n```{end}"
    return kept + end


def _opening(
    name: str,
    paradigm: str,
    manifest: dict[str, Any] | None,
    parameters: int | None,
    step: int | None,
    terms: Terms,
) -> str:
    text = f"**{name}**: a {terms.model} by {paradigm.replace('_', ' ')}"
    if parameters is not None:
        text += f", {parameters:,} parameters"
    if step is not None:
        text += f", the averaged weights after {step:,} steps"
    if manifest is None:
        return f"{text}."
    counts, leaking = manifest["counts"], manifest["leaking_pairs_after"]
    text += (
        f". Trained on {counts['train_sequences']:,} {terms.sequence}s "
        f"({counts['train_residues']:,} {terms.token}s) of `{manifest['input']}`; "
        f"{counts['validation_sequences']:,} {terms.sequence}s in "
        f"{counts['validation_clusters']:,} {terms.cluster}s are held out for validation"
    )
    if "test_sequences" in counts:
        text += f" and {counts['test_sequences']:,} for testing"
    search = "MMseqs2" if terms.unit is None else "a search"
    return (
        f"{text}. {counts['leaking_dropped']:,} training {terms.sequence}s that {search} found "
        f"similar to them were dropped; similar pairs found afterwards: {leaking:,}."
    )
