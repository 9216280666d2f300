"""The registry: versions of exported models, and which of them is the champion.

Every registered version carries its evaluation as tags and gets the alias `candidate`; `champion`
moves only when the paired interval on the same residues and masks says that the new one is better.
"""

import hashlib
import io
import math
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2plm.errors import ModelError, TrackingError
from d2plm.evaluation.likelihood import corpus_estimate
from d2plm.export import EVALUATION, load_scores
from d2plm.files import nearest_path
from d2plm.tracking.mlflow_run import reaching
from d2plm.tracking.serving import DESIGNS, INPUTS, SCORES, SETTINGS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.models import ModelSignature

CHAMPION, CANDIDATE = "champion", "candidate"
COMPARED = ("validation", "masks")  # the digests that two scores must share to be compared
WEIGHTS = "model.safetensors"
# MLflow's own stores answer the first for an alias that is not there, others the second.
NO_SUCH_ALIAS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")
DESCRIPTION = (
    "A protein language model of D2PLM, which scores, generates and fills in proteins. The alias "
    "`champion` is the best version by its bound on held-out proteins, `candidate` the last one. "
    "`mlflow models serve --env-manager local -m models:/{name}@champion` serves it."
)
MODEL_CODE = Path(__file__).with_name("served_model.py")


@dataclass(frozen=True)
class Registration:
    """A registered version and what became of the champion's alias."""

    name: str
    version: str
    is_champion: bool
    reason: str


def register(
    client: "MlflowClient", run_id: str, export: Path, name: str, digest: str
) -> Registration:
    """Log the export to the run as an MLflow model and register it under `name`.

    An export that is already registered from this run (same `digest`) is not registered again.

    Raises:
        ModelError: if the export was not evaluated.
        TrackingError: if the store refuses.
    """
    evaluation, _ = load_scores(export)
    with reaching(client, f"register {name}"):
        version = _registered(client, name, run_id, digest)
        fresh = "" if version is None else "registered already; "
        if version is None:
            version = _log_version(run_id, export, name, digest)
            for key, value in _tags(evaluation, digest).items():
                client.set_model_version_tag(name, version, key, value)
            client.update_model_version(name, version, _version_description(evaluation))
            if not client.get_registered_model(name).description:
                client.update_registered_model(name, DESCRIPTION.format(name=name))
            client.set_registered_model_alias(name, CANDIDATE, version)
    outcome = _promote(client, name, version, export)
    return replace(outcome, reason=fresh + outcome.reason)


def export_digest(export: Path) -> str:
    """SHA-256 of an evaluated export's weights and evaluation, by which it is known again.

    Raises:
        ModelError: if there are no weights, or the export was not evaluated.
    """
    if not (export / WEIGHTS).is_file():
        near = nearest_path(export)
        raise ModelError(f"{export}: no exported model there{near}; train first, or set model_dir")
    load_scores(export)
    digest = hashlib.sha256()
    for name in (WEIGHTS, EVALUATION):
        with (export / name).open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)  # goes on where the file before it ended
    return digest.hexdigest()


def download(client: "MlflowClient", name: str, alias: str) -> Path:
    """Fetch the export that an alias points to.

    Raises:
        TrackingError: if there is no such model or alias, or the store cannot be reached.
    """
    import mlflow

    with reaching(client, f"fetch model {name}@{alias}"):
        version = client.get_model_version_by_alias(name, alias)
        folder = mlflow.artifacts.download_artifacts(f"models:/{name}/{version.version}")
    return exported_folder(Path(folder))


def exported_folder(logged_model: Path) -> Path:
    """The export inside a logged MLflow model.

    Raises:
        TrackingError: if there is none.
    """
    for evaluation in (logged_model / "artifacts").glob(f"*/{EVALUATION}"):
        return evaluation.parent
    raise TrackingError(f"{logged_model}: not a model that 'd2plm register' logged; name another")


