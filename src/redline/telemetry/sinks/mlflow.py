"""MLflow: metrics, the resolved recipe as parameters, held-out answers as artifacts, in a database or on a server.

Resume: the run keeps its id, so the same run goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import Sink, check_reachable, flat

MAX_PARAMS = 100
"""Parameters of one request; MLflow refuses more."""
MAX_CHARACTERS = 6000
"""Characters of one parameter."""


class MlflowSink(Sink):
    name = "mlflow"

    def open(self, folder: RunFolder, config: Config) -> None:
        asked = config.telemetry.mlflow
        beside = folder.path.absolute().parent / "mlflow.db"
        uri = asked.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside}"
        if uri.startswith("http"):
            check_reachable("telemetry.mlflow.tracking_uri", uri)
        try:
            self._client = MlflowClient(uri)
            self._run_id = self.memory.get("run") or self._create_run(folder, config, asked.experiment)
            self._client.update_run(self._run_id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"telemetry.sinks has mlflow: {uri} did not take the run: {error}", "correct telemetry.mlflow.tracking_uri"
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, metrics=[Metric(key, float(value), now, step) for key, value in values.items()])

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        text = json.dumps(list(samples), indent=2, ensure_ascii=False)
        self._client.log_text(self._run_id, text, f"evaluations/step-{step:06d}.json")

    def alert(self, row: Mapping[str, Any]) -> None:
        self._client.set_tag(self._run_id, f"redline.alert.{row['kind']}", f"step {row.get('step')}: {row['seen']}")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _create_run(self, folder: RunFolder, config: Config, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id = self._client.create_run(experiment_id, run_name=folder.path.name).info.run_id
        self.memory.keep("run", run_id)
        params = [Param(k, str(v)[:MAX_CHARACTERS]) for k, v in flat(config.model_dump(mode="json")).items()]
        tags = [RunTag("redline.folder", folder.path.name)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS], tags=tags)
        return str(run_id)
