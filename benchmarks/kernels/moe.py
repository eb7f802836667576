"""A mixture of experts on a GPU: kernels checked against float32, timed against their bounds, and a decode step of the engine.

    PYTHONPATH=src python benchmarks/kernels/moe.py --save benchmarks/results/h200/moe.json

The shape is Qwen3-30B-A3B's, with 12 of its 48 layers: 128 experts of which a token takes 8, hidden size 2048, inner size 768.
Decoding is bound by reading weights. A step of B rows reads the experts that any row chose, 128 · (1 − (1 − 8/128)^B) of them
if routers are even, the attention's weights and the head, at the rate of a large device-to-device copy here. Weights are
random, and so is the routing.

`--sweep` also times the tilings that `products.TILINGS` could choose from; `--limit` ends the sweep early. Leaves out anything
but bfloat16, long contexts and training's speed. The last thing printed is a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from graph_timing import copy_bandwidth, seconds_per_call
from torch import Tensor
from transformers import Qwen3MoeConfig

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.kernels.experts.layer import ExpertWeights, lay_out, run_experts
from redline.kernels.experts.products import SINGLE, TILINGS, Tiling, combine, down_products, gate_up_products
from redline.kernels.experts.routing import Choices, Tiles, choose_experts, tiles_of
from redline.models.decoder import Decoder
from redline.models.files.hf import empty_decoder
from redline.models.layers.experts import Experts, grouped_product
from redline.models.spec import ExpertsSpec
from redline.telemetry import describe_environment
from redline.types import GenerateRequest, SamplingParams

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
X, C, E, I = 128, 8, 2048, 768  # noqa: E741
LAYERS = 12
TIMED_LAYERS = 4
"""Layers whose weights kernels take turns with: 4.8 GB, of which no cache holds anything."""
ROWS = (1, 64, 512)
PROMPT, FEW, MANY = 16, 64, 320
"""Tokens of a prompt, and new tokens of the two runs whose difference is a step."""
SWEPT = [
    Tiling(columns, *rest)
    for columns, rest in itertools.product((16, 32, 64, 128), ((64, 4, 4), (128, 4, 3), (128, 4, 4), (256, 4, 3), (128, 8, 3)))
]


class Report:
    """What was measured so far; saved after every line, so that a run cut short is not lost."""

    def __init__(self, save: Path | None) -> None:
        self._save = save
        identity = describe_environment()
        identity["packages"]["triton"] = metadata.version("triton")
        self._document: dict[str, Any] = {"case": "moe", "identity": identity, "results": []}
        self.bandwidth = 0.0

    def add(self, name: str, samples: list[float], num_bytes: float) -> float:
        value, bound = statistics.median(samples), num_bytes / self.bandwidth
        why = f"{num_bytes / 1e6:.1f} MB at the {self.bandwidth / 1e12:.2f} TB/s of a copy here"
        result = {"name": name, "value": value, "unit": "s", "samples": samples, "bound": {"value": bound, "why": why}}
        self._document["results"].append(result | {"fraction_of_bound": bound / value})
        if self._save:
            self._save.parent.mkdir(parents=True, exist_ok=True)
            self._save.write_text(json.dumps(self._document, indent=1) + "\n")
        print(f"{name:64s} {value * 1e6:10.2f} µs {bound / value:6.0%} of the bound", flush=True)
        return value

    def table(self) -> str:
        rows = [
            (r["name"], r["value"] * 1e6, r["bound"]["value"] * 1e6, r["fraction_of_bound"]) for r in self._document["results"]
        ]
        return "\n".join(f"{name:64s} {value:10.2f} µs {bound:10.2f} µs {part:6.0%}" for name, value, bound, part in rows)


def random_weights() -> ExpertWeights:
    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_(std=shape[-1] ** -0.5)

    return ExpertWeights(normal(X, 2 * I, E), normal(X, E, I))


def used_experts(rows: int) -> float:
    """Experts that any of so many rows chooses, if routers are even."""
    return X * (1 - (1 - C / X) ** rows)


# ── checks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(name: str, out: Tensor, expected: Tensor) -> None:
    """‖out − expected‖ / ‖expected‖ of bfloat16 against float32; NaN fails."""
    error = ((out.float() - expected).norm() / expected.norm()).item()
    print(f"check {name:58s} {error:.1e}", flush=True)
    if not error < 1e-2:
        raise SystemExit(f"{name}: relative error {error}")


def expected_layer(x_TE: Tensor, chosen: Choices, weights: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    """In float32, expert by expert: what gate and up give, the output of each pair, and their sum."""
    T, experts_P = len(x_TE), chosen.experts_TC.flatten().long()
    inner_PI, out_PE = torch.empty(T * C, I, device=DEVICE), torch.empty(T * C, E, device=DEVICE)
    for expert in range(X):
        pairs = (experts_P == expert).nonzero().flatten()
        gate, up = (x_TE[pairs // C].float() @ weights.gate_up_XIE[expert].float().T).chunk(2, dim=1)
        inner_PI[pairs] = F.silu(gate) * up
        out_PE[pairs] = inner_PI[pairs] @ weights.down_XEI[expert].float().T
    return inner_PI, out_PE, (out_PE.view(T, C, E) * chosen.weights_TC[..., None]).sum(dim=1)


def check_routing(rows: int) -> None:
    logits = torch.randn(rows, X, device=DEVICE, dtype=DTYPE)
    chosen = choose_experts(logits, C, normalized=True)
    values, experts = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    same = (chosen.experts_TC == experts[:, :C]).float().mean().item()
    print(f"check {f'experts of {rows} rows that torch chooses too':58s} {same:.4f}", flush=True)
    if same < 0.999:  # a softmax whose sum is added up in another order may round two neighbours the other way
        raise SystemExit("experts differ from torch's")
    check(f"weights of {rows} rows", chosen.weights_TC, values[:, :C] / values[:, :C].sum(dim=-1, keepdim=True))
    tiles = tiles_of(chosen, 16)
    assert tiles.pairs is not None
    pairs, flat = tiles.pairs.view(-1, 16).cpu(), chosen.experts_TC.flatten().cpu()
    there = pairs < rows * C
    if sorted(pairs[there].tolist()) != list(range(rows * C)):
        raise SystemExit(f"{rows} rows: pairs are lost, or in two tiles")
    if not torch.equal(flat[pairs[there].long()], tiles.experts.cpu()[:, None].expand_as(pairs)[there]):
        raise SystemExit(f"{rows} rows: a pair is in another expert's tile")


def check_layer(rows: int, weights: ExpertWeights) -> None:
    x, logits = torch.randn(rows, E, device=DEVICE, dtype=DTYPE), torch.randn(rows, X, device=DEVICE, dtype=DTYPE)
    chosen = choose_experts(logits, C, normalized=True)
    inner, out, total = expected_layer(x, chosen, weights)
    tiles = lay_out(chosen, X)
    found = gate_up_products(x, weights.gate_up_XIE, tiles, C)
    check(f"gate and up of {rows} rows, tiles of {tiles.size}", found, inner)
    check(f"down of {rows} rows", down_products(found, weights.down_XEI, tiles), out)
    check(f"sums of {rows} rows", combine(out.to(DTYPE), chosen.weights_TC), total)
    layer = run_experts(x, logits, weights, C, normalized=True)
    check(f"a layer of {rows} rows", layer, total)
    if not torch.equal(layer, run_experts(x, logits, weights, C, normalized=True)):
        raise SystemExit("the same rows twice are not the same bits")


def check_training() -> None:
    """torch's grouped products, and a layer's gradients in bfloat16 against float32."""
    ends = torch.tensor([0, 5, 5, 64], device=DEVICE, dtype=torch.int32)
    x, weight = torch.randn(64, 256, device=DEVICE), torch.randn(4, 128, 256, device=DEVICE) / 16
    for dtype in (torch.float32, DTYPE):
        a, b = (given.detach().clone().to(dtype).requires_grad_() for given in (x, weight))
        out = grouped_product(a, b, ends)
        out.backward(torch.ones_like(out))
        if dtype == torch.float32:
            expected = out.detach(), a.grad, b.grad
        else:
            for name, found, wide in zip(("outputs", "grad x", "grad weights"), (out, a.grad, b.grad), expected, strict=True):
                assert found is not None
                assert wide is not None
                check(f"grouped products in training: {name}", found.detach(), wide)
    torch.manual_seed(0)
    spec = ExpertsSpec(count=16, per_token=4, intermediate_size=128, normalized=True, layers=(0,))
    narrow = Experts(256, spec).to(DEVICE, DTYPE)
    for parameter in narrow.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    x = torch.randn(96, 256, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        sampled = narrow(x)
    trained = narrow(x)
    check("a layer's training against its sampling", trained.detach(), sampled.float())
    trained.square().sum().backward()
    for name, parameter in narrow.named_parameters():
        if parameter.grad is None or not bool(parameter.grad.isfinite().all()):
            raise SystemExit(f"the gradient of {name} is not finite")


# ── timings ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def time_kernels(report: Report, layers: list[ExpertWeights], sweep_until: float) -> None:
    for rows in ROWS:
        x, logits = torch.randn(rows, E, device=DEVICE, dtype=DTYPE), torch.randn(rows, X, device=DEVICE, dtype=DTYPE)
        chosen = choose_experts(logits, C, normalized=True)
        tiles, used = lay_out(chosen, X), len(chosen.experts_TC.unique())
        inner = gate_up_products(x, layers[0].gate_up_XIE, tiles, C)
        out = down_products(inner, layers[0].down_XEI, tiles)
        half = used * 2 * I * E * DTYPE.itemsize
        report.add(
            f"choose, {rows} rows",
            seconds_per_call([lambda given=logits: choose_experts(given, C, normalized=True)]),
            logits.nbytes,
        )
        if tiles.pairs is not None:
            laid = seconds_per_call([lambda c=chosen, s=tiles.size: tiles_of(c, s)])
            report.add(f"lay out in tiles of {tiles.size}, {rows} rows", laid, chosen.experts_TC.nbytes)
        gate_up = [lambda w=w, x=x, t=tiles: gate_up_products(x, w.gate_up_XIE, t, C) for w in layers]
        report.add(f"gate and up with silu, {rows} rows, {used} experts", seconds_per_call(gate_up), half)
        down = [lambda w=w, i=inner, t=tiles: down_products(i, w.down_XEI, t) for w in layers]
        report.add(f"down, {rows} rows", seconds_per_call(down), half / 2)
        report.add(f"combine, {rows} rows", seconds_per_call([lambda o=out, c=chosen: combine(o, c.weights_TC)]), out.nbytes)
        whole = [lambda w=w, x=x, given=logits: run_experts(x, given, w, C, normalized=True) for w in layers]
        report.add(f"all of a layer's experts, {rows} rows", seconds_per_call(whole), 1.5 * half)
        if time.monotonic() < sweep_until:
            sweep(report, layers, (x, inner, tiles), half, sweep_until)


def sweep(
    report: Report, layers: list[ExpertWeights], given: tuple[Tensor, Tensor, Tiles], num_bytes: int, until: float
) -> None:
    """Every tiling, each product alone; those that do not fit the device are left out."""
    x, inner, tiles = given
    for tiling in SWEPT:
        if time.monotonic() > until:
            print("out of time; the rest of the sweep is left out", flush=True)
            return
        name = f"{len(x)} rows, tiles of {tiles.size}, {tuple(tiling)}"
        gate_up = [lambda w=w, t=tiling: gate_up_products(x, w.gate_up_XIE, tiles, C, t) for w in layers]
        down = [lambda w=w, t=tiling: down_products(inner, w.down_XEI, tiles, t) for w in layers]
        for product, calls, size in (("gate and up", gate_up, num_bytes), ("down", down, num_bytes / 2)):
            try:
                report.add(f"  {product}, {name}", seconds_per_call(calls, 5), size)
            except Exception as error:  # a tiling that does not fit must not end the sweep
                print(f"  {product}, {name}: {type(error).__name__}", flush=True)
                torch.cuda.synchronize()


def random_decoder() -> Decoder:
    """12 layers of Qwen3-30B-A3B's shape."""
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=E, intermediate_size=6144, num_hidden_layers=LAYERS, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=X, num_experts_per_tok=C, moe_intermediate_size=I,
        norm_topk_prob=True, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    decoder = empty_decoder(config, DEVICE, DTYPE)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm"):
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(std=0.02)
    return decoder.requires_grad_(False)


