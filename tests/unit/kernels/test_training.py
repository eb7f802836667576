"""The fused operations of a training step against eager torch, values and gradients, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels import training
from redline.kernels.logprobs import SLOPES_TURN, summarise, to_gradient_, to_slopes_
from redline.kernels.training import ROWS_BLOCK, add_rms_norm, rotate_, select_rows, silu_mul
from redline.models.layers.rope import rotary_table, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
EPS = 1e-6
PROGRAMS = 8
"""Instead of the hundreds for a GPU: where there are more tokens, a program takes several."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, HALF])
WIDE = pytest.mark.parametrize("dtype", [torch.float32, *([HALF] if DEVICE == "cuda" else [])])  # not float16

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def check(found: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=limit, atol=limit * (expected.detach().abs().max().item() + 1e-6)
    )


def wide(*tensors: Tensor) -> list[Tensor]:
    """float32 copies with gradients of their own."""
    return [tensor.detach().float().requires_grad_() for tensor in tensors]


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(3, 96), (PROGRAMS + 9, 64)])
def test_a_residual_norm_has_eager_gradients(
    tokens: int, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "PROGRAMS", PROGRAMS)
    x, delta, weight = random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype), random(size, dtype=dtype)
    total, normed = add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    x_, delta_, weight_ = wide(x, delta, weight)
    total_ = x_ + delta_
    normed_ = F.rms_norm(total_, (size,), weight_, EPS)
    check(normed, normed_)
    on_total, on_normed = torch.randn_like(total), torch.randn_like(normed)
    torch.autograd.backward([total, normed], [on_total, on_normed])
    torch.autograd.backward([total_, normed_], [on_total.float(), on_normed.float()])
    for found, expected in zip((x, delta, weight), (x_, delta_, weight_), strict=True):
        check(found.grad, expected.grad)


def test_a_stream_without_a_delta_passes_by_its_norm() -> None:
    x, weight = random(5, 64), random(64)
    total, normed = add_rms_norm(x, None, weight, EPS)
    assert total is x
    x_, weight_ = wide(x, weight)
    (normed.sin().sum() + (3 * total).sum()).backward()
    (F.rms_norm(x_, (64,), weight_, EPS).sin().sum() + (3 * x_).sum()).backward()
    check(x.grad, x_.grad)
    check(weight.grad, weight_.grad)


@DTYPES
@pytest.mark.parametrize("size", [8, 1100])
def test_gate_and_up_have_eager_gradients(size: int, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * size, dtype=dtype)
    with torch.no_grad():
        gate_up[0, :4] = torch.tensor([30.0, -30.0, 0.0, 9.0])
    (gate_up_,) = wide(gate_up)
    gate, up = gate_up_.chunk(2, dim=-1)
    out, expected = silu_mul(gate_up), F.silu(gate) * up
    check(out, expected)
    incoming = torch.randn_like(out)
    out.backward(incoming)
    expected.backward(incoming.float())
    check(gate_up.grad, gate_up_.grad)


@DTYPES
def test_heads_are_rotated_in_place_and_their_gradients_back(dtype: torch.dtype) -> None:
    T, H, K, D = 7, 3, 2, 16
    start = random(T, (H + 2 * K) * D, dtype=dtype)
    cos, sin = rotary_table(10_000.0 ** (-torch.arange(0, D, 2, device=DEVICE) / D), 1.1, torch.arange(T, device=DEVICE), dtype)
    heads = rotate_(start * 1, H + K, cos, sin).view(T, -1, D)
    (start_,) = wide(start)
    qk, v = start_.view(T, -1, D).split([H + K, K], dim=1)
    expected = torch.cat([rotate(qk, cos.float(), sin.float()), v], dim=1)
    check(heads, expected)
    incoming = torch.randn_like(heads)
    heads.backward(incoming)
    expected.backward(incoming.float())
    check(start.grad, start_.grad)


@DTYPES
@pytest.mark.parametrize("size", [96, ROWS_BLOCK + 8])
def test_rows_that_are_wanted_more_than_once_sum_their_gradients(size: int, dtype: torch.dtype) -> None:
    x, index = random(7, size, dtype=dtype), torch.tensor([3, 0, 5, 3, 3, 6, 0], device=DEVICE)
    found = select_rows(x, index)
    assert torch.equal(found, x[index])
    grad = random(7, size, dtype=dtype).detach()
    found.backward(grad)
    check(x.grad, torch.zeros(7, size, device=DEVICE).index_add(0, index, grad.float()))
    assert not x.grad[[1, 2, 4]].any()


def test_rows_are_summed_in_the_order_they_are_wanted_in() -> None:
    x = random(2, 8)
    large = torch.tensor([1e8, -1e8, 1.0], device=DEVICE)
    for order in ([0, 1, 2], [2, 0, 1]):
        x.grad = None
        select_rows(x, torch.tensor([1, 1, 1], device=DEVICE)).backward(large[order, None].expand(3, 8).contiguous())
        assert x.grad[1].tolist() == [1.0 if order[0] == 0 else 0.0] * 8


@DTYPES
@pytest.mark.parametrize("vocabulary", [40, 8192, 10_000])
def test_a_pass_over_logits_gives_logprob_and_entropy(vocabulary: int, dtype: torch.dtype) -> None:
    logits, targets = 3 * random(4, vocabulary, dtype=dtype).detach(), torch.tensor([0, vocabulary - 1, 7, 7], device=DEVICE)
    logits[1, 3] = -torch.inf
    before = logits.clone()
    check_summary(summarise(logits, targets, 1.3), logits, targets, 1.3)
    assert torch.equal(logits, before)


