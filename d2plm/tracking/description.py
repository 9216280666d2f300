"""A run's description, Markdown: model and data, result, how to load it, and where its files are.

Every step writes it again from what is known by then.
"""

from pathlib import Path
from typing import Any

from d2plm.core.number_text import interval_text
from d2plm.evaluation.findings import judge, likelihood_table

LIMIT = 8000  # characters that MLflow keeps of a tag


def description(
    *,
    name: str,
    paradigm: str,
    output_dir: Path,
    model_dir: Path,
    manifest: dict[str, Any] | None = None,
    parameters: int | None = None,
    step: int | None = None,
    evaluation: dict[str, Any] | None = None,
    version: tuple[str, str] | None = None,
) -> str:
    """The description of a run.

    Args:
        name: of the experiment.
        paradigm: its name.
        output_dir: where the run's outputs are.
        model_dir: where its export is, or will be.
        manifest: of the prepared data.
        parameters: of the model, once it is exported.
        step: of the exported weights.
        evaluation: of the export.
        version: (name, number) in the registry.
    """
    parts = [_opening(name, paradigm, manifest, parameters, step)]
    if evaluation is not None:
        parts += [_result(evaluation), likelihood_table(evaluation)]
    if step is not None:
        parts.append(_how_to_load(model_dir.resolve(), version))
    parts.append(_how_to_resume(output_dir.resolve()))
    parts.append(_files(output_dir.resolve(), evaluation is not None))
    return shortened("\n\n".join(parts), LIMIT, "the rest is in evaluation.json")


def shortened(text: str, limit: int, rest: str) -> str:
    """`text` or, if it is longer than `limit`, its first paragraphs and the place of the `rest`."""
    if len(text) <= limit:
        return text
    end = f"\n\n… {rest}"
    kept = text[: limit - len(end) - 4].rpartition("\n\n")[0]
    if kept.count("```") % 2:  # a block of code is cut in two
        end = f"\n```{end}"
    return kept + end


def _opening(
    name: str,
    paradigm: str,
    manifest: dict[str, Any] | None,
    parameters: int | None,
    step: int | None,
) -> str:
    text = f"**{name}**: a protein language model by {paradigm.replace('_', ' ')}"
    if parameters is not None:
        text += f", {parameters:,} parameters"
    if step is not None:
        text += f", the averaged weights after {step:,} steps"
    if manifest is None:
        return f"{text}."
    counts, leaking = manifest["counts"], manifest["leaking_pairs_after"]
    text += (
        f". Trained on {counts['train_sequences']:,} proteins ({counts['train_residues']:,} "
        f"residues) of `{manifest['input']}`; {counts['validation_sequences']:,} proteins in "
        f"{counts['validation_clusters']:,} homology clusters are held out for validation"
    )
    if "test_sequences" in counts:
        text += f" and {counts['test_sequences']:,} for the test"
    return (
        f"{text}. {counts['leaking_dropped']:,} training proteins that MMseqs2 found similar to "
        f"them were dropped; pairs found after that: {leaking:,}."
    )


def _result(evaluation: dict[str, Any]) -> str:
    finding, model = judge(evaluation), evaluation["model"]
    return " ".join(
        [
            f"**{finding.headline}**",
            *finding.details,
            f"Its perplexity on {evaluation['residues']:,} held-out residues is at most "
            f"{model['perplexity']:.3f} {interval_text(model['perplexity_interval'], '.3f')}.",
        ]
    )


def _how_to_load(model_dir: Path, version: tuple[str, str] | None) -> str:
    lines = [
        "```python",
        "from d2plm import load_model",
        f'model = load_model("{model_dir}")',
        "model.generate(5, seed=1)",
        "```",
    ]
    if version is not None:
        name, number = version
        lines += [
            "",
            f"Registered as [{name} version {number}](#/models/{name}/versions/{number}): "
            f'`mlflow.pyfunc.load_model("models:/{name}/{number}")`.',
        ]
    return "### Load\n" + "\n".join(lines)


def _how_to_resume(output_dir: Path) -> str:
    return (
        "### Resume\n"
        "The same command resumes from the newest whole checkpoint, in this run:\n"
        f"```\nd2plm train --config-file {output_dir / 'config.yaml'}\n```"
    )


def _files(output_dir: Path, evaluated: bool) -> str:
    folder = f"### Files\nIn `{output_dir}`: `config.yaml`, `metrics.jsonl`, `checkpoints/`, "
    return folder + (
        "`model/` (all that loading needs), `evaluation.json`, `evaluation.png`."
        if evaluated
        else "`model/` once training has ended."
    )
