"""What the settings of several cases have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, PositiveInt

from redline.config.section import Section
from redline.config.sections.engine import EngineConfig


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


def refuse_sizes_of_a_replay(settings: Any, sizes: Sequence[str]) -> None:
    given = [name for name in sizes if name in settings.model_fields_set]
    if settings.replay is not None and given:
        raise ValueError(f"{given[0]}: its sizes are those of the run that is replayed; leave out {', '.join(given)} or replay")


def as_list(value: Any, nothing: str = "") -> Any:
    """`a,b` → [a, b]; a single value is a list of one."""
    if isinstance(value, str):
        return [] if value == nothing else [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value
