"""What `redline bench` was asked for, checked before torch is loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from redline.config import EngineRecipe, resolve_engine, validate_engine
from redline.config.installation import how_to_install
from redline.config.section import Section
from redline.config.sections.buffer import LateGroups
from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.lab.bench.overrides import read_overrides
from redline.lab.material.workloads import QUICK, RANDOM, SHAPES
from redline.telemetry import RunFolder

Peer = Literal["transformers", "vllm", "redline"]
TrainingPeer = Literal["transformers", "redline"]
SyncStrategy = Literal["shared", "cuda_ipc", "broadcast", "checkpoint_engine"]
StoragePeer = Literal["pickle", "padded", "safetensors", "tensordict", "consolidated"]
MICRO_BATCH_TOKENS = 16384


class BenchSettings(Section):
    """What all cases have in common."""

    workload: str | None = None
    """A whole setting by name, such as W1; other keys change parts of it."""
    model: str = "builtin:smollm2-135m-instruct"
    """As `model.path` of a recipe, or `random:qwen2.5-0.5b`, `random:qwen2.5-7b`: that shape with random weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of weights, keys and values, on every side."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads; null takes every core this process may use."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides random weights, prompts, lengths, samples and the order of the sides in each round."""


class PairedSettings(BenchSettings):
    """Settings of cases that run sides against each other."""

    pairs: PositiveInt = 8
    """Rounds; in each, every side runs once, in an order drawn by lot. An interval takes at least 6."""

    warmup_s: float = Field(60.0, ge=0)
    """A side runs until its runs are steady (`lab/measure/warmup.py`), but no longer than that many seconds."""


class EngineSettings(PairedSettings):
    """Settings of cases that generate."""

    engine: EngineConfig = EngineConfig()
    """The engine section of a recipe. `max_num_seqs` and `max_model_len` follow from the workload unless given."""


class GenerateSettings(EngineSettings):
    prompts: PositiveInt = 64
    """Requests, all submitted at once."""
    prompt_tokens: PositiveInt | None = None
    """Random tokens per prompt, new ones in every round; null asks short questions in the model's chat template."""
    new_tokens: int = Field(128, ge=2)
    """Tokens per completion; nothing stops one earlier."""
    n: PositiveInt = 1
    """Completions per prompt."""
    peers: tuple[Peer, ...] | None = None
    """Peers that run beside us: transformers, vllm, and redline itself for an A/A run; null takes those installed."""
    vllm_python: Path | None = None
    """The python of an environment with vllm, where it is not this one."""

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return _split(value, nothing="none")


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
        return _split(value)


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
        return _split(value, nothing="none")

    @model_validator(mode="after")
    def _sequences_make_groups(self) -> TrainerSettings:
        _refuse_sizes_of_a_replay(self, ("sequences", "tokens", "lengths", "longest", "prompt_tokens", "group_size"))
        if self.sequences % self.group_size:
            raise ValueError(f"sequences = {self.sequences} is no multiple of group_size = {self.group_size}")
        if self.tokens <= self.prompt_tokens:
            raise ValueError(f"tokens = {self.tokens} leaves nothing to train on after prompt_tokens = {self.prompt_tokens}")
        if self.longest is not None and self.longest < self.tokens:
            raise ValueError(f"longest = {self.longest} is less than the average, tokens = {self.tokens}")
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
        return _split(value, nothing="none")

    @field_validator("trainer")
    @classmethod
    def _size_is_searched_for(cls, trainer: TrainerConfig) -> TrainerConfig:
        if "max_tokens_per_micro_batch" in trainer.model_fields_set:
            raise ValueError("max_tokens_per_micro_batch is what is searched for")
        return trainer


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
        return _split(value, nothing="none")

    @field_validator("peers", mode="before")
    @classmethod
    def _read_peers(cls, value: Any) -> Any:
        return _split(value, nothing="none")

    @model_validator(mode="after")
    def _lengths_are_possible(self) -> SerializeSettings:
        if not self.prompt_tokens < self.tokens <= self.longest:
            raise ValueError(
                f"tokens = {self.tokens} is not between prompt_tokens = {self.prompt_tokens} and longest = {self.longest}"
            )
        return self


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
        return _split(value)

    @model_validator(mode="after")
    def _words_are_numbers(self) -> E2ESettings:
        if self.task == "words" and not self.model.startswith(RANDOM):
            raise ValueError(f"task=words needs a model whose words are numbers: model={RANDOM}NAME, not {self.model}")
        if self.against and self.model.startswith(RANDOM):
            raise ValueError(f"--against {self.against} needs a model that both can load, not {self.model}")
        return self


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
        return _split(value)

    @model_validator(mode="after")
    def _one_source(self) -> RolloutSettings:
        if self.environment is not None and (self.recipe is not None or self.replay is not None):
            raise ValueError("environment says what is attempted; leave recipe and replay out")
        if self.recipe is not None and self.replay is not None:
            raise ValueError("recipe and replay both say what is attempted; a run folder has its recipe")
        _refuse_sizes_of_a_replay(self, ("model", "groups_per_step", "group_size", "max_new_tokens"))
        if self.recipe is not None and "model" in self.model_fields_set:
            raise ValueError("recipe and model both say what is sampled from; leave the model to the recipe")
        return self


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
        return _split(value)


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


