"""What to change: settings that a run would choose, and cuts for one that does not fit, each with its price."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from redline.lab.bench.table import quantity
from redline.lab.plan.memory import MemoryEstimate, estimate_memory
from redline.lab.plan.rates import Rates
from redline.lab.plan.setup import Setup, refusal
from redline.lab.plan.sizes import kv_bytes_needed, rows_in
from redline.lab.plan.stages import KEY, layers_of
from redline.lab.plan.timing import estimate_time
from redline.models.layer_code import Checkpointing
from redline.trainer.parallel.place import Sharding

LORA_RANK = 16
MOST_CUTS = 3
"""Taken together; who needs more of them needs another device."""
WORTH_SAYING = 0.05
"""Share of the device's memory that a cache too large would have to waste."""


@dataclass(slots=True, frozen=True)
class Cut:
    """One change, and what it does."""

    settings: tuple[str, ...]
    """As they are written on the command line."""
    saves: int
    """Bytes of the worst phase, at the same micro-batch and the same cache."""
    time_ratio: float
    """Seconds of a step over those before."""
    costs: str
    """In words, where it costs something else than time."""
    fits: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": list(self.settings),
            "saves_bytes": self.saves,
            "time_ratio": self.time_ratio,
            "costs": self.costs,
            "fits": self.fits,
        }


@dataclass(slots=True, frozen=True)
class Choice:
    """A setting and why."""

    key: str
    value: str
    why: str

    def as_json(self) -> dict[str, str]:
        return {"key": self.key, "value": self.value, "why": self.why}


@dataclass(slots=True, frozen=True)
class _Option:
    settings: tuple[str, ...]
    costs: str
    apply: Callable[[Setup], Setup]


def fits(setup: Setup, memory: MemoryEstimate) -> bool:
    """Every phase within the device, and the trainer and the engine with room to begin."""
    return memory.worst.total <= setup.device.memory_bytes and not memory.sizes.refused


# ── cuts ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_cuts(setup: Setup, rates: Rates, memory: MemoryEstimate) -> list[Cut]:
    """Each alone, the most saving first; where none is enough, the fastest few that are, together."""
    options = list(_options(setup, rates, memory))
    alone = [_weigh(setup, rates, memory, [option]) for option in options]
    cuts = sorted((cut for cut in alone if cut.saves > 0), key=lambda cut: -cut.saves)
    if fits(setup, memory) or any(cut.fits for cut in cuts):
        return cuts
    together = _enough(setup, rates, memory, options)
    return [*cuts, together] if together else cuts


def _enough(setup: Setup, rates: Rates, memory: MemoryEstimate, options: Sequence[_Option]) -> Cut | None:
    for count in range(2, MOST_CUTS + 1):
        sets = (chosen for chosen in itertools.combinations(options, count) if _distinct(chosen))
        found = [cut for cut in (_weigh(setup, rates, memory, list(chosen)) for chosen in sets) if cut.fits]
        if found:
            return min(found, key=lambda cut: cut.time_ratio)
    return None


def _distinct(chosen: Sequence[_Option]) -> bool:
    """No key twice."""
    keys = [setting.partition("=")[0] for option in chosen for setting in option.settings]
    return len(set(keys)) == len(keys)


def _weigh(setup: Setup, rates: Rates, memory: MemoryEstimate, options: Sequence[_Option]) -> Cut:
    changed = setup
    for option in options:
        changed = option.apply(changed)
    free = estimate_memory(changed)
    before, after = (estimate_memory(_pinned(each, memory)).worst.total for each in (setup, changed))
    seconds = estimate_time(changed, free, rates).step_s / estimate_time(setup, memory, rates).step_s
    settings = tuple(setting for option in options for setting in option.settings)
    costs = "; ".join(option.costs for option in options if option.costs)
    return Cut(settings, before - after, seconds, costs, fits(changed, free))


def _pinned(setup: Setup, memory: MemoryEstimate) -> Setup:
    """With the micro-batch and the cache of `memory`, where it has none of its own: what is freed is not filled again."""
    trainer, engine = setup.config.trainer, setup.config.engine
    tokens = trainer.max_tokens_per_micro_batch or memory.sizes.training_tokens
    cache = engine.kv_cache_memory_bytes or max(1, memory.sizes.kv_bytes)
    return setup.changed(trainer={"max_tokens_per_micro_batch": tokens}, engine={"kv_cache_memory_bytes": cache})


