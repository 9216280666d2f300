"""The loop that the double's controllers share, and its garbage collector."""

import threading

from tests.cluster import pytorchjob, trainjob
from tests.cluster.store import Object, Refusal, Store, delete_pod, owned_by

RECONCILERS = {"pytorchjobs": pytorchjob.reconcile, "trainjobs": trainjob.reconcile}
TICK_SECONDS = 0.2  # for deadlines; all else follows changes


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
        seen = -1
        try:
            while not self._stopping.is_set():
                with self.store.changed:
                    if self.store.version == seen:
                        self.store.changed.wait(TICK_SECONDS)
                    seen = self.store.version
                self._collect_garbage()
                for plural in RECONCILERS:
                    for job in self.store.list(plural):
                        self._reconcile(plural, job)
        except BaseException as error:  # kept, and raised where the test ends
            self.errors.append(error)
            raise

    def _reconcile(self, plural: str, job: Object) -> None:
        metadata = job["metadata"]
        with self.store.changed:
            if "deletionTimestamp" in metadata:
                if not self.store.list("pods", None, owned_by(metadata["uid"])):
                    self.store.remove(plural, metadata["namespace"], metadata["name"])
                return
            try:
                RECONCILERS[plural](self.store, job)
            except Refusal as refusal:
                if refusal.code != 404:
                    raise  # else: deleted meanwhile

    def _collect_garbage(self) -> None:
        with self.store.changed:
            jobs = [job for plural in RECONCILERS for job in self.store.list(plural)]
            alive = {
                job["metadata"]["uid"] for job in jobs if "deletionTimestamp" not in job["metadata"]
            }
            for pod in self.store.list("pods"):
                owners = {o["uid"] for o in pod["metadata"].get("ownerReferences", ())}
                deleted = "deletionTimestamp" in pod["metadata"]
                if owners and not owners & alive and not deleted:
                    delete_pod(self.store, pod)
