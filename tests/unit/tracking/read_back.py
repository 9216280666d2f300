"""Reading the files of trackers with independent code."""

import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK, HEADER, FULL, LAST = 32768, 7, 1, 4

Points = dict[str, list[tuple[int, float]]]


@dataclass
class Events:
    """A folder of TensorBoard's event files, as TensorBoard reads it."""

    scalars: Points
    texts: dict[str, str]
    parameters: dict[str, Any]


def tensorboard_events(output_dir: Path) -> Events:
    from tensorboard.backend.event_processing import event_accumulator as reader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    sizes = {reader.SCALARS: 0, reader.TENSORS: 0}
    events = reader.EventAccumulator(str(output_dir / "tensorboard"), sizes).Reload()
    scalars = {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    texts = {}
    for tag in events.Tags()["tensors"]:
        (text,) = events.Tensors(tag)[-1].tensor_proto.string_val
        texts[tag.removesuffix("/text_summary")] = text.decode()
    parameters = {}
    with suppress(KeyError):  # raised where there are none
        content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        values = HParamsPluginData.FromString(content).session_start_info.hparams
        parameters = {key: getattr(v, str(v.WhichOneof("kind"))) for key, v in values.items()}
    return Events(scalars, texts, parameters)


@dataclass
class WandBSession:
    """One `.wandb` file: the data that one process sent to a W&B run."""

    run: Any = None  # its name, project, …
    exit_code: int | None = None
    scalars: Points = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)


def wandb_sessions(output_dir: Path, killed: int = 0) -> list[WandBSession]:
    """Every session of the offline run, oldest first, of which the first `killed` may lack an end.

    W&B's own process writes the end of a session a little after the session has ended.
    """
    files = sorted(output_dir.glob("wandb/offline-run-*/*.wandb"))
    for _ in range(100):
        sessions = [_session(file) for file in files]
        if all(session.exit_code is not None for session in sessions[killed:]):
            return sessions
        time.sleep(0.1)
    raise AssertionError(f"not finished: {sessions}")


def _session(file: Path) -> WandBSession:
    from wandb.proto.wandb_internal_pb2 import Record

    session = WandBSession()
    for content in _chunks(file.read_bytes()):
        record = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            session.run = record.run
        elif kind == "history":
            row = _values(record.history.item)
            step = int(row["_step"])
            for key, value in row.items():
                if not key.startswith("_"):
                    session.scalars.setdefault(key, []).append((step, value))
        elif kind == "config":
            session.config |= _values(record.config.update)
        elif kind == "summary":
            session.summary |= _values(record.summary.update)
        elif kind == "files":
            session.files |= {file.path for file in record.files.files}
        elif kind == "exit":
            session.exit_code = record.exit.exit_code
    return session


def _values(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _chunks(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log that begins with seven bytes of W&B's own."""
    assert content[:4] == b":W&B"
    at, record = HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        _checksum, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""
