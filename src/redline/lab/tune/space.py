"""What may be tuned: keys that decide how fast a run is and nothing of what it learns, with the values that make sense here.

Every other key stays as the recipe has it. `buffer.max_lag` is the one key of the table that changes what is trained on (older
samples), so that it is tried up to a limit that the caller gives, and what it does to the samples stands beside its gain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.config import Config

Change = Mapping[str, Any]
"""Recipe key → value; several keys that only make sense together are one change."""
CHECKPOINTING = ("none", "light", "selective", "full")
"""From the fastest to the one that spares the most memory."""
LARGER = 4
"""Times that a size grows from one trial to the next, where nothing says by how much."""
ALIKE = 1.2
"""Sizes closer to each other than this factor are one."""


@dataclass(slots=True, frozen=True)
class Situation:
    """What decides which values make sense."""

    config: Config
    """The recipe as it is now, resolved."""
    max_lag: int
    """The largest lag that may be tried."""
    cores: int
    gpus: int = 0
    tokens: float | None = None
    """Tokens of an update as they go through the trainer, most of them in a step; None where that was not recorded."""
    prompt_tokens: float | None = None
    """Tokens of prompts that the engine computes in a step; None where that was not recorded."""

    @property
    def attempts(self) -> int:
        """Attempts that one engine may have at once: those of all steps under way."""
        return self.attempts_of(self.config.buffer.max_lag, self.config.placement.engines)

    def attempts_of(self, lag: int, engines: int) -> int:
        """The same with another lag, and other engines."""
        rollouts = self.config.rollouts
        return -(-rollouts.groups_per_step * rollouts.group_size * (lag + 1) // max(1, engines))

    @property
    def on_gpu(self) -> bool:
        return self.config.run.device == "cuda"


def changes(situation: Situation) -> Iterator[Change]:
    """Give every single change of the space that would make a difference to the recipe as it is, in the order of the table."""
    for key, values in SPACE.items():
        now = setting(situation.config, key)
        for value in dict.fromkeys(values(situation)):
            if value != now:
                yield _with_rows({key: value}, situation)
    if situation.max_lag > situation.config.buffer.max_lag == 0 and situation.config.placement.engines == 0:
        for count in _engines(situation):
            yield _with_rows({"placement.engines": count, "buffer.max_lag": 1}, situation)


def _with_rows(change: Change, s: Situation) -> Change:
    """With a lag, attempts of several steps are under way. An engine that had a row for each gets rows for all of them: without
    these the next step's would wait until this one's have ended, and the lag would bring nothing."""
    rows, lag = s.config.engine.max_num_seqs, change.get("buffer.max_lag", 0)
    wanted = s.attempts_of(lag, change.get("placement.engines", s.config.placement.engines))
    if lag <= s.config.buffer.max_lag or not s.attempts <= rows < wanted:
        return change
    return {**change, "engine.max_num_seqs": wanted}


def setting(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def overrides_of(change: Change) -> list[str]:
    """The change as it is written on the command line."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in sorted(change.items())]


def name_of(change: Change) -> str:
    """The change in one line; the recipe as it was is `as it is`."""
    return " ".join(overrides_of(change)) or "as it is"


