"""A decode step in one launch, against the launches of few rows and against float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.decode import one_launch
from redline.kernels.decode.one_launch import (
    LayerTensors,
    OneLaunch,
    Shape,
    down_parts,
    macros,
    most_rows,
    serves,
    shared_bytes,
)

HALF_BILLION = Shape(896, 14, 2, 64, 4864, 151_936, 24, 64, head_norms=False)
SMALL = Shape(256, 14, 2, 64, 1184, 1000, 5, 64, head_norms=False)
NORMED = Shape(320, 16, 8, 128, 1088, 1000, 4, 16, head_norms=True)
SHORT_PAGES = Shape(256, 16, 2, 64, 1184, 1000, 4, 16, head_norms=False)
"""A tile is in two of them; and a key/value head has as many heads as there may be."""
WIDER = Shape(1024, 16, 4, 64, 2816, 1000, 4, 32, head_norms=False)
SEVEN_BILLION = Shape(3584, 28, 4, 128, 18944, 152_064, 28, 64, head_norms=False)
LARGE = replace(SEVEN_BILLION, vocab=1000, layers=4)
CONTEXT = 8192
EPS = 1e-6


def test_what_is_served_says_so_without_a_gpu() -> None:
    assert most_rows(HALF_BILLION) == 16
    assert most_rows(replace(HALF_BILLION, head_dim=128)) == 8
    assert most_rows(replace(HALF_BILLION, hidden=1536)) == 8
    assert most_rows(replace(HALF_BILLION, hidden=2048, kv_heads=8)) == 0
    assert most_rows(SEVEN_BILLION) == 1
    assert not serves(HALF_BILLION, torch.bfloat16, torch.device("cpu"))


def test_the_product_down_is_cut_where_its_sums_can_meet_at_once() -> None:
    assert down_parts(HALF_BILLION, 132) == 6  # a chunk each
    assert down_parts(SEVEN_BILLION, 132) == 2  # of 22 chunks: with 11 parts a block would have 38 units
    assert down_parts(SMALL, 132) == 2
    assert down_parts(replace(HALF_BILLION, inner=896), 132) == 1
    assert down_parts(replace(HALF_BILLION, inner=8 * 896), 7) == 1  # however few blocks there are


@pytest.mark.parametrize("shape", [HALF_BILLION, SMALL, NORMED, SHORT_PAGES, WIDER, SEVEN_BILLION])
@pytest.mark.parametrize("halves", [1, 2, 4])
@pytest.mark.parametrize("has_ahead", [False, True])
def test_the_ring_takes_what_shared_memory_has(shape: Shape, halves: int, has_ahead: bool) -> None:
    stages = macros(shape, halves, 132, has_ahead)["STAGES"]
    assert stages >= 8
    assert shared_bytes(shape, halves, stages, has_ahead) <= one_launch.SHARED_MEMORY
    assert stages == one_launch.MOST_STAGES or shared_bytes(shape, halves, stages + 1, has_ahead) > one_launch.SHARED_MEMORY


def test_small_networks_ask_for_weights_at_the_pace_of_the_whole_device() -> None:
    assert macros(HALF_BILLION, 1, 132)["PACE"] == 1250
    assert macros(HALF_BILLION, 1, 66)["PACE"] == 625
    assert macros(SEVEN_BILLION, 1, 132)["PACE"] == 0, "memory has no time to lose"


class Network:
    """Random weights of a shape, a cache with something in it, and the step in float32."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        E, D = shape.hidden, shape.head_dim
        H, heads = shape.heads * D, (shape.heads + 2 * shape.kv_heads) * D
        pages = CONTEXT // shape.page
        self.table = torch.randperm(32 * pages, device="cuda").view(32, pages).int()
        self.cache = torch.randn(
            shape.layers, 2, 32 * pages, shape.kv_heads, shape.page, D, device="cuda", dtype=torch.bfloat16
        )
        self.layers = [
            LayerTensors(
                gain(E), weight(heads, E), weight(heads, 1).flatten(), weight(E, H), weight(E, 1).flatten(), gain(E),
                weight(2 * shape.inner, E), None, weight(E, shape.inner), weight(E, 1).flatten(),
                gain(D) if shape.head_norms else None, gain(D) if shape.head_norms else None,
                *self.cache[index],
            )
            for index in range(shape.layers)
        ]  # fmt: skip
        self.embed, self.norm, self.head = weight(shape.vocab, E, 1.0), gain(E), weight(shape.vocab, E)
        angle = torch.arange(CONTEXT, device="cuda")[:, None] * 1e-2 ** (torch.arange(D // 2, device="cuda") / (D // 2))
        self.rotary = torch.stack([angle.cos(), angle.sin()]).bfloat16()
        self.step = OneLaunch(shape, self.layers, self.cache, self.embed, self.norm, self.head, self.rotary, EPS)

    def expected(self, tokens_B: Tensor, positions_B: Tensor, lines_B: Tensor) -> Tensor:
        """[B, V] in float32, nothing rounded on the way; the cache stays as it is."""
        return torch.stack([self._row(int(t), int(p), int(r)) for t, p, r in zip(tokens_B, positions_B, lines_B, strict=True)])

    def _row(self, token: int, position: int, line: int) -> Tensor:
        shape, D = self.shape, self.shape.head_dim
        x = self.embed[token].float()
        cos, sin = (part[position].float() for part in self.rotary)

        def rotated(head_ND: Tensor, norm: Tensor | None) -> Tensor:
            if norm is not None:
                head_ND = F.rms_norm(head_ND, (D,), norm.float(), EPS)
            first, second = head_ND.chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        for layer in self.layers:
            heads = layer.qkv.float() @ F.rms_norm(x, x.shape, layer.attn_norm.float(), EPS) + layer.qkv_bias.float()
            q, k, v = heads.view(-1, D).split([shape.heads, shape.kv_heads, shape.kv_heads])
            q, k = rotated(q, layer.q_norm), rotated(k, layer.k_norm)
            before_K, before_V = (
                blocks[self.table[line].long()].transpose(0, 1).flatten(1, 2)[:, :position].float()
                for blocks in (layer.keys, layer.values)
            )
            keys, values = torch.cat([before_K, k[:, None]], dim=1), torch.cat([before_V, v[:, None]], dim=1)
            scores = q.view(shape.kv_heads, -1, D) @ keys.transpose(1, 2) * D**-0.5
            x = x + layer.o.float() @ (scores.softmax(-1) @ values).flatten() + layer.o_bias.float()
            gate, up = (layer.gate_up.float() @ F.rms_norm(x, x.shape, layer.mlp_norm.float(), EPS)).chunk(2)
            x = x + layer.down.float() @ (F.silu(gate) * up) + layer.down_bias.float()
        return self.head.float() @ F.rms_norm(x, x.shape, self.norm.float(), EPS)


def weight(rows: int, columns: int, scale: float | None = None) -> Tensor:
    return (torch.randn(rows, columns, device="cuda") * (scale or 0.5 * columns**-0.5)).bfloat16()


def gain(size: int) -> Tensor:
    return (1 + 0.1 * torch.randn(size, device="cuda")).bfloat16()


@pytest.fixture(
    scope="module",
    params=[SMALL, NORMED, SHORT_PAGES, WIDER, LARGE],
    ids=["biases", "head norms", "short pages", "two chunks", "large"],
)
def network(request: pytest.FixtureRequest) -> Network:
    if not serves(request.param, torch.bfloat16, torch.device("cuda")):
        pytest.skip("the kernel is for Hopper")
    return Network(request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("longest", [1, 32, 33, 300, 1500])
def test_a_step_is_that_of_float32(network: Network, rows: int, longest: int) -> None:
    tokens, positions, lines = places(network, rows, longest)
    expected = network.expected(tokens, positions, lines)
    got = network.step.logits(tokens, positions, lines, network.table).float()
    assert (got - expected).abs().max() < 0.05 * expected.std()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("longest", [3000, 8000])
def test_long_contexts_are_cut_into_parts_that_meet(network: Network, rows: int, longest: int) -> None:
    tokens, positions, lines = places(network, rows, longest)
    expected = network.expected(tokens, positions, lines)
    for _ in range(5):  # whoever read the words of one step has said that the next one's are absent
        got = network.step.logits(tokens, positions, lines, network.table).float()
        assert (got - expected).abs().max() < 0.05 * expected.std()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 16, 32])
def test_long_contexts_are_the_same_again(network: Network, rows: int) -> None:
    """More tiles than the ring has stages, which come in any order: nobody takes one for another."""
    tokens, positions, lines = places(network, rows, 8000)
    once = network.step.logits(tokens, positions, lines, network.table).clone()
    differ = sum(not torch.equal(network.step.logits(tokens, positions, lines, network.table), once) for _ in range(300))
    assert differ == 0


@pytest.mark.gpu
def test_a_row_is_the_same_with_any_others_and_again(network: Network) -> None:
    tokens, positions, lines = places(network, 32, 1500)
    together = network.step.logits(tokens, positions, lines, network.table).clone()
    for _ in range(20):
        assert torch.equal(network.step.logits(tokens, positions, lines, network.table), together)
    for rows in (slice(0, 8), slice(8, 24), slice(5, 14), slice(31, 32), slice(3, 30)):  # each after another number of rows
        alone = network.step.logits(tokens[rows].clone(), positions[rows].clone(), lines[rows].clone(), network.table)
        torch.testing.assert_close(alone.float(), together[rows].float(), atol=0.02, rtol=0.02)  # a context in other parts


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("longest", [1, 16, 31, 32, 100, 1500])
def test_what_nobody_has_written_is_not_read(network: Network, rows: int, longest: int) -> None:
    tokens, positions, lines = places(network, rows, longest)
    expected = network.step.logits(tokens, positions, lines, network.table).clone()
    page, before = network.shape.page, network.cache.clone()
    written = torch.zeros(network.cache.shape[2], page, dtype=torch.bool, device="cuda")
    for line, position in zip(lines.tolist(), positions.tolist(), strict=True):
        places_of = torch.arange(position, device="cuda")
        written[network.table[line, places_of // page].long(), places_of % page] = True
    network.cache.masked_fill_(~written[:, None, :, None], torch.nan)
    got = network.step.logits(tokens, positions, lines, network.table).clone()
    network.cache.copy_(before)
    assert torch.equal(got, expected)


@pytest.mark.gpu
def test_a_cache_that_comes_after_another_is_read_where_it_is(network: Network) -> None:
    """An engine that wakes has its cache somewhere else; what the kernel knows of it may lie where the old one's lay."""
    tokens, positions, lines = places(network, 5, 300)
    expected = network.step.logits(tokens, positions, lines, network.table).clone()
    rest = (network.embed, network.norm, network.head, network.rotary, EPS)
    for _ in range(3):
        moved = network.cache.clone()
        layers = [layer._replace(keys=keys, values=values) for layer, (keys, values) in zip(network.layers, moved, strict=True)]
        got = OneLaunch(network.shape, layers, moved, *rest).logits(tokens, positions, lines, network.table)
        assert torch.equal(got, expected)
        moved.fill_(torch.nan)


@pytest.mark.gpu
def test_keys_and_values_are_those_that_the_next_step_wants(network: Network) -> None:
    """Tokens one by one: every step attends to what those before it wrote."""
    tokens, positions, lines = places(network, 4, 40)
    for _ in range(30):
        expected = network.expected(tokens, positions, lines)
        got = network.step.logits(tokens, positions, lines, network.table).float()
        assert (got - expected).abs().max() < 0.05 * expected.std()
        tokens, positions = (tokens + 7) % network.shape.vocab, positions + 1


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(2,), (8,), (16,), (1, 5, 2), (3, 4, 1, 8), (16, 1, 9, 6)], ids=str)
@pytest.mark.parametrize("first", [0, 1, 20, 31, 57, 300, 1400])
def test_tokens_of_one_line_that_go_in_together_are_those_that_go_in_one_by_one(
    network: Network, counts: tuple[int, ...], first: int
) -> None:
    """A token attends to those in front of it, which the cache does not have yet: what lies in their places is not read."""
    lines = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).int().cuda()
    ahead = torch.cat([torch.arange(count) for count in counts]).cuda()
    positions = first + 13 * lines.long() + ahead
    tokens = torch.randint(0, network.shape.vocab, (len(lines),), device="cuda")
    for layer in network.layers:
        for blocks in (layer.keys, layer.values):
            for line, position in zip(lines.tolist(), positions.tolist(), strict=True):
                blocks[network.table[line, position // network.shape.page], :, position % network.shape.page] = torch.nan
    together = network.step.logits(tokens, positions, lines, network.table, ahead).clone()
    written = [(layer.keys.clone(), layer.values.clone()) for layer in network.layers]
    one_by_one = torch.empty_like(together)
    for turn in range(max(counts)):
        now = ahead == turn
        one_by_one[now] = network.step.logits(tokens[now], positions[now], lines[now], network.table)
    atol = 0.05 * float(one_by_one.float().std())
    torch.testing.assert_close(together.float(), one_by_one.float(), atol=atol, rtol=0.0)
    for layer, before in zip(network.layers, written, strict=True):
        for blocks, was in zip((layer.keys, layer.values), before, strict=True):
            torch.testing.assert_close(blocks.float(), was.float(), atol=0.05, rtol=0.05)


@pytest.mark.gpu
def test_rows_that_are_not_live_disturb_nobody(network: Network) -> None:
    tokens, positions, lines = places(network, 6, 300)
    expected = network.step.logits(tokens, positions, lines, network.table).clone()
    before = [layer.keys.clone() for layer in network.layers]
    positions[2] = positions[5] = -1
    got = network.step.logits(tokens, positions, lines, network.table)
    live = positions >= 0
    assert torch.equal(got[live], expected[live])
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(network.layers, before, strict=True))


@pytest.mark.gpu
def test_it_can_be_captured_and_replayed_with_other_contents(network: Network) -> None:
    tokens, positions, lines = places(network, 5, 200)
    network.step.logits(tokens, positions, lines, network.table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = network.step.logits(tokens, positions, lines, network.table)
    others = places(network, 5, 900)
    tokens.copy_(others[0])
    positions.copy_(others[1])
    graph.replay()
    expected = network.expected(tokens, positions, lines)
    assert (out.float() - expected).abs().max() < 0.05 * expected.std()


def places(network: Network, rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, network.shape.vocab, (rows,), device="cuda")
    positions = (longest - 1 - 11 * torch.arange(rows, device="cuda")).clamp(min=0)
    return tokens, positions, torch.arange(rows, device="cuda").flip(0).int()