def _options(setup: Setup, rates: Rates, memory: MemoryEstimate) -> Iterator[_Option]:
    trainer, config = setup.config.trainer, setup.config
    words = {
        "light": "the MLPs' activations once more",
        "selective": "the MLPs' forward pass once more",
        "full": "a forward pass once more",
    }
    kinds = list(get_args(Checkpointing))
    for kind in kinds[kinds.index(trainer.gradient_checkpointing) + 1 :]:
        yield _trainer("gradient_checkpointing", kind, words[kind])
    if trainer.optimizer_states == "float32":
        yield _trainer("optimizer_states", "int8", "rounding of Adam's means, right on average")
    if setup.device.is_gpu and not trainer.offload_optimizer and _is_allowed(setup, "offload_optimizer"):
        yield _trainer("offload_optimizer", True, "masters and means cross the bus in every step; host memory")
    if not trainer.lora.rank and config.rollouts.advantages != "gae" and setup.model.takes_adapter:
        lora = trainer.lora.model_copy(update={"rank": LORA_RANK})
        yield _Option(
            (f"trainer.lora.rank={LORA_RANK}",),
            "what a low rank cannot say; usually a ten times larger learning rate",
            lambda s: s.changed(trainer={"lora": lora}),
        )
    has_reference = config.needs_reference and not trainer.lora.rank
    if has_reference and not trainer.reference_offload and _is_allowed(setup, "reference_offload"):
        yield _trainer("reference_offload", True, "the reference crosses the bus in every step; host memory")
    yield from _smaller(setup, memory)
    yield from _more_devices(setup, rates)


def _is_allowed(setup: Setup, key: str) -> bool:
    return refusal(setup.changed(trainer={key: True})) is None


