"""TensorBoard event files in the run folder: `tensorboard --logdir runs`.

Written with tensorboardX, which needs protobuf and nothing else. torch's own writer needs the whole of TensorBoard, web server
included, on the machine that trains.

Resume: a new file in the same folder, which TensorBoard shows as one run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboardX import SummaryWriter

from redline.config.schema import Config
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import Sink


class TensorBoardSink(Sink):
    name = "tensorboard"

    def open(self, folder: RunFolder, config: Config) -> None:
        first_time = not (folder.path / "tensorboard").exists()
        # Its files are named by the second, and one of the same name would replace another.
        self._writer = SummaryWriter(str(folder.path / "tensorboard"), filename_suffix=f".{time.time_ns()}")
        if first_time:
            self._text("config", config.model_dump(mode="json"), 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._text("evaluation/samples", samples, step)

    def alert(self, row: Mapping[str, Any]) -> None:
        self._text(f"alerts/{row['kind']}", row, row.get("step") or 0)

    def close(self) -> None:
        self._writer.close()

    def _text(self, tag: str, document: Any, step: int) -> None:
        """Indented by four, which TensorBoard's Markdown shows as it is: what a model wrote may hold markup."""
        lines = json.dumps(document, indent=2, ensure_ascii=False, default=str).splitlines()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in lines), step)
        self._writer.flush()
