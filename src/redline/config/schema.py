"""What a recipe may say. Section name = package name = metric prefix = trace lane.

Every field has its meaning, unit and bounds beside it: the same words are the reference and the error messages. `auto` (or
null) fields are filled once, by `resolve()`, into a new object; nothing changes a config afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator


class Section(BaseModel):
    """Frozen, strict about unknown keys, documented by the string under each field."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_means_defaults(cls, values: Any) -> Any:
        """YAML reads a section whose keys are all commented out as null."""
        return {} if values is None else values


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Run folders are called `<folder>/<name>-001`, `-002`, …"""
    folder: Path = Path("runs")
    """Where run folders are made."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides every random choice of the run: tasks, samples, initial weights of built-in models."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads for the network; null takes every core this process may use."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 keeps none but the last."""
    keep_checkpoints: PositiveInt = 1
    """Newest checkpoints kept in the run folder."""


class ModelConfig(Section):
    path: str
    """A Hugging Face folder, a .gguf file, a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`, or a built-in:
    `builtin:smollm2-135m-instruct`, `builtin:tiny`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of engine and trainer; `auto` is bfloat16 where the device has it. Master weights are always float32."""


class ReasoningGymTask(Section):
    kind: Literal["reasoning_gym"]
    """Procedural puzzles with checkable answers."""
    dataset: str
    """A data set of the reasoning_gym package, such as `chain_sum`."""
    params: dict[str, Any] = {}
    """Its own parameters, such as `{min_terms: 2, max_terms: 2}`."""
    extract: Literal["last_number", "text"] = "last_number"
    """What of the answer is scored."""
    held_out_fraction: float = Field(0.2, gt=0, lt=1)
    """Share of the distinct questions kept for evaluation, chosen by a hash of the question."""


class JsonlTask(Section):
    kind: Literal["jsonl"]
    """Prompts and reference answers from a file."""
    path: Path
    """A file with one JSON object per line."""
    prompt_field: str = "prompt"
    """Holds a string, or a list of chat messages."""
    answer_field: str = "answer"
    """Holds the reference answer, a string or a number."""
    extract: Literal["last_number", "text"] = "text"
    """What of the answer must equal the reference, after trimming."""
    held_out_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of the distinct prompts kept for evaluation, chosen by a hash of the prompt."""


class ImportTask(Section):
    kind: Literal["import"]
    """A task source of your own."""
    path: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """`package.module:ClassOrFunction`; called with `params` and `seed`, gives an object with `train`, `held_out` and
    `score` (see `redline.ports.TaskSource`)."""
    params: dict[str, Any] = {}
    """Keyword arguments for it."""


TaskConfig = Annotated[ReasoningGymTask | JsonlTask | ImportTask, Field(discriminator="kind")]


class EvaluationConfig(Section):
    num_tasks: int = Field(64, ge=0)
    """Held-out tasks per evaluation, at most; 0 switches evaluation off."""
    samples_per_task: PositiveInt = 1
    """Attempts at each held-out task; their mean is reported."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last."""


class RolloutsConfig(Section):
    task: TaskConfig
    """Where tasks and their rewards come from; `kind` chooses."""
    groups_per_step: PositiveInt = 8
    """Tasks per optimizer step."""
    group_size: int = Field(8, ge=2)
    """Attempts per task; the group is its own baseline, so it takes two."""
    max_new_tokens: PositiveInt = 256
    """Most tokens per attempt, the stop token included."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampled policy; the trainer's logprobs use the same."""
    system_prompt: str | None = None
    """First message of every conversation; null leaves it to the model's chat template."""
    prompt_suffix: str = ""
    """Added to the last user message."""
    reward_weights: dict[str, float] = {}
    """Weight of each named part of the reward; a part that is not named here weighs 1."""
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (GRPO); false leaves the centred rewards (Dr. GRPO)."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy, measured while training."""


class BufferConfig(Section):
    max_lag: int = Field(0, ge=0, le=0)
    """Most optimizer steps between the policy that sampled a token and the one trained on it. 0 is lockstep, the only mode
    of this version."""
    keep_trajectories: bool = True
    """Keep every group as Arrow files in the run folder."""


class TrainerConfig(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """Of AdamW, once warm."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(0, ge=0)
    """Steps after the warm-up over which the rate falls linearly to zero; 0 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two running means, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only; norms and biases are never decayed."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped to `[1 - clip_low, 1 + clip_high]`."""
    clip_high: float = Field(0.2, gt=0)
    """More than `clip_low` gives unlikely tokens room to grow (DAPO's clip-higher)."""
    max_tokens_per_micro_batch: PositiveInt = 16384
    """Per device: tokens through the network at once."""

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must be in [0, 1)")
        return betas


class WeightSyncConfig(Section):
    method: Literal["shared"] = "shared"
    """`shared`: engine and trainer read the same storage; nothing is copied."""


class EngineConfig(Section):
    max_num_seqs: PositiveInt = 256
    """Sequences decoded at once."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens put through the network in one step: one for each decoding sequence, the rest for prompts."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, prompt included; by default what the model's positions were made for."""
    enable_prefix_caching: bool = True
    """Reuse the keys and values of prompts that begin alike."""
    block_size: PositiveInt | None = None
    """Tokens per block of the KV cache; by default 16 on the CPU and 64 on a GPU."""
    kv_cache_memory_bytes: PositiveInt | None = None
    """Size of the KV cache; by default 4 GiB on the CPU, and what `gpu_memory_utilization` leaves on a GPU."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that divide the model among them."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the GPU's memory that may be in use once the KV cache is made."""
    max_loras: int = Field(default=0, ge=0)
    """LoRA adapters resident at once; 0 switches LoRA off."""
    max_lora_rank: PositiveInt = 16
    """Largest rank of an adapter. Every adapter takes the room, and the time, of this rank."""

    @model_validator(mode="after")
    def _adapters_are_not_divided(self) -> EngineConfig:
        if self.max_loras and self.tensor_parallel_size > 1:
            raise ValueError("LoRA adapters need the whole model in one process; set max_loras or tensor_parallel_size back")
        return self


class TelemetryConfig(Section):
    trace: bool = True
    """Write every span to `trace.json`, which ui.perfetto.dev opens."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    """Name, length, device and folder of the run."""
    model: ModelConfig
    """The policy."""
    rollouts: RolloutsConfig
    """Tasks, attempts, rewards, evaluation."""
    buffer: BufferConfig = BufferConfig()
    """Attempts on their way to the trainer."""
    trainer: TrainerConfig = TrainerConfig()
    """Loss and optimizer."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """How the engine gets the trainer's weights."""
    engine: EngineConfig = EngineConfig()
    """The sampler."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What the run records about itself."""

    @model_validator(mode="after")
    def _group_fits_the_engine(self) -> Config:
        if self.rollouts.group_size > self.engine.max_num_seqs:
            raise ValueError(
                f"rollouts.group_size = {self.rollouts.group_size} is more than engine.max_num_seqs ="
                f" {self.engine.max_num_seqs}; raise engine.max_num_seqs"
            )
        return self

    @model_validator(mode="after")
    def _rate_lasts_as_long_as_the_run(self) -> Config:
        last = self.trainer.warmup_steps + self.trainer.decay_steps
        if self.trainer.decay_steps and self.run.steps > last:
            raise ValueError(
                f"trainer.decay_steps = {self.trainer.decay_steps}: the learning rate is zero from step {last} on, but"
                f" run.steps = {self.run.steps}; raise trainer.decay_steps, or set it to 0 for a constant rate"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """groups_per_step x group_size."""
        return self.rollouts.groups_per_step * self.rollouts.group_size
