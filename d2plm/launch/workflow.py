"""The Argo workflow of a pipeline's run: whether it is being ended, or a step's pod replaced.

Both send the pod SIGTERM. A job that is kept by mistake is deleted by the exit handler or with its
owner, the workflow, but one that is deleted by mistake has to queue again. Therefore only a clear
answer deletes it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from d2plm.core.errors import ClusterError
from d2plm.launch.client import Cluster, Resource

WORKFLOW = Resource(name="Workflow", group="argoproj.io", version="v1alpha1", plural="workflows")
ANSWER_SECONDS = 5.0  # of a request and its repetitions; pods have 30 s after SIGTERM

log = logging.getLogger(__name__)


def is_ended(cluster: Cluster, owners: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run is being ended or deleted; False, with a warning, if that is unknown.

    `owners` are `ownerReferences` to the run's workflow, as from `Cluster.workflow_of`.
    """
    brief = replace(cluster, timeout_seconds=ANSWER_SECONDS, patience_seconds=ANSWER_SECONDS)
    try:
        return any(_is_ended(brief.read(WORKFLOW, owner["name"]), owner["uid"]) for owner in owners)
    except ClusterError as error:
        log.warning("%s; the run is taken for one that continues", error)
        return False


def _is_ended(workflow: Mapping[str, Any] | None, uid: str) -> bool:
    if workflow is None or workflow["metadata"]["uid"] != uid:
        return True  # deleted
    spec = workflow["spec"]  # Kubeflow Pipelines terminates by the deadline
    is_terminated = spec.get("activeDeadlineSeconds") == 0 or bool(spec.get("shutdown"))
    return is_terminated or "deletionTimestamp" in workflow["metadata"]
