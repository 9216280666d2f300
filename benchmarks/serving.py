"""Serving under load: maximal requests, some of whose clients hang up, beside eight small clients.

`d2plm serve` runs in a process of its own. A maximal request has as many of the longest proteins as
the default limit allows, a small one a protein of 22 residues; a client sends its next request when
the last one is answered. First maximal requests are sent one after another, in turns alone and
beside the small clients; then fifty at once, of which every third is hung up at a random moment.

    python -m benchmarks.serving
"""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil

from benchmarks.measure import Row, parser, publish, ratio_row, say
from benchmarks.workload import fill_weights, model_settings
from d2plm.core.vocabulary import CANONICAL
from d2plm.export.exported_model import save_export
from d2plm.generation.lengths import LengthHistogram
from d2plm.model.dit import DiT
from d2plm.model.dit_config import DiTConfig
from d2plm.paradigms.diffusion import AbsorbingDiffusion

SMALL = {"inputs": {"sequence": ["MKTAYIAKQRQISFVKSHFSRQ"]}}
LONGEST, ROWS = 510, 128  # of a maximal request
CLIENTS, MAXIMAL = 8, 50


def export(folder: str, model: str) -> str:
    """Export a model of a configuration, with random weights."""
    sizes = model_settings(model) | {"max_position_embeddings": LONGEST + 2, "relatives_dim": 64}
    dit = DiT(DiTConfig(**sizes)).eval()
    fill_weights(dit, seed=0, std=0.1)
    lengths = LengthHistogram.of(np.arange(50, LONGEST), LONGEST)
    return str(save_export(Path(folder) / "model", dit, AbsorbingDiffusion(), lengths, {}))


class Server:
    """A running server.

    Attributes:
        statuses: how often the requests of each kind were answered with which status.
        seconds: of the small requests.
    """

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.process = port, psutil.Process(pid)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.seconds: list[float] = []

    def memory(self) -> float:
        """Resident memory, MB."""
        return self.process.memory_info().rss / 1e6

    def ask(self, kind: str, body: dict[str, Any], patience: float = 600) -> float:
        """Seconds until it is answered, or hung up after `patience`; sent again if refused."""
        while True:
            began = time.monotonic()
            connection = HTTPConnection("127.0.0.1", self.port, timeout=patience)
            headers = {"Content-Type": "application/json"}
            try:
                connection.request("POST", "/invocations", json.dumps(body), headers)
                response = connection.getresponse()
                response.read()
            except TimeoutError:
                self.statuses[kind, 0] += 1
                return time.monotonic() - began
            finally:
                connection.close()
            self.statuses[kind, response.status] += 1
            if response.status != 429:
                return time.monotonic() - began
            time.sleep(min(int(response.headers["Retry-After"]), 5))

    @contextmanager
    def small_clients(self) -> Iterator[None]:
        """Small requests from all clients inside the block."""
        done = threading.Event()

        def client() -> None:
            while not done.is_set():
                self.seconds.append(self.ask("small", SMALL))

        with ThreadPoolExecutor(CLIENTS) as pool:
            for _ in range(CLIENTS):
                pool.submit(client)
            try:
                yield
            finally:
                done.set()


@contextmanager
def serving(model: str) -> Iterator[Server]:
    """A server of the model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "d2plm", "serve", model, f"port={port}", "device=cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(port, process.pid)
        while server.statuses["small", 200] < 1:
            with suppress(ConnectionError):
                server.ask("small", SMALL)
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(120)


def main() -> None:
    """Measure and print every row."""
    made = parser("serving", __doc__)
    made.add_argument("--model", default="demo", help="of configs/model, with random weights")
    made.add_argument("--masks", type=int, default=1, help="masks of maximal requests")
    made.add_argument("--turns", type=int, default=5, help="maximal requests of each arm")
    options = made.parse_args()
    rng = random.Random(0)
    maximal = {
        "inputs": {"sequence": ["".join(rng.choices(CANONICAL, k=LONGEST))] * ROWS},
        "params": {"masks_per_sequence": options.masks},
    }
    with TemporaryDirectory() as folder, serving(export(folder, options.model)) as server:
        memory, alone, beside = [server.memory()], list[float](), list[float]()
        for turn in range(options.turns):
            say(f"turn {turn}")
            alone.append(server.ask("maximal", maximal))
            with server.small_clients():
                beside.append(server.ask("maximal", maximal))

        def client(patience: float) -> None:
            server.ask("maximal", maximal, patience)
            memory.append(server.memory())

        say(f"{MAXIMAL} maximal requests")
        with server.small_clients(), ThreadPoolExecutor(MAXIMAL) as pool:
            patience = [rng.uniform(0, 60) if i % 3 == 0 else 600 for i in range(MAXIMAL)]
            list(pool.map(client, patience))
    ok = {(kind, status) for kind in ("small", "maximal") for status in (0, 200, 429)}
    bad = sum(count for what, count in server.statuses.items() if what not in ok)
    say(f"(kind, status): times {dict(server.statuses)}; MB {[round(one) for one in memory]}")
    publish(
        options,
        [
            ratio_row("a maximal request alone ÷ beside small ones", alone, beside, 0.8),
            Row("median of small requests", median(server.seconds), "s"),
            Row("99th percentile", quantiles(server.seconds, n=100)[-1], "s", 2.0, at_most=True),
            Row("small requests", len(server.seconds), ""),
            Row("small requests refused", server.statuses["small", 429], "", 0, at_most=True),
            Row("answers other than 200 and 429", bad, "", 0, at_most=True),
            Row("memory at the start", memory[0], "MB"),
            Row("memory after ten maximal requests", max(memory[:11]), "MB"),
            Row("memory after fifty", max(memory), "MB", 1.05 * max(memory[:11]), at_most=True),
        ],
    )


if __name__ == "__main__":
    main()
