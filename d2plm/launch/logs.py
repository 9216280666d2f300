"""A pod's log, line by line while it is written, whatever becomes of connections and of the pod."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from d2plm.core.errors import ClusterError
from d2plm.launch.client import (
    ABSENT,
    NOT_STARTED,
    TIMEOUT_SECONDS,
    TRANSIENT,
    Cluster,
    JobKind,
)
from d2plm.launch.job_spec import PREPARATION_CONTAINER

LAST_LINES = 30
DRAIN_SECONDS = 20  # for the rest of the log of a job that has ended
PAUSE_SECONDS = 1.0
CLOCKS_SECONDS = 60  # by which the node's clock may differ, and lines be asked for again
SILENCE_SECONDS = 3600  # of a log that is followed; then it is asked for anew


class FollowedLog:
    """Follows the log of a job's pod 0, and of those that replace it, in a thread.

    First what prepares is followed, then what trains. A connection that breaks is made again from
    the last line on, by the lines' time stamps.

    Args:
        cluster: where the job is.
        kind: what it is.
        name: its name.
        say: is given every line, once.

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
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        while True:
            ended = self._ended.is_set()  # looked at first: what follows reads to the very end
            try:
                self._read_what_there_is()
            except ApiException as error:
                if error.status not in (NOT_STARTED, ABSENT, *TRANSIENT):
                    self.say(f"the log cannot be read: {error.reason} ({error.status})")
                    return
            except (HTTPError, OSError):
                pass  # it is tried again
            except ClusterError as error:
                self.say(f"the log cannot be read: {error}")
                return
            if ended:
                return
            self._ended.wait(PAUSE_SECONDS)

    def _read_what_there_is(self) -> None:
        pods = [
            pod
            for pod in self.cluster.pods(self.kind, self.name)
            if pod.metadata.labels.get(self.kind.index_label) == "0"
        ]
        newest = max(pods, key=lambda pod: pod.metadata.creation_timestamp, default=None)
        if newest is None:
            return
        status = newest.status
        for known in [*(status.init_container_statuses or ()), *(status.container_statuses or ())]:
            if known.name not in (PREPARATION_CONTAINER, self.kind.container):
                continue
            place = self._places.setdefault((newest.metadata.uid, known.name), _Place())
            if known.state.waiting is None and not place.is_at_the_end:
                self._read(newest.metadata.name, known.name, place)
                place.is_at_the_end = known.state.terminated is not None

    def _read(self, pod_name: str, container: str, place: "_Place") -> None:
        since = {} if place.read_at is None else {"since_seconds": place.seconds_ago()}
        response = self.cluster.core.read_namespaced_pod_log(
            pod_name,
            self.cluster.namespace,
            container=container,
            follow=True,
            timestamps=True,
            **since,
            _preload_content=False,
            _request_timeout=(TIMEOUT_SECONDS, SILENCE_SECONDS),
        )
        try:
            for line in place.new(_lines(response)):
                self.last.append(line)
                self.say(line)
        finally:
            response.release_conn()


class _Place:
    """How far a log has been read.

    Attributes:
        read_at: when the last line was read, by this machine's monotonic clock.
        is_at_the_end: whether no more is to come.
    """

    def __init__(self) -> None:
        self.read_at: float | None = None
        self.is_at_the_end = False
        self._stamp, self._of_stamp = "", 0  # of the last line, and how many lines have it

    def seconds_ago(self) -> int:
        """Since when lines are to be sent again."""
        assert self.read_at is not None
        return int(time.monotonic() - self.read_at) + CLOCKS_SECONDS

    def new(self, lines: Iterator[str]) -> Iterator[str]:
        """Those of `lines`, each with its time stamp, that have not been read, without it."""
        again = 0
        for stamped in lines:
            stamp, _, line = stamped.partition(" ")
            stamp = _of_equal_length(stamp)
            if stamp < self._stamp:
                continue
            if stamp == self._stamp:
                again += 1
                if again <= self._of_stamp:
                    continue
                self._of_stamp = again
            else:
                self._stamp, self._of_stamp, again = stamp, 1, 1
            self.read_at = time.monotonic()
            yield line


def _of_equal_length(stamp: str) -> str:
    """A time stamp with all nine digits of its nanoseconds, so that it compares as text."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _lines(response: Any) -> Iterator[str]:
    """The lines of a response, as they come."""
    rest = b""
    for part in response.stream(amt=None, decode_content=True):
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")
