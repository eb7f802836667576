"""Settings of the cases that train: `trainer`, `memory`, `e2e`, `telemetry`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from redline.config.sections.buffer import LateGroups
from redline.config.sections.trainer import TrainerConfig
from redline.lab.bench.settings.shared import (
    BenchSettings,
    EngineSettings,
    PairedSettings,
    as_list,
    refuse_sizes_of_a_replay,
)
from redline.lab.material.workloads import RANDOM

TrainingPeer = Literal["transformers", "redline"]
MICRO_BATCH_TOKENS = 16384


class TrainerSettings(PairedSettings):
    sequences: PositiveInt = 32
    """Sequences of a step."""
    tokens: int = Field(512, ge=2)
    """Tokens of a sequence, on average; its prompt included."""
    lengths: Literal["equal", "long-tailed"] = "equal"
    """`long-tailed` draws log-normal lengths with the same sum."""
    longest: PositiveInt | None = None
    """Most tokens of a long-tailed sequence; null takes eight times the average."""
    prompt_tokens: PositiveInt = 1
    """Leading tokens of each sequence that are not trained on."""
    group_size: PositiveInt = 1
    """Sequences that share their prompt."""
    steps: PositiveInt = 1
    """Optimizer steps that a side takes in a round."""
    peers: tuple[TrainingPeer, ...] | None = None
    """Peers that train beside us: transformers, and redline itself for an A/A run; null takes transformers."""
    replay: Path | None = None
    """A run folder: sequences are as long, and groups as large, as in the steps that it trained; tokens are drawn."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer section of a recipe. A peer's padded micro-batches hold as many tokens as ours."""

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return as_list(value, nothing="none")

    @model_validator(mode="after")
    def _sequences_make_groups(self) -> TrainerSettings:
        refuse_sizes_of_a_replay(self, ("sequences", "tokens", "lengths", "longest", "prompt_tokens", "group_size"))
        if self.sequences % self.group_size:
            raise ValueError(f"sequences = {self.sequences} is no multiple of group_size = {self.group_size}")
        if self.tokens <= self.prompt_tokens:
            raise ValueError(f"tokens = {self.tokens} leaves nothing to train on after prompt_tokens = {self.prompt_tokens}")
        if self.longest is not None and self.longest < self.tokens:
            raise ValueError(f"longest = {self.longest} is less than the average, tokens = {self.tokens}")
        if self.longest is not None and self.lengths == "equal":
            raise ValueError("longest has no effect on lengths=equal; say lengths=long-tailed")
        return self

    @property
    def total_tokens(self) -> int:
        """sequences · tokens."""
        return self.sequences * self.tokens


class MemorySettings(BenchSettings):
    tokens: int = Field(512, ge=2)
    """Tokens of a sequence, all but the first trained on. A micro-batch is a whole number of sequences."""
    limit_bytes: PositiveInt | None = None
    """What training may take, weights included; null takes the device's memory. The CPU has to be given one."""
    first_tokens: PositiveInt = 4096
    """The first micro-batch that is tried; while it fits, the next one is twice as large."""
    most_tokens: PositiveInt = 2**22
    """No larger micro-batch is tried."""
    tolerance: float = Field(0.02, ge=0, lt=1)
    """The search ends when the smallest micro-batch that failed is at most this share larger than the largest that did not."""
    peers: tuple[Literal["transformers"], ...] | None = None
    """Peers that are searched for as well; null takes transformers."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer section of a recipe; the size of the micro-batch is what is searched for."""

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return as_list(value, nothing="none")

    @field_validator("trainer")
    @classmethod
    def _size_is_searched_for(cls, trainer: TrainerConfig) -> TrainerConfig:
        if "max_tokens_per_micro_batch" in trainer.model_fields_set:
            raise ValueError("max_tokens_per_micro_batch is what is searched for")
        return trainer


class E2ESettings(EngineSettings):
    pairs: PositiveInt = 6
    """Rounds; in each, every lag runs once, in an order drawn by lot. An interval takes at least 6."""
    model: str = "builtin:small"
    """As `model.path` of a recipe."""
    lags: tuple[int, ...] = (0, 1, 2, 4)
    """Values of `buffer.max_lag`, each in turn; 0 is lockstep."""
    late_groups: LateGroups = "wait"
    """As `buffer.late_groups` of a recipe, for lags above 0; `drop` is faster and trains on fewer long answers."""
    groups_per_step: PositiveInt = 8
    """Tasks per step."""
    group_size: int = Field(8, ge=2)
    """Attempts per task."""
    max_new_tokens: PositiveInt = 64
    """Most tokens per attempt."""
    lengths: Literal["sampled", "log-normal"] = "sampled"
    """`sampled`: an attempt ends where the model ends it. `log-normal`: at a length that is drawn for it, most of them short,
    none above `max_new_tokens`, about an eighth of that on average."""
    warmup_steps: PositiveInt = 3
    """Steps before the clock starts."""
    steps: PositiveInt = 12
    """Steps that are timed."""
    task: Literal["letters", "sums", "words"] = "letters"
    """`letters`: as many as possible, which any model can learn. `sums`: reasoning_gym's `chain_sum`, two one-digit terms.
    `words`: odd ones, for `model=random:NAME`, whose words are numbers."""
    prompt_tokens: int = Field(128, ge=2)
    """Tokens of a prompt of the `words` task."""
    price: float | None = Field(None, ge=0)
    """Dollars per hour of this machine; null takes the device's from the table of `redline plan`."""
    against: Literal["trl"] | None = None
    """e2e only: also run this framework, interleaved, in a process of its own (trl); the lag is then 0."""
    trl_python: Path | None = None
    """The python of an environment with trl, where it is not this one."""
    trainer: TrainerConfig = TrainerConfig(learning_rate=1e-3)
    """The trainer section of a recipe."""

    @field_validator("lags", mode="before")
    @classmethod
    def _read_lags(cls, value: Any) -> Any:
        return as_list(value)

    @model_validator(mode="after")
    def _words_are_numbers(self) -> E2ESettings:
        if self.task == "words" and not self.model.startswith(RANDOM):
            raise ValueError(f"task=words needs a model whose words are numbers: model={RANDOM}NAME, not {self.model}")
        if self.against and self.model.startswith(RANDOM):
            raise ValueError(f"--against {self.against} needs a model that both can load, not {self.model}")
        in_vain = sorted({"lengths", "late_groups"} & self.model_fields_set) if self.against else []
        if in_vain:
            raise ValueError(
                f"{in_vain[0]} has no effect with --against {self.against}: sides take a step at a time, as it comes"
            )
        return self


class TelemetrySettings(PairedSettings):
    model: str = "builtin:small"
    """As `model.path` of a recipe."""
    samples: PositiveInt = 100
    """How often a thousand spans are timed, in each of their ways."""
    groups_per_step: PositiveInt = 4
    """Tasks per step."""
    group_size: int = Field(4, ge=2)
    """Attempts per task."""
    max_new_tokens: PositiveInt = 32
    """Most tokens per attempt."""
    warmup_steps: PositiveInt = 1
    """Steps before the clock starts."""
    steps: PositiveInt = 4
    """Steps that are timed."""
    whole_steps: PositiveInt = 40
    """Steps of the run whose watching is counted."""


def fit_trainer(trainer: TrainerConfig) -> TrainerConfig:
    """A size of the micro-batch that a peer can be given as well, where the command line says none."""
    size = (
        {} if "max_tokens_per_micro_batch" in trainer.model_fields_set else {"max_tokens_per_micro_batch": MICRO_BATCH_TOKENS}
    )
    return trainer.model_copy(update=size)
