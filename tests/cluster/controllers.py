"""The loop that the double's controllers share, and its garbage collector."""

import threading

from tests.cluster import pytorchjob, trainjob
from tests.cluster.store import RESOURCES, Object, Refusal, Store, delete_pod, owned_by

RECONCILERS = {"pytorchjobs": pytorchjob.reconcile, "trainjobs": trainjob.reconcile}
OWNERS = {plural: RESOURCES[plural].kind for plural in (*RECONCILERS, "trainingruntimes")}
TICK_SECONDS = 0.2  # for a TrainJob's deadline; all else follows changes


class Controllers:
    """Reconciles every job whenever something changes, and removes what has lost its owner."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.errors: list[BaseException] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        with self.store.changed:
            self.store.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        seen = before = -1
        try:
            while not self._stopping.is_set():
                with self.store.changed:
                    if self.store.version == seen:
                        self.store.changed.wait(TICK_SECONDS)
                    before, seen = seen, self.store.version
                self._collect_garbage()
                idle = self.store.version == before
                for plural in ["trainjobs"] if idle else RECONCILERS:
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
                RECONCILERS[plural](self.store, job)
            except Refusal as refusal:
                if refusal.code != 404:
                    raise  # else: deleted meanwhile

    def _collect_garbage(self) -> None:
        """Delete what has lost its owner, and remove what has been deleted and is free to go."""
        with self.store.changed:
            everything = {plural: self.store.list(plural) for plural in OWNERS}
            alive = {
                content["metadata"]["uid"]
                for contents in everything.values()
                for content in contents
                if "deletionTimestamp" not in content["metadata"]
            }
            for pod in self.store.list("pods"):
                if "deletionTimestamp" not in pod["metadata"] and _is_orphan(pod, alive):
                    delete_pod(self.store, pod)
            for plural, contents in everything.items():
                for content in contents:
                    deleted = "deletionTimestamp" in content["metadata"]
                    if (deleted or _is_orphan(content, alive)) and not self._is_held(content):
                        metadata = content["metadata"]
                        self.store.remove(plural, metadata["namespace"], metadata["name"])

    def _is_held(self, content: Object) -> bool:
        if content["kind"] == "TrainingRuntime":
            return trainjob.is_used(self.store, content)
        if "foregroundDeletion" not in content["metadata"].get("finalizers", ()):
            return False
        return bool(self.store.list("pods", None, owned_by(content["metadata"]["uid"])))


def _is_orphan(content: Object, alive: set[str]) -> bool:
    """Whether it had owners of the kinds that are known here, and has none of them any more."""
    references = content["metadata"].get("ownerReferences", ())
    owners = {reference["uid"] for reference in references if reference["kind"] in OWNERS.values()}
    return bool(owners) and len(owners) == len(references) and not owners & alive
