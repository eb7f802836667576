"""Settings of the cases that move bytes: `weight-sync`, `transfer`, `serialize`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from redline.lab.bench.settings.shared import PairedSettings, as_list

SyncStrategy = Literal["shared", "cuda_ipc", "broadcast", "checkpoint_engine"]
StoragePeer = Literal["pickle", "padded", "safetensors", "tensordict", "consolidated"]


class WeightSyncSettings(PairedSettings):
    """A set of weights, to an engine in this process or in another."""

    model_size: Literal["0.5b", "7b", "32b", "70b"] | None = None
    """Random weights of a model of this size instead of `model`. Where they do not fit, some layers are measured and the rest
    is by count."""
    strategy: SyncStrategy | None = None
    """One transport, beside a copy on the device; null takes shared storage, a copy and a file."""
    compare_all: bool = False
    """Every transport, a copy and a file."""
    iterations: PositiveInt | None = None
    """Rounds: another name for `pairs`."""

    @field_validator("model_size", "strategy", mode="before")
    @classmethod
    def _read_names(cls, value: Any) -> Any:
        return value.lower().replace("-", "_") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of_each(self) -> WeightSyncSettings:
        if self.model_size is not None and "model" in self.model_fields_set:
            raise ValueError("model and model_size both say which weights; leave one out")
        if self.compare_all and self.strategy is not None:
            raise ValueError("compare_all takes every strategy; leave strategy out")
        if self.iterations is not None and "pairs" in self.model_fields_set:
            raise ValueError("iterations is another name for pairs; leave one out")
        return self


class TransferSettings(PairedSettings):
    model: str = "builtin:tiny"
    """Not used."""
    sizes: tuple[PositiveInt, ...] = (2**16, 2**20, 2**24, 2**28)
    """Bytes of a copy, each number in turn."""
    overlap_bytes: PositiveInt = 2**28
    """Bytes of the copy that runs beside products."""

    @field_validator("sizes", mode="before")
    @classmethod
    def _read_sizes(cls, value: Any) -> Any:
        return as_list(value)


class SerializeSettings(PairedSettings):
    pairs: PositiveInt = 6
    """Rounds; in each, every side writes and reads once, in an order drawn by lot. An interval takes at least 6."""
    warmup_s: float = Field(10.0, ge=0)
    """As for all; there is little to compile."""
    model: str = "builtin:tiny"
    """Not used."""
    device: Literal["cpu"] = "cpu"
    """Nothing leaves the host."""
    trajectories: tuple[PositiveInt, ...] = (1_000, 10_000, 100_000)
    """Attempts to store, each number in turn; whole steps of them."""
    tokens: int = Field(384, ge=2)
    """Tokens of an attempt, on average; its prompt included. Lengths are log-normal."""
    prompt_tokens: PositiveInt = 128
    """Leading tokens that were not sampled."""
    longest: PositiveInt = 2048
    """Most tokens of an attempt."""
    group_size: PositiveInt = 8
    """Attempts at a task."""
    groups_per_step: PositiveInt = 32
    """Groups of a step: what peers write to one file, and what a batch holds."""
    peers: tuple[StoragePeer, ...] | None = None
    """Peers: pickle, padded (torch.save), safetensors, tensordict, consolidated; null takes those installed."""
    handed_over: tuple[PositiveInt, ...] = (8, 32, 128)
    """Groups of a batch that is handed to this process and to another one, each number in turn; `none` leaves that out."""

    @field_validator("trajectories", "handed_over", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any) -> Any:
        return as_list(value, nothing="none")

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return as_list(value, nothing="none")

    @model_validator(mode="after")
    def _lengths_are_possible(self) -> SerializeSettings:
        if not self.prompt_tokens < self.tokens <= self.longest:
            raise ValueError(
                f"tokens = {self.tokens} is not between prompt_tokens = {self.prompt_tokens} and longest = {self.longest}"
            )
        return self
