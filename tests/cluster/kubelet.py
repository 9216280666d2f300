"""The double's scheduler and kubelet: a pod's containers are run as processes of this machine.

What a node would give a pod is replaced: mounted folders by local ones, the DNS names of other pods
by 127.0.0.1 with a free port. Everything that a container started ends with it, as in a cluster,
where it is alone in its process namespace; here a variable in the environment tells.
"""

import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.store import Object, Refusal, Store, now

REPOSITORY = Path(__file__).parents[2]
MARK = "CLUSTER_DOUBLE_POD"
POLL_SECONDS = 0.02
REMOVAL_SECONDS = 0.1  # of a deleted pod that has ended


@dataclass(frozen=True)
class Script:
    lines: tuple[str, ...] = ()
    seconds: float | None = 0.0  # after the last line; None: until it is ended
    exit_code: int = 0

    def command(self) -> list[str]:
        words = ["trap 'exit 143' TERM"]
        for line in self.lines:
            words += [f"printf '%s\\n' {shlex.quote(line)}"]
        words += [_sleep(self.seconds), f"exit {self.exit_code}"]
        return ["/bin/sh", "-c", "\n".join(filter(None, words))]


def _sleep(seconds: float | None) -> str:
    # In the background: a shell hears a signal only between two commands, or while it waits.
    return "" if seconds == 0 else f"sleep {'infinity' if seconds is None else seconds} & wait $!"


Line = tuple[datetime, bytes]  # when it was written, and its content


@dataclass
class Log:
    """What a container has written, and whether it will write no more."""

    lines: list[Line] = field(default_factory=list)
    ended: bool = False

    def text(self) -> str:
        return b"".join(content for _, content in self.lines).decode(errors="replace")


class _Deleted(Exception):  # noqa: N818  # a way out, no error
    """The pod was deleted before it ran."""


class Kubelet(threading.Thread):
    """Runs every pod of the store, one thread and one folder each."""

    def __init__(self, store: Store, folder: Path, mounts: Mapping[str, Path]) -> None:
        super().__init__(daemon=True)
        self.store, self.folder, self.mounts = store, folder, dict(mounts)
        self.unschedulable = self.no_image = ""  # why pods wait
        self.scripts: dict[int | None, list[Script]] = {}
        self.errors: list[BaseException] = []
        self.lost: dict[str, bool] = {}  # uid of pods on lost nodes → whether logs are answered
        self._runners: dict[str, _Runner] = {}
        self._gone_at: dict[str, float] = {}  # when a deleted pod that has ended goes, by uid
        self._ports: dict[str, int] = {}
        self._choosing_port = threading.Lock()
        self.stopping = False

    def stop(self) -> None:
        """Kill every container and wait for the threads."""
        self.stopping = True
        for runner in list(self._runners.values()):
            runner.kill(137, "Error")
        self.join()
        for runner in list(self._runners.values()):
            runner.join()

    def runner(self, pod: Object) -> "_Runner":
        return self._runners[pod["metadata"]["uid"]]

    def log_of(self, uid: str, container: str) -> Log | None:
        """None while the container has not started."""
        runner = self._runners.get(uid)
        return None if runner is None else runner.logs.get(container)

    def script_for(self, worker: int) -> Script | None:
        """The next of a worker's scripts; the last one stays."""
        scripts = self.scripts.get(worker) or self.scripts.get(None)
        if not scripts:
            return None
        return scripts.pop(0) if worker in self.scripts and len(scripts) > 1 else scripts[0]

    def local_port(self, address: str) -> int:
        """A free port of this machine in place of another pod's `host:port`."""
        with self._choosing_port:  # two pods of a job ask for the same one at once
            while address not in self._ports:
                # Below those that the kernel gives out: a client that waits for one of these to be
                # listened at may at last be connected with itself.
                port = random.randrange(12_000, 32_000)
                with socket.socket() as server, suppress(OSError):
                    server.bind(("127.0.0.1", port))
                    self._ports[address] = port
            return self._ports[address]

    def run(self) -> None:
        while not self.stopping:
            with self.store.changed:
                pods = self.store.list("pods")
                for pod in pods:
                    self._attend_to(pod)
                self.store.changed.wait(POLL_SECONDS)

    def _attend_to(self, pod: Object) -> None:
        metadata = pod["metadata"]
        runner = self._runners.get(metadata["uid"])
        if not pod["spec"].get("containers"):
            return  # a test's own
        if runner is None:
            runner = self._runners[metadata["uid"]] = _Runner(self, pod)
            runner.start()
        elif "deletionTimestamp" in metadata and not runner.is_alive():
            if metadata["uid"] in self.lost and metadata["deletionGracePeriodSeconds"] > 0:
                return  # nobody confirms the end of its processes
            # As in a cluster, whose kubelet takes a moment to confirm that nothing is left.
            gone_at = self._gone_at.setdefault(metadata["uid"], time.monotonic() + REMOVAL_SECONDS)
            if time.monotonic() >= gone_at:
                self.store.remove("pods", metadata["namespace"], metadata["name"])


