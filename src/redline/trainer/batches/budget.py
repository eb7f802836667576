"""How many tokens go through the network at once: planned from the device's memory, and less after running out of it.

    device − others − weights, masters, gradients, moments − logits − margin   =   room
    room / bytes per token                                                     =   budget

But no larger than what keeps all its logits: those of further tokens would be made a second time by the backward pass, which
costs more than larger products save. A pass without gradients keeps nothing for a backward pass, so its budget is several
times as large. The plan may be wrong: other programs come and go, and memory breaks into pieces. Then the step begins again
with a smaller budget. That changes nothing but the time, since the loss of a batch is a plain sum over its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from redline.errors import NoRoomError
from redline.models.files.hf import AnyDecoder
from redline.models.layer_code import Checkpointing
from redline.models.sizes.memory import FLOAT32, NO_BYTES, ParameterBytes, TokenBytes, token_bytes
from redline.models.spec import ModelShape
from redline.trainer.batches.micro_batches import MicroBatchPlan
from redline.trainer.loss.logprobs import CHUNK_BYTES, KEPT_BYTES

MARGIN = 0.08
"""The share of the device's memory left free: for CUDA's own, workspaces of its libraries, and gaps between allocations."""
BUSY_TOKENS = 8192
"""So many rows keep a GPU's products near their best rate; the budget is no smaller for the sake of its logits."""
MOST_TOKENS = 131_072
"""More at once make no device faster."""
STEP = 256
"""Budgets are multiples of this."""
FORWARD_RATIO = 4
"""Tokens of a pass without gradients for each of one with them, where only the latter's budget is given."""
CPU_TOKENS = 4096
"""Products with this many rows keep every core busy; more of them only take more memory."""
SHRINK = 0.75
"""What is left of the largest micro-batch after running out of memory."""

Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Budgets:
    """Tokens per micro-batch, and why."""

    training: int
    forward: int
    """For passes without gradients: reference, values, old logprobs."""
    reason: str


