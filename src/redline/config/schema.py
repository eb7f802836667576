"""What a recipe may say. Section name = package name = metric prefix = trace lane.

Every field has its meaning, unit and bounds beside it: the same words are the reference and the error messages. `auto` (or
null) fields are filled once, by `resolve()`, into a new object; nothing changes a config afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

Algorithm = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo"]
AdvantageEstimator = Literal["group", "group_centred", "leave_one_out", "batch", "batch_baseline", "gae"]
Loss = Literal["clip", "gspo", "cispo", "reinforce"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
GroupOrder = Literal["fresh_first", "oldest_first", "signal_first"]
LateGroups = Literal["wait", "drop"]
Mismatch = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]
ProfileKind = Literal["rollout", "trainer", "e2e"]
AlertKind = Literal[
    "not_finite",
    "stalled_rollouts",
    "stall",
    "long_wait",
    "throughput_drop",
    "staleness_rise",
    "length_bias",
    "kv_saturation",
    "host_memory_slope",
    "reward_collapse",
    "not_learning",
    "abort_storm",
    "dead_worker",
]
LocalPath = Annotated[Path, AfterValidator(lambda path: Path(os.path.expanduser(path)))]
"""`~` is the user's folder: no shell sees a recipe."""
Sink = Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus", "opentelemetry"]


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
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Run folders are called `<folder>/<name>-001`, `-002`, …"""
    folder: LocalPath = Path("runs")
    """Where run folders are made."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides every random choice of the run: tasks, samples, initial weights of built-in models."""
    steps: PositiveInt = 100
    """Steps to take. A step is one batch and one version of the policy, by one update of AdamW or several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads for the network, at most as many as the machine has cores; null takes OMP_NUM_THREADS of the environment,
    else every core this process may use."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 keeps none but the last."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept in the run folder: where there is one, a damaged file costs the run. Each takes 12 bytes per
    trained parameter on the disk, and the next one is written beside them."""


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
    path: LocalPath
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
    folder: LocalPath | None = None
    """Where the module is looked for when it is not an installed package; null is the folder in which redline is called."""
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
    stop_at: float | None = None
    """End the run after the first evaluation whose mean reward is at least this; null takes all steps. It needs `every`. An
    evaluation of which more than 3% of the answers failed does not end a run: each failure counts as 0."""

    @model_validator(mode="after")
    def _a_stop_needs_evaluations(self) -> EvaluationConfig:
        if self.stop_at is not None and not (self.every and self.num_tasks):
            raise ValueError(
                f"stop_at = {self.stop_at:g}: nothing is evaluated on the way; set every to a number of steps, and num_tasks to"
                " more than 0"
            )
        return self


class RewardModelConfig(Section):
    """A model that scores whole conversations; its score is the part `reward_model` of the reward."""

    path: str | None = None
    """A Hugging Face folder or hub id of a sequence classifier with one label; null uses none."""
    max_tokens_per_batch: PositiveInt = 16384
    """Tokens scored at once, padding included."""