class _Runner(threading.Thread):
    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        super().__init__(daemon=True, name=pod["metadata"]["name"])
        self.kubelet, self.pod = kubelet, pod
        self.logs: dict[str, Log] = {}
        self.worker = worker_of(pod)
        self._killed: tuple[int, str] | None = None
        self._last_words: Object = {}

    def run(self) -> None:
        try:
            self._live()
        except (_Deleted, Refusal):
            return  # its object is gone, or about to go
        except BaseException as error:  # kept, and raised where the test ends
            self.kubelet.errors.append(error)
            raise

    def kill(self, exit_code: int, reason: str, status: Object | None = None) -> None:
        """SIGKILL to everything in the pod; its container ended for `reason`, it with `status`."""
        self._last_words = status or {}
        self._killed = (exit_code, reason)
        kill_all(self.pod["metadata"]["uid"])

    def _live(self) -> None:
        spec = self.pod["spec"]
        self._until_scheduled()
        self._until_pulled()
        script = self.kubelet.script_for(self.worker)
        for container in spec.get("initContainers", ()) if script is None else ():
            if self._run_container(container, "initContainerStatuses", None) != 0:
                return
        self._run_container(spec["containers"][0], "containerStatuses", script)

    def _until_scheduled(self) -> None:
        with self._edited() as pod:
            pod.setdefault("status", {})["phase"] = "Pending"
        while message := self.kubelet.unschedulable:
            self.kubelet.store.warn(self.pod, "FailedScheduling", message)
            with self._edited() as pod:
                set_condition(pod, "PodScheduled", "False", "Unschedulable", message)
            self._pause()
        with self._edited() as pod:
            set_condition(pod, "PodScheduled", "True")
            pod["spec"]["nodeName"] = f"node-{self.worker}"
        prepares = self.pod["spec"].get("initContainers")
        self._set_waiting("PodInitializing" if prepares else "ContainerCreating")

    def _until_pulled(self) -> None:
        while message := self.kubelet.no_image:
            image = self.pod["spec"]["containers"][0]["image"]
            said = f'Failed to pull image "{image}": {message}'
            self.kubelet.store.warn(self.pod, "Failed", said)
            self._set_waiting("ImagePullBackOff", message=message)
            self._pause()

    def _pause(self) -> None:
        """Raises where the pod is deleted."""
        if self._grace() is not None or self.kubelet.stopping or self._killed is not None:
            raise _Deleted
        time.sleep(POLL_SECONDS)

    def _run_container(self, container: Object, statuses: str, script: Script | None) -> int:
        name = container["name"]
        log = self.logs[name] = Log()
        started = now()
        command, environment = self._localised(container)
        folder = self.kubelet.folder / self.pod["metadata"]["uid"]
        folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            script.command() if script else command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(process, log), daemon=True)
        reader.start()
        main = statuses == "containerStatuses"
        phase = {"phase": "Running", "podIP": "127.0.0.1"} if main else {}
        self._set_state(statuses, container, {"running": {"startedAt": started}}, **phase)
        code = self._wait_for(process)
        # All that is left in the container ends with its first process.
        kill_all(self.pod["metadata"]["uid"])
        reader.join()
        exit_code, reason = self._killed or (code, "Completed" if code == 0 else "Error")
        state = {"exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": now()}
        # As in a cluster, the log ends a little before the pod's status reports the reason.
        log.ended = True
        with suppress(Refusal):
            phase = {"phase": "Failed"} if exit_code else {"phase": "Succeeded"} if main else {}
            self._set_state(statuses, container, {"terminated": state}, **phase, **self._last_words)
        return exit_code

    def _wait_for(self, process: "subprocess.Popen[bytes]") -> int:
        """Its exit code as a shell has it; ends it where the pod is deleted."""
        told: float | None = None  # when; a second deletion may shorten the grace period
        uid = self.pod["metadata"]["uid"]
        while process.poll() is None:
            grace = self._grace()
            late = told is not None and time.monotonic() > told + (grace or 0)
            if self.kubelet.stopping or late or self._killed is not None:
                kill_all(uid)
            elif grace is not None and told is None:
                told = time.monotonic()
                process.terminate()  # the first process alone, as in a cluster
            time.sleep(POLL_SECONDS)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def _grace(self) -> int | None:
        """Seconds that a deleted pod has left; None: it is not deleted."""
        metadata = self.pod["metadata"]
        try:
            known = self.kubelet.store.get("pods", metadata["namespace"], metadata["name"])
        except Refusal:
            return 0
        if known["metadata"]["uid"] != metadata["uid"]:
            return 0
        if "deletionTimestamp" not in known["metadata"]:
            return None
        return int(known["metadata"]["deletionGracePeriodSeconds"])

    def _localised(self, container: Object) -> tuple[list[str], dict[str, str]]:
        folder = str(self.kubelet.folder / self.pod["metadata"]["uid"])
        environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(REPOSITORY),
            "HOSTNAME": self.pod["metadata"]["name"],
            **{each["name"]: self._mounted(each["value"]) for each in container.get("env", ())},
            "HOME": folder,
            "TMPDIR": folder,
            MARK: self.pod["metadata"]["uid"],
        }
        self._localise_rendezvous(environment)
        command = [*container.get("command", ()), *container.get("args", ())]
        command = [self._mounted(word) for word in command]
        if command and command[0] in ("python", "python3"):
            command[0] = sys.executable
        return command, environment

    def _mounted(self, text: str) -> str:
        for path, folder in self.kubelet.mounts.items():
            inside = rf"(?<![\w./-]){re.escape(path)}(?=/|$|[^\w.-])"
            text = re.sub(inside, str(folder).replace("\\", r"\\"), text)
        return text

    def _localise_rendezvous(self, environment: dict[str, str]) -> None:
        environment["PET_LOCAL_ADDR"] = "127.0.0.1"
        if endpoint := environment.get("PET_RDZV_ENDPOINT"):
            environment["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{self.kubelet.local_port(endpoint)}"
            # torchrun asks whether the endpoint is this machine; here it always is.
            is_host = endpoint.partition(":")[0] == self.pod["metadata"]["name"]
            given = environment.get("PET_RDZV_CONF", "")
            environment["PET_RDZV_CONF"] = ",".join(filter(None, (given, f"is_host={is_host}")))
            # torchrun gives ranks in the order of addresses: those of pods follow their names.
            number = int(self.pod["metadata"]["name"].rpartition("-")[2])
            environment["PET_LOCAL_ADDR"] = f"127.0.0.{10 + number}"
        if master := environment.get("PET_MASTER_ADDR"):
            port = self.kubelet.local_port(f"{master}:{environment.get('PET_MASTER_PORT')}")
            environment |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}

    def _edited(self) -> Any:
        metadata = self.pod["metadata"]
        if metadata["uid"] in self.kubelet.lost:
            raise Refusal(503, "", "the node is lost")
        return self.kubelet.store.edit("pods", metadata["namespace"], metadata["name"])

    def _set_waiting(self, reason: str, **message: str) -> None:
        state = {"waiting": {"reason": reason, **message}}
        for container in self.pod["spec"]["containers"]:
            self._set_state("containerStatuses", container, state)

    def _set_state(self, statuses: str, container: Object, state: Object, **status: Any) -> None:
        ready = "running" in state and statuses == "containerStatuses"
        with self._edited() as pod:
            known = pod["status"].setdefault(statuses, [])
            known[:] = [c for c in known if c["name"] != container["name"]]
            fixed = {"image": container["image"], "imageID": "", "restartCount": 0, "lastState": {}}
            started = {"ready": ready, "started": "running" in state}
            known.append({"name": container["name"], **fixed, **started, "state": state})
            pod["status"] |= status
            if statuses == "containerStatuses":
                set_condition(pod, "Ready", str(ready))
                set_condition(pod, "ContainersReady", str(ready))


