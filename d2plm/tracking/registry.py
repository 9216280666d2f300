"""The MLflow model registry: versions of exported models, and the champion among them.

Every new version has its evaluation as tags and the alias `candidate`. The alias `champion` moves
only if the paired interval on the same residues and masks shows that the new version is better.
"""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from d2plm.core.errors import ModelError, TrackingError
from d2plm.core.estimate import Verdict, difference_text
from d2plm.core.files import files_digest, nearest_path
from d2plm.evaluation.findings import judge
from d2plm.evaluation.likelihood import corpus_estimate
from d2plm.evaluation.result import EVALUATION, SEQUENCE_SCORES, Evaluation
from d2plm.evaluation.scoring import BITS_PER_BYTE
from d2plm.export.exported_model import read_provenance
from d2plm.export.model_evaluation import load_scores
from d2plm.model import lora
from d2plm.serving import service
from d2plm.tracking.description import card_text, shortened
from d2plm.tracking.mlflow_run import GIT_TAG, MAX_DIGEST, SOURCE_TAG, reaching

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.models import ModelSignature

CHAMPION, CANDIDATE = "champion", "candidate"
SCORED = (EVALUATION, SEQUENCE_SCORES)  # files by which the champion is compared
COMPARED = ("validation", "masks")  # digests that must be equal to compare two models
# Error codes for a missing alias: the first from MLflow's own stores, the second from others.
NO_SUCH_ALIAS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
DESCRIPTION = (
    "A protein language model of D2PLM that scores, generates and fills in proteins. The alias "
    "`champion` is the version with the best bound on held-out proteins, `candidate` the latest. "
    "`d2plm serve model_dir=models:/{name}@champion` serves it."
)
DIGEST_TAG = "export_digest"
# The tags of a new version; the copy that a repeated request makes has no others.
MADE_HERE = {"d2plm.made_by": "d2plm register"}
MAX_DESCRIPTION = 5000  # characters of a version's description in MLflow's databases
EVALUATED = ("evaluation/", "given_relatives/", "versus/")  # metrics that belong to the model
MODEL_CODE = Path(__file__).with_name("pyfunc_model.py")
# Columns of the registered model, all optional, with MLflow's names of their types. A length is a
# double because a column of integers cannot have gaps.
INPUTS = {"sequence": "string", "length": "double"}
SCORES = {
    **dict.fromkeys(("residues", "bases", "codons", "bytes", "tokens"), "long"),
    **dict.fromkeys(("nats", "nats_low", "nats_high", "perplexity", BITS_PER_BYTE), "double"),
}
DESIGNS = {"row": "long", "sequence": "string", "length": "long", "settings": "string"}


@dataclass(frozen=True)
class Registration:
    """A registered version, and whether it is the champion."""

    name: str
    version: str
    is_champion: bool
    reason: str


def register(
    client: "MlflowClient", run_id: str, export: Path, name: str, digest: str
) -> Registration:
    """Log the export to the run as an MLflow model and register it under `name`.

    Every step is idempotent, so that the next call completes an interrupted registration: the
    logged model is identified by its `digest`, the version by its logged model. Versions that a
    user has made of the same logged model, or has given an alias, are kept.

    Raises:
        ModelError: if the export was not evaluated, or its provenance is damaged.
        TrackingError: if the store rejects a request.
    """
    import mlflow

    (evaluation, _), provenance = load_scores(export), read_provenance(export) or {}
    if (export / lora.CONFIG).is_file() and not lora.base_of(export)[0].startswith("models:/"):
        raise ModelError(
            f"{export}: is an adapter whose base model is a local folder; adapt a registered model "
            "(init_from=models:/NAME@ALIAS), or register the merged model"
        )
    with reaching(client, f"register {name}"):
        run = client.get_run(run_id)
        model_id = _logged_model(client, run, export, name, digest, provenance)
        of_model = f"models:/{model_id}"

        def versions() -> list["ModelVersion"]:
            found = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
            return [one for one in found if one.source == of_model]

        same = found = versions()
        if not same:
            with _quiet():
                made = mlflow.register_model(of_model, name, tags=MADE_HERE)
            found = versions() or [made]  # a search may lag behind
        version = _without_copies(client, found)
        _link_evaluation(client, run, model_id, evaluation)
        tags = _tags(evaluation, digest, provenance, run.data.tags.get(GIT_TAG))
        for key, value in tags.items():
            client.set_model_version_tag(name, version, key, value)
        client.update_model_version(name, version, _version_description(evaluation, export))
        if not client.get_registered_model(name).description:
            client.update_registered_model(name, DESCRIPTION.format(name=name))
        known = client.search_model_versions(f"name = '{name}'")
        if all(int(one.version) <= int(version) for one in known):
            client.set_registered_model_alias(name, CANDIDATE, version)
    is_champion, reason = _promote(client, name, version, export)
    reason = f"already registered; {reason}" if same else reason
    return Registration(name, version, is_champion, reason)