class RolloutsConfig(Section):
    task: TaskConfig
    """Where tasks and their rewards come from; `kind` chooses."""
    groups_per_step: PositiveInt = 8
    """Tasks per optimizer step."""
    group_size: PositiveInt = 8
    """Attempts per task; where the group is its own baseline, it takes two."""
    max_new_tokens: PositiveInt = 256
    """Most tokens per attempt, the stop token included."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampled policy; the trainer's logprobs use the same."""
    system_prompt: str | None = None
    """First message of every conversation; null leaves it to the model's chat template."""
    prompt_suffix: str = ""
    """Added to the last user message."""
    answer_prefix: str = ""
    """Words that the assistant's turn begins with, such as `The final answer is`. They are a part of the prompt: the policy
    continues them and is not trained on them, and `score` sees only what the policy wrote. First answers become short and
    scorable where a model would otherwise begin with a preamble."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt, chat template included; null is what `max_new_tokens` leaves of the longest sequence."""
    long_prompts: Literal["drop", "truncate"] = "drop"
    """What becomes of a task whose prompt has more. `drop`: a JSONL file is read without it, any other source's task is a
    recorded failure when its turn comes. `truncate`: the last user message loses its beginning and keeps its end."""
    task_timeout_s: float | None = Field(300.0, gt=0)
    """Seconds that a call of the task source's `train` may take; then the task counts as failed, and the run goes on without
    it. null waits for ever."""
    reward_timeout_s: float | None = Field(300.0, gt=0)
    """Seconds that a call of `score` may take; then its attempt counts as failed. To be able to give one up, calls are made in
    threads of their own. null waits for ever, and in lockstep calls `score` in the main thread, if one thread is all there may
    be: for code that works nowhere else."""
    reward_weights: dict[str, float] = {}
    """Weight of each named part of the reward; a part that is not named here weighs 1."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Scores every answer beside the task's own reward; `reward_weights.reward_model` is its weight."""
    max_reward_workers: PositiveInt | None = None
    """Most threads that call the task's `score` at once; beside the trainer (`buffer.max_lag` > 0) a controller decides how
    many do. null is 8 for a source with `score_is_thread_safe = True` and 1 for any other: only its author knows whether two
    calls get in each other's way, and what was written for one thread must stay right. Threads help rewards that wait, for a
    service, a process or a disk; those that compute in Python take turns, however many there are."""
    overlong_fraction: float = Field(0.0, ge=0, le=1)
    """Share of `max_new_tokens`, at its end, over which the reward falls by 1 in a straight line (DAPO's soft overlong
    punishment); 0 punishes no length. It shapes groups whose attempts score differently without it, and moves no others, unless
    advantages come from the batch or a critic. Evaluation is never punished."""
    advantages: AdvantageEstimator = "group"
    """What an attempt is compared with. `group`: the others of its group, in units of their standard deviation (GRPO).
    `group_centred`: the same in units of reward (Dr. GRPO). `leave_one_out`: the mean of the others (RLOO). `batch`: all tokens
    of the batch (REINFORCE++). `batch_baseline`: its group, in units of the batch (REINFORCE++ with a baseline). `gae`: a
    critic (PPO)."""
    max_extra_rounds: int = Field(0, ge=0)
    """Dynamic sampling (DAPO): groups whose attempts all scored alike, before any penalty for length, are replaced by attempts
    at further tasks, in at most this many rounds per step; 0 takes groups as they come."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The reward of held-out tasks, measured while training."""


