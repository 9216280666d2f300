"""d2plm doctor: check this machine and the cluster, and explain how to fix problems."""

import importlib
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from d2plm.assembly.training_job import training_job
from d2plm.core.errors import DoctorError
from d2plm.doctor import machine_checks, service_checks
from d2plm.doctor.cluster_checks import ClusterChecks
from d2plm.doctor.verdicts import Check, Verdict, examine, show, skipped
from d2plm.launch.client import is_configured
from d2plm.settings.commands import DoctorSettings

LIMIT_SECONDS = 30.0  # for all checks; initialising many GPUs takes long
# Imported before the checks start, because their threads might see half-imported modules.
USED_BY_SEVERAL = ("torch", "mlflow", "kubernetes.client")


def run(config: DoctorSettings) -> list[dict[str, str]]:
    """Run all checks, print and return their verdicts; raises `DoctorError` if one has failed."""
    for module in USED_BY_SEVERAL:
        with suppress(Exception):  # reported by the check that needs it
            importlib.import_module(module)
    checks, absent = _checks_from_here(config), _no_cluster(config)
    if absent is not None:
        verdicts = {**examine(checks, LIMIT_SECONDS), "cluster": absent}
    else:
        job = training_job(config, (), name="d2plm-doctor")
        reached = ClusterChecks(config.launcher.kind, job, config.timeout_seconds)
        verdicts = examine({**checks, "API server": reached.reach}, LIMIT_SECONDS)
        if verdicts["API server"].status == "ok":
            verdicts |= examine(reached.checks(), LIMIT_SECONDS)
    show(verdicts)
    rows = [{"check": name, **asdict(verdict)} for name, verdict in verdicts.items()]
    names = [name for name, verdict in verdicts.items() if verdict.status == "failed"]
    if names:
        refusal = DoctorError(
            f"{len(names)} of {len(verdicts)} checks failed: {', '.join(names)}; fix them as shown "
            "above"
        )
        refusal.document = rows
        raise refusal
    return rows


def _no_cluster(config: DoctorSettings) -> Verdict | None:
    if config.cluster is False:
        return skipped("cluster=false")
    if config.cluster == "auto" and config.launcher.kind == "local":
        return skipped("launcher.kind=local needs no cluster")
    if config.cluster == "auto" and not is_configured():
        return skipped("kubectl and pods have none configured", "set KUBECONFIG to check a cluster")
    return None


def _checks_from_here(config: DoctorSettings) -> dict[str, Check]:
    work_dir, trainer, tracking = Path(config.work_dir), config.trainer, config.tracking
    temporary = config.data.temporary_dir or tempfile.gettempdir()
    timeout, kfp_host = config.timeout_seconds, config.kfp_host
    return {
        "python": machine_checks.python,
        "torch": partial(machine_checks.torch_and_device, trainer.device),
        "compiler": partial(machine_checks.compiler, trainer.device, trainer.compile),
        "MMseqs2": machine_checks.mmseqs2,
        "cores, memory": machine_checks.processor_and_memory,
        "shared memory": machine_checks.shared_memory,
        "work folder": partial(machine_checks.disk, work_dir, "work_dir"),
        "file locks": partial(machine_checks.file_locks, work_dir),
        "temporary folder": partial(machine_checks.disk, Path(temporary), "TMPDIR"),
        "MLflow": partial(
            service_checks.mlflow, tracking.trackers, tracking.uri, tracking.experiment, timeout
        ),
        "Kubeflow Pipelines": partial(service_checks.kubeflow_pipelines, kfp_host, timeout),
    }
