"""Settings of the cases that sample: `generate`, `n-sampling`, `rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from redline.config.sections.engine import EngineConfig
from redline.lab.bench.settings.shared import EngineSettings, as_list, refuse_sizes_of_a_replay

Peer = Literal["transformers", "vllm", "redline"]


class GenerateSettings(EngineSettings):
    prompts: PositiveInt = 64
    """Requests, all submitted at once."""
    prompt_tokens: PositiveInt | None = None
    """Random tokens per prompt, new ones in every round; null asks short questions in the model's chat template."""
    new_tokens: int = Field(128, ge=2)
    """Tokens per completion, on average; nothing stops one earlier."""
    lengths: Literal["equal", "long-tailed"] = "equal"
    """`long-tailed` draws a log-normal length for each prompt, with the same sum; each round and side has the same ones."""
    longest: PositiveInt | None = None
    """Most tokens of a long-tailed completion; null takes eight times the average."""
    n: PositiveInt = 1
    """Completions per prompt, all of one length."""
    peers: tuple[Peer, ...] | None = None
    """Peers that run beside us: transformers, vllm, and redline itself for an A/A run; null takes those installed."""
    vllm_python: Path | None = None
    """The python of an environment with vllm, where it is not this one."""
    replay: Path | None = None
    """A run folder, or a file of attempts (`benchmarks/rollouts/attempts.py`): these are drawn, whatever the network says, with
    engine.speculation off and auto in turn; then texts that do not repeat."""

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return as_list(value, nothing="none")

    @model_validator(mode="after")
    def _average_is_within_reach(self) -> GenerateSettings:
        if self.longest is not None and self.lengths == "equal":
            raise ValueError("longest has no effect on lengths=equal; say lengths=long-tailed")
        if self.longest is not None and self.longest < self.new_tokens:
            raise ValueError(f"longest = {self.longest} is less than the average, new_tokens = {self.new_tokens}")
        return self

    @model_validator(mode="after")
    def _a_replay_is_ours(self) -> GenerateSettings:
        if self.replay is not None and (self.n > 1 or self.peers or self.engine.kind != "native"):
            raise ValueError(
                "replay draws a given text for each prompt, in our engine alone; leave out n, peers and engine.kind"
            )
        if self.replay is not None and self.engine.speculation != "off":
            raise ValueError("replay runs engine.speculation off and auto in turn; leave it out")
        return self


class NSamplingSettings(EngineSettings):
    prompts: PositiveInt = 1
    """Distinct prompts, all submitted at once."""
    prompt_tokens: PositiveInt = 2048
    """Random tokens per prompt, new ones in every run."""
    new_tokens: int = Field(128, ge=2)
    """Tokens per completion; nothing stops one earlier."""
    n: tuple[PositiveInt, ...] = (1, 2, 4, 8, 16)
    """Completions per prompt, each number in turn."""

    @field_validator("n", mode="before")
    @classmethod
    def _read_numbers(cls, value: Any) -> Any:
        return as_list(value)


class RolloutSettings(EngineSettings):
    pairs: PositiveInt = 8
    """Rounds; each attempts the tasks of one step."""
    model: str = "builtin:small"
    """As `model.path` of a recipe; with `recipe` or `replay` it is theirs."""
    recipe: Path | None = None
    """Tasks, rewards, model and sizes are those of this recipe; null takes letters, as `e2e` does."""
    replay: Path | None = None
    """A run folder: its recipe and its tasks, and each attempt is as long as it was."""
    groups_per_step: PositiveInt = 8
    """Tasks of a round."""
    group_size: PositiveInt = 8
    """Attempts per task."""
    max_new_tokens: PositiveInt = 64
    """Most tokens of a reply."""
    environment: str | None = None
    """An environment, as `rollouts.environment.name` of a recipe, or `single-turn`: what each thing that makes rollouts fast
    gains, from rounds in which it is off."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Of the environment."""
    without: tuple[str, ...] | None = None
    """What is switched off, by name: `state-cache,broker`. null takes all that the environment has."""
    adapter_rank: int = Field(8, ge=0)
    """With `environment`: the rank of a LoRA adapter that all replies are sampled with; 0 takes none."""
    max_rows: PositiveInt = 1024
    """With `environment`: most rows of the engine, where `engine.max_num_seqs` is not given."""
    tokenizer: Path | None = None
    """With `environment` and `model=random:NAME`: a folder with the tokenizer; null takes one token for each byte."""

    @field_validator("without", mode="before")
    @classmethod
    def _read_without(cls, value: Any) -> Any:
        return as_list(value)

    @model_validator(mode="after")
    def _one_source(self) -> RolloutSettings:
        if self.environment is not None and (self.recipe is not None or self.replay is not None):
            raise ValueError("environment says what is attempted; leave recipe and replay out")
        if self.recipe is not None and self.replay is not None:
            raise ValueError("recipe and replay both say what is attempted; a run folder has its recipe")
        refuse_sizes_of_a_replay(self, ("model", "groups_per_step", "group_size", "max_new_tokens"))
        if self.recipe is not None and "model" in self.model_fields_set:
            raise ValueError("recipe and model both say what is sampled from; leave the model to the recipe")
        if (self.recipe or self.replay) is not None and "dtype" in self.model_fields_set:
            raise ValueError("dtype is that of the recipe, or of the run; leave it out, or change model.dtype there")
        if self.environment is not None and self.adapter_rank and self.engine.quantization != "none":
            raise ValueError("an adapter by name stands beside weights that are not quantized; set adapter_rank=0")
        return self


def fit_engine(engine: EngineConfig, num_sequences: int, longest: int) -> EngineConfig:
    """Rows for every sequence at once and room for the longest, where the command line does not say otherwise."""
    derived = {"max_num_seqs": num_sequences, "max_model_len": longest}
    return engine.model_copy(update={key: value for key, value in derived.items() if key not in engine.model_fields_set})
