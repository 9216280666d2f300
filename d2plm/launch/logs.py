"""Following the log of a job's first pod across broken connections and restarted pods."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from d2plm.core.errors import ClusterError
from d2plm.launch.client import Cluster, JobKind
from d2plm.launch.job_spec import PREPARATION_CONTAINER
from d2plm.launch.pod_state import container_statuses

LAST_LINES = 30
DRAIN_SECONDS = 20  # for the rest of the log after the job has ended
PAUSE_SECONDS, PAUSE_AFTER_ERROR_SECONDS = 1.0, 15.0


@contextmanager
def followed_log(
    cluster: Cluster, kind: JobKind, name: str, say: Callable[[str], None]
) -> Iterator[deque[str]]:
    """Follow the log of a job's pod 0, and of its replacements, in a thread.

    The log of the preparation comes first, then that of the training. After a broken connection,
    reading continues after the last line, by its time stamp. A log that cannot be read is tried
    again, because another pod may replace its pod. Yields the last lines so far; `say` is called
    with every line, and with each reason why the log cannot be read.
    """
    last: deque[str] = deque(maxlen=LAST_LINES)
    places: defaultdict[tuple[str, str], _Place] = defaultdict(_Place)  # by pod and container
    ended, closed, reasons = threading.Event(), threading.Event(), set[str]()

    def run() -> None:
        from urllib3.exceptions import HTTPError

        while True:
            is_last = ended.is_set()  # before reading, so that the last pass reads to the end
            pause = PAUSE_SECONDS
            try:
                for line in _unread(cluster, kind, name, places):
                    if closed.is_set():
                        return
                    last.append(line)
                    say(line)
            except ClusterError as error:
                # A silent container looks like a silent node; only the pod's state differs.
                if not isinstance(error.__cause__, (HTTPError, OSError)):
                    pause = PAUSE_AFTER_ERROR_SECONDS
                    if str(error) not in reasons:
                        reasons.add(str(error))
                        say(f"the log cannot be read: {error}")
            except (HTTPError, OSError):
                pass  # the next pass continues after the last line
            if is_last or closed.is_set():
                return
            ended.wait(pause)

    thread = threading.Thread(target=run, name="pod log", daemon=True)
    thread.start()
    try:
        yield last
        ended.set()
        thread.join(DRAIN_SECONDS)
    finally:
        closed.set()
        ended.set()


def _unread(
    cluster: Cluster, kind: JobKind, name: str, places: "defaultdict[tuple[str, str], _Place]"
) -> Iterator[str]:
    """Yield the unread log lines of the newest pod 0 until its containers end."""
    pods = cluster.pods(kind, name)
    pods = [pod for pod in pods if pod["metadata"]["labels"].get(kind.index_label) == "0"]
    pods.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    for known in container_statuses(pods[-1]) if pods else ():
        container, state = known["name"], known["state"]
        if container not in (PREPARATION_CONTAINER, kind.container):
            continue
        metadata = pods[-1]["metadata"]
        place = places[metadata["uid"], container]
        if state.get("waiting") is None and not place.is_at_the_end:
            query = {"follow": "true", "timestamps": "true"}
            if place.read_until:
                query["sinceTime"] = place.read_until
            yield from place.new(cluster.log(metadata["name"], container, **query))
            place.is_at_the_end = state.get("terminated") is not None


class _Place:
    """Position in a log up to which it has been read."""

    def __init__(self) -> None:
        self.read_until = ""  # time stamp of the last line
        self.is_at_the_end = False  # whether the container has ended and its log is read
        self._stamp, self._of_stamp = "", 0  # last time stamp, and number of lines with it

    def new(self, lines: Iterator[str]) -> Iterator[str]:
        """Yield the unread `lines` without their leading time stamps."""
        again = 0
        for sent, _, line in (stamped.partition(" ") for stamped in lines):
            seconds, _, fraction = sent.removesuffix("Z").partition(".")
            stamp = f"{seconds}.{fraction:0<9}"  # padded, so that stamps compare as text
            if stamp > self._stamp:
                self._stamp, self._of_stamp, again = stamp, 0, 0
            again += stamp == self._stamp
            if stamp == self._stamp and again > self._of_stamp:
                self.read_until, self._of_stamp = sent, again
                yield line
