"""An adapter trained inside the network, held against PEFT on transformers."""

from __future__ import annotations

import functools
import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from support.fakes import Attempt, train_batch
from support.small_models import CONFIGS, SHAPE, VOCAB_SIZE, logits_of, random_model, random_tokens, write_model
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from redline.config.sections.engine import EngineConfig, ServedEngineConfig
from redline.config.sections.lora import LoraConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.engine.native.lora import make_bank
from redline.errors import ModelError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder, save_folder
from redline.models.generic import GenericDecoder
from redline.models.lora.peft import read_adapter
from redline.models.lora.per_token import BARE
from redline.models.lora.trainable import adapter_tensors, add_adapter, is_adapter, merged_tensors, save_adapter
from redline.trainer.batches.micro_batches import micro_batches
from redline.trainer.loss.logprobs import selected_logprobs
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.passes.forward import recompute
from redline.types import GenerateRequest, SamplingParams, TrainBatch, WeightUpdate

LORAS: dict[str, LoraConfig] = {
    "all": LoraConfig(rank=4, alpha=6),
    "q and v": LoraConfig(rank=3, alpha=5, targets=("q_proj", "v_proj")),
    "scattered, stabilized": LoraConfig(rank=5, alpha=2, rslora=True, targets=("k_proj", "o_proj", "up_proj", "down_proj")),
}


@dataclass
class Bench:
    """One set of weights with one adapter, ours and PEFT's."""

    folder: Path
    decoder: Decoder
    oracle: Any
    config: LoraConfig


def make_bench(folder: Path, family: str = "llama, tied", lora: str = "all") -> Bench:
    config = LORAS[lora]
    model = write_model(folder, CONFIGS[family], seed=3, std=0.15)
    decoder = adapted(folder, config)
    scramble(decoder)
    oracle: Any = peft.get_peft_model(model, peft_config(config))
    unknown = peft.set_peft_model_state_dict(oracle, adapter_tensors(decoder)).unexpected_keys
    assert not unknown
    return Bench(folder, decoder, oracle, config)


def peft_config(config: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        target_modules=list(config.targets),
    )