@dataclass(slots=True, frozen=True)
class MemoryPlan:
    """What fills a device, in bytes."""

    device: int
    """All of it."""
    others: int
    """Held by the engine and other programs."""
    parameters: ParameterBytes
    logits: int
    keeps: int
    """Tokens whose logits are all kept for the backward pass."""
    per_token: TokenBytes

    @property
    def room(self) -> int:
        """For tokens: device · (1 - MARGIN) - others - parameters - logits."""
        return int(self.device * (1 - MARGIN)) - self.others - self.parameters.total - self.logits

    def budgets(self) -> Budgets:
        most = min(MOST_TOKENS, max(BUSY_TOKENS, self.keeps // STEP * STEP))
        training, forward = _tokens(self.room, self.per_token.training, most), _tokens(self.room, self.per_token.forward)
        if training < STEP:
            raise NoRoomError(
                f"no room to train: of {_size(self.device)}, others hold {_size(self.others)}, weights, gradients and optimizer"
                f" need {_size(self.parameters.total)}, logits {_size(self.logits)}",
                "lower engine.gpu_memory_utilization, set trainer.offload_optimizer=true, or take a smaller model",
            )
        why = ", the most that is of use" if training == most else ""
        return Budgets(
            training,
            forward,
            f"auto: {_size(self.room)} of {_size(self.device)} are left for tokens of {_size(self.per_token.training)}{why}",
        )


def find_budgets(
    network: AnyDecoder,
    dtype: torch.dtype,
    parameters: ParameterBytes,
    own_bytes: int,
    checkpointing: Checkpointing,
    messages: TokenBytes = NO_BYTES,
) -> Budgets:
    """For a network on its device. `own_bytes` of the memory now in use are of kinds that `parameters` counts; `messages` are
    what stages hold of a token that they pass on."""
    device = next(network.parameters()).device
    if device.type != "cuda":
        return cpu_budgets()
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    code = network.training_code(dtype)
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    plan = MemoryPlan(
        device=total,
        others=max(0, total - free - cached - own_bytes),
        parameters=parameters,
        logits=logits_bytes(network.spec, dtype),
        keeps=tokens_kept(network.spec, dtype),
        per_token=messages.beside(token_bytes(network.spec, num_parameters, dtype, checkpointing, code)),
    )
    return plan.budgets()


def cpu_budgets() -> Budgets:
    """Host memory is large and shared, so that it does not decide."""
    return Budgets(CPU_TOKENS, 2 * CPU_TOKENS, "auto: enough to keep a CPU busy")


def logits_bytes(shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> int:
    """On a GPU, whatever the number of tokens: logits that are kept and a chunk of others, and in float32 the head's gradient,
    which half precision adds to its sum as it is made (`gradient_sums.py`)."""
    head = FLOAT32 * shape.vocab_size * shape.hidden_size if dtype == torch.float32 else 0
    return KEPT_BYTES["cuda"] + CHUNK_BYTES["cuda"] + head


def tokens_kept(shape: ModelShape, dtype: torch.dtype) -> int:
    """Whose logits a GPU keeps for the backward pass, if every one of them predicts a trained token."""
    return KEPT_BYTES["cuda"] // (dtype.itemsize * shape.vocab_size)


def _tokens(room: int, per_token: int, most: int = MOST_TOKENS) -> int:
    return min(most, max(0, room) // per_token // STEP * STEP)


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


# ── after running out of memory ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class TokenBudget:
    """Tokens per micro-batch; once it shrank it stays so."""

    current: int
    key: str = "trainer.max_tokens_per_micro_batch"
    """What a recipe calls it."""
    retries: int = 0
    """Times that memory ran out and a pass began again, since `take_retries`."""

    def take_retries(self) -> int:
        """Return how often memory ran out since the last call."""
        taken, self.retries = self.retries, 0
        return taken

    def after_oom(self, tried: int, longest: int) -> str:
        """Shrink below `tried`, the largest micro-batch that was planned; says what it did. Raises what `smaller` does."""
        self.current = self.smaller(tried, longest)
        self.retries += 1
        return (
            f"out of memory with {tried:,} tokens in a micro-batch; the step begins again with at most {self.current:,}."
            f" {self.key}={self.current} would have spared it"
        )

    def no_room(self, tried: int, longest: int) -> NoRoomError:
        """The error of a rank that ran out where others wait for it, so that nothing begins again. Raises what `smaller`
        does."""
        smaller = self.smaller(tried, longest)
        return NoRoomError(
            f"out of memory with {tried:,} tokens in a micro-batch; {self.key}={smaller} may be enough",
            f"continue with --resume {self.key}={smaller}; trainer.gradient_checkpointing=full needs less for each token",
        )

    def smaller(self, tried: int, longest: int) -> int:
        """Tokens below `tried`, by at least a sequence of `longest`. Raises `NoRoomError` for a micro-batch that is no larger
        than its longest sequence: nothing makes it smaller."""
        if tried <= longest:
            raise NoRoomError(
                f"out of memory: a sequence of {longest:,} tokens does not fit, even alone",
                "lower rollouts.max_new_tokens, set trainer.gradient_checkpointing=full, or leave the trainer more memory"
                " (engine.gpu_memory_utilization)",
            )
        return max(longest, min(int(SHRINK * tried), tried - longest))


def with_oom_retry(
    budget: TokenBudget,
    plan: Callable[[int], MicroBatchPlan],
    run: Callable[[MicroBatchPlan], Result],
    undo: Callable[[], None],
    tell: Callable[[str], None],
    anywhere: Callable[[bool], bool] = lambda here: here,
) -> Result:
    """`run` the micro-batches of a plan; where memory runs out, `undo` what it did so far and begin again with smaller ones.

    `anywhere` says whether memory ran out on any rank, so that all begin again together; it needs ranks that do not wait for
    each other inside `run`.
    """
    while True:
        planned = plan(budget.current)
        done = _unless_out_of_memory(run, planned)
        if not anywhere(done is None):
            assert done is not None
            return done[0]
        undo()
        torch.cuda.empty_cache()
        tell(budget.after_oom(planned.largest_micro_batch, planned.longest_sequence))


def _unless_out_of_memory(run: Callable[[MicroBatchPlan], Result], planned: MicroBatchPlan) -> tuple[Result] | None:
    """Returns before anything else is done: until then, the error keeps alive the tensors of all frames that it passed."""
    try:
        return (run(planned),)
    except torch.OutOfMemoryError:
        return None