def export_digest(export: Path) -> str:
    """SHA-256 of an export's weights and evaluation; `ModelError` if one of them is missing."""
    weights = sorted(export.glob("*.safetensors"))
    if not weights:
        near = nearest_path(export)
        raise ModelError(f"{export}: not an exported model{near}; train first, or set model_dir")
    load_scores(export)
    return files_digest(*weights, export / EVALUATION)


def version_of(client: "MlflowClient", name: str, alias: str) -> str:
    """The version to which an alias points; raises `TrackingError` if there is none."""
    with reaching(client, f"fetch model {name}@{alias}"):
        return str(client.get_model_version_by_alias(name, alias).version)


def download(
    client: "MlflowClient",
    name: str,
    version: str,
    files: Sequence[str] = ("",),
    into: Path | None = None,
) -> Path:
    """Download the export of a version, or only `files` of it; `TrackingError` if it is missing."""
    from mlflow.artifacts import download_artifacts, list_artifacts

    of_version = f"models:/{name}/{version}"
    with reaching(client, f"fetch version {version} of model {name}"), _quiet():
        for export in list_artifacts(f"{of_version}/artifacts"):
            for file in files:
                uri = f"{of_version}/{export.path}/{file}".rstrip("/")
                path = Path(download_artifacts(uri, dst_path=into and str(into)))
            return path.parent if file else path
    raise TrackingError(
        f"{of_version}: not a model registered by 'd2plm register'; choose another version"
    )


def _without_copies(client: "MlflowClient", versions: "Sequence[ModelVersion]") -> str:
    """Return the version of a logged model, after deleting its copies.

    The client repeats a request whose answer a proxy has lost, and each request makes a version. A
    version with an alias, a description or other tags than `MADE_HERE` is not such a copy.
    """
    current = [client.get_model_version(one.name, str(one.version)) for one in versions]

    def is_bare(one: "ModelVersion") -> bool:
        return one.tags == MADE_HERE and not one.aliases and not one.description

    def rank(one: "ModelVersion") -> tuple[bool, bool, int]:
        return not MADE_HERE.items() <= one.tags.items(), is_bare(one), int(one.version)

    kept, *others = sorted(current, key=rank)
    for copy in filter(is_bare, others):
        client.delete_model_version(copy.name, str(copy.version))
    return str(kept.version)


def _logged_model(
    client: "MlflowClient",
    run: "Run",
    export: Path,
    name: str,
    digest: str,
    provenance: dict[str, Any],
) -> str:
    """Return the id of the run's MLflow model of this export, logging the model if necessary.

    MLflow adds the run's parameters, and the metrics of its step, to a new model. Incomplete models
    of an interrupted registration, and of requests that the client has repeated, are deleted. Of
    complete ones, which are kept, the one with a version of `name` is chosen.
    """

    def models() -> list[Any]:
        experiment, of_run = run.info.experiment_id, f"source_run_id = '{run.info.run_id}'"
        found = client.search_logged_models([experiment], of_run)
        return [model for model in found if model.tags.get(DIGEST_TAG) == digest]

    versions = client.search_model_versions(f"run_id = '{run.info.run_id}'")
    sources = {one.source for one in versions}
    of_name = {one.source for one in versions if one.name == name}
    whole = [str(model.model_id) for model in models() if model.status == "READY"]
    whole.sort(key=lambda model_id: f"models:/{model_id}" not in of_name)
    kept = whole[0] if whole else _log_model(run, export, digest, provenance)
    for model in models():
        is_used = model.status == "READY" or f"models:/{model.model_id}" in sources
        if model.model_id != kept and not is_used:
            client.delete_logged_model(model.model_id)
    return kept


def _log_model(run: "Run", export: Path, digest: str, provenance: dict[str, Any]) -> str:
    import mlflow

    step = provenance.get("step", 0)
    with mlflow.start_run(run_id=run.info.run_id), _quiet():
        logged = mlflow.pyfunc.log_model(
            name=f"{provenance.get('paradigm', 'model')}-step{step}",
            step=step,
            python_model=str(MODEL_CODE),
            artifacts={"export": str(export)},
            signature=_signature(),
            pip_requirements=["d2plm"],
            metadata={DIGEST_TAG: digest},
            tags={SOURCE_TAG: "d2plm register", DIGEST_TAG: digest},
        )
    return str(logged.model_id)


def _quiet() -> redirect_stderr[io.StringIO]:
    """Hide the progress that MLflow prints to standard error; failures are raised."""
    return redirect_stderr(io.StringIO())