# ── token budgets ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _micro_batch(s: Situation) -> Sequence[int | None]:
    """What memory holds; the whole update, a half and a quarter of it, since smaller pieces may stay in a cache."""
    now = s.config.trainer.max_tokens_per_micro_batch
    if s.tokens is None:
        return (None, LARGER * now) if now else ()
    whole = int(1.25 * s.tokens) + 1
    if now and now > whole:
        now = whole  # more room than the update needs
    sizes = [whole, whole // 2, whole // 4]
    return [None, *(size for size in sizes if size >= 1 and (not now or not now / ALIKE <= size <= now * ALIKE))]


def _forward(s: Situation) -> Sequence[int | None]:
    """What memory holds."""
    return (None,)


def _critic(s: Situation) -> Sequence[int]:
    now = s.config.trainer.critic.max_tokens_per_micro_batch
    return (LARGER * now,) if s.config.needs_critic and s.tokens and now < s.tokens else ()


def _batched_tokens(s: Situation) -> Sequence[int]:
    """More where prompts and rows of a step do not fit into one pass."""
    now, need = s.config.engine.max_num_batched_tokens, (s.prompt_tokens or 0.0) + s.attempts
    return (int(min(LARGER * now, ALIKE * need)),) if need > ALIKE * now else ()


def _reward_tokens(s: Situation) -> Sequence[int]:
    model = s.config.rollouts.reward_model
    return (LARGER * model.max_tokens_per_batch,) if model.path else ()


# ── the engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _rows(s: Situation) -> Sequence[int]:
    """All attempts at once, or some more than now; no more than there are."""
    now = s.config.engine.max_num_seqs
    return [size for size in (s.attempts, LARGER * now) if now < size <= s.attempts]


def _prefix_caching(s: Situation) -> Sequence[bool]:
    return (True,)


def _kv_bytes(s: Situation) -> Sequence[int]:
    """Only what the doctor asks for: a cache that holds all there is gains nothing by growing."""
    return ()


def _kv_share(s: Situation) -> Sequence[float]:
    engine = s.config.engine
    is_read = s.on_gpu and not engine.kv_cache_memory_bytes
    return [share for share in (0.7, 0.85) if is_read and share > engine.gpu_memory_utilization]


def _guesses(s: Situation) -> Sequence[str]:
    """The same samples; whether attempts repeat each other enough, only a trial says."""
    engine = s.config.engine
    return ("auto",) if engine.kind == "native" and engine.tensor_parallel_size == 1 else ()


# ── memory that costs time ─────────────────────────────────────────────────────────────────────────────────────────────


def _checkpointing(s: Situation) -> Sequence[str]:
    return CHECKPOINTING[: CHECKPOINTING.index(s.config.trainer.gradient_checkpointing)]


def _off(s: Situation) -> Sequence[bool]:
    return (False,)


# ── who works beside whom ──────────────────────────────────────────────────────────────────────────────────────────────


def _lag(s: Situation) -> Sequence[int]:
    now = s.config.buffer.max_lag
    return (now + 1,) if now < s.max_lag else ()


def _workers(s: Situation) -> Sequence[int]:
    environment = s.config.rollouts.environment
    if environment.name is None:
        return ()
    return [size for size in (s.attempts, LARGER * environment.workers) if environment.workers < size <= min(256, s.attempts)]


def _run_in(s: Situation) -> Sequence[str]:
    return ("threads",) if s.config.rollouts.environment.run_in == "loop" else ()


def _engines(s: Situation) -> Sequence[int]:
    """Processes that sample: GPUs that the trainer leaves, or one beside the trainer where there are two cores."""
    return (max(1, s.gpus - 1),) if s.on_gpu and s.gpus > 1 else (1,) if not s.on_gpu and s.cores > 1 else ()


def _engines_of_a_lag(s: Situation) -> Sequence[int]:
    """In lockstep an engine in a process of its own only waits: it then comes together with a lag (`changes`)."""
    return (*_engines(s), 0) if s.config.buffer.max_lag else (0,)


def _threads(s: Situation) -> Sequence[int]:
    return () if s.on_gpu else (s.cores, max(1, s.cores // 2), 1)


def _transport(s: Situation) -> Sequence[str]:
    return ("auto",) if s.config.engine.kind == "native" else ()


SPACE: Mapping[str, Callable[[Situation], Sequence[Any]]] = {
    "engine.max_num_seqs": _rows,
    "trainer.max_tokens_per_micro_batch": _micro_batch,
    "trainer.gradient_checkpointing": _checkpointing,
    "buffer.max_lag": _lag,
    "engine.enable_prefix_caching": _prefix_caching,
    "engine.gpu_memory_utilization": _kv_share,
    "engine.kv_cache_memory_bytes": _kv_bytes,
    "engine.max_num_batched_tokens": _batched_tokens,
    "engine.speculation": _guesses,
    "trainer.offload_optimizer": _off,
    "trainer.reference_offload": _off,
    "placement.sleep": _off,
    "rollouts.environment.workers": _workers,
    "rollouts.environment.run_in": _run_in,
    "trainer.max_tokens_per_forward": _forward,
    "trainer.critic.max_tokens_per_micro_batch": _critic,
    "rollouts.reward_model.max_tokens_per_batch": _reward_tokens,
    "placement.engines": _engines_of_a_lag,
    "placement.transport": _transport,
    "run.num_threads": _threads,
}
"""Key → the values that make sense for it. Nothing else is ever changed."""
