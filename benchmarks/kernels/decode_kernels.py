"""The kernels of a decode step on a GPU: each checked against float32, then timed inside a CUDA graph against its bound.

    PYTHONPATH=src python benchmarks/kernels/decode_kernels.py --save benchmarks/results/h200/kernels.json

All of them are bound by memory. The bound of attention is the bytes of the keys and values it must read, at the rate of a large
device-to-device copy here. Norm and activation find their inputs in the L2 cache, where the product before them left them, so
they may beat the same bound. Attention takes turns among caches that are several times the L2, and finds nothing there.

Leaves out: anything but bfloat16, rows of different lengths, and the engine around the kernels. Sweeps the tiles that
`decode_attention.TILES` chooses from; `--limit` ends the sweeps early. The last thing printed is a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from graph_timing import CALLS, copy_bandwidth, seconds_per_call
from torch import Tensor

from redline.kernels.decode import DecodeBatch, SharedPrefixes, Tile, copy_blocks
from redline.kernels.decode.attention import decode_attention
from redline.kernels.decoder_steps import add_rms_norm, silu_mul
from redline.models.layers.rope import rotary_table, rotate
from redline.telemetry import describe_environment

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
EPS = 1e-6
MODELS = {"0.5B": (14, 2, 64), "7B": (28, 4, 128)}
"""Query heads, key heads and head size of Qwen 2.5."""
TILES = {
    64: [Tile(32, 1, 3), Tile(32, 2, 3), Tile(32, 2, 4), Tile(64, 1, 3), Tile(64, 2, 2), Tile(64, 2, 3), Tile(128, 4, 3)],
    128: [Tile(32, 2, 3), Tile(32, 4, 3), Tile(32, 4, 4), Tile(64, 2, 3), Tile(64, 4, 2), Tile(64, 4, 3), Tile(128, 4, 2)],
}


@dataclass
class Step:
    """One decode step of B rows that each have `context` tokens in the cache, of which groups of rows share a prefix."""

    model: str
    rows: int
    context: int
    page: int = 64
    layers: int = 4
    group: int = 1
    shared_blocks: int = 0
    heads_BND: Tensor = field(init=False)
    caches: Tensor = field(init=False)
    """[layers, 2, blocks, K, page, D]."""

    def __post_init__(self) -> None:
        (H, K, D), B = MODELS[self.model], self.rows
        per_row = self.context // self.page + 1
        self.heads_BND = torch.randn(B, H + 2 * K, D, device=DEVICE, dtype=DTYPE)
        self.caches = torch.empty(self.layers, 2, B * per_row, K, self.page, D, device=DEVICE, dtype=DTYPE)
        for plane in self.caches.flatten(0, 1):
            plane.normal_()
        self.table = torch.randperm(B * per_row, device=DEVICE).view(B, per_row).int()
        self.table[:, : self.shared_blocks] = self.table[:: self.group, : self.shared_blocks].repeat_interleave(self.group, 0)
        self.positions = torch.full((B,), self.context, device=DEVICE)
        self.lines = torch.arange(B, device=DEVICE, dtype=torch.int32)
        frequencies, positions = (
            1e6 ** (-torch.arange(0, D, 2, device=DEVICE) / D),
            torch.arange(self.context + 1, device=DEVICE),
        )
        self.rotary = torch.stack(rotary_table(frequencies, 1.0, positions, DTYPE)).squeeze(2)

    def poison(self) -> Step:
        """NaN wherever no token was written yet."""
        self.caches[:, :, self.table[:, -1].long(), :, self.context % self.page :] = torch.nan
        return self

    @property
    def bytes(self) -> int:
        """Keys and values of one layer, a shared prefix once per group."""
        _, K, D = MODELS[self.model]
        shared = self.shared_blocks * self.page
        return (self.rows * (self.context - shared) + self.rows // self.group * shared) * K * D * 2 * DTYPE.itemsize

    def calls(
        self, splits: int = 1, prefixes: SharedPrefixes | None = None, tile: Tile | None = None
    ) -> list[Callable[[], Tensor]]:
        """One per layer."""
        batch = DecodeBatch(self.positions, self.lines, self.table, splits, prefixes)

        def call(layer: int) -> Callable[[], Tensor]:
            return lambda: decode_attention(self.heads_BND, *self.caches[layer], batch, self.rotary, tile=tile)

        return [call(layer) for layer in range(self.layers)]

    def prefixes(self, num_splits: int) -> SharedPrefixes:
        starts = torch.arange(0, self.rows, self.group, device=DEVICE, dtype=torch.int32)
        lengths = torch.full_like(starts, self.shared_blocks * self.page)
        lengths_B = lengths.repeat_interleave(self.group)
        return SharedPrefixes(starts, torch.full_like(starts, self.group), lengths, lengths_B, self.group, num_splits)

    def expected(self, layer: int) -> Tensor:
        """In float32, through torch's attention over gathered blocks."""
        H, K, _ = MODELS[self.model]
        table = self.rotary[:, self.positions].unsqueeze(2)
        q, k, v = self.heads_BND.split([H, K, K], dim=1)
        keys, values = (
            torch.cat((cache[self.table.long()].transpose(1, 2).flatten(2, 3)[:, :, : self.context], new[:, :, None]), dim=2)
            for cache, new in zip(self.caches[layer], (rotate(k, *table), v), strict=True)
        )
        q = rotate(q, *table).float()[:, :, None]
        return F.scaled_dot_product_attention(q, keys.float(), values.float(), enable_gqa=True)[:, :, 0]