def _link_evaluation(
    client: "MlflowClient", run: "Run", model_id: str, evaluation: Evaluation
) -> None:
    """Link the run's evaluation metrics to the model, with their data set."""
    from mlflow.entities import Metric

    digest = evaluation.digests[evaluation.settings.get("split", "validation")][:MAX_DIGEST]
    data = next((i.dataset for i in run.inputs.dataset_inputs if i.dataset.digest == digest), None)
    names = [name for name in run.data.metrics if name.startswith(EVALUATED)]
    points = [client.get_metric_history(run.info.run_id, name)[-1] for name in names]
    dataset = {} if data is None else {"dataset_name": data.name, "dataset_digest": data.digest}
    # With the same times, MLflow does not add the points to the run a second time.
    linked = [
        Metric(p.key, p.value, p.timestamp, p.step, model_id=model_id, **dataset) for p in points
    ]
    if linked:
        client.log_batch(run.info.run_id, metrics=linked)


def _promote(client: "MlflowClient", name: str, version: str, export: Path) -> tuple[bool, str]:
    """Make the version the champion if it is better; return whether it now is, and why."""
    from mlflow.exceptions import MlflowException

    champion = None
    with reaching(client, f"find the champion of {name}"):
        try:
            champion = str(client.get_model_version_by_alias(name, CHAMPION).version)
        except MlflowException as error:
            if error.error_code not in NO_SUCH_ALIAS:
                raise
    if champion == version:
        return True, "it is already the champion"
    better, reason = True, "there was no champion"
    if champion is not None:
        with TemporaryDirectory(prefix="d2plm-") as folder:
            scored = download(client, name, champion, SCORED, Path(folder))
            better, reason = beats(export, scored)
    if better:
        with reaching(client, f"make version {version} of {name} the champion"):
            client.set_registered_model_alias(name, CHAMPION, version)
    return better, reason


def beats(challenger: Path, champion: Path) -> tuple[bool, str]:
    """Whether the evaluation in one folder is better than that in another, and the reason.

    They are compared on the same residues and masks; the training data may differ. Raises
    `ModelError` if one of them is missing.
    """
    ours, scores = load_scores(challenger)
    theirs, baseline = load_scores(champion)
    if any(ours.digests.get(key) != theirs.digests.get(key) for key in COMPARED):
        return False, "the champion was evaluated on other data or masks; evaluate both on the same"
    difference = corpus_estimate(
        scores["nats"] - baseline["nats"], scores["residues"], scores["clusters"]
    )
    figures = difference_text(difference, ours.terms.token)
    is_better = difference.verdict is Verdict.BETTER
    return is_better, f"{difference.verdict} the champion: {figures}"


def _signature() -> "ModelSignature":
    """Columns and parameters of the registered model; see `serving.service`."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema
    from pydantic import TypeAdapter

    def columns(types: dict[str, str]) -> Schema:
        return Schema([ColSpec(kind, name, required=False) for name, kind in types.items()])

    def parameter(name: str, schema: dict[str, Any]) -> ParamSpec:
        kind = schema.get("anyOf", [schema])[0]["type"]  # the other one of two is null
        kind, shape = ("string", (-1,)) if kind == "array" else (kind, None)
        kind = {"integer": "long", "number": "double"}.get(kind, kind)
        return ParamSpec(name, kind, service.DEFAULTS[name], shape)

    schemas: dict[str, dict[str, Any]] = {}
    for task in (service.Infilling, service.Generating, service.Scoring):
        schemas |= TypeAdapter(task).json_schema()["properties"]
    return ModelSignature(
        inputs=columns(INPUTS),
        outputs=columns(SCORES | DESIGNS),
        params=ParamSchema([parameter(*one) for one in schemas.items()]),
    )


def _version_description(evaluation: Evaluation, export: Path) -> str:
    text = f"{judge(evaluation).headline}\n\n{card_text(export)}".strip()
    return shortened(text, MAX_DESCRIPTION)


def _tags(
    evaluation: Evaluation, digest: str, provenance: dict[str, Any], revision: str | None
) -> dict[str, str]:
    perplexity, best = evaluation.model.perplexity, judge(evaluation).baseline
    interval, mlm15 = perplexity.interval, evaluation.model.perplexity_mlm15
    tags = {
        DIGEST_TAG: digest,
        "perplexity": f"{perplexity.value:.4f}",
        "perplexity_interval": str(interval and [round(bound, 4) for bound in interval]),
        "estimator": evaluation.estimator,
        "best_baseline": best,
        "perplexity_best_baseline": f"{evaluation.baselines[best].perplexity.value:.4f}",
        "perplexity_mlm15": f"{mlm15:.4f}" if mlm15 else "none: the source is not a mask",
        "data_digest": evaluation.digests["validation"],
        "masks_digest": evaluation.digests["masks"],
    }
    known = {
        "training_data_digest": evaluation.digests.get("train"),
        "paradigm": provenance.get("paradigm"),
        "step": provenance.get("step"),
        "d2plm_version": provenance.get("d2plm_version"),
        "git_revision": revision,
    }
    return tags | {key: str(value) for key, value in known.items() if value is not None}
