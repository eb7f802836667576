"""Section `trainer`: loss and optimizer."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from redline.config.section import Entries, Section
from redline.config.sections.lora import LoraConfig

Algorithm = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo"]
Loss = Literal["clip", "gspo", "cispo", "reinforce"]
Sharding = Literal["none", "grad_op", "full"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Mismatch = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]


class ScheduleConfig(Entries):
    """The learning rate of every step, as a share of `learning_rate`."""

    short: ClassVar[str] = "kind"

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: no fall, a line, or half a cosine."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: PositiveInt | None = None
    """Steps after the warm-up over which the rate falls; null falls until the run ends."""
    min_ratio: float = Field(0.0, ge=0, lt=1)
    """Where the fall ends, as a share of `learning_rate`."""


class MismatchConfig(Entries):
    """How samples are weighed by the ratio of the trainer's policy to the engine's."""

    short: ClassVar[str] = "kind"

    kind: Mismatch = "none"
    """The ratio of a `token`, of a whole `sequence`, or the `geometric` mean over a sequence. `truncate`: samples are weighed
    by the ratio, clipped to `[low, high]`. `mask`: by the ratio, and not at all outside. `none`: not at all."""
    low: float = Field(0.0, ge=0, lt=1)
    """Smallest ratio; 0 sets no bound."""
    high: float = Field(2.0, gt=1)
    """Largest ratio."""
    correct_lag: bool = True
    """With `kind: none`, weigh a batch that holds samples of an older policy as `token_truncate` does, with `loss: gspo` as
    `geometric_truncate`; `loss: cispo` weighs them itself, up to 1 + `clip_high`. Batches of the current policy stay as they
    are. `false` takes the policy that sampled for the old one, and its clip bounds both."""


class CriticConfig(Section):
    """The value network of PPO: the policy's layers and a linear head. Where the policy trains an adapter, the critic has its
    own beside the same frozen weights, else a copy of them all."""

    learning_rate: float = Field(1e-5, gt=0)
    """Learning rate of the critic's AdamW, once warm; everything else about the optimizer is as for the policy."""
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
    """Learning rate of AdamW, once warm; all updates of a step have the same."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate rises and falls: `cosine`, or `{kind: cosine, warmup_steps: 10}`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's two running means, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW, on matrices only; norms and biases are never decayed."""
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
    """Upper bound of the clip; more than `clip_low` gives unlikely tokens room to grow (DAPO's clip-higher)."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts where the advantage is negative, with `loss: clip`; null sets no bound there. Usually 3."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy the run began with; 0 needs no reference policy."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: a term of the loss, or subtracted from the reward at every token."""
    kl_estimator: KlEstimator = "k3"
    """How the KL at a token is estimated, with x = log π_ref - log π. `k1`: -x. `k2`: x² / 2. `k3`: exp(x) - 1 - x."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the bonus for entropy, in nats per token."""
    mismatch: MismatchConfig = MismatchConfig()
    """How samples are weighed by π_trainer / π_engine, with π_trainer the policy at the beginning of the step:
    `token_truncate`, or `{kind: token_truncate, high: 3}`."""
    gae_gamma: float = Field(1.0, gt=0, le=1)
    """Discount of a reward per token, with `rollouts.advantages: gae`."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Decay of later errors of the critic, with `gae`: 1 trusts the rewards alone, 0 the critic's next value alone."""
    recompute_old_logprobs: Literal["auto", True, False] = "auto"
    """The old policy of the loss is the trainer's own at the beginning of the step (`true`), not the engine that sampled
    (`false`). With several updates per step that takes a pass over the batch, with one it takes none. `auto` is `true` where a
    step has several updates, and where the rounding of the engine would be clipped: of bfloat16 and less by `loss: gspo`, of
    `engine.quantization: int8` and `fp8` by `clip` too; `cispo` and `reinforce` clip nothing around it."""
    replay_routing: bool = False
    """Send each token of a mixture of experts to the experts that it went to when it was sampled (`engine.record_routing`),
    with the weights that the router gives them now. Without it a router that rounds otherwise trains other experts."""
    gradient_checkpointing: Literal["none", "light", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it. `light`: the MLPs' activations. `selective`: the MLPs.
    `full`: whole layers."""
    max_tokens_per_micro_batch: PositiveInt | None = None
    """Per device: tokens through the network at once; by default what memory holds, and no more than what keeps logits from
    being computed twice. It shrinks after running out of memory."""
    max_tokens_per_forward: PositiveInt | None = None
    """Per device: tokens through the network at once in passes without gradients (reference, old logprobs); by default what
    memory holds."""
    sharding: Sharding = "none"
    """What several ranks (`torchrun --nproc-per-node N -m redline train …`) divide among them. `none`: each holds all weights.
    `grad_op`: masters, gradients and optimizer state are divided. `full`: also the weights of layers that are not at work."""
    replicate: PositiveInt = 1
    """With `sharding`, groups of ranks that each hold all of the weights, divided inside the group: as many as there are nodes
    keeps the gathering of weights inside a node. Must divide the number of ranks."""
    prefetch_layers: int = Field(1, ge=0)
    """With `sharding`, layers whose weights are fetched ahead of their turn; 0 leaves it to torch. More hides slower links and
    takes the memory of as many layers."""
    sequence_parallel_size: PositiveInt = 1
    """Ranks that divide the tokens of a micro-batch (Ulysses), for contexts too long for one device. Must divide the number of
    ranks and the model's attention heads; the token budget of a micro-batch grows with it."""
    pipeline_parallel_size: PositiveInt = 1
    """Ranks that divide the layers: each has neighbouring ones with their gradients and optimizer state, and passes
    micro-batches on to the next. Must divide the number of ranks; others get micro-batches of their own. A step has at least as
    many micro-batches as stages, and the more there are, the less the stages wait for each other."""
    rank_timeout_s: float = Field(60.0, ge=5)
    """With several ranks, seconds without a sign of life after which a rank is lost, and the others end with its name. A rank
    that is alive but does not come to a meeting of its step has ten times as long."""
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
