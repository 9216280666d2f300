"""The model card: the README.md of an exported folder, for people and for the Hugging Face Hub.

The template `model_card.md.jinja` states only what the folder's own files contain, and says what is
not known, such as figures before the evaluation. Tests run its code examples.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, FileSystemLoader

from d2plm.evaluation.findings import judge
from d2plm.evaluation.result import Evaluation
from d2plm.evaluation.tables import as_markdown
from d2plm.evaluation.terms import Terms, terms_for
from d2plm.paradigms.masked import MaskedParadigm
from d2plm.paradigms.paradigm import Paradigm

TAGS = ("protein", "protein-language-model", "biology")
EXAMPLES = {  # sequences to score
    "protein": '["MKTAYIAKQR", "GSHMLEDPVA"]',
    "dna": '["ACGTTGCAAC", "GGCATTACGA"]',
    "rna": '["ACGUUGCAAC", "GGCAUUACGA"]',
    "codon": '["ATGGCTAAATAA", "ATGTTTCCCTGA"]',
}
TEXTS = '["In the beginning", "was the word"]'


def model_card(
    paradigm: Paradigm,
    provenance: dict[str, Any],
    *,
    name: str,
    parameters: int,
    max_residues: int,
    evaluation: Evaluation | None = None,
) -> str:
    """Render the model card as Markdown with YAML front matter.

    Missing parts of the provenance are omitted; `name` is used if it has none.
    """
    name = provenance.get("name") or name
    vocabulary = paradigm.vocabulary
    terms = terms_for(vocabulary)
    environment = Environment(  # noqa: S701  # Markdown, not HTML
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("model_card.md.jinja").render(
        name=name,
        front_matter=_front_matter(name, paradigm, provenance, evaluation, terms),
        terms=terms,
        examples=EXAMPLES.get(vocabulary.name, TEXTS),
        paradigm=paradigm,
        masked=isinstance(paradigm, MaskedParadigm),
        middle=(paradigm.prior_time + paradigm.data_time) / 2,
        provenance=provenance,
        crop=provenance.get("settings", {}).get("data", {}).get("max_length"),
        parameters=parameters,
        max_residues=max_residues,
        evaluation=evaluation,
        finding=evaluation and judge(evaluation),
        result=evaluation and as_markdown(evaluation),
        directions=_directions,
        covered=covered,
    )


def _front_matter(
    name: str,
    paradigm: Paradigm,
    provenance: dict[str, Any],
    evaluation: Evaluation | None,
    terms: Terms,
) -> str:
    results = None
    if evaluation is not None:
        inputs = ", ".join(member["origin"]["input"] for member in provenance.get("data") or [])
        results = [
            EvalResult(
                task_type="fill-mask",
                dataset_type=f"{terms.sequence}s",
                dataset_name=f"held-out {terms.sequence}s of {inputs or 'the training data'}",
                dataset_revision=evaluation.digests.get("validation"),
                metric_type="perplexity",
                metric_name=f"perplexity ({evaluation.estimator})",
                metric_value=round(evaluation.model.perplexity.value, 4),
            )
        ]
    card = ModelCardData(
        library_name="d2plm",
        tags=[
            *(TAGS if terms.unit is None else [paradigm.vocabulary.name]),
            paradigm.name.replace("_", "-"),
        ],
        metrics=["perplexity"],
        model_name=name,
        eval_results=results,
    )
    return str(card.to_yaml())


def covered(search: dict[str, Any]) -> str:
    """Describe a search's coverage mode; empty for rare modes."""
    words = {"either": " of either sequence", 0: " of both sequences"}
    return words.get(search.get("coverage_mode", ""), "")


def _directions(member: dict[str, Any]) -> str:
    """Describe the directions in which homologs were searched."""
    found = member["verification"]["pairs_found"].values()
    ways = {way.replace("_", " ") for pairs in found for way in pairs}
    return " and ".join(sorted(ways))
