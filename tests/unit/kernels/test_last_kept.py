"""Top-k and top-p by kernel against the sampler, which sorts. Without a CUDA device in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.engine.native.running import sampler  # noqa: E402
from redline.engine.native.running.sampler import SamplingRows, sample  # noqa: E402
from redline.kernels.decode import last_kept, sampling  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CUDA else []
DEVICE = "cuda" if ON_CUDA else "cpu"
CHUNK = 64
"""Several chunks in a small vocabulary. To interpret a program takes tens of milliseconds, whatever its chunk."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_kept, "CHUNK", CHUNK)
    monkeypatch.setattr(sampling, "CHUNK", CHUNK)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_rows(top_k: list[int], top_p: list[float], temperature: float = 1.0) -> SamplingRows:
    count = len(top_k)
    random = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(1))
    return SamplingRows(
        torch.full((count,), temperature, device=DEVICE),
        random.to(DEVICE),
        torch.arange(count, device=DEVICE),
        top_k_B=torch.tensor(top_k, dtype=torch.int32, device=DEVICE) if any(top_k) else None,
        top_p_B=torch.tensor(top_p, device=DEVICE) if any(p < 1 for p in top_p) else None,
    )


def assert_same(values_BV: torch.Tensor, top_k: list[int], top_p: list[float]) -> None:
    """What the kernels keep is what the sampler keeps on a CPU, by sorting."""
    rows = as_rows(top_k, top_p)
    value_B1, id_B1 = last_kept.last_kept(values_BV.to(DEVICE), rows.top_k_B, rows.top_p_B)
    ids_V = torch.arange(values_BV.shape[1])
    value_B1, id_B1 = value_B1.cpu(), id_B1.cpu()
    kept_BV = ~((values_BV < value_B1) | ((values_BV == value_B1) & (ids_V > id_B1)))
    for name in ("top_k_B", "top_p_B", "temperature_B", "streams_B", "counters_B"):
        column = getattr(rows, name)
        setattr(rows, name, None if column is None else column.cpu())
    expected_BV = sampler._filtered(values_BV, rows) > -math.inf
    possible_BV = values_BV > -math.inf
    assert (kept_BV & possible_BV).tolist() == expected_BV.tolist()


def test_ties_limits_and_impossible_tokens_end_where_they_end_in_order() -> None:
    values = 3 * gaussian(4, 70)
    values[0] = torch.where(gaussian(70, seed=3) < 0, 0.0, -0.0)
    values[1] = torch.randint(0, 4, (70,), generator=torch.Generator().manual_seed(2)).float()
    values[2, 20:] = -math.inf
    assert_same(values, [7, 60, 40, 0], [1.0, 0.7, 0.999, 0.9])


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0])
def test_what_is_kept_is_what_sorting_keeps(size: int, spread: float) -> None:
    values = spread * gaussian(8, size, seed=size)
    values[::2] = values[::2].bfloat16().float()
    top_k = [1, size // 2, size - 1, size + 9, 0, 0, 0, 3]
    assert_same(values, top_k, [1.0, 0.5, 0.9999999, 0.3, 1e-6, 0.9, 0.9999999, 1.0])


@pytest.mark.slow
def test_each_filter_works_without_the_other() -> None:
    values = 2 * gaussian(4, 130)
    assert_same(values, [1, 2, 65, 130], [1.0] * 4)
    assert_same(values, [0] * 4, [0.1, 0.5, 0.99, 1.0])


@pytest.mark.slow
def test_the_constants_that_a_device_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert last_kept.CHUNK > CHUNK
    values = 2 * gaussian(4, 2 * last_kept.CHUNK + 77)
    values[3, ::5] = 1.0
    assert_same(values, [50, 0, 3000, 2000], [1.0, 0.9, 0.95, 1.0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
def test_a_faulty_row_keeps_everything_and_harms_no_other() -> None:
    values = gaussian(5, 70)
    rows = as_rows([3] * 5, [0.9] * 5)
    healthy = last_kept.last_kept(values.to(DEVICE), rows.top_k_B, rows.top_p_B)
    values[1, 40], values[2], values[3, 5] = math.nan, -math.inf, math.inf
    faulty = last_kept.last_kept(values.to(DEVICE), rows.top_k_B, rows.top_p_B)
    for one, other in zip(healthy, faulty, strict=True):
        assert one[[0, 4]].tolist() == other[[0, 4]].tolist()
    dropped = values.to(DEVICE) < faulty[0]
    assert not dropped[1, 40]
    assert not dropped[2].any()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_and_logprobs_are_those_of_the_sampler_without_kernels(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (3 * gaussian(6, 130)).bfloat16().to(DEVICE)
    rows = as_rows([5, 0, 40, 1, 0, 200], [1.0, 0.8, 0.9, 1.0, 1.0, 0.5], temperature)
    monkeypatch.setattr(sampler, "kernels_serve", lambda tensor: False)
    expected = sample(logits, rows)
    monkeypatch.setattr(sampler, "kernels_serve", lambda tensor: True)
    found = sample(logits, rows)
    assert found.tokens_B.tolist() == expected.tokens_B.tolist()
    torch.testing.assert_close(found.logprobs_B, expected.logprobs_B, rtol=1e-6, atol=5e-6)


COMPILED = """
from redline.kernels.decode import last_kept
from support.compiled import compile_kernel

rows = {"values_BV": "*fp32", "stride": "i64", "V": "i32", "peaks_B": "*fp32", "C": "i32"}
rows |= dict.fromkeys(("p_B", "reach_2BCD", "above_2BC", "tallies_BC3", "out_values_B"), "*fp32")
rows |= dict.fromkeys(("targets_B", "counted_B", "weighed_B", "kept_B"), "*fp64")
rows |= dict.fromkeys(("prefixes_PB", "floor_B", "keys_B", "out_ids_B"), "*i64")
sizes = {"N": last_kept.CHUNK, "PADDED_C": 64}
for weighed in (False, True):
    for index in (0, 1, last_kept.PASSES - 1):
        compile_kernel(last_kept._digit, rows, {"PASS": index, "WEIGHED": weighed, **sizes}, num_warps=last_kept.WARPS)
compile_kernel(last_kept._tally, rows, sizes, num_warps=last_kept.WARPS)
compile_kernel(last_kept._end_top_k, rows, {"PADDED_C": 64}, num_warps=last_kept.WARPS)
compile_kernel(last_kept._last, rows, sizes, num_warps=last_kept.WARPS)
"""


@pytest.mark.slow
def test_they_compile_for_a_device_that_is_not_there() -> None:
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env={**without, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