def adapted(folder: Path, config: LoraConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    decoder = load_decoder(folder)
    assert isinstance(decoder, Decoder)
    add_adapter(decoder, config, dtype, seed)
    return decoder


@torch.no_grad()
def scramble(decoder: Decoder, seed: int = 9) -> None:
    """B is zero at first, which would hide most mistakes. In place, as the optimizer does it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def forward(decoder: Decoder, tokens_T: Tensor, *, bare: bool = False) -> Tensor:
    """Logits [T, V] of one sequence."""
    attend = PackedAttention(Segments.independent([len(tokens_T)]))
    return decoder.logits(decoder(tokens_T, attend.positions_T, attend, BARE if bare else None))


def random_batch(seed: int = 0) -> TrainBatch:
    generator = np.random.default_rng(seed)
    groups = []
    for attempts in (3, 1, 2):
        prompt = generator.integers(2, VOCAB_SIZE, generator.integers(1, 12)).tolist()
        answers = [generator.integers(2, VOCAB_SIZE, generator.integers(1, 20)).tolist() for _ in range(attempts)]
        groups.append([Attempt([(prompt, False), (answer, True)], float(generator.normal())) for answer in answers])
    return train_batch(groups)


# ── the same function and the same gradients as PEFT ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama, all biases", "qwen2, tied", "qwen3, own head size"])
def test_the_network_with_its_adapter_gives_the_logits_of_peft(family: str, lora: str, tmp_path: Path) -> None:
    bench, tokens_T = make_bench(tmp_path, family, lora), random_tokens(30, seed=1)
    torch.testing.assert_close(forward(bench.decoder, tokens_T), logits_of(bench.oracle, tokens_T), atol=1e-4, rtol=1e-4)
    with bench.oracle.disable_adapter():
        theirs_TV = logits_of(bench.oracle, tokens_T)
    torch.testing.assert_close(forward(bench.decoder, tokens_T, bare=True), theirs_TV, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(forward(bench.decoder, tokens_T), theirs_TV, atol=0.1)


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama, tied", "llama, all biases", "qwen2, untied"])
def test_a_packed_step_gives_the_gradients_of_peft(family: str, lora: str, tmp_path: Path) -> None:
    bench, batch = make_bench(tmp_path, family, lora), random_batch()
    for micro_batch in micro_batches(batch, 40):
        attend = PackedAttention(micro_batch.segments)
        hidden_TE = bench.decoder(torch.from_numpy(micro_batch.tokens_T), attend.positions_T, attend)
        hidden_ME = hidden_TE[torch.from_numpy(micro_batch.predicted_from_M)]
        logprobs_M, _ = selected_logprobs(
            hidden_ME, bench.decoder.output_weight, torch.from_numpy(micro_batch.targets_M), temperature=0.7
        )
        (logprobs_M * torch.from_numpy(batch.advantages[micro_batch.sequence_M])).sum().backward()
    naive_loss(bench.oracle, batch, temperature=0.7).backward()

    gradients = {name: p.grad for name, p in bench.decoder.named_parameters() if p.grad is not None}
    assert all(map(is_adapter, gradients))
    theirs = {name.replace(".default", ""): p.grad for name, p in bench.oracle.named_parameters() if p.requires_grad}
    ours = adapter_tensors(bench.decoder, gradients)
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-5 * largest, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def naive_loss(model: PreTrainedModel, batch: TrainBatch, temperature: float) -> Tensor:
    """Σ advantage · logprob, one whole sequence at a time."""
    loss = torch.zeros(())
    for start, end, advantage in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.advantages, strict=True):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / temperature, dim=-1)
        chosen = torch.from_numpy(batch.loss_mask[start + 1 : end])
        loss = loss + float(advantage) * logprobs.gather(1, ids[1:, None]).squeeze(1)[chosen].sum()
    return loss


def test_the_gradients_are_those_of_finite_differences(tmp_path: Path) -> None:
    decoder = make_bench(tmp_path, lora="scattered, stabilized").decoder.double()
    linear, x_TI = decoder.layers[0].gate_up, torch.randn(5, 48, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, a, b: torch.func.functional_call(linear, {"lora_a": a, "lora_b": b}, (x,)),
                             (x_TI, linear.lora_a, linear.lora_b))  # fmt: skip


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    decoder, tokens_T = make_bench(tmp_path).decoder, random_tokens(20, seed=1)
    found = []
    for checkpointed in (False, True):
        forward(decoder, tokens_T).square().mean().backward()
        found.append({name: p.grad for name, p in decoder.named_parameters() if p.grad is not None})
        decoder.zero_grad()
        for layer in decoder.layers if not checkpointed else ():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


# ── a fresh adapter ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_fresh_adapter_changes_nothing(tmp_path: Path) -> None:
    model, tokens_T = write_model(tmp_path, CONFIGS["qwen2, untied"]), random_tokens(20, seed=0)
    decoder = adapted(tmp_path, LORAS["all"])
    assert torch.equal(forward(decoder, tokens_T), forward(decoder, tokens_T, bare=True))
    torch.testing.assert_close(forward(decoder, tokens_T), logits_of(model, tokens_T), atol=1e-4, rtol=1e-4)


def test_a_is_drawn_as_peft_draws_it(tmp_path: Path) -> None:
    model = write_model(tmp_path, CONFIGS["llama, tied"])
    oracle = peft.get_peft_model(model, peft_config(LORAS["all"]))
    drawn = adapter_tensors(adapted(tmp_path, LORAS["all"]))
    for name, theirs in peft.get_peft_model_state_dict(oracle).items():
        bound = 1 / math.sqrt(theirs.shape[1])  # U(-bound, bound) has the standard deviation bound / √3
        assert drawn[name].shape == theirs.shape
        for tensor in (drawn[name], theirs) if ".lora_A." in name else ():
            assert bound * 0.8 < float(tensor.abs().max()) <= bound
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.15)
        if ".lora_B." in name:
            assert not drawn[name].any()
            assert not theirs.any()


def test_the_seed_decides_what_is_drawn(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    one, same, other = (adapted(tmp_path, LORAS["all"], seed=seed).layers[1].down.lora_a for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    first, second = (layer.down.lora_a for layer in adapted(tmp_path, LORAS["all"]).layers)
    assert not torch.equal(first, second)


def test_everything_but_the_adapter_is_frozen_in_the_compute_dtype(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, all biases"])
    before = {name: p.detach().clone() for name, p in load_decoder(tmp_path).named_parameters()}
    decoder = adapted(tmp_path, LORAS["q and v"], torch.bfloat16)
    trained = {name for name, p in decoder.named_parameters() if p.requires_grad}
    assert trained == {f"layers.{layer}.qkv.lora_{side}" for layer in (0, 1) for side in "ab"}
    for name, parameter in decoder.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16)
        if name not in trained:
            assert torch.equal(parameter, before[name].bfloat16())
    assert decoder.rotary_frequencies.dtype == torch.float32


def test_a_network_of_another_family_is_refused() -> None:
    decoder = GenericDecoder(random_model(AutoConfig.for_model("gpt_neox", **SHAPE)))
    with pytest.raises(ModelError, match=r"trainer\.lora: model family"):
        add_adapter(decoder, LORAS["all"], torch.float32, seed=0)


def test_the_optimizer_keeps_states_of_the_adapter_alone_and_writes_its_compute_copies(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["llama, untied"])
    decoder = adapted(tmp_path, LORAS["all"], torch.bfloat16)
    drawn = {name: p.detach().clone() for name, p in decoder.named_parameters() if p.requires_grad}
    optimizer = MasterAdamW(decoder, torch.bfloat16, TrainerConfig(learning_rate=1e-2))
    frozen = {name: p.detach().clone() for name, p in decoder.named_parameters() if not is_adapter(name)}
    assert optimizer.masters.keys() == drawn.keys()
    assert all(torch.equal(master, drawn[name]) for name, master in optimizer.masters.items())

    addresses = {name: p.data_ptr() for name, p in decoder.named_parameters()}
    for _ in range(2):  # the first step moves B alone: while B is zero, A has no gradient
        forward(decoder, random_tokens(30, seed=1)).float().square().mean().backward()
        optimizer.step(1e-2)
    assert {name: p.data_ptr() for name, p in decoder.named_parameters()} == addresses
    for name, parameter in decoder.named_parameters():
        if is_adapter(name):
            assert not torch.equal(optimizer.masters[name], drawn[name])
            assert torch.equal(parameter, optimizer.masters[name].bfloat16())
        else:
            assert torch.equal(parameter, frozen[name])
            assert parameter.grad is None


# ── the engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ask(max_tokens: int = 8, adapter: str | None = None) -> GenerateRequest:
    prompt = random_tokens(40, seed=4).numpy().astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), adapter)


@torch.no_grad()
def greedy(oracle: Any, request: GenerateRequest) -> list[int]:
    ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return oracle.generate(input_ids=ids, max_new_tokens=request.sampling.max_tokens, **options)[0, ids.shape[1] :].tolist()


def test_the_engine_samples_with_the_adapter_and_sees_every_update_in_place(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    engine = NativeEngine(bench.decoder, EngineConfig(max_num_seqs=2))
    found = engine.generate([ask()])[0][0].token_ids.tolist()
    assert found == greedy(bench.oracle, ask())
    scramble(bench.decoder, seed=10)
    engine.apply(WeightUpdate(version=1, changed=(), bytes_moved=0))
    peft.set_peft_model_state_dict(bench.oracle, adapter_tensors(bench.decoder))
    completion = engine.generate([ask()])[0][0]
    assert completion.token_ids.tolist() == greedy(bench.oracle, ask()) != found
    assert completion.cached_tokens == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_engine_and_trainer_agree_on_logprobs_after_every_update(device: str, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS["qwen2, tied"])
    decoder = load_decoder(tmp_path, device)
    add_adapter(decoder, LORAS["all"], torch.float32, seed=0)
    assert isinstance(decoder, Decoder)
    engine, request = NativeEngine(decoder, EngineConfig(max_num_seqs=4)), ask(20)
    sampling = replace(request.sampling, temperature=1.0, n=3)
    for version in range(3):
        for completion in engine.generate([replace(request, sampling=sampling)])[0]:
            attempt = Attempt([(request.prompt_ids.tolist(), False), (completion.token_ids.tolist(), True)], 1.0)
            (logprobs_M,) = recompute(decoder, micro_batches(train_batch([[attempt]]), 100), temperature=1.0)
            np.testing.assert_allclose(logprobs_M.cpu().numpy(), completion.logprobs, atol=2e-3 if device == "cuda" else 1e-4)
        scramble(decoder, seed=version)
        engine.apply(WeightUpdate(version=version + 1, changed=(), bytes_moved=0))


def test_another_engine_takes_the_adapter_as_tensors(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, lora="scattered, stabilized")
    decoder, config = load_decoder(tmp_path), ServedEngineConfig(max_num_seqs=2, max_loras=1)
    engine = NativeEngine(decoder, config, bank=make_bank(decoder, config))
    tensors = adapter_tensors(bench.decoder)
    engine.load_adapter("policy", tensors, version=3, alpha=bench.config.alpha, use_rslora=bench.config.rslora)
    assert engine.generate([ask(adapter="policy")])[0][0].token_ids.tolist() == greedy(bench.oracle, ask())


# ── saved ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama, all biases", "qwen2, untied"])
def test_peft_loads_the_saved_adapter_and_gives_our_logits(family: str, lora: str, tmp_path: Path) -> None:
    bench, tokens_T = make_bench(tmp_path / "model", family, lora), random_tokens(30, seed=1)
    save_adapter(tmp_path / "adapter", bench.decoder, bench.config, str(tmp_path / "model"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns of tensors that it misses or does not know
        warnings.simplefilter("ignore", ResourceWarning)  # of what is collected meanwhile
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        loaded: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(logits_of(loaded, tokens_T), forward(bench.decoder, tokens_T), atol=1e-4, rtol=1e-4)
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (bench.config.rank, bench.config.alpha, bench.config.rslora)
    assert set(config.target_modules) == set(bench.config.targets)


def test_peft_finds_the_model_that_the_adapter_belongs_to(tmp_path: Path) -> None:
    bench, tokens_T = make_bench(tmp_path / "model"), random_tokens(30, seed=1)
    save_adapter(tmp_path / "adapter", bench.decoder, bench.config, str(tmp_path / "model"))
    loaded: Any = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(loaded, tokens_T), forward(bench.decoder, tokens_T), atol=1e-4, rtol=1e-4)


def test_our_own_reader_takes_the_saved_adapter(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "model", lora="q and v")
    save_adapter(tmp_path / "adapter", bench.decoder, bench.config, "somewhere")
    parts, tensors = read_adapter(tmp_path / "adapter").parts, adapter_tensors(bench.decoder)
    assert {name for _, name in parts} == {"q_proj", "v_proj"}
    b_OR = tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    torch.testing.assert_close(parts[1, "v_proj"].b_OR, bench.config.scale * b_OR)


def test_what_is_saved_are_the_masters(tmp_path: Path) -> None:
    write_model(tmp_path / "model", CONFIGS["llama, tied"])
    decoder = adapted(tmp_path / "model", LORAS["all"], torch.bfloat16)
    scramble(decoder)
    masters = {name: p.detach().clone() for name, p in decoder.named_parameters() if is_adapter(name)}
    for name, parameter in decoder.named_parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        assert not is_adapter(name) or not torch.equal(parameter, masters[name])
    save_adapter(tmp_path / "adapter", decoder, LORAS["all"], "somewhere", masters)
    saved = read_adapter(tmp_path / "adapter").parts[0, "down_proj"].a_RI
    assert torch.equal(saved, masters["layers.0.down.lora_a"])


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", ["llama, all biases", "qwen2, tied"])
def test_merged_weights_are_an_ordinary_model_with_the_same_logits(family: str, lora: str, tmp_path: Path) -> None:
    bench, tokens_T = make_bench(tmp_path / "model", family, lora), random_tokens(30, seed=1)
    before = {name: p.detach().clone() for name, p in bench.decoder.named_parameters()}
    save_folder(tmp_path / "merged", bench.decoder, tmp_path / "model", torch.float32, merged_tensors(bench.decoder))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits_of(merged, tokens_T), forward(bench.decoder, tokens_T), atol=1e-4, rtol=1e-4)
    assert all(torch.equal(parameter, before[name]) for name, parameter in bench.decoder.named_parameters())
    theirs = bench.oracle.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-5, rtol=1e-5)


def test_the_config_of_a_saved_adapter_is_json_of_plain_lora(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "model")
    save_adapter(tmp_path / "adapter", bench.decoder, bench.config, "somewhere")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["bias"], config["base_model_name_or_path"]) == ("LORA", "none", "somewhere")
