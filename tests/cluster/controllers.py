"""The loop that the double's controllers share, and its garbage collector."""

import copy
import threading
from collections import defaultdict
from contextlib import suppress

from tests.cluster import indexed_job, kueue, pytorchjob, trainjob
from tests.cluster.pytorchjob import is_true, set_condition
from tests.cluster.store import FOREGROUND, RESOURCES, Object, Refusal, Store, end_pods, owned_by

RECONCILERS = {
    "pytorchjobs": pytorchjob.reconcile,
    "trainjobs": trainjob.reconcile,
    "jobs": indexed_job.reconcile,
}
OWNERS = {
    plural: RESOURCES[plural].kind for plural in (*RECONCILERS, "trainingruntimes", "workflows")
}
TICK_SECONDS = 0.1  # for backoffs and deadlines of Jobs; all else follows changes


class Controllers(threading.Thread):
    """Reconciles every job whenever something changes, and removes what has lost its owner."""

    def __init__(self, store: Store) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.errors: list[BaseException] = []
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self.join()

    def run(self) -> None:
        seen = before = -1
        try:
            while not self._stopping.is_set():
                with self.store.changed:
                    if self.store.version == seen:
                        self.store.changed.wait(TICK_SECONDS)
                    before, seen = seen, self.store.version
                self._collect_garbage()
                idle = self.store.version == before
                for plural in ["jobs"] if idle else RECONCILERS:
                    for job in self.store.list(plural):
                        self._reconcile(plural, job)
        except BaseException as error:  # kept, and raised where the test ends
            self.errors.append(error)
            raise

    def _reconcile(self, plural: str, job: Object) -> None:
        with self.store.changed:
            if "deletionTimestamp" in job["metadata"]:
                return
            try:
                self._manage(plural, job)
                kueue.reconcile(self.store, plural, job)
            except Refusal as refusal:
                if refusal.code != 404:
                    raise  # else: deleted meanwhile

    def _manage(self, plural: str, job: Object) -> None:
        """Bring a job's pods and status one step nearer to its specification."""
        metadata, kind, spec = job["metadata"], job["kind"], job["spec"]
        status = copy.deepcopy(job.get("status", {}))
        pods = self.store.list("pods", metadata["namespace"], owned_by(metadata["uid"]))
        if any(is_true(status, ended) for ended in ("Complete", "Succeeded", "Failed")):
            end_pods(self.store, pods)  # as the policy of all jobs here is
        elif spec.get("runPolicy", spec).get("suspend"):
            end_pods(self.store, pods)
            text = f"{kind} {metadata['name']} is suspended."
            if is_true(status, "Running"):
                set_condition(status, "Running", "False", f"{kind}Suspended", text)
            set_condition(status, "Suspended", "True", f"{kind}Suspended", text)
        else:
            if is_true(status, "Suspended"):
                text = f"{kind} {metadata['name']} is resumed."
                set_condition(status, "Suspended", "False", f"{kind}Resumed", text)
            RECONCILERS[plural](self.store, job, status, pods)
        if status != job.get("status", {}):
            with self.store.edit(plural, metadata["namespace"], metadata["name"]) as edited:
                edited["status"] = status

    def _collect_garbage(self) -> None:
        """One pass; the rules were read in Kubernetes' source, and seen on 1.36.

        What has lost all owners is deleted in the background. What is owned by something that is
        being deleted in the foreground is deleted too, whether it blocks its owner or not, and in
        the foreground if it owns something itself. The owner goes when nothing blocks it any more.
        """
        with self.store.changed:
            objects = {
                content["metadata"]["uid"]: (plural, content)
                for plural in (*OWNERS, "workloads", "pods")
                for content in self.store.list(plural)
            }
            owned: defaultdict[str, list[Object]] = defaultdict(list)  # references to it, by uid
            for _, content in objects.values():
                for reference in content["metadata"].get("ownerReferences", ()):
                    owned[reference["uid"]].append(reference)
            waiting = {uid for uid, (_, content) in objects.items() if _is_waiting(content)}
            for uid, (plural, content) in objects.items():
                metadata = content["metadata"]
                if uid in waiting:
                    if not any(one.get("blockOwnerDeletion") for one in owned[uid]):
                        self._finish(plural, content)
                elif "deletionTimestamp" not in metadata and _is_orphan(
                    content, {*objects} - waiting
                ):
                    owners = {one["uid"] for one in metadata["ownerReferences"]}
                    policy = "Foreground" if owners & waiting and owned[uid] else "Background"
                    self.store.delete(plural, metadata["namespace"], metadata["name"], policy)

    def _finish(self, plural: str, content: Object) -> None:
        """Remove the finalizer, which webhooks may reject; the collector then tries again."""
        with suppress(Refusal):
            if plural == "trainjobs":
                trainjob.admit(self.store, content)
            self.store.remove(plural, content["metadata"]["namespace"], content["metadata"]["name"])


def _is_waiting(content: Object) -> bool:
    return FOREGROUND in content["metadata"].get("finalizers", ())


def _is_orphan(content: Object, alive: set[str]) -> bool:
    """Whether it had owners, all of kinds that are known here, and has none of them any more."""
    references = content["metadata"].get("ownerReferences", ())
    known = all(reference["kind"] in OWNERS.values() for reference in references)
    return bool(references) and known and not {one["uid"] for one in references} & alive
