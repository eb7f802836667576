"""How fast a device is, and how much of that our code reaches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Efficiency:
    """How much of the device's rates the kernels of a phase reach."""

    products: float
    """Share of the device's operations per second that products reach."""
    memory: float
    """Share of its bandwidth that passes over memory reach."""
    layer_s: float
    """Seconds that a pass through a layer takes beyond both: small kernels, launches, the host."""
    how: str
    """Where the three numbers come from."""
    host_ahead: bool = False
    """The seconds of a layer are the host's, which works ahead of the device: they count only where it falls behind."""


@dataclass(slots=True, frozen=True)
class Rates:
    """The rates of one device."""

    flops: float
    bandwidth: float
    host_bandwidth: float
    generation: Efficiency
    training: Efficiency
    optimizer: Efficiency


@dataclass(slots=True, frozen=True)
class Cost:
    """Least seconds of some kernels, by what binds them, and passes through a layer."""

    products: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    """To the host or to other devices."""
    layers: float = 0.0
    """Passes through a layer: each has its overhead."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.products + other.products, self.memory + other.memory, self.link + other.link, self.layers + other.layers
        )

    def times(self, count: float) -> Cost:
        return Cost(self.products * count, self.memory * count, self.link * count, self.layers * count)

    def seconds(self, efficiency: Efficiency) -> float:
        return sum(self.parts(efficiency).values())

    def bound(self, efficiency: Efficiency) -> str:
        """What most of the time goes into."""
        parts = self.parts(efficiency)
        if efficiency.host_ahead and parts["small kernels and launches"]:
            return "small kernels and launches"
        return max(parts, key=lambda name: parts[name])

    def parts(self, efficiency: Efficiency) -> dict[str, float]:
        products, memory = self.products / efficiency.products, self.memory / efficiency.memory
        overhead = self.layers * efficiency.layer_s
        return {
            "products": products,
            "memory bandwidth": memory,
            "the link": self.link,
            "small kernels and launches": max(0.0, overhead - products - memory) if efficiency.host_ahead else overhead,
        }