SETTINGS: Mapping[str, type[BenchSettings]] = {
    "generate": GenerateSettings,
    "n-sampling": NSamplingSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "e2e": E2ESettings,
    "weight-sync": WeightSyncSettings,
    "memory": MemorySettings,
    "transfer": TransferSettings,
    "serialize": SerializeSettings,
    "telemetry": TelemetrySettings,
}


def make_settings(case: str, overrides: Sequence[str] = ()) -> BenchSettings:
    """Settings with nothing left open but what depends on the prompts. Raises `ConfigError`."""
    if case not in SETTINGS:
        raise ConfigError(f"{case!r} is no case of redline bench", f"one of {', '.join(SETTINGS)}, or all")
    settings = read_overrides(case, SETTINGS[case], overrides)
    try:
        config = as_recipe(settings)
    except ConfigError as error:
        if isinstance(settings, TransferSettings) and settings.device == "cuda":
            raise ConfigError(
                error.message, "expose the device, or copy from host memory to host memory: device=cpu"
            ) from error
        raise
    chosen: dict[str, Any] = {"device": config.run.device, "dtype": config.model.dtype, "num_threads": config.run.num_threads}
    if isinstance(settings, GenerateSettings):
        chosen |= _choose_prompts_and_peers(settings)
    if isinstance(settings, TrainerSettings):
        chosen |= {"peers": _training_peers(settings.peers), "trainer": fit_trainer(settings.trainer)}
    if isinstance(settings, SerializeSettings):
        chosen |= {"peers": _storage_peers(settings.peers)}
    if isinstance(settings, TrainerSettings | RolloutSettings) and settings.replay is not None:
        RunFolder.open(settings.replay)
    if isinstance(settings, E2ESettings):
        chosen |= _against(settings)
    if isinstance(settings, WeightSyncSettings):
        chosen |= {"pairs": settings.iterations or settings.pairs}
    if isinstance(settings, MemorySettings):
        chosen |= {"peers": _training_peers(settings.peers)}
        _refuse_all_of_the_host(settings, config.run.device)
    return settings.model_copy(update=chosen)


def quick_overrides(case: str) -> Sequence[str]:
    """What `--quick` says before anybody else does."""
    return QUICK.get(case, ())


def as_recipe(settings: BenchSettings) -> EngineRecipe:
    """Return the settings as a resolved recipe of an engine: one place knows what `auto` means and which models there are."""
    if settings.model.startswith(RANDOM) and settings.model.removeprefix(RANDOM) not in SHAPES:
        known = ", ".join(f"{RANDOM}{name}" for name in SHAPES)
        raise ConfigError(f"model = {settings.model!r}: no such shape", f"one of {known}")
    path = "builtin:tiny" if settings.model.startswith(RANDOM) else settings.model  # a shape is no path, and needs no check
    recipe = {
        "run": {"device": settings.device, "num_threads": settings.num_threads, "seed": settings.seed},
        "model": {"path": path, "dtype": settings.dtype},
    }
    return resolve_engine(validate_engine(recipe, "redline bench")).recipe