def check_summary(found: tuple[Tensor, ...], logits: Tensor, targets: Tensor, temperature: float) -> None:
    log_p = torch.log_softmax(logits.float() / temperature, dim=-1)
    torch.testing.assert_close(found[0], log_p.gather(1, targets[:, None]).squeeze(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], torch.special.entr(log_p.exp()).sum(dim=-1), rtol=1e-4, atol=1e-4)


@WIDE
@pytest.mark.parametrize("vocabulary", [40, SLOPES_TURN, 2 * SLOPES_TURN + 1])
def test_logits_become_their_slopes(vocabulary: int, dtype: torch.dtype) -> None:
    logits, targets = 3 * random(4, vocabulary, dtype=dtype).detach(), torch.tensor([0, vocabulary - 1, 7, 7], device=DEVICE)
    logits[1, 3] = -torch.inf
    check_slopes(logits, targets, 1.3)


@WIDE
def test_slopes_of_logits_that_are_far_apart(dtype: torch.dtype) -> None:
    """Turns of the kernel's loop whose entries are far above all those before them, a little above, and all -inf."""
    logits = 3 * random(7, 3 * SLOPES_TURN, dtype=dtype).detach()
    second, third = slice(SLOPES_TURN, 2 * SLOPES_TURN), slice(2 * SLOPES_TURN, None)
    logits[0, second] += 300
    logits[1, third] += 40
    logits[2, second] += 42
    logits[2, third] += 84
    logits[3, : 2 * SLOPES_TURN] = -torch.inf
    logits[4, -1] = 1e4
    logits[5, 0] = 1e4
    logits[6] = 0
    logits[6, SLOPES_TURN] = 40  # so little above the first turn that the reference stays
    logits[6, -1] = 42  # too far: what has been written fades, but not to nothing
    for target in (SLOPES_TURN + 5, 3 * SLOPES_TURN - 1):
        check_slopes(logits.clone(), torch.full((7,), target, device=DEVICE), 1.0)


def check_slopes(logits: Tensor, targets: Tensor, temperature: float) -> None:
    before = logits.clone()
    logprobs, entropies, sums, tops = to_slopes_(logits, targets, temperature)
    check_summary((logprobs, entropies), before, targets, temperature)
    (logits_,) = wide(before)
    log_p = torch.log_softmax(logits_ / temperature, dim=-1)
    torch.testing.assert_close(tops, log_p.detach().max(dim=-1).values, rtol=1e-5, atol=1e-5)
    log_p.gather(1, targets[:, None]).sum().backward()
    shares = logits.float() / sums[:, None]  # row by row: the sums are far apart too
    torch.testing.assert_close(shares, -logits_.grad * temperature, rtol=TOLERANCE[logits.dtype], atol=1e-6)


@WIDE
def test_slopes_become_a_gradient_with_that_of_entropies(dtype: torch.dtype) -> None:
    logits, targets = 3 * random(4, 9000, dtype=dtype).detach(), torch.tensor([0, 8999, 7, 7], device=DEVICE)
    grads = torch.randn(4, device=DEVICE), torch.tensor([0.0, 0.5, 1.0, -2.0], device=DEVICE)
    (logits_,) = wide(logits)
    log_p = torch.log_softmax(logits_ / 0.7, dim=-1)
    entropies = -(log_p.exp() * log_p).sum(dim=-1)
    torch.autograd.backward([log_p.gather(1, targets[:, None]).squeeze(1), entropies], grads)
    to_gradient_(logits, targets, to_slopes_(logits, targets, 0.7), *grads, 0.7)
    check(logits, logits_.grad)


def test_the_gradient_of_a_small_entropy() -> None:
    """Of rows where one entry is almost certain, the target or another: its logprob is far smaller than half precision makes
    its probability wrong by."""
    logits, targets = random(4, 2 * SLOPES_TURN).detach(), torch.tensor([5, SLOPES_TURN + 9, 7, 7], device=DEVICE)
    certain = [5, SLOPES_TURN + 9, SLOPES_TURN + 8, 11]
    logits[range(4), certain] = torch.tensor([14, 16, 15.3, 17.7], device=DEVICE)
    (logits_,) = wide(logits)
    log_p = torch.log_softmax(logits_, dim=-1)
    (-(log_p.exp() * log_p).sum()).backward()
    summary = to_slopes_(logits, targets, 1.0)
    logits.copy_(logits.bfloat16())
    to_gradient_(logits, targets, summary, torch.zeros(4, device=DEVICE), torch.ones(4, device=DEVICE), 1.0)
    for found, expected in zip(logits, logits_.grad, strict=True):
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_no_tokens_are_no_work() -> None:
    nothing = torch.empty(0, 64, device=DEVICE, requires_grad=True)
    silu_mul(nothing).sum().backward()
    add_rms_norm(nothing, nothing, torch.ones(64, device=DEVICE, requires_grad=True), EPS)[1].sum().backward()
    assert nothing.grad is not None
    logits, nobody = nothing.detach(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    to_gradient_(logits, nobody, to_slopes_(logits, nobody, 1.0), logits[:, 0], logits[:, 0], 1.0)
    some = random(3, 64)
    select_rows(some, nobody).sum().backward()
    assert not some.grad.any()