def _log_version(run_id: str, export: Path, name: str, digest: str) -> str:
    import mlflow

    # MLflow tells of each step of it in lines of its own; what fails is raised.
    with mlflow.start_run(run_id=run_id), redirect_stderr(io.StringIO()):
        logged = mlflow.pyfunc.log_model(
            name="model",
            python_model=str(MODEL_CODE),
            artifacts={"export": str(export)},
            registered_model_name=name,
            signature=_signature(),
            pip_requirements=["d2plm"],
            metadata={"export_digest": digest},
        )
    return str(logged.registered_model_version)


def _promote(client: "MlflowClient", name: str, version: str, export: Path) -> Registration:
    champion = _champion(client, name)
    if champion == version:
        return Registration(name, version, True, "it is the champion already")
    better, reason = True, "there was no champion"
    if champion is not None:
        better, reason = beats(export, download(client, name, CHAMPION))
    if better:
        with reaching(client, f"make version {version} of {name} the champion"):
            client.set_registered_model_alias(name, CHAMPION, version)
    return Registration(name, version, better, reason)


def _champion(client: "MlflowClient", name: str) -> str | None:
    from mlflow.exceptions import MlflowException

    with reaching(client, f"find the champion of {name}"):
        try:
            return str(client.get_model_version_by_alias(name, CHAMPION).version)
        except MlflowException as error:
            if error.error_code not in NO_SUCH_ALIAS:
                raise
            return None


def beats(challenger: Path, champion: Path) -> tuple[bool, str]:
    """Whether one evaluated export is better than another, and why (not).

    Better means: on the same residues and masks, the 95 % interval of the paired difference in
    nats per residue lies below zero. The training data may differ.

    Raises:
        ModelError: if either was not evaluated.
    """
    ours, scores = load_scores(challenger)
    theirs, baseline = load_scores(champion)
    if any(ours["digests"].get(key) != theirs["digests"].get(key) for key in COMPARED):
        return False, "the champion was evaluated on other data or masks: evaluate both alike"
    difference = corpus_estimate(
        scores["nats"] - baseline["nats"], scores["residues"], scores["clusters"]
    )
    figures = (
        f"{difference.value:+.4f} nats/residue [{difference.low:+.4f}, {difference.high:+.4f}]"
    )
    if difference.high < 0:
        return True, f"better than the champion: {figures}"
    return False, f"not significantly better than the champion: {figures}"


def _signature() -> "ModelSignature":
    """What the served model takes and gives; see `serving`."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    of = {bool: DataType.boolean, int: DataType.long, float: DataType.double, str: DataType.string}

    def columns(kinds: dict[str, type]) -> Schema:
        return Schema([ColSpec(of[kind], name, required=False) for name, kind in kinds.items()])

    return ModelSignature(
        inputs=columns(INPUTS),
        outputs=columns(SCORES | DESIGNS),
        params=ParamSchema(
            [ParamSpec(name, of[kind], default) for name, (kind, default, _) in SETTINGS.items()]
        ),
    )


def _registered(client: "MlflowClient", name: str, run_id: str, digest: str) -> str | None:
    versions = client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'")
    same = [v for v in versions if v.tags.get("export_digest") == digest]
    return max((str(v.version) for v in same), key=int, default=None)


def _version_description(evaluation: dict[str, Any]) -> str:
    model, composition = evaluation["model"], evaluation["baselines"]["composition"]
    low, high = model["perplexity_interval"] or (math.nan, math.nan)
    return (
        f"Perplexity {model['perplexity']:.3f} [{low:.3f}, {high:.3f}] on held-out proteins, where "
        f"the composition baseline has {composition['perplexity']:.3f}."
    )


def _tags(evaluation: dict[str, Any], digest: str) -> dict[str, str]:
    model = evaluation["model"]
    interval, mlm15 = model["perplexity_interval"], model["perplexity_mlm15"]
    return {
        "export_digest": digest,
        "perplexity": f"{model['perplexity']:.4f}",
        "perplexity_interval": str(interval and [round(bound, 4) for bound in interval]),
        "estimator": evaluation["estimator"],
        "perplexity_composition": f"{evaluation['baselines']['composition']['perplexity']:.4f}",
        "perplexity_mlm15": f"{mlm15:.4f}" if mlm15 else "none: the source is not a mask",
        "data_digest": evaluation["digests"]["validation"],
        "masks_digest": evaluation["digests"]["masks"],
    }