def _smaller(setup: Setup, memory: MemoryEstimate) -> Iterator[_Option]:
    sizes = memory.sizes
    if sizes.training_tokens >= 2 * setup.longest:
        half = sizes.training_tokens // 2
        yield _trainer("max_tokens_per_micro_batch", half, "smaller products; the gradient is the same")
    needed = kv_bytes_needed(setup)
    if setup.device.is_gpu and needed < sizes.kv_bytes:
        yield _engine("kv_cache_memory_bytes", needed, "nothing: all attempts of a step still fit at once")
    rows = min(setup.config.engine.max_num_seqs, setup.work.sequences)
    if rows // 2 >= setup.work.group_size:
        fewer = setup.changed(engine={"max_num_seqs": rows // 2})
        room = kv_bytes_needed(fewer)
        yield _Option(
            (f"engine.max_num_seqs={rows // 2}", f"engine.kv_cache_memory_bytes={room}"),
            "attempts wait for a row",
            lambda s: s.changed(engine={"max_num_seqs": rows // 2, "kv_cache_memory_bytes": room}),
        )


def _more_devices(setup: Setup, rates: Rates) -> Iterator[_Option]:
    """Divided as `choose_parallel` would."""
    if not setup.device.is_gpu:
        return

    def spread(gpus: int) -> Callable[[Setup], Setup]:
        return lambda s: choose_parallel(replace(s, gpus=gpus), rates)[0]

    for gpus in (2, 4, 8):
        if gpus > setup.gpus and gpus % setup.stages == 0:
            yield _Option((f"--gpus={gpus}",), f"{gpus / setup.gpus:g} times the price of an hour", spread(gpus))


def _trainer(key: str, value: object, costs: str) -> _Option:
    return _Option((f"trainer.{key}={_written(value)}",), costs, lambda s: s.changed(trainer={key: value}))


def _engine(key: str, value: object, costs: str) -> _Option:
    return _Option((f"engine.{key}={_written(value)}",), costs, lambda s: s.changed(engine={key: value}))


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ── choices ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def choose_parallel(setup: Setup, rates: Rates) -> tuple[Setup, list[Choice]]:
    """How several devices divide the trainer's state and the engine, where the recipe leaves it to us."""
    if setup.gpus == 1:
        return setup, []
    setup, divided = (setup, _stages(setup)) if setup.stages > 1 else _choose_sharding(setup)
    setup, parallel = _choose_tensor_parallel(setup, rates)
    return setup, [divided, parallel]


def _stages(setup: Setup) -> Choice:
    first, last = layers_of(setup.model, setup.stages)
    layers = f"{first} layers" if first == last else f"{last} to {first} layers"
    why = f"as {KEY} says: {layers} on each device, {setup.data_ranks} {'pipeline' if setup.data_ranks == 1 else 'pipelines'}"
    return Choice("stages", str(setup.stages), why)


def _choose_sharding(setup: Setup) -> tuple[Setup, Choice]:
    """The least that fits: what is divided has to be put together again over the link."""
    if "sharding" in setup.given:
        key = "trainer.sharding" if setup.config.trainer.sharding == setup.sharding else "--sharding"
        return setup, Choice("sharding", setup.sharding, f"as {key} says")
    tried: dict[str, int] = {}
    chosen, reason = setup, None
    for kind in get_args(Sharding):
        divided = replace(setup, sharding=kind)
        if reason := refusal(divided):
            break
        chosen, memory = divided, estimate_memory(divided)
        tried[kind] = memory.worst.total
        if fits(chosen, memory):
            break
    sizes = ", ".join(f"{kind} {quantity(size, 'bytes')}" for kind, size in tried.items())
    room = quantity(setup.device.memory_bytes, "bytes")
    why = f"{reason.message}: {sizes} of {room}" if reason else f"the least divided that fits {room}: {sizes}"
    return chosen, Choice("sharding", chosen.sharding, why)


def _choose_tensor_parallel(setup: Setup, rates: Rates) -> tuple[Setup, Choice]:
    """The fastest that fits. Replicas send nothing but each reads all weights in every step, parts of an engine read a part."""
    if "tensor_parallel_size" in setup.given:
        return setup, Choice("tensor parallel", str(setup.tensor_parallel_size), "as --tensor-parallel says")
    options: dict[int, tuple[Setup, float, bool]] = {}
    for size in (1, 2, 4, 8) if setup.config.engine.quantization == "none" else (1,):
        changed = replace(setup, tensor_parallel_size=size)
        if setup.gpus % size or refusal(changed):
            continue
        memory = estimate_memory(changed)
        seconds = estimate_time(changed, memory, rates).seconds_of("generation")
        options[size] = changed, setup.work.new_tokens / seconds, fits(changed, memory)
    best = max(options, key=lambda size: (options[size][2], options[size][1]))
    each = ", ".join(
        f"{size}: {rate:,.0f} tok/s{'' if ok else ', does not fit'}" for size, (_, rate, ok) in sorted(options.items())
    )
    serves = "" if best == 1 else "; a run has such engines beside the trainer (engine.tensor_parallel_size, placement.engines)"
    why = f"{setup.gpus // best} replicas; all devices together at {each}{serves}"
    return options[best][0], Choice("tensor parallel", str(best), why)


def choices(setup: Setup, memory: MemoryEstimate) -> list[Choice]:
    """What a run chooses for itself on one device, and what it had better be told."""
    sizes, work = memory.sizes, setup.work
    rows = min(work.share(setup.engines).sequences, rows_in(setup, sizes.kv_tokens, work.max_new_tokens))
    needed = kv_bytes_needed(setup.changed(engine={"max_num_seqs": rows}))
    found = [
        Choice(
            "trainer.max_tokens_per_micro_batch",
            str(sizes.training_tokens),
            _reason(memory, "trainer.max_tokens_per_micro_batch"),
        ),
        Choice("engine.max_num_seqs", str(rows), _rows_reason(setup, rows)),
        Choice("KV cache", quantity(sizes.kv_bytes, "bytes"), memory.sizes.reasons["KV cache"]),
    ]
    if setup.device.is_gpu and sizes.kv_bytes - needed > WORTH_SAYING * setup.device.memory_bytes:
        found.append(
            Choice(
                "engine.kv_cache_memory_bytes",
                str(needed),
                f"{rows} attempts need no more; {quantity(sizes.kv_bytes - needed, 'bytes')} of the cache would stay empty, and"
                " the trainer has a use for them",
            )
        )
    return found


def _reason(memory: MemoryEstimate, key: str) -> str:
    return memory.sizes.reasons[key]


def _rows_reason(setup: Setup, rows: int) -> str:
    if rows == setup.work.share(setup.engines).sequences:
        return f"all {rows} attempts of {'a step' if setup.engines == 1 else 'an engine in a step'} at once"
    return "as many attempts as the cache holds at their end"


def room(setup: Setup, memory: MemoryEstimate) -> int:
    """Bytes that the worst phase leaves; negative where it does not fit."""
    return setup.device.memory_bytes - memory.worst.total
