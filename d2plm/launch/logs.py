"""The log of a job's first pod, line by line, across broken connections and restarted pods."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

from d2plm.core.errors import ClusterError
from d2plm.launch.client import Cluster, JobKind
from d2plm.launch.job_spec import PREPARATION_CONTAINER
from d2plm.launch.pod_state import container_statuses

LAST_LINES = 30
DRAIN_SECONDS = 20  # for the rest of the log after the job has ended
PAUSE_SECONDS = 1.0


class FollowedLog:
    """Follows the log of a job's pod 0, and of those that replace it, in a thread.

    The preparation's log comes first, then the training's. After a broken connection, reading
    continues after the last line, by the lines' time stamps.

    Args:
        cluster: that has the job.
        kind: of the job.
        name: of the job.
        say: called with every line, once.

    Attributes:
        last: the last lines.
    """

    def __init__(
        self, cluster: Cluster, kind: JobKind, name: str, say: Callable[[str], None]
    ) -> None:
        self.cluster, self.kind, self.name, self.say = cluster, kind, name, say
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._places: dict[tuple[str, str], _Place] = {}  # by pod and container
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pod log", daemon=True)

    def __enter__(self) -> "FollowedLog":
        self._thread.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._ended.set()
        if error is None:
            self._thread.join(DRAIN_SECONDS)

    def _run(self) -> None:
        from urllib3.exceptions import HTTPError

        while True:
            ended = self._ended.is_set()  # before reading, so that the last pass reads to the end
            try:
                self._read_all()
            except ClusterError as error:
                self.say(f"the log cannot be read: {error}")
                return
            except (HTTPError, OSError):
                pass  # the next pass continues after the last line
            if ended:
                return
            self._ended.wait(PAUSE_SECONDS)

    def _read_all(self) -> None:
        """Read what the containers of the newest pod 0 have written, until they end."""
        index = self.kind.index_label
        pods = self.cluster.pods(self.kind, self.name)
        pods = [pod for pod in pods if pod["metadata"]["labels"].get(index) == "0"]
        newest = max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)
        if newest is None:
            return
        for known in container_statuses(newest):
            name, state = known["name"], known["state"]
            if name not in (PREPARATION_CONTAINER, self.kind.container):
                continue
            metadata = newest["metadata"]
            place = self._places.setdefault((metadata["uid"], name), _Place())
            if state.get("waiting") is None and not place.is_at_the_end:
                query = {"follow": "true", "timestamps": "true"}
                if place.read_until:
                    query["sinceTime"] = place.read_until
                for line in place.new(self.cluster.log(metadata["name"], name, **query)):
                    self.last.append(line)
                    self.say(line)
                place.is_at_the_end = state.get("terminated") is not None


class _Place:
    """How far a log has been read.

    Attributes:
        read_until: time stamp of the last line; empty before the first.
        is_at_the_end: whether the container has ended and all of its log is read.
    """

    def __init__(self) -> None:
        self.read_until = ""
        self.is_at_the_end = False
        self._stamp, self._of_stamp = "", 0  # of the last line, and how many lines have it

    def new(self, lines: Iterator[str]) -> Iterator[str]:
        """The unread ones among `lines`, without the time stamps that they begin with."""
        again = 0
        for stamped in lines:
            sent, _, line = stamped.partition(" ")
            stamp = _of_equal_length(sent)
            if stamp < self._stamp:
                continue
            if stamp == self._stamp:
                again += 1
                if again <= self._of_stamp:
                    continue
                self._of_stamp = again
            else:
                self._stamp, self._of_stamp, again = stamp, 1, 1
            self.read_until = sent
            yield line


def _of_equal_length(stamp: str) -> str:
    """A time stamp with all nine digits of its nanoseconds, so that it compares as text."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"
