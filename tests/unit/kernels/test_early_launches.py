"""Launches that begin before the one in front of them has ended: every program waits for it first, compiled for Hopper here.

What is in front of that one has ended only if its programs have waited in their turn, those without work included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[2]
PROGRAM = """
import sys
from support.compiled import waits_first
from redline.kernels.decode import few_rows, shared_prefix
from redline.kernels.decode import attention
from redline.kernels import decoder_steps

half, wide, whole, small = "*bf16", "*fp32", "*i64", "*i32"
batch = {"positions": whole, "prefixes": small, "peaks": wide, "totals": wide, "sums": wide, "B": "i32"}
cache = {"keys": half, "values": half, "scale": "fp32", "rows": small, "block_table": small, "table_stride": "i32"}
heads = {"H": 14, "K": 2, "D": 64, "EARLY": early}
decoded = {"heads": half, "eps": "fp32", "rotary": half, "num_positions": "i32", "out": half, **batch, **cache}
plain = {"q_norm": None, "k_norm": None, "BLOCK_Q": 16, "BLOCK_N": 32, "PAGE": 16, **heads}
alone = {**plain, "queries": None, "prefixes": None}
norm = {"x": half, "delta": half, "weight": half, "x_sum": half, "normed": half, "eps": "fp32"}
groups = {"queries": half, "starts": small, "sizes": small, "lengths": small}
product = {"x": half, "weight": half, "bias": half, "out": half, "parts": wide, "arrived": small, "B": "i32", "N": "i32"}
cut = {"K": 896, "PARTS": 4, "TURNS": 2, "GATED": False, "BLOCK_B": 16, "BLOCK_N": 16, "BLOCK_K": 128, "EARLY": early}
kernels = {
    "norm": (decoder_steps._add_rms_norm, norm, {"E": 896, "BLOCK": 1024, "EARLY": early}),
    "silu": (decoder_steps._silu_mul, {"gate_up": half, "out": half}, {"I": 4864, "BLOCK": 1024, "EARLY": early}),
    "one split": (attention._decode, decoded, {
        **alone, "arrived": None, "peaks": None, "totals": None, "sums": None, "SPLITS": 1}),
    "several splits": (attention._decode, decoded, {**alone, "arrived": None, "SPLITS": 4}),
    "merging splits": (attention._decode, {**decoded, "arrived": small}, {**alone, "SPLITS": 4}),
    "beside a prefix": (attention._decode, {**decoded, "queries": half}, {**plain, "arrived": None, "SPLITS": 2}),
    "prefix": (shared_prefix.shared_prefix, {**groups, **batch, **cache}, {
        **heads, "PAGE": 16, "FIRST_PART": 2, "SPLITS": 2, "BLOCK_M": 16, "BLOCK_Q": 64, "BLOCK_N": 64}),
    "merge": (attention._merge, {"out": half, **batch}, {**heads, "SPLITS": 2, "PARTS": 4}),
    "product": (few_rows._product, product, cut),
}
kernel, types, constants = kernels[sys.argv[1]]
sys.exit(0 if waits_first(kernel, types, constants, launch_pdl=early) else 3)
"""
KERNELS = ("norm", "silu", "one split", "several splits", "merging splits", "beside a prefix", "prefix", "merge", "product")


def ends_with(name: str, early: bool) -> int:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    program = f"early = {early}\n{PROGRAM}"
    return subprocess.run([sys.executable, "-c", program, name], env=environment, timeout=120, check=False).returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_program_waits_before_it_touches_memory(name: str) -> None:
    assert ends_with(name, early=True) == 0


def test_a_kernel_that_does_not_wait_is_found_out() -> None:
    assert ends_with("silu", early=False) == 3
