"""The Markdown description of a run: how to resume it, its files, and the model card.

Every pipeline step rewrites it from the files that exist at that time.
"""

import re
from pathlib import Path

CARD = "README.md"  # as in huggingface_hub, which the image that prepares data lacks
LIMIT = 8000  # maximum number of characters of a tag in MLflow
REGISTERED = (
    "Registered as [{name} version {number}](#/models/{name}/versions/{number}): "
    '`mlflow.pyfunc.load_model("models:/{name}/{number}")`.'
)
RESUME = "Resume it from its newest checkpoint: `d2plm train --config-file {folder}/config.yaml`."
FILES = (
    "In `{folder}`: `config.yaml`, `metrics.jsonl`, `checkpoints/`; after training, the model is "
    "in `{model_dir}`, which is sufficient to load it."
)


def description(
    *,
    name: str,
    paradigm: str,
    output_dir: Path,
    model_dir: Path,
    version: tuple[str, str] | None = None,
) -> str:
    """Describe a run; `version` is its (name, number) in the registry."""
    parts = [f"**{name}**: {paradigm.replace('_', ' ')}."]
    if version is not None:
        parts[0] += " " + REGISTERED.format(name=version[0], number=version[1])
    folder = output_dir.resolve()
    parts.append(RESUME.format(folder=folder))
    parts.append(FILES.format(folder=folder, model_dir=model_dir.resolve()))
    return shortened("\n\n".join([*parts, card_text(model_dir)]).strip(), LIMIT)


def card_text(export: Path) -> str:
    """The model card of an export without its front matter; empty if there is none."""
    file = export / CARD
    if not file.is_file():
        return ""
    card = file.read_text(encoding="utf-8")
    return re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL).strip()


def shortened(text: str, limit: int) -> str:
    """Shorten `text` to `limit` characters at the end of a paragraph, with a note on the rest."""
    if len(text) <= limit:
        return text
    end = f"\n\n… the rest is in {CARD} of the model"
    kept = text[: limit - len(end) - 4].rpartition("\n\n")[0]
    if kept.count("```") % 2:  # a code block was cut
        end = f"\n```{end}"
    return kept + end
