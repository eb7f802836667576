"""Norms, the activation and rotations in C with gradients, beside torch's in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.small_models import llama, random_tokens, write_model
from torch import Tensor
from torch.autograd.graph import Node

from redline.kernels.cpu import training
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.layers.rope import rotary_table, rotate

if training._functions(torch.float32) is None:
    pytest.skip("no compiler here serves", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("threads")

EPS = 1e-5
DTYPES = (torch.float32, torch.bfloat16)
OFF = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Of the largest number: bfloat16 is rounded by 2**-9 of itself where a result is written, and forward between, too."""
H, K, D = 3, 2, 64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """What comes out, and what comes back of a random part of it."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    outs = function(*leaves)
    sum((out * drawn(*out.shape, seed=9 + number).to(out.dtype)).sum() for number, out in enumerate(outs)).backward()
    return [out.detach() for out in outs], [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_same(own: Callable[..., tuple[Tensor, ...]], torchs: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
    found, expected = gradients(own, inputs), gradients(torchs, tuple(each.double() for each in inputs))
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert ours.dtype is inputs[0].dtype
        assert (ours.double() - theirs).abs().max() < OFF[ours.dtype] * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("width", [16, 48, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    drawn_ones = 3 * drawn(rows, width), drawn(rows, width, seed=1), drawn(width, seed=2)
    x, delta, weight = (each.to(dtype) for each in drawn_ones)

    def torchs(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + delta, F.rms_norm(x + delta, weight.shape, weight, EPS)

    assert_same(lambda *given: training.add_rms_norm(*given, EPS), torchs, x, delta, weight)
    first = lambda x, weight: (F.rms_norm(x, weight.shape, weight, EPS),)  # noqa: E731
    assert_same(lambda x, weight: training.add_rms_norm(x, None, weight, EPS)[1:], first, x, weight)


def test_the_stream_without_a_delta_is_itself() -> None:
    x = drawn(4, 32)
    assert training.add_rms_norm(x, None, drawn(32), EPS)[0] is x


def test_where_only_the_sum_is_wanted_the_weight_gets_nothing() -> None:
    x, delta, weight = (each.requires_grad_() for each in (drawn(5, 32), drawn(5, 32, seed=1), drawn(32, seed=2)))
    training.add_rms_norm(x, delta, weight, EPS)[0].sum().backward()
    assert x.grad is not None
    assert delta.grad is not None
    assert torch.equal(x.grad, torch.ones(5, 32))
    assert torch.equal(delta.grad, x.grad)
    assert weight.grad is None or not weight.grad.any()


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("width", [16, 48, 1536])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * drawn(rows, 2 * width)).to(dtype)

    def torchs(gate_up: Tensor) -> tuple[Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up,)

    assert_same(lambda gate_up: (training.silu_mul(gate_up),), torchs, gate_up)


@pytest.mark.parametrize("gate", [-3e38, -1e20, -1e4, -200.0, -89.0, -88.0, 88.0, 200.0, 1e4])
def test_an_activation_far_out_is_neither_lost_nor_nan(gate: float) -> None:
    gate_up = torch.cat([torch.full((1, 16), gate), torch.ones(1, 16)], dim=1).requires_grad_()
    out = training.silu_mul(gate_up)
    out.sum().backward()
    assert gate_up.grad is not None
    torch.testing.assert_close(out, torch.full((1, 16), max(gate, 0.0)), atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(gate_up.grad[:, :16], torch.full((1, 16), float(gate > 0)), atol=1e-30, rtol=1e-6)


def test_an_activation_of_minus_infinity_is_nan_as_in_torch() -> None:
    gate_up = torch.cat([torch.full((1, 16), -torch.inf), torch.ones(1, 16)], dim=1).requires_grad_()
    out = training.silu_mul(gate_up)
    out.sum().backward()
    assert gate_up.grad is not None
    assert out.isnan().all()
    assert gate_up.grad.isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(rows: int, dtype: torch.dtype) -> None:
    frequencies = 100.0 ** -torch.arange(0, 1, 2 / D)
    positions = torch.arange(rows) * 3

    def own(heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return training.turned_heads(heads, H, K, *rotary_table(frequencies, 1.5, positions, dtype))

    def torchs(heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (part.double() for part in rotary_table(frequencies, 1.5, positions, dtype))
        qk, v = heads.view(rows, -1, D).split([H + K, K], dim=1)
        return *rotate(qk, cos, sin).split([H, K], dim=1), v

    assert_same(own, torchs, drawn(rows, (H + 2 * K) * D).to(dtype))


def test_bfloat16_is_rounded_where_eager_torch_rounds() -> None:
    x, delta, gate_up = (each.bfloat16() for each in (drawn(50, 96), drawn(50, 96, seed=1), 3 * drawn(50, 192, seed=2)))
    assert torch.equal(training.add_rms_norm(x, delta, drawn(96).bfloat16(), EPS)[0], x + delta)
    gate, up = gate_up.chunk(2, dim=-1)
    assert (training.silu_mul(gate_up) != F.silu(gate) * up).sum() <= 5, "a silu that lies between two of them"
    table = rotary_table(100.0 ** -torch.arange(0, 1, 2 / D), 1.0, torch.arange(50), torch.bfloat16)
    heads = drawn(50, (H + 2 * K) * D).bfloat16()
    expected = rotate(heads.view(50, -1, D)[:, : H + K], *table).split([H, K], dim=1)
    assert all(map(torch.equal, training.turned_heads(heads, H, K, *table)[:2], expected))


def test_nan_stays_nan() -> None:
    x = drawn(3, 32)
    x[1, 5] = torch.nan
    normed = training.add_rms_norm(x, drawn(3, 32, seed=1), drawn(32, seed=2), EPS)[1]
    assert torch.equal(normed.isnan().any(dim=1), torch.tensor([False, True, False]))
    assert training.silu_mul(x).isnan().any(dim=1).tolist() == [False, True, False]


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, delta, weight, gate_up = drawn(40, 64), drawn(40, 64, seed=1), drawn(64, seed=2), drawn(40, 64, seed=3)
    whole = (*training.add_rms_norm(x, delta, weight, EPS), training.silu_mul(gate_up))
    some = slice(7, 20)
    part = (*training.add_rms_norm(x[some], delta[some], weight, EPS), training.silu_mul(gate_up[some]))
    assert all(torch.equal(all_of[some], one) for all_of, one in zip(whole, part, strict=True))


def test_other_dtypes_and_widths_are_torch_s() -> None:
    assert training.serves(drawn(2, 32), 32)
    assert not training.serves(drawn(2, 32), 24)
    assert training.serves(drawn(2, 32).bfloat16(), 32)
    assert not training.serves(drawn(2, 32).half(), 32)
    assert not training.serves(drawn(2, 32).double(), 32)


TABLE = (torch.ones(2, 1, 16), torch.zeros(2, 1, 16))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: training.add_rms_norm(x, x[:1], drawn(96), EPS),
        lambda x: training.add_rms_norm(x, x.bfloat16(), drawn(96), EPS),
        lambda x: training.add_rms_norm(x, x, drawn(80), EPS),
        lambda x: training.turned_heads(x, 1, 1, *(part[:1] for part in TABLE)),
        lambda x: training.turned_heads(x, 1, 1, *(part[..., :8] for part in TABLE)),
        lambda x: training.turned_heads(x, 1, 1, *(part.bfloat16() for part in TABLE)),
    ],
    ids=["fewer rows", "another dtype", "another width", "fewer positions", "a part of a head", "turned in another dtype"],
)
def test_tensors_that_do_not_fit_are_refused(call: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError):
        call(drawn(2, 96))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: training.add_rms_norm(x, None, drawn(96), EPS)[1],
        lambda x: training.add_rms_norm(x, x, drawn(96), EPS)[0],
        lambda x: training.silu_mul(x),
        lambda x: training.turned_heads(x, 1, 1, *TABLE)[0],
    ],
    ids=["norm", "sum", "activation", "rotation"],
)
def test_a_second_derivative_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    x = drawn(2, 96).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad((function(x) ** 2).sum() + (x**4).sum(), x, create_graph=True)


@pytest.mark.parametrize("shape", [{"head_dim": 32}, {"head_dim": 64, "num_key_value_heads": 1}], ids=str)
def test_a_network_has_the_gradients_of_transformers(shape: dict[str, int], tmp_path: Path) -> None:
    oracle = write_model(tmp_path, llama(hidden_size=96, intermediate_size=160, tie_word_embeddings=False, **shape))
    decoder = load_decoder(tmp_path)
    assert isinstance(decoder, Decoder)
    tokens = random_tokens(40, seed=1).long()
    attend = PackedAttention(Segments.independent([len(tokens)]))
    ours = decoder.logits(decoder(tokens, attend.positions_T, attend)).log_softmax(-1)
    theirs = oracle(tokens[None]).logits[0].log_softmax(-1)
    for logprobs in (ours, theirs):
        logprobs[:-1].gather(1, tokens[1:, None]).sum().backward()
    layer, same = decoder.layers[1], oracle.model.layers[1]
    attention, mlp = same.self_attn, same.mlp
    expected = {
        layer.attn_norm: same.input_layernorm.weight.grad,
        layer.mlp_norm: same.post_attention_layernorm.weight.grad,
        layer.qkv.weight: torch.cat([part.weight.grad for part in (attention.q_proj, attention.k_proj, attention.v_proj)]),
        layer.gate_up.weight: torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]),
        layer.down.weight: mlp.down_proj.weight.grad,
        decoder.norm: oracle.model.norm.weight.grad,
        decoder.embed: oracle.model.embed_tokens.weight.grad,
    }
    for parameter, grad in expected.items():
        assert parameter.grad is not None
        assert (parameter.grad - grad).abs().max() < 1e-4 * grad.abs().max()
    names = {node.name() for node in _graph(ours)}
    assert {"_AddRMSNormBackward", "_SiluMulBackward", "_TurnedHeadsBackward"} <= names, "another path was taken"


def _graph(out: Tensor) -> Iterator[Node]:
    seen, open_ = set(), [out.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            open_ += [function for function, _ in node.next_functions]


def test_without_gradients_the_bits_are_the_same() -> None:
    torch.manual_seed(0)
    x_TE, delta_TE, weight_E = torch.randn(7, 48), torch.randn(7, 48), torch.randn(48)
    heads_TX, angles = torch.randn(7, 4 * D).requires_grad_(), torch.randn(7, 1, D // 2)

    def all_of_them() -> list[Tensor]:
        normed = training.add_rms_norm(x_TE, delta_TE, weight_E.requires_grad_(), 1e-6)
        alone = training.add_rms_norm(x_TE, None, weight_E, 1e-6)
        turned = training.turned_heads(heads_TX, 2, 1, angles.cos(), angles.sin())
        return [*normed, *alone, training.silu_mul(heads_TX), *turned]

    with torch.no_grad():
        plain = all_of_them()
    for one, other in zip(plain, all_of_them(), strict=True):
        assert torch.equal(one, other)
