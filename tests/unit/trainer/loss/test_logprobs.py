from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kept_sums import Kept
from torch import Tensor

from redline.trainer.loss import logprobs as module
from redline.trainer.loss.logprobs import selected_logprobs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities


def random_inputs(tokens: int, vocabulary: int, size: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(tokens, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """All logits at once, in float64, by torch's own log-softmax and autograd."""
    everything = torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)
    return everything[torch.arange(len(targets)), targets], -(everything.exp() * everything).sum(dim=-1)


@pytest.fixture(params=["torch", "C", "kernels"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without a compiler and with one, or as on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(module.cpu, "serves", lambda *_: False)
    elif request.param == "C":
        if not module.cpu.serves(torch.device("cpu"), torch.float32):
            pytest.skip("no compiler here serves")
    else:
        pytest.importorskip("triton")
        request.getfixturevalue("interpreter")
        monkeypatch.setattr(module, "kernels_serve", lambda _: True)


@pytest.mark.parametrize(
    "chunk_elements", [1, 40, 37 * 4, 37 * 22, 10**9], ids=["one each", "uneven", "fours", "all but one", "one chunk"]
)
@pytest.mark.parametrize(("temperature", "kept_bytes"), [(1.0, 0), (0.7, 37 * 9 * 4), (2.0, 10**9)])
@pytest.mark.usefixtures("way")
def test_values_and_gradients_are_those_of_a_log_softmax_for_any_chunk_size(
    chunk_elements: int, temperature: float, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * chunk_elements)
    monkeypatch.setitem(module.KEPT_BYTES, "cpu", kept_bytes)
    hidden, weight, targets = random_inputs(tokens=23, vocabulary=37, size=11, seed=0)
    ours = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    theirs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found, entropy = selected_logprobs(*ours, targets, temperature)
    expected, expected_entropy = naive(*theirs, targets, temperature)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-4)
    directions = torch.randn(2, 23, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward([found, entropy], list(directions))
    torch.autograd.backward([expected, expected_entropy], list(directions.double()))
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=5e-5)


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 8), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 10.0]))
def test_logprobs_and_entropy_for_any_shape_and_sharpness(
    tokens: int, vocabulary: int, size: int, seed: int, scale: float
) -> None:
    inputs = random_inputs(tokens, vocabulary, size, seed, scale)
    found, entropy = selected_logprobs(*inputs, 1.0)
    expected, expected_entropy = naive(*inputs, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-3, atol=1e-3)
    assert bool((found <= 1e-6).all())


