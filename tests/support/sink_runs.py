"""A run told to the sinks of a recipe, and what TensorBoard and Weights & Biases have of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.config.load import validate
from redline.config.schema import Config
from redline.telemetry import RunFolder
from redline.telemetry.listeners import Listeners
from redline.telemetry.sinks import make_sinks

SAMPLES = [{"prompt": "2 + 2", "answer": "<script>4</script>", "reward": 1.0}]
ALERT = {"time": 1.0, "step": 3, "kind": "reward_collapse", "seen": "reward 0", "since": "step 2", "look_at": "rewards"}


def make_config(name: str, **settings: Any) -> Config:
    return validate(
        {
            "model": {"path": "builtin:tiny"},
            "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}},
            "telemetry": {"sinks": [name], name: settings} if settings else {"sinks": [name]},
        }
    )


@contextmanager
def listening(folder: Path, config: Config) -> Iterator[Listeners]:
    """The sinks of a run; whatever one of them fails at fails the test."""
    told: list[str] = []
    listeners = Listeners(make_sinks(config.telemetry), tell=told.append)
    listeners.started(RunFolder(folder), config)
    with listeners:
        yield listeners
    assert told == []


def row(step: int) -> dict[str, Any]:
    return {"step": step, "trainer/loss": step / 10, "trainer/skipped": False, "rollouts/reward_mean": None}


def tell(listeners: Listeners, steps: Sequence[int]) -> None:
    for step in steps:
        listeners.step(row(step))
        listeners.trajectories({"step": step, "samples": trajectories(step)})
    listeners.evaluation({"step": steps[-1], "evaluation/reward_mean": 0.5, "evaluation/samples": SAMPLES})
    listeners.alert(ALERT | {"step": steps[-1]})


def trajectories(step: int) -> list[dict[str, Any]]:
    common = {"task": "t", "version": step, "finish_reason": "stop", "tokens": 3, "attempt": 0, "role": ""}
    return [{**common, "answer": f"answer {n}", "reward": float(n)} for n in range(2)]


def killed_and_resumed(folder: Path, config: Config) -> None:
    """Three steps; then the run goes back to its checkpoint after step 1, and goes on to step 5."""
    with listening(folder, config) as listeners:
        tell(listeners, [1, 2, 3])
    with listening(folder, config) as listeners:
        tell(listeners, [2, 3, 4, 5])


def tensorboard_events(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, list[tuple[int, bytes]]]]:
    """Scalars and texts by tag, of all files in the order they were begun, which is how TensorBoard shows a folder. A file has
    records of length (8), checksum (4), an event, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    scalars: dict[str, list[tuple[int, float]]] = {}
    texts: dict[str, list[tuple[int, bytes]]] = {}
    for path in sorted(folder.iterdir(), key=lambda path: int(path.name.rpartition(".")[2])):
        content, position = path.read_bytes(), 0
        while position < len(content):
            length = int.from_bytes(content[position : position + 8], "little")
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += length + 16
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "text":
                    texts.setdefault(value.tag, []).append((event.step, value.tensor.string_val[0]))
                else:
                    scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
        assert position == len(content), "the last record is whole"
    return scalars, texts


def wandb_records(path: Path) -> Iterator[bytes]:
    """A .wandb file is a LevelDB log after 7 bytes of its own: blocks of 32 KiB, records in pieces of checksum (4), length (2),
    whether it is whole, first, middle or last (1), data."""
    content, position, record = path.read_bytes(), 7, b""
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        piece = content[position + 7 : position + 7 + length]
        position += 7 + length
        record = piece if kind in (1, 2) else record + piece
        if kind in (1, 4):
            yield record


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in wandb_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
