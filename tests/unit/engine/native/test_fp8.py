"""Sampling in 8-bit floating point: the second network without its rounding, which is the first one's to the last bits, in
Triton's interpreter; and on a GPU all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.small_models import CONFIGS, VOCAB_SIZE, llama, write_model
from support.small_models import SHAPE as SMALL
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config

pytest.importorskip("triton")

from redline.config.sections.engine import EngineConfig
from redline.config.sections.lora import LoraConfig
from redline.engine import NativeEngine
from redline.engine.native.fp8 import Fp8Copy
from redline.engine.native.quantized import FP8_CAPABILITY, HEAD_SIZES, refuse_without_fp8
from redline.errors import ConfigError, ModelError
from redline.kernels import fp8
from redline.kernels.decode import weights_first
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend
from redline.models.files.hf import load_decoder
from redline.models.layers.rope import rotary_table, rotate
from redline.models.lora.trainable import AdaptedLinear, add_adapter
from redline.types import Completion, GenerateRequest, SamplingParams, WeightUpdate

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, of the interpreter's infinities

SHAPE = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
FAMILIES = {
    "plain": llama(**SHAPE),
    "biases of queries, keys and values": Qwen2Config(**{**SMALL, **SHAPE}),
    "all biases": llama(**SHAPE, attention_bias=True, mlp_bias=True),
    "norms of heads": CONFIGS["qwen3, biases"],
    "tied": llama(**SHAPE, tie_word_embeddings=True),
}


class Causal(FusedAttend):
    """Each token to all before it, in torch."""

    def __init__(self, decoder: Decoder, positions_T: Tensor) -> None:
        self._table = rotary_table(decoder.rotary_frequencies, decoder.rotary_factor, positions_T, torch.float32)

    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor:
        spec = layer.spec
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (F.rms_norm(x, w.shape, w, spec.norm_eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
        q, k, v = (x.transpose(0, 1)[None] for x in (rotate(q, *self._table), rotate(k, *self._table), v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).contiguous()


@pytest.fixture
def without_rounding(monkeypatch: pytest.MonkeyPatch, interpreter: None) -> None:
    def product(x_TI: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: object) -> Tensor:
        return F.linear(x_TI * x_scale, weight * scale, bias)

    monkeypatch.setattr(fp8, "DTYPE", torch.float32)
    monkeypatch.setattr(fp8, "product", product)


def loaded(folder: Path, config: object, seed: int = 5) -> Decoder:
    write_model(folder, config, seed=seed, std=0.15)  # type: ignore[arg-type]
    return load_decoder(folder)  # type: ignore[return-value]


def hidden(network: Decoder, only_M: Tensor | None = None) -> Tensor:
    tokens_T = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, 12))
    positions_T = torch.arange(12)
    with torch.no_grad():
        return network(tokens_T, positions_T, Causal(network, positions_T), only_M=only_M)


def check_same(copy: Fp8Copy, decoder: Decoder) -> None:
    copy.renew()
    torch.testing.assert_close(hidden(copy.network), hidden(decoder), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("without_rounding")
def test_without_rounding_it_is_the_first_network(family: str, tmp_path: Path) -> None:
    decoder = loaded(tmp_path, FAMILIES[family])
    check_same(Fp8Copy(decoder), decoder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("most", [11, 12])
@pytest.mark.usefixtures("without_rounding")
def test_few_rows_ask_for_weights_first(family: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = []

    def product(
        x_TI: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_gated: bool = False, scales: tuple[Tensor, Tensor]
    ) -> Tensor:
        gated.append(is_gated)
        y_TO = F.linear(x_TI * scales[0], weight * scales[1], bias)
        gate_TI, up_TI = y_TO.chunk(2, dim=1)
        return F.silu(gate_TI) * up_TI if is_gated else y_TO

    monkeypatch.setattr(weights_first, "serves", lambda weight: True)
    monkeypatch.setattr(weights_first, "product", product)
    monkeypatch.setattr("redline.engine.native.fp8.FIRST_ROWS", most)
    decoder = loaded(tmp_path, FAMILIES[family])
    check_same(Fp8Copy(decoder), decoder)
    assert bool(gated) == (most == 12)
    if gated and family == "plain":
        assert gated == [False, False, True, False] * decoder.spec.num_layers


@pytest.mark.usefixtures("without_rounding")
def test_only_some_tokens_go_on_after_the_last_attention(tmp_path: Path) -> None:
    decoder, ends = loaded(tmp_path, llama(**SHAPE)), torch.tensor([3, 11])
    copy = Fp8Copy(decoder)
    copy.renew()
    torch.testing.assert_close(hidden(copy.network, ends), hidden(decoder)[ends], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_rounding")
def test_weights_and_gains_are_taken_anew_after_forget_and_not_before(tmp_path: Path) -> None:
    decoder = loaded(tmp_path, llama(**SHAPE))
    copy = Fp8Copy(decoder)
    check_same(copy, decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    scales = copy.network.norm_scales.clone()
    copy.renew()
    assert copy.network.norm_scales.equal(scales)
    copy.forget()
    check_same(copy, decoder)
    torch.testing.assert_close(copy.network.norm_scales, scales * 1.5)


@pytest.mark.usefixtures("without_rounding")
def test_an_adapter_that_is_trained_stands_beside_it(tmp_path: Path) -> None:
    decoder = loaded(tmp_path, llama(**SHAPE))
    copy = Fp8Copy(decoder)
    check_same(copy, decoder)
    add_adapter(decoder, LoraConfig(rank=4, alpha=8), torch.float32, seed=0)
    for module in decoder.modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.lora_b, std=0.2)
    copy.forget()
    check_same(copy, decoder)


@pytest.mark.usefixtures("without_rounding")
def test_it_takes_a_byte_for_each_weight_of_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "DTYPE", torch.float8_e4m3fn)
    decoder = loaded(tmp_path, llama(**SHAPE))
    inside = sum(linear.weight.numel() for linear in decoder.modules() if isinstance(linear, torch.nn.Linear))
    assert Fp8Copy(decoder).bytes == inside


def test_sizes_of_heads_are_those_of_the_kernels() -> None:
    from redline.kernels.decode.attention import TILES

    assert set(HEAD_SIZES) == set(TILES)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONFIGS["qwen3_moe"], "experts"),
        (llama(**{**SHAPE, "num_attention_heads": 2, "head_dim": 48}), "heads of 48"),
        (llama(**{**SHAPE, "intermediate_size": 100}), "multiples of 16"),
    ],
)
def test_other_networks_are_refused(config: object, said: str, tmp_path: Path) -> None:
    decoder = loaded(tmp_path, config)
    with pytest.raises(ModelError, match=said):
        Fp8Copy(decoder)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    decoder = loaded(tmp_path, llama(**SHAPE))
    with pytest.raises(ConfigError, match="it is for GPUs"):
        NativeEngine(decoder, EngineConfig(quantization="fp8"))


def test_older_gpus_other_types_and_odd_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device, has = torch.device("cuda"), FP8_CAPABILITY
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    refuse_without_fp8(device, torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="the dtype is float32"):
        refuse_without_fp8(device, torch.float32, 64)
    with pytest.raises(ConfigError, match=r"engine\.block_size = 48"):
        refuse_without_fp8(device, torch.bfloat16, 48)
    has = (8, 0)
    with pytest.raises(ConfigError, match="A100 has no such products"):
        refuse_without_fp8(device, torch.bfloat16, 64)


# ── on a device ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def oracle(tmp_path: Path) -> PreTrainedModel:
    return write_model(tmp_path, llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2), seed=5, std=0.1)


def engine_of(folder: Path, **settings: object) -> NativeEngine:
    settings = {"max_num_seqs": 32, "kv_cache_memory_bytes": 2**26, "quantization": "fp8", **settings}
    return NativeEngine(load_decoder(folder, "cuda", torch.bfloat16), EngineConfig(**settings))  # type: ignore[arg-type]


def requests(number: int = 12, n: int = 2, **sampling: object) -> list[GenerateRequest]:
    drawn = np.random.default_rng(0)
    return [
        GenerateRequest(
            drawn.integers(2, VOCAB_SIZE, int(drawn.integers(2, 60))).astype(np.int32),
            SamplingParams(max_tokens=int(drawn.integers(20, 60)), n=n, seed=seed, **sampling),  # type: ignore[arg-type]
        )
        for seed in range(number)
    ]


@torch.no_grad()
def off_by(oracle: PreTrainedModel, asked: list[GenerateRequest], found: list[list[Completion]]) -> float:
    """Logprobs, on average, from those of transformers in float32."""
    off = []
    for request, completion in ((r, c) for r, each in zip(asked, found, strict=True) for c in each):
        whole = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
        expected = oracle(whole[None]).logits[0].log_softmax(-1)[:-1].gather(1, whole[1:, None]).squeeze(1).numpy()
        off.append(np.abs(completion.logprobs - expected[len(request.prompt_ids) - 1 :]))
    return float(np.concatenate(off).mean())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32, 512])
def test_logprobs_are_near_those_of_transformers(oracle: PreTrainedModel, tmp_path: Path, rows: int) -> None:
    asked = requests(max(1, rows // 8), n=min(rows, 8))
    plain = off_by(oracle, asked, engine_of(tmp_path, max_num_seqs=rows, quantization="none").generate(asked))
    found = off_by(oracle, asked, engine_of(tmp_path, max_num_seqs=rows).generate(asked))
    assert plain < found < 0.3


@pytest.mark.gpu
def test_versions_sleep_and_guesses_are_sampled_from_the_weights_as_they_are(oracle: PreTrainedModel, tmp_path: Path) -> None:
    engine, asked = engine_of(tmp_path, speculation="always"), requests()
    assert off_by(oracle, asked, engine.generate(asked)) < 0.3
    with torch.no_grad():
        for parameter in (*engine.decoder.parameters(), *oracle.parameters()):
            parameter.mul_(-0.8)
    engine.apply(WeightUpdate(1, (), 0))
    assert off_by(oracle, asked, engine.generate(asked)) < 0.3
    engine.sleep()
    engine.wake()
    assert off_by(oracle, asked, engine.generate(asked)) < 0.3


@pytest.mark.gpu
@pytest.mark.usefixtures("oracle")
def test_an_adapter_counts_on_a_device(tmp_path: Path) -> None:
    decoder, asked = load_decoder(tmp_path, "cuda", torch.bfloat16), requests(n=1, prompt_logprobs=True)
    add_adapter(decoder, LoraConfig(rank=4, alpha=8), torch.bfloat16, seed=0)
    for module in decoder.modules():
        if isinstance(module, AdaptedLinear):
            torch.nn.init.normal_(module.lora_b, std=0.3)
    decoder.to(torch.bfloat16)
    engines = [
        NativeEngine(decoder, EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**24, quantization=kind))  # type: ignore[arg-type]
        for kind in ("none", "fp8")
    ]
    one, other = (np.concatenate([c[0].prompt_logprobs[1:] for c in engine.generate(asked)]) for engine in engines)
    bare = np.concatenate([c[0].prompt_logprobs[1:] for c in engine_of(tmp_path, quantization="none").generate(asked)])
    assert np.abs(one - bare).mean() > 1, "the adapter makes no difference"
    assert np.abs(one - other).mean() < 0.3
