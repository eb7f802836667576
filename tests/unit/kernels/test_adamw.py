"""The step in one pass against torch's AdamW and the 8-bit moments of `quantized_states.py`, in Triton's interpreter or on a
GPU. The kernel draws other numbers than torch, so what is rounded is compared by its two neighbours and by its mean."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

import triton
import triton.language as tl

from redline.config.sections.trainer import TrainerConfig
from redline.kernels import adamw as adamw_kernel
from redline.kernels import flat_state
from redline.kernels.adamw import AdamWKernel, _random
from redline.kernels.flat_state import BLOCK
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.flat_layout import FlatLayout, part
from redline.trainer.optimizer.offload import HostMemory
from redline.trainer.optimizer.quantized_states import CODECS, Int8Codec

ON_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
HALF = torch.bfloat16 if ON_CUDA else torch.float16
BETAS, EPS, RATE, DECAY = (0.8, 0.95), 1e-6, 1e-2, 0.1
SHAPES = {"fits": (4, 256), "longer": (2, 700), "vector": (300,), "few": (7,), "short": (5, 3)}
MOMENTS = [("exp_avg", flat_state.FIRST_LEVELS, flat_state.FIRST_OCTAVES)]
MOMENTS += [("exp_avg_sq", flat_state.SECOND_LEVELS, flat_state.SECOND_OCTAVES)]

pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")]  # numpy's, of the interpreter's infinities
if ON_CUDA:
    pytestmark.append(pytest.mark.gpu)


def wild(size: int, decades: float = 3.0, seed: int = 0) -> Tensor:
    """Signed values over several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator).sign() * 10 ** (-decades * torch.rand(size, generator=generator))
    return values.to(DEVICE)


@dataclass
class Case:
    """Parameters with their state, as the optimizer has them; each weight lies between guards, some at odd addresses."""

    layout: FlatLayout
    weights: dict[str, Tensor]
    guarded: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: Tensor

    def step(self, skip: float = 0.0, seed: int = 1, most: int | None = None, clip: float = 2.0, taken: int = 3) -> None:
        stretches = self.layout.stretches(most)
        scalars = [torch.tensor(value, device=DEVICE) for value in (float(taken), clip, skip)]
        update = flat_state.Update(RATE, BETAS, EPS, *scalars, seed)
        visited = [
            (stretch, {name: part(tensor, stretch, self.layout.num_elements) for name, tensor in self.state.items()})
            for stretch in stretches
        ]
        AdamWKernel(stretches, self.weights, DECAY).step(visited, self.gradients, update)

    def everything(self) -> dict[str, Tensor]:
        tensors = self.state | {f"weight/{name}": tensor for name, tensor in self.guarded.items()}
        return {name: tensor.clone() for name, tensor in tensors.items()}