class Report:
    """What was measured so far; saved after every line, so that a run cut short is not lost."""

    def __init__(self, save: Path | None, limit_s: float) -> None:
        self._save = save
        self._ends = time.monotonic() + limit_s
        identity = describe_environment()
        identity["packages"]["triton"] = metadata.version("triton")
        self._document: dict[str, Any] = {"case": "kernels", "identity": identity, "results": []}
        self.bandwidth = 0.0

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self._ends

    def add(self, name: str, samples: list[float], num_bytes: int) -> float:
        value, bound = statistics.median(samples), num_bytes / self.bandwidth
        why = f"{num_bytes / 1e6:.1f} MB at the {self.bandwidth / 1e12:.2f} TB/s of a copy here"
        result = {"name": name, "value": value, "unit": "s", "samples": samples, "bound": {"value": bound, "why": why}}
        self._document["results"].append(result | {"fraction_of_bound": bound / value})
        if self._save:
            self._save.parent.mkdir(parents=True, exist_ok=True)
            self._save.write_text(json.dumps(self._document, indent=1) + "\n")
        return value

    def table(self) -> str:
        rows = [(r["name"], r["value"] * 1e6, r["fraction_of_bound"]) for r in self._document["results"]]
        return "\n".join(f"{name:56s} {value:9.2f} µs {fraction:6.0%}" for name, value, fraction in rows)


# ── checks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(name: str, out: Tensor, expected: Tensor) -> None:
    """‖out − expected‖ / ‖expected‖ of bfloat16 against float32; NaN fails."""
    error = ((out.float() - expected).norm() / expected.norm()).item()
    print(f"check {name:50s} {error:.1e}", flush=True)
    if not error < 1e-2:
        raise SystemExit(f"{name}: relative error {error}")


def check_all() -> None:
    for model, context, page in itertools.product(MODELS, (1, 127, 128, 129), (16, 64)):
        step = Step(model, rows=6, context=context, page=page, layers=1)
        expected = step.expected(0)
        for splits in (1, 3):
            out = step.poison().calls(splits)[0]()
            check(f"attention {model} context {context} page {page} splits {splits}", out, expected)
    for model, group, splits in itertools.product(MODELS, (2, 16), (1, 2)):
        step = Step(model, rows=32, context=300, layers=1, group=group, shared_blocks=3)
        expected = step.expected(0)
        out = step.poison().calls(splits, step.prefixes(splits))[0]()
        check(f"attention {model}, {group} rows share a prefix, splits {splits}", out, expected)
    x, delta = (torch.randn(512, 896, device=DEVICE, dtype=DTYPE) for _ in range(2))
    weight = torch.randn(896, device=DEVICE, dtype=DTYPE)
    total, normed = add_rms_norm(x, delta, weight, EPS)
    check("add", total, (x + delta).float())
    check("rms_norm", normed, F.rms_norm((x + delta).float(), (896,), weight.float(), EPS))
    gate_up = torch.randn(512, 2 * 4864, device=DEVICE, dtype=DTYPE)
    gate, up = gate_up.float().chunk(2, dim=-1)
    check("silu_mul", silu_mul(gate_up), F.silu(gate) * up)
    caches = torch.randn(3, 2, 8, 2, 64, 64, device=DEVICE, dtype=DTYPE)
    expected = caches.clone()
    expected[:, :, [1, 2]] = caches[:, :, [6, 7]]
    copy_blocks(caches, torch.tensor([6, 7, -1], device=DEVICE), torch.tensor([1, 2, 3], device=DEVICE))
    check("copy_blocks", caches, expected.float())


