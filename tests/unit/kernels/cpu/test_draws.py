"""Draws by C beside those of torch; tests/unit/engine/native/running/test_sampler.py has what both must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.engine.native.running import sampler
from redline.engine.native.running.sampler import Sampled, SamplingRows, sample
from redline.kernels.cpu.draws import draws

if draws() is None:
    pytest.skip("no compiler here, or torch computes with other threads", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads")


def rows_of(count: int, seed: int) -> SamplingRows:
    """Temperatures from greedy to wide, at any number of any stream."""
    torch.manual_seed(seed)
    streams_B, counters_B = torch.randint(-(2**63), 2**63 - 1, (count,)), torch.randint(0, 2**40, (count,))
    return SamplingRows(torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(count)[:count], streams_B, counters_B)


def by_torch(logits_BV: Tensor, rows: SamplingRows) -> Sampled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "draws", lambda: None)
        return sample(logits_BV, rows)


@pytest.mark.parametrize("size", [1, 15, 16, 127, 128, 129, 1000, 49_152, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_logprobs_are_torchs(size: int, dtype: torch.dtype) -> None:
    rows = rows_of(40 if size < 2000 else 8, seed=size)
    logits_BV = (4 * torch.randn(len(rows.streams_B), size)).to(dtype)
    ours, reference = sample(logits_BV, rows), by_torch(logits_BV, rows)
    assert ours.tokens_B.tolist() == reference.tokens_B.tolist()
    torch.testing.assert_close(ours.logprobs_B, reference.logprobs_B, rtol=1e-6, atol=1e-5)


def test_logprobs_are_as_near_to_the_truth_as_float32_says() -> None:
    rows, logits_BV = rows_of(16, seed=1), 4 * torch.randn(16, 49_152)
    sampled = sample(logits_BV, rows)
    divisors_B1 = torch.where(rows.temperature_B > 0, rows.temperature_B, 1.0)[:, None].double()
    exact_BV = torch.log_softmax(logits_BV.double() / divisors_B1, dim=-1)
    exact_B = exact_BV.gather(1, sampled.tokens_B[:, None]).squeeze(1)
    torch.testing.assert_close(sampled.logprobs_B.double(), exact_B, rtol=1e-6, atol=4e-6)


def test_rows_may_lie_apart() -> None:
    rows, padded = rows_of(5, seed=0), torch.full((5, 320), 1e9)
    padded[:, :300] = torch.randn(5, 300)
    apart, together = sample(padded[:, :300], rows), sample(padded[:, :300].contiguous(), rows)
    assert torch.equal(apart.tokens_B, together.tokens_B)
    assert torch.equal(apart.logprobs_B, together.logprobs_B)
    assert int(apart.tokens_B.max()) < 300