def set_condition(pod: Object, kind: str, value: str, reason: str = "", message: str = "") -> None:
    """Change a condition of a pod; the time of its last change stays where it stays as it was."""
    known = pod["status"].setdefault("conditions", [])
    condition = {"type": kind, "status": value}
    condition |= {"reason": reason, "message": message} if reason else {}
    if not any(c.items() >= condition.items() for c in known):
        known[:] = [c for c in known if c["type"] != kind]
        known.append({**condition, "lastTransitionTime": now()})


def worker_of(pod: Object) -> int:
    labels = pod["metadata"].get("labels", {})
    of_operator = labels.get("training.kubeflow.org/replica-index")
    return int(of_operator or labels.get("batch.kubernetes.io/job-completion-index") or 0)


def kill_all(uid: str) -> None:
    """SIGKILL to every process that a pod has started, whatever its parent or session is."""
    while alive := processes_of(uid):
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 4)


def processes_of(uid: str) -> list[int]:
    mark, known = f"{MARK}={uid}".encode(), [entry.name for entry in Path("/proc").iterdir()]
    return [int(name) for name in known if name.isdigit() and mark in _environment(name)]


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # a zombie's is empty
    except OSError:
        return []


def _read(process: "subprocess.Popen[bytes]", log: Log) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in iter(stream.readline, b""):
            log.lines.append((datetime.now(UTC), line))