@pytest.mark.parametrize("kept_bytes", [0, 10**9], ids=["made again", "kept"])
@pytest.mark.parametrize("level", [0.0, 100.0, -100.0])
@pytest.mark.usefixtures("way")
def test_the_entropy_does_not_depend_on_how_large_the_logits_are(
    level: float, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand tokens with logits around ±100, to a few units in the last place of the entropy itself."""
    monkeypatch.setitem(module.KEPT_BYTES, "cpu", kept_bytes)
    spread = torch.randn(1000, 1, generator=torch.Generator().manual_seed(3))
    spread[700] = 3.0
    weight = torch.cat([spread, torch.ones(1000, 1)], dim=1)
    hidden = torch.tensor([[0.5, level], [3.0, level], [0.0, level]]).requires_grad_()
    targets = torch.tensor([0, 1, 2])
    _, entropy = selected_logprobs(hidden, weight, targets, 1.0)
    logits = (hidden.detach() @ weight.T).double()  # as rounded by the product, which is not in question here
    everything = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(entropy.double(), -(everything.exp() * everything).sum(dim=-1), rtol=5e-6, atol=2e-6)


def test_the_entropy_of_no_preference_is_the_log_of_the_vocabulary() -> None:
    found, entropy = selected_logprobs(torch.zeros(2, 4), torch.randn(50, 4), torch.tensor([0, 49]), 1.0)
    torch.testing.assert_close(entropy, torch.full((2,), 50.0).log())
    torch.testing.assert_close(found, -torch.full((2,), 50.0).log())


@pytest.mark.usefixtures("way")
def test_a_head_that_is_not_trained_costs_no_product() -> None:
    hidden, weight, targets = random_inputs(5, 7, 3, seed=0)
    selected_logprobs(hidden.requires_grad_(), weight, targets, 1.0)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("wanted", [1, 2], ids=["logprobs", "entropies too"])
@pytest.mark.parametrize("keeps_sum", [False, True])
@pytest.mark.usefixtures("way")
def test_gradients_are_the_same_whoever_keeps_the_heads(keeps_sum: bool, wanted: int) -> None:
    hidden, weight, targets = random_inputs(23, 37, 11, seed=0)
    theirs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    ours = hidden.requires_grad_(), weight.requires_grad_()
    kept = Kept(weight) if keeps_sum else None
    for _ in range(2):
        found = selected_logprobs(*ours, targets, 0.8)
        sum(each.sum() for each in found[:wanted]).backward()  # gradients that lie in one place for all tokens
    sum(2 * each.sum() for each in naive(*theirs, targets, 0.8)[:wanted]).backward()
    torch.testing.assert_close(kept.total if kept else weight.grad, theirs[1].grad, rtol=1e-4, atol=5e-5)
    assert kept is None or weight.grad is None
    torch.testing.assert_close(hidden.grad, theirs[0].grad, rtol=1e-4, atol=5e-5)


@pytest.mark.usefixtures("way")
def test_without_a_trained_token_there_is_nothing() -> None:
    hidden, weight, targets = random_inputs(0, 7, 3, seed=0)
    found, entropies = selected_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets, 1.0)
    (found.sum() + entropies.sum()).backward()
    assert hidden.grad.shape == (0, 3)
    assert not weight.grad.any()


def test_a_pass_without_gradients_keeps_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of old logprobs, through weights that are trained."""
    kept: list[bool] = []
    summarise = module._summarise
    monkeypatch.setattr(module, "_summarise", lambda *of, keeps: (kept.append(keeps), summarise(*of, keeps=keeps))[1])
    hidden, weight, targets = torch.randn(9, 16), torch.randn(64, 16).requires_grad_(), torch.randint(0, 64, (9,))
    with torch.no_grad():
        without = module.selected_logprobs(hidden, weight, targets, 1.0)
    assert kept == [False]
    recorded = module.selected_logprobs(hidden, weight, targets, 1.0)
    assert kept == [False, True]
    assert torch.equal(without[0], recorded[0])


def test_on_a_gpu_logits_that_are_all_kept_are_one_chunk() -> None:
    bfloat16, vocabulary = torch.bfloat16, 1000
    most = module.CHUNK_BYTES["cuda"] // (2 * vocabulary)
    room = 2 * vocabulary * 3 * most
    assert module.chunk_rows(3 * most, vocabulary, bfloat16, "cuda", room) == 3 * most
    assert module.chunk_rows(3 * most + 1, vocabulary, bfloat16, "cuda", room) == -(-(3 * most + 1) // 4)
    assert module.chunk_rows(3 * most, vocabulary, bfloat16, "cuda") == most
    assert module.chunk_rows(100, vocabulary, bfloat16, "cpu", 10**12) == 100
    assert module.chunk_rows(10**6, vocabulary, bfloat16, "cpu", 10**12) <= module.CHUNK_BYTES["cpu"] // (4 * vocabulary)


def test_a_token_that_is_chosen_twice_gets_both_gradients() -> None:
    hidden, weight, _ = random_inputs(2, 7, 3, seed=0)
    weight.requires_grad_()
    selected_logprobs(hidden, weight, torch.tensor([4, 4]), 1.0)[0].sum().backward()
    reference = weight.detach().clone().requires_grad_()
    naive(hidden, reference, torch.tensor([4, 4]), 1.0)[0].sum().backward()
    torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_network_gets_float32_logprobs_and_bfloat16_gradients() -> None:
    hidden, weight, targets = (t.bfloat16() if t.is_floating_point() else t for t in random_inputs(40, 300, 16, seed=0))
    hidden.requires_grad_()
    weight.requires_grad_()
    found, entropy = selected_logprobs(hidden, weight, targets, 0.8)
    assert found.dtype == entropy.dtype == torch.float32
    expected, _ = naive(hidden.detach(), weight.detach(), targets, 0.8)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.05)
    found.sum().backward()
    theirs = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    naive(*theirs, targets, 0.8)[0].sum().backward()
    for mine, right in zip((hidden, weight), theirs, strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert (mine.grad.double() - right.grad.double()).norm() < 0.02 * right.grad.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.parametrize("kept_rows", [0, 30, 100], ids=["none kept", "some", "all"])
def test_on_a_gpu_gradients_are_the_same_whatever_is_kept(
    kept_rows: int, with_entropies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 9000
    monkeypatch.setitem(module.CHUNK_BYTES, "cuda", 2 * vocabulary * 25)
    monkeypatch.setitem(module.KEPT_BYTES, "cuda", 2 * vocabulary * kept_rows)
    hidden, weight, targets = (t.cuda() for t in random_inputs(100, vocabulary, 64, seed=0, scale=0.3))
    ours = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    directions = torch.randn(2, 100, generator=torch.Generator().manual_seed(1)).cuda()
    wanted = 2 if with_entropies else 1
    found = selected_logprobs(*ours, targets, 0.8)[:wanted]
    expected = naive(*theirs, targets, 0.8)[:wanted]
    for _ in range(2):  # the second time from logits that nobody has kept
        mine = torch.autograd.grad(found, ours, list(directions[:wanted]), retain_graph=True)
        right = torch.autograd.grad(expected, theirs, list(directions[:wanted].double()), retain_graph=True)
        for here, there in zip(mine, right, strict=True):
            assert (here.double() - there.double()).norm() < 0.02 * there.double().norm()


def test_capped_logits_have_the_logprobs_and_gradients_of_capped_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 3 * 4 * 50)  # three rows at once
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(8, 4), 5 * torch.randn(50, 4), torch.randint(50, (8,))
    ours = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found, entropy = selected_logprobs(*ours, targets, 0.8, cap=3.0)
    (found.sum() + 0.3 * entropy.sum()).backward()
    wide = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (3.0 * torch.tanh(wide[0] @ wide[1].T / 3.0) / 0.8).log_softmax(dim=-1)
    expected, expected_entropy = log_p[torch.arange(8), targets], -(log_p.exp() * log_p).sum(dim=-1)
    (expected.sum() + 0.3 * expected_entropy.sum()).backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    for own, other in zip(ours, wide, strict=True):
        assert own.grad is not None
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