class BufferConfig(Section):
    max_lag: int = Field(0, ge=0)
    """Most optimizer steps between the policy that sampled a token and the one trained on it. 0 is lockstep, 1 samples the next
    batch while this one is trained on, more lets slow attempts take longer."""
    depth: PositiveInt | None = None
    """Steps' worth of groups that may be under way or waiting at once, at most `max_lag + 1`; null lets a controller hold it
    where neither trainer nor groups wait long."""
    order: GroupOrder = "fresh_first"
    """Which of the groups within the lag budget a batch takes. `fresh_first`: the newest, but the oldest while there is time.
    `oldest_first`: as they were begun. `signal_first`: those whose attempts differ in reward. Lockstep has no choice."""
    late_groups: LateGroups = "wait"
    """What becomes of groups that are still under way when the next step would make them older than `max_lag`. `wait`: the
    trainer waits for them, and trains on everything that is sampled. `drop`: they are given up, which is faster and biased:
    long answers are late most often, so training sees fewer of them than the policy gives. Lockstep has no late groups."""
    max_reuses: int = Field(0, ge=0)
    """Times a group may be trained on again, within the lag budget, where new groups are too few for a batch."""
    group_timeout_s: float | None = Field(3600.0, gt=0)
    """Seconds after which a group that is still under way is given up, with that reason, and another task is attempted in its
    place; null waits for ever. Give it more time than the longest answers need: what it drops is not trained on. In lockstep
    nobody looks at this clock: a step takes as long as `rollouts.task_timeout_s` and `rollouts.reward_timeout_s` let it."""
    keep_trajectories: bool = True
    """Keep groups as Arrow files in the run folder."""
    max_bytes: PositiveInt | None = 8 << 30
    """Size of those files, 8 GiB by default; beyond it the oldest that no step, replay or resumed run needs are deleted. null
    keeps all."""
    max_age_steps: PositiveInt | None = None
    """Steps after which a group that was trained on or dropped is deleted; null keeps all."""

    @model_validator(mode="after")
    def _only_a_lag_makes_groups_late(self) -> BufferConfig:
        if self.late_groups == "drop" and self.max_lag == 0:
            raise ValueError("late_groups = drop: in lockstep (max_lag = 0) no group is late; leave it out, or raise max_lag")
        return self

    @model_validator(mode="after")
    def _depth_is_within_the_lag_budget(self) -> BufferConfig:
        if self.depth is not None and self.depth > self.max_lag + 1:
            raise ValueError(
                f"depth = {self.depth}: a group may wait for at most max_lag = {self.max_lag} steps; set depth to"
                f" {self.max_lag + 1} or less, or raise max_lag"
            )
        return self


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """A low-rank adapter beside frozen weights: W + scale · B A."""

    rank: int = Field(0, ge=0)
    """Rows of A and columns of B; 0 trains all weights and no adapter."""
    alpha: float = Field(32.0, gt=0)
    """The scale is `alpha / rank`."""
    rslora: bool = False
    """Make the scale `alpha / √rank` (rank-stabilized LoRA)."""
    targets: tuple[Projection, ...] = get_args(Projection)
    """Projections that get an adapter in every layer, by their Hugging Face names; `all`, the default, is all seven."""

    @field_validator("targets", mode="before")
    @classmethod
    def _at_least_one(cls, targets: Any) -> Any:
        if not targets:
            raise ValueError("an adapter must be somewhere; name projections, or write all")
        return get_args(Projection) if targets == "all" else targets

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / √rank."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class CriticConfig(Section):
    """The value network of PPO: the policy's layers and a linear head. Where the policy trains an adapter, the critic has its
    own beside the same frozen weights, else a copy of them all."""

    learning_rate: float = Field(1e-5, gt=0)
    """Of its AdamW, once warm; everything else about the optimizer is as for the policy."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    clip: float | None = Field(0.2, gt=0)
    """A value may move this far from what it was when the batch came, further moves have no gradient; null leaves them free."""
    max_tokens_per_micro_batch: PositiveInt = 32768
    """Per device: tokens through the value network at once."""


class TrainerConfig(Section):
    algorithm: Algorithm = "grpo"
    """A name for a set of keys, here and in `rollouts`: it fills those that the recipe leaves open, and nothing else."""
    loss: Loss = "clip"
    """`clip`: PPO's clipped surrogate. `gspo`: the same with one ratio per sequence. `cispo`: clipped importance weights, every
    token keeps its gradient. `reinforce`: the plain policy gradient."""
    aggregation: Aggregation = "sequence_mean"
    """The mean over a batch. `sequence_mean`: every attempt weighs the same. `token_mean`: every token does. `constant`: the
    sum over tokens / (attempts · max_new_tokens)."""
    mini_batches: PositiveInt = 1
    """Parts that a batch is divided into, by whole groups; each is one update by AdamW, and its loss is a mean over it alone. A
    step stays one batch and one version, however many updates it takes. At most `rollouts.groups_per_step`."""
    epochs: PositiveInt = 1
    """Times that a step goes through its batch, with other mini-batches each time. The critic, where there is one, goes through
    the same."""
    learning_rate: float = Field(1e-6, gt=0)
    """Of AdamW, once warm; all updates of a step have the same."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(0, ge=0)
    """Steps after the warm-up over which the rate falls to its end; 0 keeps it constant."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """How the rate falls over `decay_steps`; `constant` after the warm-up needs none."""
    min_lr_ratio: float = Field(0.0, ge=0, lt=1)
    """Where the rate's fall ends, as a fraction of `learning_rate`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two running means, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only; norms and biases are never decayed."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""
    optimizer_states: Literal["float32", "int8"] = "float32"
    """How AdamW's two running means are kept. `int8` takes a quarter of the memory, and rounds at random so that the means stay
    right on average."""
    offload_optimizer: bool = False
    """Keep master weights and AdamW's running means in host memory, and pass them through the GPU during each step. Saves up to
    12 bytes of GPU memory per parameter, costs their way there and back."""
    max_bad_steps: PositiveInt = 3
    """Steps in a row whose loss or gradient may be NaN or infinite. Each is skipped; after the last the run ends and keeps the
    batch for replay."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """The ratio is clipped to `[1 - clip_low, 1 + clip_high]`; 1 leaves it without a lower bound. With one update per step
    there is nothing to clip: the policy is the one the step began with, and its ratio is 1."""
    clip_high: float = Field(0.2, gt=0)
    """More than `clip_low` gives unlikely tokens room to grow (DAPO's clip-higher)."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts where the advantage is negative, with `loss: clip`; null sets no bound there. Usually 3."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy the run began with; 0 needs no reference policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: a term of the loss, or subtracted from the reward at every token."""
    kl_estimator: KlEstimator = "k3"
    """Of the KL at a token, with x = log π_ref - log π. `k1`: -x. `k2`: x² / 2. `k3`: exp(x) - 1 - x."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the bonus for entropy, in nats per token."""
    mismatch: Mismatch = "none"
    """How samples are weighed by π_trainer / π_engine, with π_trainer the policy at the beginning of the step: the ratio of a
    `token`, of a whole `sequence`, or the `geometric` mean over a sequence. `truncate`: by the ratio, clipped to
    `[mismatch_low, mismatch_high]`. `mask`: by the ratio, and not at all outside. `none`: not at all."""
    mismatch_low: float = Field(0.0, ge=0, lt=1)
    """Smallest ratio; 0 sets no bound."""
    mismatch_high: float = Field(2.0, gt=1)
    """Largest ratio."""
    correct_lag: bool = True
    """With `mismatch: none`, weigh a batch that holds samples of an older policy as `token_truncate` does, with `loss: gspo` as
    `geometric_truncate`; `loss: cispo` weighs them itself, up to 1 + `clip_high`. Batches of the current policy stay as they
    are. `false` takes the policy that sampled for the old one, and its clip bounds both."""
    gae_gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a reward per token, with `rollouts.advantages: gae`."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """With `gae`: 1 trusts the rewards alone, 0 the critic's next value alone."""
    recompute_old_logprobs: Literal["auto", True, False] = "auto"
    """The old policy of the loss is the trainer's own at the beginning of the step (`true`), not the engine that sampled
    (`false`). With several updates per step that takes a pass over the batch, with one it takes none. `auto` is `true` where a
    step has several updates, or `loss: gspo` would clip the rounding of bfloat16; `loss: cispo` and `reinforce` need it not."""
    gradient_checkpointing: Literal["none", "light", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it. `light`: the MLPs' activations. `selective`: the MLPs.
    `full`: whole layers."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Per device: tokens through the network at once; by default what memory holds, and no more than makes no logits twice. It
    shrinks after running out of memory."""
    max_tokens_per_forward: PositiveInt | None = None
    """The same in passes without gradients (reference, old logprobs); by default what memory holds."""
    sharding: Literal["none", "grad_op", "full"] = "none"
    """What the trainer's processes divide among them. `none`: nothing, each holds all weights. `grad_op`: masters, gradients
    and optimizer state. `full`: the weights of layers that are not at work as well."""
    prefetch_layers: int = Field(1, ge=0)
    """Layers whose weights are fetched ahead of their turn where they are sharded; 0 leaves it to torch. More hides slower
    links and takes the memory of as many layers."""
    data_parallel_size: PositiveInt | None = None
    """Groups of processes that get micro-batches of their own; by default processes / sequence_parallel_size."""
    sequence_parallel_size: PositiveInt = 1
    """Processes that divide the tokens of a micro-batch, for contexts too long for one device; must divide the number of
    attention heads. The token budget of a micro-batch grows with it."""
    lora: LoraConfig = LoraConfig()
    """The adapter that is trained, where one is."""
    reference_offload: bool = False
    """Keep the reference policy, where the loss needs one, in host memory and move it to the device for each pass."""
    critic: CriticConfig = CriticConfig()
    """The value network, where the algorithm has one."""

    @property
    def updates_per_step(self) -> int:
        """mini_batches x epochs."""
        return self.mini_batches * self.epochs

    @field_validator("betas")
    @classmethod
    def _betas_in_range(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each beta must be in [0, 1)")
        return betas

    @model_validator(mode="after")
    def _schedule_has_its_steps(self) -> TrainerConfig:
        if self.lr_scheduler_type == "constant" and self.decay_steps:
            raise ValueError(
                f"lr_scheduler_type: constant takes no decay_steps, but they are {self.decay_steps}; set them to 0"
            )
        if self.lr_scheduler_type == "cosine" and not self.decay_steps:
            raise ValueError("lr_scheduler_type: cosine needs decay_steps; set it to run.steps - warmup_steps")
        return self


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


class WandbConfig(Section):
    project: str = Field("redline", min_length=1)
    """The project the run appears in."""
    entity: str | None = None
    """User or team; null takes the one that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder, for `wandb sync` later."""
    trajectories_every: int = Field(10, ge=0)
    """Steps between tables of what was sampled; 0 sends none."""


class TrackioConfig(Section):
    project: str = Field("redline", min_length=1)
    """The project the run appears in."""
    space_id: str | None = Field(None, pattern=r"^([^/\s]+/)?[^/\s]+$")
    """A Hugging Face Space to show it in, as `owner/name`; null keeps it on this machine."""


class MlflowConfig(Section):
    tracking_uri: str | None = None
    """A server (http://…) or a database (sqlite:///…); null takes the environment's MLFLOW_TRACKING_URI, else `mlflow.db`
    beside the run folders."""
    experiment: str = Field("redline", min_length=1)
    """The experiment the run appears in."""


class PrometheusConfig(Section):
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. The endpoint asks nobody who they are: one that others can reach is the network's to guard."""
    port: int = Field(9464, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""


class OpenTelemetryConfig(Section):
    endpoint: str = Field("http://127.0.0.1:4318", pattern=r"^https?://")
    """A collector that takes OTLP over HTTP."""
    min_span_ms: float = Field(1.0, ge=0)
    """Spans shorter than this are not sent: a step may hold thousands. `trace.json` has them."""


class AlertsConfig(Section):
    """What a person is told of while the run goes on. Each kind is told once per episode."""

    off: tuple[AlertKind, ...] = ()
    """Kinds that are not looked for."""
    webhook: str | None = Field(None, pattern=r"^(https?://|env:\w)")
    """Where each alert is posted as JSON: a URL, or `env:NAME` for an environment variable that holds it, which keeps it out of
    the run folder; null posts none."""
    webhook_timeout_s: float = Field(5.0, gt=0)
    """For one post. One that fails is told once and stops nothing."""
    rollouts_floor_s: float = Field(60.0, gt=0)
    """`stalled_rollouts`: making or awaiting the groups of a step may always take this long, whatever steps before took."""
    wait_floor_s: float = Field(10.0, gt=0)
    """`long_wait`: a lane may always wait this long in a step."""
    wait_deviations: float = Field(8.0, gt=0)
    """`stalled_rollouts` and `long_wait`: how far beyond its median a wait may go, in robust standard deviations; twice the
    longest so far is never too long."""
    throughput_drop: float = Field(0.25, gt=0, lt=1)
    """`throughput_drop`: share by which tokens per second must have fallen for good."""
    staleness_steps: float = Field(0.5, gt=0)
    """`staleness_rise`: steps by which the mean lag of a batch must have risen."""
    dropped_fraction: float = Field(0.02, gt=0, lt=1)
    """`length_bias`: share of the groups of some steps that may be dropped as late."""
    kv_use: float = Field(0.98, gt=0, le=1)
    """`kv_saturation`: share of the KV cache in use that counts as full."""
    memory_hours: float = Field(6.0, gt=0)
    """`host_memory_slope`: tell when memory would be full within this time."""
    reward_drop: float = Field(0.5, gt=0)
    """`reward_collapse`: share of the best mean reward that must be lost."""
    no_signal_steps: PositiveInt = 10
    """`not_learning`: steps in a row in which all attempts of every group may score alike: there is nothing to learn from."""
    abort_fraction: float = Field(0.2, gt=0, lt=1)
    """`abort_storm`: share of attempts that may fail or be given up, where fewer did before."""


class TargetsConfig(Section):
    """What the end of a run is judged by; null switches a target off."""

    gpu_utilization_percent: float | None = Field(80.0, ge=0, le=100)
    """At least: mean of all samples."""
    memory_percent: float | None = Field(90.0, ge=0, le=100)
    """Below: peak use of the device's memory, on the CPU of the machine's."""
    weight_sync_s: float | None = Field(2.0, gt=0)
    """Below: median step."""
    first_token_s: float | None = Field(0.1, gt=0)
    """Below: median step's median request."""
    generation_tokens_per_s: float | None = Field(None, gt=0)
    """At least. It depends on the model, so there is no default."""
    training_tokens_per_s: float | None = Field(None, gt=0)
    """At least. It depends on the model, so there is no default."""
    samples_per_hour: float | None = Field(None, gt=0)
    """At least. It depends on model and task, so there is no default."""
    steps_per_hour: float | None = Field(60.0, gt=0)
    """At least."""
    mfu_percent: float | None = Field(None, gt=0, le=100)
    """At least: median step. It depends on model and batch, so there is no default."""
    batch_size: float | None = Field(None, gt=0)
    """At least: sequences decoded at once, median step. It depends on the recipe, so there is no default."""
    preemptions: int | None = Field(0, ge=0)
    """At most, in the whole run."""
    padding_tokens: int | None = Field(0, ge=0)
    """At most, in the whole run."""
    imbalance: float | None = Field(1.25, ge=1)
    """At most: the dearest micro-batch over the mean, median step."""
    policy_lag_steps: int | None = Field(2, ge=0)
    """At most, in any step."""
    weight_sync_percent: float | None = Field(15.0, ge=0, le=100)
    """At most: share of the steps' time."""
    data_percent: float | None = Field(5.0, ge=0, le=100)
    """At most: share of the steps' time."""
    other_percent: float | None = Field(10.0, ge=0, le=100)
    """At most: share of the steps' time that is neither work nor waiting."""
    unaccounted_percent: float | None = Field(2.0, ge=0, le=100)
    """At most: share of the steps' time that no span explains."""


class TelemetryConfig(Section):
    trace: bool = True
    """Write spans to `trace.json`, which ui.perfetto.dev opens."""
    trace_max_bytes: int | None = Field(256 << 20, ge=1 << 20)
    """Size of `trace.json`, which keeps its beginning and its newest stretch; what was between is left out, and the file says
    so. null keeps every span: some hundred bytes each, 230 to 580 kB for a step of long answers."""
    sample_every_s: float = Field(1.0, ge=0)
    """Seconds between two samples of host and devices in `samples.jsonl`; 0 takes none."""
    peak_tflops: Literal["auto", "measure"] | PositiveFloat = "auto"
    """What MFU is a share of, in 10¹² operations per second of one device: a number, `measure` (a few products when the run
    begins), or `auto` (the data sheet of a GPU that is known; else there is no MFU)."""
    targets: TargetsConfig = TargetsConfig()
    """What the end of a run is judged by."""
    alerts: AlertsConfig = AlertsConfig()
    """What to look out for, and whom to tell."""
    stall_after_s: float | None = Field(None, ge=0)
    """Nothing may move, and no call of `score` or `train` may last, for this long before a file in `stalls/` says who waits for
    whom. null takes three times the longest so far: of pauses, at least 25 s (a minute while a run evaluates or saves, ten
    before its third step); of calls, at least 20 s from the first on. 0 never writes one."""
    profile: ProfileKind | None = None
    """Profile some steps. `rollout`: while groups are made. `trainer`: the trainer's step. `e2e`: all of it. A run can also be
    asked while it goes on, with `redline profile`."""
    profile_steps: tuple[PositiveInt, ...] = (3,)
    """The steps to profile, where `profile` says what."""
    nvtx: Literal["auto", "on", "off"] = "auto"
    """Give spans to NVIDIA's tools as NVTX ranges; `auto` does where Nsight Systems has started the run, and while a step is
    profiled."""
    sinks: list[Sink] = []
    """Where else the rows of the run folder go: tensorboard, wandb, trackio, mlflow, prometheus, opentelemetry."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    trackio: TrackioConfig = TrackioConfig()
    """trackio."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """An endpoint for Prometheus to scrape."""
    opentelemetry: OpenTelemetryConfig = OpenTelemetryConfig()
    """Spans and metrics over OTLP."""


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
        if self.trainer.decay_steps and not self.trainer.min_lr_ratio and self.run.steps > last:
            raise ValueError(
                f"trainer.decay_steps = {self.trainer.decay_steps}: the learning rate is zero from step {last} on, but"
                f" run.steps = {self.run.steps}; raise trainer.decay_steps, or set it to 0 for a constant rate"
            )
        return self

    @model_validator(mode="after")
    def _profiled_steps_are_taken(self) -> Config:
        late = [step for step in self.telemetry.profile_steps if step > self.run.steps]
        if self.telemetry.profile and late:
            raise ValueError(
                f"telemetry.profile_steps = {list(self.telemetry.profile_steps)}: the run ends after step {self.run.steps};"
                " name earlier steps"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """groups_per_step x group_size."""
        return self.rollouts.groups_per_step * self.rollouts.group_size

    @property
    def needs_reference(self) -> bool:
        """kl_coef > 0."""
        return self.trainer.kl_coef > 0

    @property
    def needs_anchor(self) -> bool:
        """A resolved recipe's steps begin with a pass for the old policy's logprobs: recompute_old_logprobs, and more than one
        update."""
        return self.trainer.recompute_old_logprobs is True and self.trainer.updates_per_step > 1

    @property
    def needs_critic(self) -> bool:
        """Advantages come from a critic."""
        return self.rollouts.advantages == "gae"

    @property
    def trains_on_every_attempt(self) -> bool:
        """An attempt with advantage 0 has a gradient all the same: from the KL, the entropy or the critic, or because its
        advantage is only known once the batch is whole."""
        in_batch = self.rollouts.advantages in ("batch", "batch_baseline", "gae")
        return in_batch or self.trainer.kl_coef > 0 or self.trainer.entropy_coef > 0