# ── timings ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def time_small_kernels(report: Report) -> None:
    for E, inner in ((896, 4864), (3584, 18944)):
        x, delta = (torch.randn(512, E, device=DEVICE, dtype=DTYPE) for _ in range(2))
        weight, gate_up = torch.randn(E, device=DEVICE, dtype=DTYPE), torch.randn(512, 2 * inner, device=DEVICE, dtype=DTYPE)
        norms = seconds_per_call([lambda x=x, delta=delta, weight=weight: add_rms_norm(x, delta, weight, EPS)] * CALLS)
        report.add(f"add_rms_norm [512, {E}]", norms, 4 * x.nbytes)
        activations = seconds_per_call([lambda gate_up=gate_up: silu_mul(gate_up)] * CALLS)
        report.add(f"silu_mul [512, 2 x {inner}]", activations, gate_up.nbytes * 3 // 2)


def time_copies(report: Report) -> None:
    caches = torch.randn(24, 2, 2048, 2, 64, 64, device=DEVICE, dtype=DTYPE)
    source, target = torch.randperm(2048, device=DEVICE)[:1024].view(2, 512)
    num_bytes = 2 * 512 * caches[:, :, 0].nbytes
    report.add(
        "copy_blocks, 512 blocks of 24 layers", seconds_per_call([lambda: copy_blocks(caches, source, target)]), num_bytes
    )

    def with_torch() -> None:
        caches.index_copy_(2, target, caches.index_select(2, source))

    report.add("the same with index_select and index_copy_", seconds_per_call([with_torch]), num_bytes)


def time_attention(report: Report, cases: Iterator[tuple[str, Step, list[Callable[[], Tensor]]]]) -> None:
    for name, step, calls in cases:
        if not report.has_time:
            print("out of time; the rest of this sweep is left out", flush=True)
            return
        try:
            value = report.add(name, seconds_per_call(calls), step.bytes)
        except Exception as error:  # a tile that does not fit must not end the sweep
            print(f"{name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            torch.cuda.synchronize()
            continue
        print(f"{name:56s} {value * 1e6:9.2f} µs {step.bytes / value / 1e12:5.2f} TB/s", flush=True)


def large_batches() -> Iterator[tuple[str, Step, list[Callable[[], Tensor]]]]:
    """The tiles as chosen, at the contexts of the goals; then every page size."""
    for model, context, page in (
        *itertools.product(MODELS, (512, 1024), (64,)),
        *itertools.product(MODELS, (512,), (16, 32, 128)),
    ):
        step = Step(model, 512, context, page)
        yield f"attention {model} B=512 context {context} page {page}", step, step.calls()


def tiles(page: int) -> Iterator[tuple[str, Step, list[Callable[[], Tensor]]]]:
    for model in MODELS:
        step = Step(model, 512, 512, page)
        for tile in TILES[MODELS[model][2]]:
            yield f"attention {model} B=512 context 512 page {page} tile {tuple(tile)}", step, step.calls(tile=tile)


def small_batches() -> Iterator[tuple[str, Step, list[Callable[[], Tensor]]]]:
    for model, context in itertools.product(MODELS, (512, 1024)):
        step = Step(model, 64, context, layers=16)
        for splits in (1, 2, 4, 8):
            yield f"attention {model} B=64 context {context} splits {splits}", step, step.calls(splits)
        if model == "0.5B":
            yield f"attention {model} B=64 context {context} tile (128, 4, 3)", step, step.calls(tile=Tile(128, 4, 3))


def shared_prefixes() -> Iterator[tuple[str, Step, list[Callable[[], Tensor]]]]:
    for model, (group, prompt) in itertools.product(MODELS, ((8, 512), (16, 1024))):
        step = Step(model, 512, prompt + 256, group=group, shared_blocks=prompt // 64)
        name = f"attention {model} B=512 {group} x ({prompt} + 256)"
        yield f"{name} through L2", step, step.calls()
        for splits in (1, 2, 4):
            yield f"{name} prefix once, splits {splits}", step, step.calls(1, step.prefixes(splits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="where to write the JSON document")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further case is begun")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.save, options.limit)
    with torch.inference_mode():
        check_all()
        report.bandwidth = copy_bandwidth()
        time_small_kernels(report)
        time_attention(report, large_batches())
        time_attention(report, small_batches())
        time_attention(report, shared_prefixes())
        time_copies(report)
        for page in (64, 16):
            time_attention(report, tiles(page))
    print(f"\ncopy: {report.bandwidth / 1e12:.2f} TB/s\n{report.table()}")


if __name__ == "__main__":
    main()
