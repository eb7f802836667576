"""Two inference engines as a profiler would see them, with a serialisation stall whose cost is known.

In every step the first rank of an engine schedules, packs an object that grows with batch × length, and sends it; the others
wait for it, unpack it and launch their CUDA graph late. The last rank unpacks slowest. All times are integers, in nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MS = 1_000_000
US = 1_000


@dataclass(slots=True, frozen=True)
class Call:
    pid: int
    tid: int
    name: str
    start: int
    end: int
    kind: str
    """range (record_function, NVTX), cuda or system."""
    correlation: int = 0
    payload: int | None = None


@dataclass(slots=True, frozen=True)
class Kernel:
    pid: int
    device: int
    stream: int
    name: str
    start: int
    end: int
    correlation: int
    graph: int
    """Identity of the graph that replays it."""
    node: int


@dataclass(slots=True)
class Recorded:
    """What a profiler recorded, and what is true of it."""

    ranks: dict[int, tuple[int, int]]
    """Process id → engine and rank."""
    calls: list[Call] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    packing: list[int] = field(default_factory=list)
    """Nanoseconds per step in which engine 0 packs."""
    unpacking: list[int] = field(default_factory=list)
    """Nanoseconds per step in which the last rank of engine 0 unpacks."""
    sizes: list[int] = field(default_factory=list)
    """Batch × length of each step of engine 0."""


@dataclass(slots=True)
class Scenario:
    engines: int = 2
    ranks: int = 4
    steps: int = 30
    batch: int = 32
    layers: int = 6
    ns_per_token: int = 25
    """What an object of one more token costs to pack."""
    inner_ranges: bool = True
    """Whether pickle and zmq are ranges of their own inside the broadcast."""
    in_names: bool = False
    """Whether the range of a step has batch and length in its name; else the payload of the broadcast has their product."""
    correlation: int = 100

    def record(self) -> Recorded:
        found = Recorded({1000 * (e + 1) + r: (e, r) for e in range(self.engines) for r in range(self.ranks)})
        for engine in range(self.engines):
            now = engine * 3_217 * US  # engines are not in step
            for step in range(self.steps):
                now = self._step(found, engine, step, now)
        return found

    def _step(self, found: Recorded, engine: int, step: int, begin: int) -> int:
        """Record one step. Returns when the next begins: when the device is done and the CPU knows."""
        size = self.batch * (200 + 40 * step + 900 * engine)
        pack = 200 * US + self.ns_per_token * size
        scheduled = begin + 30 * US + 150 * US
        packed = scheduled + 20 * US + pack
        sent = packed + 40 * US
        ready: list[int] = []
        for rank in range(self.ranks):
            unpack = 0 if rank == 0 else pack * (12 if rank == self.ranks - 1 else 10) // 10
            ready.append((sent if rank == 0 else sent + 10 * US + unpack) + 15 * US)
            self._calls(found, engine, rank, step, size, (begin, scheduled, packed, sent, ready[rank]))
        if engine == 0:
            found.packing.append(pack)
            found.unpacking.append(pack * 12 // 10)
            found.sizes.append(size)
        return self._replay(found, engine, step, ready)

    def _calls(self, found: Recorded, engine: int, rank: int, step: int, size: int, moments: tuple[int, ...]) -> None:
        begin, scheduled, packed, sent, ready = moments
        pid = 1000 * (engine + 1) + rank
        named = f"step batch={self.batch} seq_len={size // self.batch}" if self.in_names else "step"

        def add(name: str, start: int, end: int, kind: str = "range", payload: int | None = None) -> None:
            found.calls.append(Call(pid, pid + 7, name, start, end, kind, payload=payload))

        add(named, begin + 5 * US, ready + 12 * US)
        payload = None if self.in_names else size
        if rank == 0:
            add("schedule", begin + 30 * US, scheduled)
            add("gen_context", scheduled, ready - 5 * US)
            add("zmq_bcast_ctx_meta", scheduled + 15 * US, sent, payload=payload)
            if self.inner_ranges:
                add("pickle.dumps", scheduled + 20 * US, packed)
                add("zmq.send", packed, sent, "range")
        else:
            add("gen_context", begin + 30 * US, ready - 5 * US)
            add("zmq_bcast_ctx_meta", begin + 35 * US, ready - 10 * US, payload=payload)
            if self.inner_ranges:
                add("zmq.recv", begin + 40 * US, sent + 10 * US)
                add("pickle.loads", sent + 10 * US, ready - 15 * US)

    def _replay(self, found: Recorded, engine: int, step: int, ready: list[int]) -> int:
        """Record the launches and what the devices do: products apart, reductions together."""
        clock = [moment + 8 * US for moment in ready]
        correlation = self.correlation + 10 * step
        node = 0
        for _ in range(self.layers):
            node += 2
            begun = [at + 45 * US for at in clock]
            done = max(begun) + 18 * US
            for rank in range(self.ranks):
                where = (1000 * (engine + 1) + rank, engine * self.ranks + rank, 7)
                found.kernels.append(Kernel(*where, "gemm_bf16", clock[rank], begun[rank], correlation, 5, node))
                reduce = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                found.kernels.append(Kernel(*where, reduce, begun[rank] + US, done + rank * US // 2, correlation, 5, node + 1))
            clock = [done + 2 * US for _ in clock]
        for rank in range(self.ranks):
            pid = 1000 * (engine + 1) + rank
            found.calls.append(Call(pid, pid + 7, "cudaGraphLaunch", ready[rank], ready[rank] + 10 * US, "cuda", correlation))
            found.calls.append(
                Call(pid, pid + 7, "cudaStreamSynchronize", ready[rank] + 15 * US, done + 4 * US, "cuda", correlation + 1)
            )
        return done + 6 * US
