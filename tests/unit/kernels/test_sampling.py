"""Without a CUDA device the kernels run in Triton's interpreter: that shows whether they are right, not how fast they are."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

ON_CUDA = torch.cuda.is_available()
if not ON_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
pytest.importorskip("triton")

from redline.engine.native.running import sampler  # noqa: E402
from redline.engine.native.running.sampler import Sampled, SamplingRows, sample, uniform  # noqa: E402
from redline.kernels.decode import sampling  # noqa: E402

pytestmark = [pytest.mark.gpu] if ON_CUDA else []
DEVICE = "cuda" if ON_CUDA else "cpu"
CHUNK = 64
"""Of most tests: several chunks in a small vocabulary. To interpret a program takes ten milliseconds, whatever its chunk."""
VOCABULARIES = (1, 63, 64, 65, 200)
ZERO, LAST_BELOW_ONE = 7046029254386353131, -761617829288982729
"""Streams whose number 0 is 0 and the largest below 1."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", CHUNK)


@pytest.fixture(autouse=True, scope="module")
def beside_torch() -> Iterator[None]:
    """The sampler's own draws on a CPU are C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "draws", lambda: None)
        yield


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def as_rows(count: int, temperature: float | list[float] = 1.0, streams: int | None = None, seed: int = 0) -> SamplingRows:
    """Rows at different numbers of random streams, or at number 0 of the stream given."""
    random = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=torch.Generator().manual_seed(seed))
    streams_B, counters_B = random[0], random[1].abs() % 1000
    if streams is not None:
        streams_B, counters_B = torch.full((count,), streams), torch.zeros(count, dtype=torch.int64)
    temperature_B = torch.tensor(temperature).expand(count) if isinstance(temperature, float) else torch.tensor(temperature)
    return SamplingRows(temperature_B.contiguous().to(DEVICE), streams_B.to(DEVICE), counters_B.to(DEVICE))


def by_kernel(logits_BV: torch.Tensor, rows: SamplingRows) -> Sampled:
    tokens_B = torch.full((len(logits_BV),), -1, device=DEVICE)
    logprobs_B = torch.full((len(logits_BV),), 1.0, device=DEVICE)
    sampling.sample_plain(logits_BV, rows.temperature_B, rows.streams_B, rows.counters_B, tokens_B, logprobs_B)
    return Sampled(tokens_B, logprobs_B)


def assert_same(logits_BV: torch.Tensor, rows: SamplingRows) -> None:
    ours, reference = by_kernel(logits_BV, rows), sample(logits_BV, rows)
    assert ours.tokens_B.tolist() == reference.tokens_B.tolist()
    torch.testing.assert_close(ours.logprobs_B, reference.logprobs_B, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_and_logprobs_are_those_of_the_sampler(size: int, dtype: torch.dtype) -> None:
    spread = torch.tensor([0.5, 8.0], device=DEVICE).repeat_interleave(4)[:, None]
    logits = (spread * gaussian(8, size, seed=size)).to(dtype)
    assert_same(logits, as_rows(8, temperature=[0.0, 0.3, 1.0, 2.5] * 2, seed=size))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_tokens_and_logprobs_are_those_of_the_sampler_for_many_seeds(seed: int) -> None:
    assert_same((3 * gaussian(40, 200, seed=seed)).bfloat16(), as_rows(40, temperature=[0.0, 0.3, 1.0, 2.5] * 10, seed=seed))


def test_the_chunks_of_a_large_vocabulary_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants that a CUDA device sees."""
    monkeypatch.undo()
    assert sampling.CHUNK > CHUNK
    logits = (2 * gaussian(4, 2 * sampling.CHUNK + 77)).bfloat16()
    assert_same(logits, as_rows(4, temperature=[0.0, 1.0, 1.0, 0.6]))


