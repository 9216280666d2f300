"""The model card: the README.md of an exported folder, for people and for Hugging Face's hub.

It says what the folder's own files say, and no more: where something is not known, as before the
evaluation, the card says that. Tests run its code.
"""

from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from d2plm.evaluation.findings import judge, likelihood_table
from d2plm.paradigms.base import Paradigm
from d2plm.paradigms.masked import MaskedParadigm

FILE = "README.md"
HERE = "path/to/this/folder"

GENERATE = f"""\
from d2plm import load_model

model = load_model("{HERE}")
for protein in model.generate(3, seed=1):
    print(protein)
"""
INFILL = f"""\
from d2plm import load_model

model = load_model("{HERE}")
for design in model.infill("MKT____GGLL", number=3, seed=1):
    print(design)
"""
SCORE = f"""\
from d2plm import load_model

model = load_model("{HERE}")
for score in model.score(["MKTAYIAKQR", "GSHMLEDPVA"]):
    print(score.perplexity, score.nats, score.interval)
"""
MUTATIONS = f"""\
from d2plm import load_model

model = load_model("{HERE}")
print(model.score_mutations("MKTAYIAKQR", ["A4G", "A4G:K8R"]))
"""
TRANSFORMERS = f"""\
import d2plm.model.dit, torch
from transformers import AutoModel, AutoTokenizer

model, tokenizer = (of.from_pretrained("{HERE}") for of in (AutoModel, AutoTokenizer))
batch = tokenizer(["MKTAY", "GSHMLED"], return_tensors="pt", padding=True)
logits = model.forward_padded(**batch, times=torch.tensor([{{time}}, {{time}}]))
"""


def model_card(
    paradigm: Paradigm,
    provenance: dict[str, Any],
    *,
    name: str,
    parameters: int,
    max_residues: int,
    evaluation: dict[str, Any] | None = None,
) -> str:
    """The card as Markdown, with YAML front matter.

    Args:
        paradigm: of the model.
        provenance: as in the export; what it lacks is left out.
        name: of the model, where the provenance has none.
        parameters: how many.
        max_residues: the longest protein that the model takes.
        evaluation: as `d2plm.evaluation.summary.summarise` returned it; None before the evaluation.
    """
    name = provenance.get("name") or name
    figures = ["Not evaluated yet: `d2plm evaluate` does."]
    if evaluation is not None:
        figures = [*_figures(evaluation)]
    limits = _limits(paradigm, provenance, max_residues, evaluation)
    sections = [
        f"---\n{_front_matter(name, paradigm, provenance, evaluation)}\n---",
        f"# {name}",
        _summary(paradigm, provenance, parameters, max_residues),
        "## How to use it",
        *_usage(paradigm),
        "## Data",
        *_data(provenance),
        "## How good it is",
        *figures,
        "## Use and limits",
        "\n".join(f"- {limit}" for limit in limits),
    ]
    return "\n\n".join(section.rstrip("\n") for section in sections) + "\n"


def _front_matter(
    name: str, paradigm: Paradigm, provenance: dict[str, Any], evaluation: dict[str, Any] | None
) -> str:
    results = None
    if evaluation is not None:
        model = evaluation["model"]
        results = [
            EvalResult(
                task_type="fill-mask",
                dataset_type="proteins",
                dataset_name=f"held-out proteins of {_inputs(provenance) or 'the training data'}",
                dataset_revision=evaluation["digests"].get("validation"),
                metric_type="perplexity",
                metric_name=f"perplexity ({evaluation['estimator']})",
                metric_value=round(model["perplexity"], 4),
            )
        ]
    card = ModelCardData(
        library_name="d2plm",
        tags=["protein", "protein-language-model", "biology", paradigm.name.replace("_", "-")],
        metrics=["perplexity"],
        model_name=name,
        eval_results=results,
    )
    return str(card.to_yaml())


def _summary(
    paradigm: Paradigm, provenance: dict[str, Any], parameters: int, max_residues: int
) -> str:
    step = provenance.get("step")
    average = "" if step is None else f", the moving average at step {step:,} of training"
    return (
        f"A protein language model that generates, fills in and scores proteins of up to "
        f"{max_residues:,} residues: a bidirectional transformer (DiT) of {parameters:,} "
        f"parameters{average}. Trained by {paradigm.description} with "
        f"D2PLM {provenance['d2plm_version']}."
    )


def _usage(paradigm: Paradigm) -> Iterator[str]:
    yield (
        "With D2PLM installed; nothing but this folder is needed. The same seed gives the same "
        "proteins."
    )
    drawn = "with lengths drawn from those of the training proteins"
    yield f"Generate, {drawn}:\n\n{_python(GENERATE)}"
    yield f"Fill in what is marked by `_`:\n\n{_python(INFILL)}"
    yield (
        "Score: an upper bound of −log p of each protein in nats, with its interval, and the "
        f"perplexity (lower is likelier):\n\n{_python(SCORE)}"
    )
    if isinstance(paradigm, MaskedParadigm):
        yield (
            "Score mutations by masked-marginal log-odds (higher is likelier):\n\n"
            f"{_python(MUTATIONS)}"
        )
    time = (paradigm.prior_time + paradigm.data_time) / 2
    yield (
        "The network alone, through `transformers`. `times` is the paradigm's time of each "
        f"protein, {paradigm.data_time:g} at the protein and {paradigm.prior_time:g} where nothing "
        f"of it is left:\n\n{_python(TRANSFORMERS.format(time=time))}"
    )
    yield (
        "Or from the shell:\n\n```\n"
        f"d2plm generate model_dir={HERE} generation.number=10\n"
        f"d2plm score model_dir={HERE} input=proteins.fasta\n```"
    )


