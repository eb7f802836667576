"""Section `trainer.lora`: the adapter that is trained."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from redline.config.section import Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """A low-rank adapter beside frozen weights: W + scale · B A."""

    rank: int = Field(0, ge=0)
    """Rank of the adapter, the rows of A and columns of B; 0 trains all weights and no adapter."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapter, times its rank: the scale is `alpha / rank`."""
    rslora: bool = False
    """Make the scale `alpha / √rank` (rank-stabilized LoRA)."""
    targets: tuple[Projection, ...] = get_args(Projection)
    """Projections that get an adapter in every layer, by their Hugging Face names; `all`, the default, is all seven."""

    @field_validator("targets", mode="before")
    @classmethod
    def _at_least_one_and_each_once(cls, targets: Any) -> Any:
        if not targets:
            raise ValueError("an adapter must be somewhere; name projections, or write all")
        if targets == "all":
            return get_args(Projection)
        return tuple(dict.fromkeys(map(str, targets))) if isinstance(targets, list | tuple) else targets

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / √rank."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
