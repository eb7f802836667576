"""The params of the environment `diplomacy`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from redline.errors import ConfigError

KEY = "rollouts.environment.params"


@dataclass(slots=True, frozen=True)
class Settings:
    """How a game is begun, asked and ended; and, to be measured, each thing that makes it fast."""

    years: int = 2
    """An attempt ends this many game years after the one it began in."""
    phases: int = 0
    """It also ends after so many phases; 0 is no such limit."""
    quiet_years: int = 3
    """It also ends when no supply centre has changed hands for so many years; 0 is never."""
    warm_up: int = 0
    """Without `states`, an attempt begins up to so many phases into a game that a script played."""
    states: str = ""
    """A file of `redline env warm` with positions to begin from."""
    conversation: bool = False
    """A power's phases are one conversation; else each phase is asked by itself, and the prompt says all there is to know."""
    show_map: bool = True
    """The prompt says which places are next to which. All legal orders are listed either way."""
    suggest: bool = False
    """The prompt ends with orders that a script would give, for a model that finds no legal ones by itself: it learns from
    copying them, and then from leaving them."""
    tokens_per_order: int = 16
    """A reply may be so many tokens long for each order that is due, and as many again."""

    compact: bool = True
    """Prompts say every fact once, in lines; else in indented JSON."""
    memoise: bool = True
    """Legal orders are asked once per position, for all powers and attempts; else once for each power that is asked."""
    keep_prompts: bool = True
    """Rules and map are written once, the board once per position; else both anew for each reply."""
    gather: bool = True
    """All powers of a phase are asked at the same time; else one after another."""
    clone: str = "position"
    """`position`: attempts are values, and share one game object. `deepcopy`: each has a game object with its history, copied
    from that of its start."""
    workers: int = 0
    """Processes that compute phases; 0 computes them in the event loop."""

    def __post_init__(self) -> None:
        for name, least in (
            ("years", 1),
            ("phases", 0),
            ("quiet_years", 0),
            ("warm_up", 0),
            ("tokens_per_order", 1),
            ("workers", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"{KEY}.{name} = {value!r}: not a whole number of at least {least}", f"for example {least + 1}"
                )
        if self.clone not in ("position", "deepcopy"):
            raise ConfigError(f"{KEY}.clone = {self.clone!r}: no such way", "one of position, deepcopy")
        if self.states and self.warm_up:
            raise ConfigError(f"{KEY}.warm_up: `states` says where games begin", "leave one of the two out")
        if self.clone == "deepcopy" and self.workers:
            raise ConfigError(
                f"{KEY}.workers: a game object of its own stays in its process", "set clone to position, or workers to 0"
            )

    @classmethod
    def of(cls, params: dict[str, object]) -> Settings:
        """The settings that these params say. Raises ConfigError for one that there is not."""
        known = [field.name for field in fields(cls)]
        for name in params:
            if name not in known:
                raise ConfigError(f"{KEY}.{name}: the environment diplomacy has no such param", f"one of {', '.join(known)}")
        return cls(**params)  # type: ignore[arg-type]