def step_bytes(decoder: Decoder, rows: int) -> float:
    """What one decode step must read."""
    spec = decoder.spec
    one_expert = 3 * I * E * DTYPE.itemsize
    others = sum(
        p.nbytes for name, p in decoder.named_parameters() if ".experts.gate_up" not in name and ".experts.down" not in name
    )
    context = PROMPT + (FEW + MANY) / 2
    cached = rows * context * 2 * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize * LAYERS
    return others - decoder.embed.nbytes + LAYERS * used_experts(rows) * one_expert + cached


def time_engine(report: Report) -> None:
    decoder = random_decoder()
    for rows in ROWS:
        config = EngineConfig(
            max_num_seqs=rows, kv_cache_memory_bytes=8 * 2**30, max_model_len=1024, enable_prefix_caching=False
        )
        engine = NativeEngine(decoder, config)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(5, 150_000, PROMPT, dtype=np.int32) for _ in range(rows)]

        def seconds(new_tokens: int, engine: NativeEngine = engine, prompts: list[np.ndarray] = prompts) -> float:
            sampling = SamplingParams(max_tokens=new_tokens)
            torch.cuda.synchronize()
            started = time.perf_counter()
            found = engine.generate([GenerateRequest(prompt, sampling) for prompt in prompts])
            torch.cuda.synchronize()
            assert all(len(completion.token_ids) == new_tokens for [completion] in found), "a completion ended early"
            return time.perf_counter() - started

        seconds(FEW)
        samples = [(seconds(MANY) - seconds(FEW)) / (MANY - FEW) for _ in range(3)]
        report.add(f"a decode step of the engine, {LAYERS} layers, {rows} rows", samples, step_bytes(decoder, rows))
        del engine
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="where to write the JSON document")
    parser.add_argument("--sweep", action="store_true", help="also time other tilings")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which no further tiling is begun")
    options = parser.parse_args()
    torch.manual_seed(0)
    report, until = Report(options.save), time.monotonic() + options.limit if options.sweep else 0.0
    check_training()
    with torch.inference_mode():
        layers = [random_weights() for _ in range(TIMED_LAYERS)]
        for rows in (1, 7, 64, 512, 3000):
            check_routing(rows)
        for rows in (1, 4, 5, 64, 256, 512, 2048):
            check_layer(rows, layers[0])
        report.bandwidth = copy_bandwidth()
        time_kernels(report, layers, until)
        del layers
        torch.cuda.empty_cache()
        time_engine(report)
    print(f"\ncopy: {report.bandwidth / 1e12:.2f} TB/s; the tilings in use: {SINGLE}, {TILINGS}\n{report.table()}")


if __name__ == "__main__":
    main()
