"""Weights & Biases: metrics, the resolved recipe, tables of held-out answers and of what was sampled.

Resume: the run keeps its id, so the same run goes on. Offline, each process leaves a folder of its own under `wandb/`;
`wandb sync` gives them to one run.
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import wandb

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import Sink, connection_error

INIT_S = 30
OR_OFFLINE = "or set telemetry.wandb.mode=offline and sync later"
COLUMNS = ("task", "version", "answer", "reward", "finish_reason", "tokens", "attempt", "role")


class WandbSink(Sink):
    name = "wandb"

    def open(self, folder: RunFolder, config: Config) -> None:
        asked = config.telemetry.wandb
        if asked.mode == "online":
            _check_login()
            _check_network()
        if self.memory.get("run") is None:
            self.memory.keep("run", uuid.uuid4().hex)
        self._tables_every = asked.trajectories_every
        try:
            self._run = wandb.init(
                project=asked.project,
                entity=asked.entity,
                id=self.memory.get("run"),
                name=folder.path.name,
                dir=str(folder.path),
                config=config.model_dump(mode="json"),
                allow_val_change=True,  # run.steps may be a new number
                mode=asked.mode,
                resume="allow" if asked.mode == "online" else None,
                # The console belongs to the run's own lines, and the run folder has what was said there.
                settings=wandb.Settings(init_timeout=INIT_S, silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"telemetry.sinks has wandb: it did not start: {error}",
                f"check telemetry.wandb.entity, {OR_OFFLINE}",
            ) from error

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._table("evaluation/samples", ("prompt", "answer", "reward"), samples, step)

    def trajectories(self, row: Mapping[str, Any]) -> None:
        if self._tables_every and row["step"] % self._tables_every == 0 and self.memory.is_new("trajectories", row["step"]):
            self._table("rollouts/trajectories", COLUMNS, row["samples"], row["step"])

    def alert(self, row: Mapping[str, Any]) -> None:
        self._run.alert(title=f"redline: {row['kind']}", text=f"{row['seen']}\nsince {row['since']}\nlook at {row['look_at']}")

    def close(self) -> None:
        self._run.finish()

    def _table(self, key: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({key: wandb.Table(columns=list(columns), data=data)}, step=step)


def _check_login() -> None:
    """Without a key, `wandb.init` would ask for one on the terminal."""
    try:
        found = _has_key()
    except wandb.Error as error:  # a key that cannot be one
        raise ConfigError(f"telemetry.sinks has wandb: {error}", f"run `wandb login --relogin`, {OR_OFFLINE}") from error
    if not found:
        raise ConfigError(
            "telemetry.sinks has wandb: nobody is logged in",
            "run `wandb login`, set WANDB_API_KEY, or set telemetry.wandb.mode=offline",
        )


def _has_key() -> bool:
    """In the environment; else in netrc or wandb's settings, where the library looks without asking anybody."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # Unless it is silent, the login asks the server for a name to greet; online, whatever WANDB_MODE says, as `init` will be.
    wandb.setup(wandb.Settings(silent=True, mode="online"))
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False, verify=False))
    return bool(wandb.api.api_key)  # before there was `prompt`


def _check_network() -> None:
    """Where no server answers, `wandb.init` would try again and again for all of its time. Behind a proxy only it can tell."""
    settings = wandb.setup().settings
    url = str(settings.base_url)
    scheme = urlsplit(url).scheme
    if getproxies().get(scheme) or getattr(settings, f"{scheme}_proxy", None):
        return
    if error := connection_error(url):
        raise ConfigError(
            f"telemetry.sinks has wandb: cannot connect to {url}: {error}",
            f"check the network and WANDB_BASE_URL, {OR_OFFLINE}",
        )
