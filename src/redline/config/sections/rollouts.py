"""Section `rollouts`: tasks, attempts, rewards and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from redline.config.section import Section
from redline.config.sections.environment import EnvironmentConfig
from redline.config.sections.tasks import TaskConfig

HOTTEST, COLDEST = 1e6, 1e-6
"""Beyond these temperatures, logits leave the range of float32."""

AdvantageEstimator = Literal["group", "group_centred", "leave_one_out", "batch", "batch_baseline", "gae"]


class EvaluationConfig(Section):
    num_tasks: int = Field(64, ge=0)
    """Held-out tasks per evaluation, at most; 0 switches evaluation off."""
    samples_per_task: PositiveInt = 1
    """Attempts at each held-out task; their mean is reported."""
    temperature: float = Field(1.0, ge=0, le=HOTTEST)
    """Temperature of attempts at held-out tasks; 0 is greedy."""
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last."""
    stop_at: float | None = None
    """End the run after the first evaluation whose mean reward is at least this; null takes all steps. It needs `every`. An
    evaluation of which more than 3% of the answers failed does not end a run: its mean is over the other answers alone."""

    @field_validator("temperature")
    @classmethod
    def _cold_or_greedy(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:
            raise ValueError(f"a temperature is 0 (greedy), or from {COLDEST:g} to {HOTTEST:g}")
        return temperature

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
    task: TaskConfig = None
    """Where tasks and their rewards come from; `kind` chooses. null where the environment brings its own."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """What an attempt is played in; without a name, each task is one question with one reply."""
    groups_per_step: PositiveInt = 8
    """Tasks per optimizer step."""
    group_size: PositiveInt = 8
    """Attempts per task; where the group is its own baseline, it takes two."""
    max_new_tokens: PositiveInt = 256
    """Most tokens per reply, the stop token included. An attempt is one reply, unless there is an environment."""
    temperature: float = Field(1.0, ge=COLDEST, le=HOTTEST)
    """Temperature of the policy that is sampled and trained: the trainer's logprobs use the same."""
    system_prompt: str | None = None
    """First message of every conversation; null leaves it to the model's chat template."""
    prompt_suffix: str = ""
    """Added to the last user message of an attempt's first prompt."""
    answer_prefix: str = ""
    """Words that the assistant's turn begins with, such as `The final answer is`. They are a part of the prompt: the policy
    continues them and is not trained on them, and `score` sees only what the policy wrote. First answers become short and
    scorable where a model would otherwise begin with a preamble."""
    max_prompt_tokens: PositiveInt | None = None
    """Most tokens of a prompt, chat template included; null is what `max_new_tokens` leaves of the longest sequence."""
    long_prompts: Literal["drop", "truncate"] = "drop"
    """What becomes of a task whose prompt has more than `max_prompt_tokens`. `drop`: a JSONL file is read without it, any other
    source's task is a recorded failure when its turn comes. `truncate`: the last user message loses its beginning and
    keeps its end."""
    task_timeout_s: float | None = Field(300.0, gt=0)
    """Seconds that a call of the task source's `train` may take; then the task counts as failed, and the run goes on without
    it. null waits for ever."""
    reward_timeout_s: float | None = Field(300.0, gt=0)
    """Seconds that a call of `score` may take; then its attempt counts as failed. To be able to cancel one, calls are made in
    threads of their own. null waits for ever, and in lockstep calls `score` in the main thread, if one thread is all there may
    be: for code that works nowhere else."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each named part of the reward; a part that is not named here weighs 1."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Scores every answer beside the task's own reward; `reward_weights.reward_model` is its weight."""
    max_reward_workers: PositiveInt | None = None
    """Most threads that call the task's `score` at once; beside the trainer (`buffer.max_lag` > 0) a controller decides how
    many do. null is 8 for a source with `score_is_thread_safe = True` and 1 for any other: only its author knows whether two
    calls get in each other's way, and what was written for one thread must stay right. Threads help rewards that wait, for a
    service, a process or a disk; those that compute in Python take turns, however many there are."""
    reward_run_in: Literal["threads", "processes"] = "threads"
    """Where `score` of a task of your own (`task.kind: import`) runs. `threads`: in the run's process. `processes`: in worker
    processes, each with a source of its own, made with the same parameters; there are as many as there are calls at once, up to
    `max_reward_workers` (null is then 8). A call that does not return, or a crash of the interpreter, costs its own attempt;
    the start of a process, and the import of your module there, are no part of a call. A task whose data would not arrive as it
    is (a set, an enum, an object of your own) is refused. With `placement.cluster: ray` they are actors, spread over the
    nodes."""
    min_workers: int = Field(1, ge=0)
    """Worker processes of games, and as many of rewards, that stay once they have begun."""
    worker_idle_s: float | None = Field(300.0, gt=0)
    """Seconds after which a worker process beyond `min_workers` ends that has had nothing to do; null keeps all. Another begins
    as soon as there is more to do than there are processes, up to `environment.workers` and `max_reward_workers`."""
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

    @model_validator(mode="before")
    @classmethod
    def _tasks_come_from_somewhere(cls, values: Any) -> Any:
        """Without an environment, which may bring tasks of its own, a missing `task` is refused as one without a `kind` is."""
        values = {} if values is None else values
        if not isinstance(values, Mapping) or values.get("task") is not None:
            return values
        environment = values.get("environment")
        name = environment.get("name") if isinstance(environment, Mapping) else getattr(environment, "name", None)
        return values if name is not None else {**values, "task": {}}