def test_the_numbers_are_those_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among V equal tokens, the number times V is the token: twelve bits of it, from the ends of int64 on."""
    monkeypatch.setattr(sampling, "CHUNK", 4096)
    pairs = [(stream, counter) for stream in (-(2**63), 2**63 - 1, -1, 0) for counter in (0, 1, 2**31, 2**62)]
    streams_B, counters_B = torch.tensor(pairs, device=DEVICE).T.contiguous()
    sampled = by_kernel(
        torch.zeros(16, 4096, device=DEVICE), SamplingRows(torch.ones(16, device=DEVICE), streams_B, counters_B)
    )
    assert sampled.tokens_B.tolist() == (uniform(streams_B, counters_B) * 4096).long().tolist()


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize(("stream", "number"), [(ZERO, 0.0), (LAST_BELOW_ONE, 1 - 2.0**-53)])
def test_a_number_at_the_edge_gives_a_token_that_can_be(size: int, stream: int, number: float) -> None:
    rows = as_rows(6, streams=stream)
    assert uniform(rows.streams_B, rows.counters_B)[0] == number
    logits = 12 * gaussian(6, size, seed=size)
    impossible = torch.rand(6, size, generator=torch.Generator().manual_seed(size)).to(DEVICE) < 0.7
    impossible[:, size // 2] = False
    sampled = by_kernel(logits.masked_fill(impossible, -math.inf), rows)
    assert not impossible.gather(1, sampled.tokens_B[:, None]).any()
    assert bool(sampled.logprobs_B.isfinite().all())
    if number == 0:
        assert sampled.tokens_B.tolist() == (~impossible).int().argmax(dim=-1).tolist()


def test_of_equal_largest_logits_temperature_zero_takes_the_first() -> None:
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[0, [5, 6, 299]], logits[1, [130, 140, 280]], logits[2, 299] = 1.0, 1.0, 1e-12
    assert by_kernel(logits, as_rows(4, temperature=0.0)).tokens_B.tolist() == [5, 130, 299, 0]


def test_the_logprob_of_a_greedy_row_is_at_temperature_one() -> None:
    logits = 3 * gaussian(3, 200)
    expected = torch.log_softmax(logits.double(), dim=-1).amax(dim=-1).float()
    torch.testing.assert_close(by_kernel(logits, as_rows(3, temperature=0.0)).logprobs_B, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("height", [200.0, 1e4, 3e38])
def test_a_certain_token_is_always_sampled(height: float) -> None:
    logits = torch.zeros(3, 300, device=DEVICE)
    for row, certain in enumerate((0, 100, 299)):
        logits[row, certain] = height
    sampled = by_kernel(logits, as_rows(3))
    assert sampled.tokens_B.tolist() == [0, 100, 299]
    assert sampled.logprobs_B.tolist() == [0.0] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("size", [7, 150])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_faulty_row_gets_nan_and_harms_no_other(size: int, temperature: float) -> None:
    logits = gaussian(8, size, seed=size)
    rows = as_rows(8, temperature=temperature)
    healthy = by_kernel(logits, rows)
    for row, (where, value) in {
        0: (slice(0, 1), math.nan),
        1: (slice(size - 1, size), math.nan),
        3: (slice(size // 2, size // 2 + 1), math.nan),
        4: (slice(None), math.nan),
        5: (slice(None), -math.inf),
        7: (slice(3, 4), math.inf),
    }.items():
        logits[row, where] = value
    sampled = by_kernel(logits, rows)
    assert sampled.logprobs_B.isnan().tolist() == [True, True, False, True, True, True, False, True]
    assert bool(((sampled.tokens_B >= 0) & (sampled.tokens_B < size)).all())
    for row in (2, 6):
        assert sampled.tokens_B[row] == healthy.tokens_B[row]
        assert sampled.logprobs_B[row] == healthy.logprobs_B[row]


def test_rows_may_lie_apart() -> None:
    """The logits of a padded vocabulary, without the padding: what lies beyond a row's end would win."""
    padded = torch.full((4, 320), 1e9, device=DEVICE)
    padded[:, :300] = gaussian(4, 300)
    assert_same(padded[:, :300], as_rows(4, temperature=[0.0, 1.0] * 2))


def test_a_row_is_sampled_the_same_in_any_company() -> None:
    logits, rows = gaussian(4, 200), as_rows(4, temperature=[0.0, 1.0, 0.5, 2.0])
    together = by_kernel(logits, rows)
    for row in range(4):
        one = slice(row, row + 1)
        alone = by_kernel(logits[one], SamplingRows(rows.temperature_B[one], rows.streams_B[one], rows.counters_B[one]))
        assert alone.tokens_B[0] == together.tokens_B[row]
        assert alone.logprobs_B[0] == together.logprobs_B[row]


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from redline.kernels.decode import sampling

TYPES = {"stride": "i32", "V": "i32", "C": "i32", "N": "constexpr", "PADDED_C": "constexpr"}
TYPES |= {"streams_B": "*i64", "counters_B": "*i64", "tokens_B": "*i64"}
TYPES |= {name: "*fp32" for name in ("temperature_B", "peaks_BC", "sums_BC", "logprobs_B")}

def compile_for_hopper(kernel, logits, constants):
    signature = {name: "constexpr" if name in constants else (TYPES | {"logits_BV": logits})[name] for name in kernel.arg_names}
    at = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(kernel, signature, constexprs=at), target=GPUTarget("cuda", 90, 32))

for logits in ("*bf16", "*fp32"):
    compile_for_hopper(sampling._summarise, logits, {"N": sampling.CHUNK})
    compile_for_hopper(sampling._pick, logits, {"N": sampling.CHUNK, "PADDED_C": 64})
    # An argument that is 1 is a constant to the compiler, as the number of chunks of a small vocabulary.
    compile_for_hopper(sampling._pick, logits, {"N": sampling.CHUNK, "PADDED_C": 1, "C": 1})
"""


@pytest.mark.slow
def test_the_compiler_accepts_what_the_interpreter_does() -> None:
    """The compiler needs no device, but cannot share a process with the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