def fit_engine(engine: EngineConfig, num_sequences: int, longest: int) -> EngineConfig:
    """Rows for every sequence at once and room for the longest, where the command line does not say otherwise."""
    derived = {"max_num_seqs": num_sequences, "max_model_len": longest}
    return engine.model_copy(update={key: value for key, value in derived.items() if key not in engine.model_fields_set})


def fit_trainer(trainer: TrainerConfig) -> TrainerConfig:
    """A size of the micro-batch that a peer can be given as well, where the command line says none."""
    size = (
        {} if "max_tokens_per_micro_batch" in trainer.model_fields_set else {"max_tokens_per_micro_batch": MICRO_BATCH_TOKENS}
    )
    return trainer.model_copy(update=size)


def is_installed(peer: str, vllm_python: Path | None = None) -> bool:
    return peer == "redline" or (peer == "vllm" and vllm_python is not None) or importlib.util.find_spec(peer) is not None


def _training_peers(peers: tuple[str, ...] | None) -> tuple[str, ...]:
    return ("transformers",) if peers is None else peers


def _storage_peers(peers: tuple[StoragePeer, ...] | None) -> tuple[StoragePeer, ...]:
    """tensordict comes in two kinds; what is not ours to need is left out where it is not installed."""
    packages: dict[StoragePeer, str] = {
        "pickle": "pickle",
        "padded": "torch",
        "safetensors": "safetensors",
        "tensordict": "tensordict",
        "consolidated": "tensordict",
    }
    installed = [peer for peer, package in packages.items() if is_installed(package)]
    missing = [peer for peer in peers or () if peer not in installed]
    if missing:
        raise ConfigError(
            f"peers: {', '.join(missing)} needs a package that is not installed here",
            f"leave it out, or {how_to_install('bench')}",
        )
    return tuple(installed) if peers is None else peers


def _against(settings: E2ESettings) -> dict[str, Any]:
    if settings.against is None:
        return {}
    if settings.trl_python is not None and not settings.trl_python.is_file():
        raise ConfigError(f"trl_python = {str(settings.trl_python)!r}: no such file", "give the path of a python")
    if settings.trl_python is None and not is_installed("trl"):
        raise ConfigError(
            "redline bench e2e: trl is not installed here",
            "name an environment that has it: --trl-python .venv-trl/bin/python",
        )
    return {"lags": (0,)}


def _refuse_sizes_of_a_replay(settings: Any, sizes: Sequence[str]) -> None:
    given = [name for name in sizes if name in settings.model_fields_set]
    if settings.replay is not None and given:
        raise ValueError(f"{given[0]}: its sizes are those of the run that is replayed; leave out {', '.join(given)} or replay")


def _refuse_all_of_the_host(settings: MemorySettings, device: str) -> None:
    if device == "cpu" and settings.limit_bytes is None:
        raise ConfigError(
            "redline bench memory: the CPU's memory is not only ours to fill", "say how much: limit_bytes=4_000_000_000"
        )


def _choose_prompts_and_peers(settings: GenerateSettings) -> dict[str, Any]:
    """A shape has no tokenizer to write questions with. Peers asked for by name must be there."""
    missing = [peer for peer in settings.peers or () if not is_installed(peer, settings.vllm_python)]
    if missing:
        raise ConfigError(
            f"peers: {', '.join(missing)} is not installed here",
            "leave it out, or name an environment that has it: vllm_python=.venv-vllm/bin/python",
        )
    if settings.vllm_python is not None and not settings.vllm_python.is_file():
        raise ConfigError(f"vllm_python = {str(settings.vllm_python)!r}: no such file", "give the path of a python")
    tokens = settings.prompt_tokens or (128 if settings.model.startswith(RANDOM) else None)
    installed = [peer for peer in ("transformers", "vllm") if is_installed(peer, settings.vllm_python)]
    return {"prompt_tokens": tokens, "peers": tuple(installed) if settings.peers is None else settings.peers}


def _split(value: Any, nothing: str = "") -> Any:
    """`a,b` → [a, b]; a single value is a list of one."""
    if isinstance(value, str):
        return [] if value == nothing else [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value