def _python(code: str) -> str:
    return f"```python\n{code}```"


def _inputs(provenance: dict[str, Any]) -> str:
    """The files that the proteins came from."""
    names = [member["origin"]["input"] for member in provenance.get("data") or []]
    flat = [name for each in names for name in (each if isinstance(each, list) else [each])]
    return ", ".join(str(name) for name in flat if name)


def _data(provenance: dict[str, Any]) -> Iterator[str]:
    members, residues = provenance.get("data") or [], provenance.get("residues", "real")
    if residues != "real":
        yield f"Trained on {residues} residues, as a control: no model of proteins."
    if not members:
        yield "Where its proteins come from was not recorded."
    for member in members:
        yield "\n".join(f"- {fact}" for fact in _facts(member))
    digests = [f"`{digest}` ({split})" for split, digest in provenance.get("digests", {}).items()]
    if digests:
        yield f"SHA-256 of the prepared proteins: {', '.join(digests)}."
    licence = provenance.get("data_license")
    yield (
        f"Licence of the proteins, as whoever trained the model states it: {licence}."
        if licence
        else "The licence of the proteins was not stated (`data.license`)."
    )


def _facts(member: dict[str, Any]) -> Iterator[str]:
    """What is known of one of the prepared folders that were trained on."""
    origin, checked = member["origin"], member["verification"]
    named = _inputs({"data": [member]}) or "unnamed input"
    yield f"source: {named}, {origin['records']:,} records, {origin['duplicates']:,} duplicates"
    for split, counts in member["splits"].items():
        yield (
            f"{split}: {counts['sequences']:,} proteins, {counts['residues']:,} residues, "
            f"{counts['clusters']:,} homology clusters"
        )
    dropped = [f"{n:,} {why.replace('_', ' ')}" for why, n in origin["dropped"].items() if n]
    yield f"dropped: {', '.join(dropped) or 'nothing'}"
    search = member["search"]
    directions = {
        way.replace("_", " ") for found in checked["pairs_found"].values() for way in found
    }
    yield (
        "training proteins that MMseqs2 found similar to held-out ones (identity ≥ "
        f"{search['min_seq_id']:g}, coverage ≥ {search['coverage']:g}, sensitivity "
        f"{search['sensitivity']:g}; {' and '.join(sorted(directions))}) were dropped, after "
        f"which it found {checked['leaking_pairs_after']} such pairs"
    )


def _figures(evaluation: dict[str, Any]) -> Iterator[str]:
    finding = judge(evaluation)
    yield " ".join([f"**{finding.headline}**", *finding.details])
    yield (
        f"On {evaluation['sequences']:,} held-out proteins ({evaluation['residues']:,} residues, "
        f"{evaluation['clusters']:,} clusters); {evaluation['estimator']}; intervals are "
        f"{evaluation['interval']}."
    )
    yield likelihood_table(evaluation)
    masked = evaluation["model"]["perplexity_mlm15"]
    if masked is not None:
        yield (
            f"With 15 % of the residues masked, as masked language models are compared: pseudo-"
            f"perplexity {masked:.3f} (no bound of a likelihood)."
        )
    digests = evaluation["digests"]
    yield (
        f"Computed on `{digests['validation']}` with the masks `{digests['masks']}`; all of it is "
        "in `evaluation.json`, each protein's in `sequence_scores.npz`."
    )


def _limits(
    paradigm: Paradigm,
    provenance: dict[str, Any],
    max_residues: int,
    evaluation: dict[str, Any] | None,
) -> Iterator[str]:
    yield (
        "For research on protein sequences: proposing sequences and designs, ranking sequences and "
        "variants, and comparing ways to train such models."
    )
    yield (
        "No protein of it was made or tested: that one folds, is expressed, binds or does anything "
        "is not claimed, and nothing was filtered for what it might do. It knows sequences alone, "
        "no structure and no function. Scores of variants are no clinical evidence."
    )
    yield (
        "The bound is one of −log p(sequence | its length): the model does not choose the length, "
        "which is drawn from the training proteins' (`length_histogram.json`). The perplexity it "
        "gives is an upper bound of the model's own."
    )
    crop = provenance.get("settings", {}).get("data", {}).get("max_length")
    trained = (
        "" if crop is None else f" It was trained on windows of at most {crop - 2:,} residues."
    )
    yield (
        f"It takes at most {max_residues:,} residues; the evaluation scores the first so many of "
        f"longer proteins.{trained}"
    )
    yield (
        "Only the twenty amino acids are generated and scored; X, B, Z, U and O are seen, not "
        "predicted."
    )
    if evaluation is not None:
        yield (
            "The figures hold for proteins like the held-out ones, which are of the same source. "
            "Homologs that the search above cannot find may be left in the training data."
        )
    if not isinstance(paradigm, MaskedParadigm):
        yield "A model of the uniform source has no masked prediction: it cannot score mutations."
