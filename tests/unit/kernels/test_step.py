"""The end of a decode step in one launch, beside the launches that it stands for."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass

import pytest
import torch
from torch import Tensor

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.kernels.decode import sampling  # noqa: E402
from redline.kernels.decode.step import begin_step, end_step, sample_and_end  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CUDA else []
DEVICE = "cuda" if ON_CUDA else "cpu"
ROWS, VOCAB, STEPS, STOPS, LAST = 7, 200, 4, 4, 8
DEAD = ROWS - 1
"""The row that fills a batch up."""


@dataclass(slots=True)
class Rows:
    alive_R: Tensor
    next_token_R: Tensor
    position_R: Tensor
    sampled_R: Tensor
    limit_R: Tensor
    streams_R: Tensor
    temperature_R: Tensor
    stops_RS: Tensor
    recent_RO: Tensor

    @classmethod
    def some(cls) -> Rows:
        """One that may sample two more tokens, one that never sampled, one with stops, a greedy one, one that ended before."""
        random = torch.Generator().manual_seed(0)
        rows = cls(
            alive_R=torch.tensor([True, True, True, True, False, True, False]),
            next_token_R=torch.arange(ROWS),
            position_R=10 + torch.arange(ROWS),
            sampled_R=torch.tensor([3, 0, 5, 1, 9, 2, 0]),
            limit_R=torch.tensor([5, 100, 100, 100, 9, 100, 1]),
            streams_R=torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=random),
            temperature_R=torch.tensor([1.0, 0.7, 1.0, 0.0, 1.0, 1.3, 1.0]),
            stops_RS=torch.full((ROWS, STOPS), -1),
            recent_RO=torch.full((ROWS, LAST), -1, dtype=torch.int32),
        )
        rows.stops_RS[2] = torch.tensor([7, 3, 150, -1])
        return cls(*(tensor.to(DEVICE) for tensor in astuple(rows)))


def steps(logits_TBV: Tensor, batch: list[int], *, at_once: bool) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """The rows after some steps of a batch, and what was sampled."""
    rows, rows_B = Rows.some(), torch.tensor(batch, device=DEVICE)
    launched_R = torch.zeros(ROWS, dtype=torch.int64, device=DEVICE)
    tokens_SB = torch.full((STEPS, len(batch)), -5, device=DEVICE)
    logprobs_SB = torch.full((STEPS, len(batch)), 5.0, device=DEVICE)
    inputs = begin_step(rows, rows_B)
    for logits_BV in logits_TBV:
        if at_once:
            sample_and_end(rows, rows_B, inputs, logits_BV, launched_R, (tokens_SB, logprobs_SB))
            begun = begin_step(rows, rows_B)
            is_live_B = begun.positions_B >= 0
            for own_B, expected_B in zip(astuple(inputs), astuple(begun), strict=True):
                assert own_B[is_live_B].tolist() == expected_B[is_live_B].tolist()
            assert inputs.positions_B.tolist() == begun.positions_B.tolist(), "of a row that ends it is said here too"
            continue
        inputs = begin_step(rows, rows_B)
        tokens_B, logprobs_B = torch.empty_like(inputs.tokens_B), torch.empty_like(inputs.temperature_B)
        sampling.sample_plain(logits_BV, inputs.temperature_B, inputs.streams_B, inputs.counters_B, tokens_B, logprobs_B)
        end_step(rows, rows_B, tokens_B, logprobs_B, launched_R, (tokens_SB, logprobs_SB))
    return rows, launched_R, tokens_SB, logprobs_SB


@pytest.mark.parametrize("chunk", [64, 4096])
@pytest.mark.parametrize("batch", [[0, 1, 2, 3, 4, 5], [5, 2, DEAD, DEAD], [3]], ids=str)
def test_one_launch_ends_a_step_as_two_do(batch: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps, each of what the last one left; rows end by a limit, a stop, a NaN, and stay as they are after it."""
    monkeypatch.setattr(sampling, "CHUNK", chunk)
    logits_TBV = torch.randn(STEPS, len(batch), VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    if 2 in batch:
        logits_TBV[1, batch.index(2), 150] = 50.0
    if 5 in batch:
        logits_TBV[2, batch.index(5), 9] = torch.nan
    together, apart = steps(logits_TBV, batch, at_once=True), steps(logits_TBV, batch, at_once=False)
    for own, expected in zip([*astuple(together[0]), *together[1:]], [*astuple(apart[0]), *apart[1:]], strict=True):
        assert (
            torch.equal(own.nan_to_num(-7.0), expected.nan_to_num(-7.0))
            if own.is_floating_point()
            else torch.equal(own, expected)
        )
    ended = {0, 2, 5} & set(batch)
    assert not together[0].alive_R[list(ended)].any()
    assert together[1][list(ended)].tolist() == [{0: 2, 2: 2, 5: 3}[row] for row in ended]