def make(states: str = "int8", dtype: torch.dtype = HALF, shapes: dict[str, tuple[int, ...]] = SHAPES) -> Case:
    layout = FlatLayout({name: torch.empty(shape) for name, shape in shapes.items()})
    size = layout.num_elements
    guarded, weights = {}, {}
    for index, (name, shape) in enumerate(shapes.items()):
        guarded[name] = wild(math.prod(shape) + 32, seed=index).to(dtype)
        start = 16 - index % 2  # the odd ones do not begin on a multiple of 16 bytes
        weights[name] = guarded[name][start : start + math.prod(shape)].view(shape)
    codec = CODECS[states]()
    state = {name: torch.zeros(size // per, dtype=kind, device=DEVICE) for name, (kind, per) in codec.kept.items()}
    moments = {name: torch.zeros(size, device=DEVICE) for name in ("exp_avg", "exp_avg_sq")}
    gradients, master = torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)
    for index, name in enumerate(shapes):
        count = math.prod(shapes[name])
        first = wild(count, seed=10 + index)
        layout.view(moments["exp_avg"], name).copy_(first.view(shapes[name]))
        layout.view(moments["exp_avg_sq"], name).copy_(first.square().mul(3).view(shapes[name]))
        layout.view(gradients, name).copy_(wild(count, seed=20 + index).view(shapes[name]))
        layout.view(master, name).copy_(wild(count, seed=30 + index).view(shapes[name]))
    if states == "int8":
        codec.encode((moments["exp_avg"], moments["exp_avg_sq"]), state, torch.zeros((), device=DEVICE), seed=0)
    else:
        state |= moments
    if dtype == torch.float32:
        for name, weight in weights.items():
            weight.copy_(layout.view(master, name))
    else:
        state["master"] = master
    return Case(layout, weights, guarded, state, gradients)


def by_torch(case: Case, states: str, clip: float = 2.0, taken: int = 3) -> dict[str, dict[str, Tensor]]:
    """What torch's AdamW makes of the state: float32 weights and moments by name."""
    first, second = CODECS[states]().decode(case.state)
    found: dict[str, dict[str, Tensor]] = {}
    for name, weight in case.weights.items():
        start = case.layout.view(case.state["master"], name) if "master" in case.state else weight
        parameter = nn.Parameter(start.clone())
        parameter.grad = case.layout.view(case.gradients, name) / clip
        adamw = torch.optim.AdamW([parameter], RATE, BETAS, EPS, DECAY if weight.dim() > 1 else 0.0, foreach=False)
        adamw.state[parameter] = {
            "step": torch.tensor(float(taken - 1)),
            "exp_avg": case.layout.view(first, name).clone(),
            "exp_avg_sq": case.layout.view(second, name).clone(),
        }
        adamw.step()
        moments = {key: adamw.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
        found[name] = {"master": parameter.detach(), **moments}
    return found


def flat(case: Case, expected: dict[str, dict[str, Tensor]], key: str) -> Tensor:
    together = torch.zeros(case.layout.num_elements, device=DEVICE)
    for name, tensors in expected.items():
        case.layout.view(together, name).copy_(tensors[key])
    return together


def exact_levels(values: Tensor, levels: int, octaves: int) -> Tensor:
    """float64, of the absolute values: between two whole numbers a value is between two levels."""
    blocks = values.double().view(-1, BLOCK).abs()
    return ((blocks / blocks.amax(dim=1, keepdim=True)).log2() * levels / octaves + levels).view(-1)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("states", ["float32", "int8"])
def test_weights_are_those_of_torchs_adamw(states: str, dtype: torch.dtype) -> None:
    case = make(states, dtype)
    before, expected = case.everything(), by_torch(case, states)
    case.step()
    for index, (name, weight) in enumerate(case.weights.items()):
        master = case.layout.view(case.state["master"], name) if "master" in case.state else weight
        torch.testing.assert_close(master, expected[name]["master"], rtol=2e-6, atol=2e-6)
        assert torch.equal(weight, master.to(dtype))
        start, guarded = 16 - index % 2, case.guarded[name]
        old = before[f"weight/{name}"]
        assert torch.equal(guarded[:start], old[:start])
        assert torch.equal(guarded[start + weight.numel() :], old[start + weight.numel() :])
    if states == "float32":
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(case.state[key], flat(case, expected, key), rtol=1e-5, atol=1e-8)


def test_moments_take_one_of_the_two_levels_next_to_torchs() -> None:
    case = make()
    expected = by_torch(case, "int8")
    case.step()
    for key, levels, octaves in MOMENTS:
        moment = flat(case, expected, key)
        torch.testing.assert_close(case.state[f"{key}_scale"], moment.view(-1, BLOCK).abs().amax(dim=1), rtol=1e-5, atol=0.0)
        code, there = case.state[key].double(), moment != 0
        assert bool((code * moment >= 0).all())
        assert not code[~there].any()
        distance = code.abs()[there] - exact_levels(moment, levels, octaves)[there].clamp(min=0)
        assert float(distance.abs().max()) < 1.001
        assert bool((distance > 0.01).any() and (distance < -0.01).any())


def test_what_fills_up_a_block_stays_zero() -> None:
    case = make()
    case.step()
    case.step(seed=2)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        outside = torch.ones(case.layout.num_elements, dtype=torch.bool, device=DEVICE)
        for view in case.layout.views(outside).values():
            view.zero_()
        assert int(outside.sum()) == sum(-math.prod(shape) % BLOCK for shape in SHAPES.values())
        assert not case.state[key][outside].any(), key


@pytest.mark.parametrize("states", ["float32", "int8"])
def test_skipping_changes_no_bit(states: str) -> None:
    case = make(states)
    case.gradients.fill_(math.nan)
    before = case.everything()
    case.step(skip=1.0)
    assert_equal(case.everything(), before)


def test_blocks_of_zeros_stay_zeros_and_only_decay_moves_their_weights() -> None:
    case = make(shapes={"matrix": (6, 256), "vector": (600,)})
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        case.state[name].zero_()
    case.gradients.zero_()
    case.gradients[BLOCK + 3] = 1.0  # one block of the six is not
    before = case.state["master"].clone()
    case.step()
    zero = torch.ones(len(before) // BLOCK, dtype=torch.bool)
    zero[1] = False
    for key, _, _ in MOMENTS:
        assert not case.state[key].view(-1, BLOCK)[zero].any()
        assert (case.state[f"{key}_scale"] > 0).tolist() == (~zero).tolist()
    torch.testing.assert_close(case.state["master"][: 6 * BLOCK].view(6, BLOCK)[zero[:6]],
                               before[: 6 * BLOCK].view(6, BLOCK)[zero[:6]] * (1 - RATE * DECAY))  # fmt: skip
    assert torch.equal(case.state["master"][6 * BLOCK :], before[6 * BLOCK :])


def test_a_positive_second_moment_never_becomes_zero() -> None:
    case = make(shapes={"vector": (2 * BLOCK,)})
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        case.state[name].zero_()
    case.gradients.fill_(1e-10)
    case.gradients[0], case.gradients[5], case.gradients[BLOCK] = 1.0, 0.0, 1.0
    case.step(clip=1.0)
    assert (case.state["exp_avg_sq"] > 0).tolist() == (case.gradients > 0).tolist()
    assert int(case.state["exp_avg_sq"][1]) == 1


def test_moments_at_the_end_of_float32_give_numbers() -> None:
    case = make(shapes={"vector": (2 * BLOCK,)})
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        case.state[name].zero_()
    case.gradients.copy_(wild(2 * BLOCK) * 1e-19)
    case.gradients[BLOCK:] *= 1e-19  # the first moments' scale has no inverse, the second moments are zero
    case.step(clip=1.0)
    first, second = Int8Codec().decode(case.state)
    expected = (1 - BETAS[0]) * case.gradients
    torch.testing.assert_close(first, expected, rtol=0.1, atol=2.0**-141)  # the lowest level of the smallest scale
    assert bool(second[:BLOCK].isfinite().all())
    assert not second[BLOCK:].any()
    case.step(clip=1.0, seed=2)
    assert bool(case.state["master"].isfinite().all())


# ── rounding ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """To interpret a program takes ten milliseconds, whatever its elements."""
    if not ON_CUDA:
        monkeypatch.setattr(adamw_kernel, "ELEMENTS", 2**16)


def rounded(copies: int, seed: int = 1) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of both moments, over copies of one block: what is to be rounded, how it was, and whether up; the last two of shape
    [copies, BLOCK]."""
    case = make(shapes={"vector": (copies * BLOCK,)})
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        case.state[name].zero_()
    values = wild(BLOCK, decades=4.0)
    case.gradients.copy_(values.repeat(copies))
    case.step(clip=1.0, seed=seed)
    exact = [(1 - BETAS[0]) * values.double(), (1 - BETAS[1]) * values.double().square()]
    decoded = [moment.double().view(copies, BLOCK) for moment in Int8Codec().decode(case.state)]
    ups = [
        case.state[key].double().abs().view(copies, BLOCK) > exact_levels(moment.float(), levels, octaves)
        for (key, levels, octaves), moment in zip(MOMENTS, exact, strict=True)
    ]
    return exact, decoded, ups


@pytest.mark.usefixtures("large_programs")
def test_rounding_is_right_on_average() -> None:
    copies = 2048
    exact, decoded, _ = rounded(copies)
    for (_, levels, octaves), moment, found in zip(MOMENTS, exact, decoded, strict=True):
        error, apart = (found / moment - 1).mean(dim=0), 2 ** (octaves / levels) - 1
        odds = (2 ** (exact_levels(moment, levels, octaves) % 1 * octaves / levels) - 1) / apart
        deviation = apart * (odds * (1 - odds) / copies).sqrt()
        # Where the odds are small, the number of hits is not normal: four more may well be.
        assert bool((error.abs() < 5 * deviation + 4 * apart / copies).all())
        assert abs(float(error.mean())) < 5 * float(deviation.square().mean().sqrt()) / math.sqrt(BLOCK)


@pytest.mark.usefixtures("large_programs")
def test_what_is_smaller_than_the_first_level_is_right_on_average_too() -> None:
    case = make(shapes={"vector": (64 * BLOCK,)})
    for name in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        case.state[name].zero_()
    lowest = 2 ** (-(flat_state.FIRST_LEVELS - 1) * flat_state.FIRST_OCTAVES / flat_state.FIRST_LEVELS)
    case.gradients.fill_(-0.3 * lowest)
    case.gradients[::BLOCK] = 1.0
    case.step(clip=1.0)
    codes = case.state["exp_avg"].view(-1, BLOCK)[:, 1:].double()
    assert codes.unique().tolist() == [-1, 0]
    assert abs(float(codes.mean()) + 0.3) < 5 * math.sqrt(0.3 * 0.7 / codes.numel())


@pytest.mark.usefixtures("large_programs")
def test_draws_of_moments_elements_and_updates_have_nothing_to_do_with_each_other() -> None:
    copies = 1024
    _, _, (first, second) = rounded(copies)
    _, _, (later, _) = rounded(copies, seed=2)

    def normal(ups: Tensor) -> Tensor:
        odds = ups.double().mean(dim=0)
        return torch.where((odds > 0.02) & (odds < 0.98), (ups.double() - odds) / (odds * (1 - odds)).sqrt(), 0.0)

    limit = 5 / math.sqrt(copies * BLOCK)
    assert abs(float((normal(first) * normal(second)).mean())) < limit
    assert abs(float((normal(first) * normal(later)).mean())) < limit
    for step in (1, 2, 3, 4, 128):
        assert abs(float((normal(first) * normal(first).roll(step, dims=1)).mean())) < limit
        assert abs(float((normal(first) * normal(second).roll(step, dims=1)).mean())) < limit
    assert abs(float((normal(first) * normal(first).roll(1, dims=0)).mean())) < limit


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    results = []
    for seed in (7, 7, 8):
        case = make()
        case.step(seed=seed)
        results.append(case.everything())
    assert_equal(results[0], results[1])
    assert torch.equal(results[0]["master"], results[2]["master"])
    assert not torch.equal(results[0]["exp_avg"], results[2]["exp_avg"])
    assert not torch.equal(results[0]["exp_avg_sq"], results[2]["exp_avg_sq"])


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK])
def test_how_the_state_is_cut_changes_no_bit(most: int) -> None:
    whole, cut = make(), make()
    whole.step()
    cut.step(most=most)
    assert_equal(cut.everything(), whole.everything())


@triton.jit
def _random_at(starts, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.program_id(0) * N + tl.arange(0, N), _random(1, tl.load(starts + tl.program_id(0)), N).to(tl.int64))


def test_elements_beyond_32_bits_have_numbers_of_their_own() -> None:
    starts = torch.tensor([0, 2**32, 2**34, 2**34 + 4, 8], device=DEVICE)
    out = torch.zeros(5, 16, dtype=torch.int64, device=DEVICE)
    _random_at[(5,)](starts, out, N=16)
    assert len(out[:4].unique()) == 64 - 12
    assert torch.equal(out[3, :12], out[2, 4:])
    assert torch.equal(out[4, :8], out[0, 8:])


# ── in the optimizer ───────────────────────────────────────────────────────────────────────────────────────────────────


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 24)
        self.hidden = nn.Linear(24, 40)

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.hidden(self.embed(tokens_T))


def optimizer_for(states: str) -> tuple[Small, MasterAdamW]:
    network = Small().to(DEVICE)
    config = TrainerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, optimizer_states=states)
    optimizer = MasterAdamW(network, torch.float32 if not ON_CUDA else HALF, config)
    optimizer._kernel = optimizer._make_kernel()
    return network, optimizer


def train(network: Small, optimizer: MasterAdamW, steps: range) -> dict[str, Tensor]:
    for step in steps:
        tokens_T = torch.randint(0, 40, (64,), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        nn.functional.cross_entropy(network(tokens_T).float(), (tokens_T * 7 + 3) % 40).backward()
        optimizer.step(1e-2)
    return {name: tensor.detach().clone() for name, tensor in optimizer.masters.items()}


def test_training_is_that_of_the_path_through_torch() -> None:
    trained = {}
    for states in ("float32", "int8"):
        for way in ("kernel", "torch"):
            network, optimizer = optimizer_for(states)
            optimizer._kernel = optimizer._kernel if way == "kernel" else None
            before = torch.cat([tensor.detach().flatten() for tensor in optimizer.masters.values()])
            after = torch.cat([tensor.flatten() for tensor in train(network, optimizer, range(5)).values()])
            trained[states, way] = after - before

    def apart(one: tuple[str, str], other: tuple[str, str]) -> float:
        return float((trained[one] - trained[other]).norm() / trained[other].norm())

    assert apart(("float32", "kernel"), ("float32", "torch")) < 1e-4
    assert 0 < apart(("int8", "torch"), ("float32", "torch")) < 0.05
    assert apart(("int8", "kernel"), ("float32", "torch")) < 1.2 * apart(("int8", "torch"), ("float32", "torch"))


def test_a_resumed_optimizer_repeats_what_it_would_have_done() -> None:
    network, optimizer = optimizer_for("int8")
    train(network, optimizer, range(2))
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    expected = train(network, optimizer, range(2, 4))
    resumed_network, resumed = optimizer_for("int8")
    resumed.load_state(saved)
    assert_equal(train(resumed_network, resumed, range(2, 4)), expected)
    assert_equal(resumed.state(), optimizer.state())


@pytest.mark.skipif(ON_CUDA, reason="optimizer/test_adamw_cuda.py has it with streams")
def test_a_passage_through_host_memory_changes_no_bit() -> None:
    expected = train(*optimizer_for("int8"), range(3))
    network, optimizer = optimizer_for("int8")
    optimizer._memory = HostMemory(Int8Codec.kept, optimizer._layout.num_elements, DEVICE)
    optimizer._stretches = optimizer._layout.stretches(2 * BLOCK)
    optimizer._kernel = optimizer._make_kernel()
    assert_equal(train(network, optimizer, range(3)), expected)


# ── the compiler ───────────────────────────────────────────────────────────────────────────────────────────────────────

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from redline.kernels.adamw import BLOCK, ELEMENTS, _adamw

TYPES = {"table": "*i64", "seed": "i32", "first_block": "i32"}
TYPES |= {name: "fp32" for name in ("learning_rate", "decay", "beta1", "beta2", "eps")}
TYPES |= {name: "*fp32" for name in ("gradients", "clip", "skip", "corrections", "masters", "first_scales", "second_scales")}

def compile_for_hopper(types, constants):
    signature = {name: "constexpr" if name in constants else (TYPES | types)[name] for name in _adamw.arg_names}
    at = {(_adamw.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(_adamw, signature, constexprs=at), target=GPUTarget("cuda", 90, 32))

for weight, no_masters in (("*bf16", {}), ("*fp16", {}), ("*fp32", {"masters": None})):
    sizes = {"N": ELEMENTS, "BLOCK": BLOCK} | no_masters
    compile_for_hopper({"like": weight, "firsts": "*fp32", "seconds": "*fp32"},
                       sizes | {"first_scales": None, "second_scales": None})
    done = compile_for_hopper({"like": weight, "firsts": "*i8", "seconds": "*u8"}, sizes)
    assert "lg2.approx" in done.asm["ptx"]
"""


@pytest.mark.slow
def test_the_compiler_accepts_what_the_interpreter_does() -> None:
    """The compiler needs no device, but cannot share a process with the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
