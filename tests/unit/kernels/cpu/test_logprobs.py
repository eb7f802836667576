"""Logprobs, entropies and the gradient of logits in C, beside torch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.kernels.cpu import logprobs

if logprobs._functions(torch.float32) is None:
    pytest.skip("no compiler here serves", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads")

WIDTHS = (1, 3, 16, 511, 512, 513, 1500, 49_152)
DTYPES = (torch.float32, torch.bfloat16)


def drawn(rows: int, width: int, dtype: torch.dtype, spread: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + width)
    logits = spread * torch.randn(rows, width, generator=generator) + 7
    return logits.to(dtype), torch.randint(width, (rows,), generator=generator)


def exact(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits.double() / temperature).log_softmax(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), torch.special.entr(log_p.exp()).sum(dim=-1)


def gradient(logits: Tensor, targets: Tensor, temperature: float, logprobs_too: Tensor, entropies_too: Tensor | None) -> Tensor:
    """By these functions, of a copy."""
    own = logits.clone()
    summary = logprobs.summarise(own, targets, temperature)
    logprobs.to_gradient_(own, targets, summary, logprobs_too, entropies_too, temperature)
    return own


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("temperature", "spread"), [(1.0, 1.0), (0.7, 4.0), (1.3, 40.0)])
def test_values_and_gradients_are_those_of_float64(width: int, dtype: torch.dtype, temperature: float, spread: float) -> None:
    logits, targets = drawn(5, width, dtype, spread)
    found, entropies, normalizers = logprobs.summarise(logits, targets, temperature)
    expected, expected_entropies = exact(logits, targets, temperature)
    rounded = 3e-7 * max(1.0, float((logits.abs() / temperature).max()))
    assert (found - expected).abs().max() < rounded
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(normalizers.double(), (logits.double() / temperature).logsumexp(dim=-1), rtol=3e-7, atol=0)
    wide, directions = logits.double().requires_grad_(), torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    for wanted in (1, 2):
        sums = zip(exact(wide, targets, temperature)[:wanted], directions.double(), strict=False)
        (right,) = torch.autograd.grad(sum((value * way).sum() for value, way in sums), wide)
        ours = gradient(logits, targets, temperature, directions[0], directions[1] if wanted == 2 else None)
        allowed = rounded + (1e-5 if dtype is torch.float32 else 2**-8)  # a bfloat16 is off by half of that at most
        assert ((ours.double() - right).abs() <= allowed * right.abs() + 3e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_in_any_company(dtype: torch.dtype) -> None:
    logits, targets = drawn(7, 1300, dtype, 3.0)
    directions = torch.randn(2, 7)
    whole = [*logprobs.summarise(logits, targets, 0.9), gradient(logits, targets, 0.9, *directions)]
    for m in range(7):
        row, target = logits[m : m + 1].clone(), targets[m : m + 1]
        alone = [*logprobs.summarise(row, target, 0.9), gradient(row, target, 0.9, *directions[:, m : m + 1].clone())]
        assert all(torch.equal(one, all_[m : m + 1]) for one, all_ in zip(alone, whole, strict=True))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    logits, targets = drawn(64, 700, torch.bfloat16, 2.0)
    back = torch.randn(64, generator=torch.Generator().manual_seed(2)) * 10.0 ** torch.linspace(-30, 30, 64)
    narrow = gradient(logits, targets, 1.0, back, None)
    assert torch.equal(narrow, gradient(logits.float(), targets, 1.0, back, None).bfloat16())


@pytest.mark.parametrize("sure", [0.0, 3.0, 12.0, 20.0, 80.0, 300.0])
def test_no_logprob_is_above_nothing_and_no_entropy_below(sure: float) -> None:
    logits, targets = drawn(6, 900, torch.float32, 0.5)
    logits[:, 17] += sure
    targets[:3] = 17
    found, entropies, _ = logprobs.summarise(logits, targets, 1.0)
    expected, expected_entropies = exact(logits, targets, 1.0)
    assert (found <= 0).all()
    assert (entropies >= 0).all()
    torch.testing.assert_close(found.double(), expected, rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_are_excluded_have_no_share(dtype: torch.dtype) -> None:
    logits, targets = drawn(3, 600, dtype, 1.0)
    logits[:, 100:590] = -torch.inf
    targets[:] = torch.tensor([0, 99, 595])
    found, entropies, _ = logprobs.summarise(logits, targets, 1.0)
    kept = torch.cat([logits[:, :100], logits[:, 590:]], dim=1)
    expected, expected_entropies = exact(kept, torch.tensor([0, 99, 105]), 1.0)
    torch.testing.assert_close(found.double(), expected)
    torch.testing.assert_close(entropies.double(), expected_entropies)
    ours = gradient(logits, targets, 1.0, torch.ones(3), torch.ones(3))
    assert not ours[:, 100:590].any()
    assert ours.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_a_row_that_is_not_finite_is_nan_and_no_other_is(dtype: torch.dtype, bad: float, place: int) -> None:
    logits, targets = drawn(3, 600, dtype, 1.0)
    logits[1, place] = bad
    found, entropies, _ = logprobs.summarise(logits, targets, 1.0)
    ours = gradient(logits, targets, 1.0, torch.ones(3), None)
    for each in (found, entropies, ours[:, 5]):
        assert each.isnan().tolist() == [False, True, False]


def test_targets_that_lie_elsewhere_are_refused() -> None:
    for target in (-1, 600):
        with pytest.raises(AssertionError, match="writes where a target says"):
            logprobs.summarise(drawn(1, 600, torch.float32, 1.0)[0], torch.tensor([target]), 1.0)


def test_other_types_and_devices_are_left_to_torch() -> None:
    assert not logprobs.serves(torch.device("cpu"), torch.float64)
    assert not logprobs.serves(torch.device("cpu"), torch.float16)
    assert not logprobs.serves(torch.device("cuda"), torch.float32)
