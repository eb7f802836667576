"""trackio: a local database that `trackio show` displays, or a Hugging Face Space.

Resume: the run of the same name goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import trackio
import trackio.run
from huggingface_hub import get_token

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import Sink, flat

# It prints alerts and its own end; stdout is for data. Its thread may not redirect the stdout of the others.
trackio.run.print = lambda *words: print(*words, file=sys.stderr)


class TrackioSink(Sink):
    name = "trackio"

    def open(self, folder: RunFolder, config: Config) -> None:
        asked = config.telemetry.trackio
        if asked.space_id and not get_token():
            raise ConfigError(
                f"telemetry.trackio.space_id = {asked.space_id!r}: nobody is logged in to Hugging Face",
                "run `hf auth login`, set HF_TOKEN, or leave telemetry.trackio.space_id out",
            )
        known = self.memory.get("run") is not None
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=asked.project,
                name=folder.path.name,
                space_id=asked.space_id,
                config=flat(config.model_dump(mode="json")),
                resume="allow" if known else "never",  # another folder may have had a run of this name
                embed=False,
                auto_log_gpu=False,  # the run's own samples have them
                auto_log_cpu=False,
            )
        self.memory.keep("run", folder.path.name)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({"evaluation/samples": trackio.Table(data=[dict(sample) for sample in samples])}, step=step)

    def alert(self, row: Mapping[str, Any]) -> None:
        self._run.alert(f"redline: {row['kind']}", f"{row['seen']}; look at {row['look_at']}", step=row.get("step"))

    def close(self) -> None:
        self._run.finish()
