"""d2plm doctor: check this machine and the cluster, and say how to mend what is amiss."""

import importlib
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from d2plm.assembly.training_job import KINDS, training_job
from d2plm.config import Config
from d2plm.core.errors import DoctorError, require, require_choice, require_number
from d2plm.doctor import cluster, local, services
from d2plm.doctor.image import PULL_SECONDS
from d2plm.doctor.report import Check, Status, Verdict, Verdicts, as_rows, examine, show, skipped

LIMIT_SECONDS = 30.0  # of all checks; a machine of many GPUs takes its time to wake them
# Imported before the checks: two threads that import each other's halves may find them unfinished.
USED_BY_SEVERAL = ("torch", "mlflow", "kubernetes.client")


def run(config: Config) -> list[dict[str, str]]:
    """Run all checks, print what they found, and give it as rows.

    Raises:
        DoctorError: if any failed.
    """
    timeout, pull = config["timeout_seconds"], config["pull"]
    require(
        config["cluster"] in (True, False, "auto"),
        "cluster",
        config["cluster"],
        "auto, true or false",
    )
    require_choice("launcher.kind", config["launcher"]["kind"], KINDS)
    require_number("timeout_seconds", timeout, low=0, low_open=True)
    for module in USED_BY_SEVERAL:
        with suppress(Exception):  # the check that needs it says what is wrong with it
            importlib.import_module(module)
    checks, absent = _checks_from_here(config), _no_cluster(config)
    if absent is not None:
        verdicts = {**examine(checks, LIMIT_SECONDS), "cluster": absent}
    else:
        job = training_job(config, (), name="d2plm-doctor")
        reached = cluster.ClusterChecks(config["launcher"]["kind"], job, timeout)
        verdicts = examine({**checks, "API server": reached.reach}, LIMIT_SECONDS)
        limit = LIMIT_SECONDS + (PULL_SECONDS if pull else 0)
        known = reached.api is not None
        verdicts |= examine(reached.checks(pull), limit) if known else reached.unreached()
    return _tell(verdicts)


def _no_cluster(config: Config) -> Verdict | None:
    """Why no cluster is looked at; None: one is."""
    if config["cluster"] is False:
        return skipped("cluster=false")
    if config["cluster"] is True:
        return None
    if config["launcher"]["kind"] == "local":
        return skipped("launcher.kind=local needs none")
    if not cluster.is_configured():
        return skipped(
            "neither a kubectl configuration nor a service account is here",
            "set KUBECONFIG to check one",
        )
    return None


def _checks_from_here(config: Config) -> dict[str, Check]:
    work_dir, trainer = Path(config["work_dir"]), config["trainer"]
    temporary = config["data"]["temporary_dir"] or tempfile.gettempdir()
    timeout = config["timeout_seconds"]
    return {
        "python": local.python,
        "packages": local.packages,
        "lock file": local.lock_file,
        "torch": partial(local.torch_and_device, trainer["device"]),
        "compiler": partial(local.compiler, trainer["device"], trainer["compile"]),
        "MMseqs2": local.mmseqs2,
        "cores, memory": local.processor_and_memory,
        "shared memory": local.shared_memory,
        "work folder": partial(local.disk, work_dir, "work_dir"),
        "file locks": partial(local.file_locks, work_dir),
        "temporary folder": partial(local.disk, Path(temporary), "TMPDIR"),
        "MLflow": partial(
            services.mlflow, config["tracking"]["trackers"], config["tracking"]["uri"], timeout
        ),
        "Kubeflow Pipelines": partial(services.kubeflow_pipelines, config["kfp_host"], timeout),
    }


def _tell(verdicts: Verdicts) -> list[dict[str, str]]:
    show(verdicts)
    names = [name for name, verdict in verdicts.items() if verdict.status is Status.FAILED]
    if names:
        refusal = DoctorError(
            f"{len(names)} of {len(verdicts)} checks failed: {', '.join(names)}; above stands what "
            "each found and how to mend it"
        )
        refusal.document = as_rows(verdicts)
        raise refusal
    return as_rows(verdicts)
