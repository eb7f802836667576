"""Plans against what exists: parameters, optimizer state, caches and logits counted in real objects; and how sizes move."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from support.small_models import CONFIGS, EXPERTS, SHAPE, llama, write_model
from textbook import CHANGES, after, all_at_once, enough
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DebertaV2Config,
    Gemma3Config,
    Gemma3TextConfig,
    JetMoeConfig,
    MambaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
    T5Config,
)

from redline.config.load import validate
from redline.config.schema import Config
from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.engine import NativeEngine
from redline.errors import ConfigError, ModelError
from redline.lab.material.train_batches import random_batch
from redline.lab.measure.roofline import Load
from redline.lab.plan import cpu, gguf_header
from redline.lab.plan.advice import find_cuts, fits
from redline.lab.plan.calibration import rates_of
from redline.lab.plan.devices import DEVICES, FLOAT32_FLOPS, find_device, with_prices
from redline.lab.plan.held import held_terms, kept_logits, policy_bytes
from redline.lab.plan.memory import MemoryEstimate, estimate_memory
from redline.lab.plan.plan import Hardware, Plan, make_plan, plan_setup
from redline.lab.plan.setup import Setup, divided, make_setup
from redline.lab.plan.shapes import NAMED, describe_model
from redline.lab.plan.sizes import balanced, choose_sizes, decoding_rows, kv_bytes_needed, rows_in
from redline.lab.plan.stages import parameters_of, time_share
from redline.lab.plan.table import render
from redline.lab.plan.timing import decode_cost, network_cost, prompt_cost, read_context, training_cost
from redline.models.files.hf import check_folder, empty_decoder, load_config, load_decoder
from redline.models.files.sources import packaged_smollm2
from redline.models.sizes.flops import NetworkCost
from redline.models.stage import cut_stage
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.micro_batches import plan_micro_batches
from redline.trainer.loss import logprobs
from redline.trainer.loss.logprobs import selected_logprobs
from redline.trainer.parallel.place import Division, refuse_offloads

GB = 10**9
SEVEN, HALF = "random:qwen2.5-7b", "random:qwen2.5-0.5b"
H100X4 = Hardware("h100", 4)


def recipe(path: str = HALF, **sections: dict[str, Any]) -> Config:
    rollouts = {"task": {"kind": "import", "path": "no:tasks"}, "groups_per_step": 16, "group_size": 8, "max_new_tokens": 256}
    return validate(
        {"model": {"path": path}, **sections, "rollouts": rollouts | sections.get("rollouts", {})}, "the test's recipe"
    )


def setup_of(path: str = HALF, device: str = "h100", gpus: int = 1, **sections: dict[str, Any]) -> Setup:
    return make_setup(recipe(path, **sections), DEVICES[device], gpus)


def worst(setup: Setup) -> int:
    return estimate_memory(setup).worst.total


def plan_of(path: str, device: str, gpus: int = 1, **sections: dict[str, Any]) -> Plan:
    return make_plan(recipe(path, **sections), Hardware(device, gpus))


# ── shapes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama, tied", "llama, all biases", "mistral, own head size", "qwen3, own head size"])
def test_a_folder_is_described_without_its_weights(tmp_path: Path, family: str) -> None:
    CONFIGS[family].save_pretrained(tmp_path)  # config.json alone
    model = describe_model(str(tmp_path))
    network = empty_decoder(load_config(tmp_path), "meta")
    assert model.parameters == sum(parameter.numel() for parameter in network.parameters())
    layers = sum(parameter.numel() for parameter in network.layers.parameters()) + network.norm.numel()
    assert model.body_parameters == layers
    assert model.head_parameters == network.output_weight.numel()


def test_the_header_of_a_gguf_file_says_what_its_folder_says() -> None:
    pairs, names = gguf_header.read_header(packaged_smollm2())
    assert pairs["general.architecture"] == "llama"
    assert "output.weight" not in names
    model = describe_model("builtin:smollm2-135m-instruct")
    assert model.parameters == 134_515_008
    assert model.tied


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "version 2 or 3"), (b"GGUF\x07\0\0\0", "version 2 or 3"), (b"GGUF\x03\0\0\0\x01", "unreadable header")],
)
def test_a_broken_gguf_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        describe_model(str(path))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-7b", 7.616), ("qwen2.5-32b", 32.76), ("llama-3-8b", 8.030), ("llama-3-70b", 70.55)],
)
def test_named_shapes_have_as_many_parameters_as_the_models(name: str, billions: float) -> None:
    assert describe_model(f"random:{name}").parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_families_that_are_not_ours_are_counted_without_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=64)
    config.save_pretrained(tmp_path)
    counted = AutoModelForCausalLM.from_config(config)
    model = describe_model(str(tmp_path))
    assert model.parameters == sum(parameter.numel() for parameter in counted.parameters())
    assert (model.shape.num_layers, model.shape.head_dim) == (2, 8)


def test_an_unknown_shape_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError) as refused:
        describe_model("random:qwen9")
    assert all(name in refused.value.hint for name in NAMED)


# ── bytes that exist ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "trainer", [{}, {"optimizer_states": "int8"}, {"lora": {"rank": 3}}, {"lora": {"rank": 2, "targets": ["q_proj"]}}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_holds_what_was_planned(tmp_path: Path, trainer: dict[str, Any], dtype: str) -> None:
    write_model(tmp_path, CONFIGS["qwen2, untied"])
    decoder = load_decoder(tmp_path)
    made = PolicyTrainer(decoder, getattr(torch, dtype), TrainerConfig.model_validate(trainer), Sampling())
    setup = make_setup(recipe(str(tmp_path), model={"path": str(tmp_path), "dtype": dtype}, trainer=trainer), DEVICES["h100"])
    planned = policy_bytes(setup)
    assert planned.weights == sum(parameter.nbytes for parameter in decoder.parameters())
    state = sum(tensor.nbytes for tensor in made._optimizer._memory.tensors.values())
    rounding = 256 * 12 * len(list(decoder.parameters()))  # every parameter begins on a block
    assert planned.masters + planned.moments <= state <= planned.masters + planned.moments + rounding
    gradients = sum(gradient.nbytes for gradient in made._optimizer.gradients().values())
    assert planned.gradients == gradients


@pytest.mark.parametrize("given", [100_000, 1_000_000, 10**9])
def test_the_cache_is_as_large_as_the_engine_makes_it(tmp_path: Path, given: int) -> None:
    write_model(tmp_path, CONFIGS["llama, tied"])
    section = {"kv_cache_memory_bytes": given, "max_num_seqs": 8, "block_size": 16}
    engine = NativeEngine(load_decoder(tmp_path), EngineConfig.model_validate(section))
    setup = make_setup(
        recipe(str(tmp_path), model={"path": str(tmp_path), "dtype": "float32"}, engine=section), DEVICES["h100"]
    )
    sizes = estimate_memory(setup).sizes
    assert engine._runner is not None
    assert sizes.kv_bytes == engine._runner.cache.bytes


@pytest.mark.parametrize("predicted", [1, 7, 40, 100])
def test_kept_logits_are_those_of_the_trainer(monkeypatch: pytest.MonkeyPatch, predicted: int) -> None:
    setup = setup_of("builtin:tiny")
    setup = replace(setup, device=replace(setup.device, kind="cpu", name="cpu"))
    V, E = setup.model.shape.vocab_size, setup.model.shape.hidden_size
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 4 * V * 16)
    monkeypatch.setitem(logprobs.KEPT_BYTES, "cpu", 2 * V * 50)
    hidden = torch.randn(predicted, E, dtype=torch.bfloat16, requires_grad=True)
    found, _ = selected_logprobs(
        hidden, torch.randn(V, E, dtype=torch.bfloat16), torch.zeros(predicted, dtype=torch.int64), 1.0
    )
    kept = sum(logits.nbytes for logits, _ in found.grad_fn.chunks if logits is not None)
    assert kept_logits(setup, predicted)[0] == kept


@pytest.mark.parametrize(("groups", "size", "budget"), [(16, 8, 4096), (8, 4, 1000), (32, 8, 4096), (16, 1, 512), (5, 8, 9000)])
def test_the_largest_micro_batch_is_that_of_the_trainer_which_deals_whole_groups(groups: int, size: int, budget: int) -> None:
    work = {"groups_per_step": groups, "group_size": size, "max_new_tokens": 60, "advantages": "batch"}
    config = recipe("builtin:small", rollouts=work, trainer={"max_tokens_per_micro_batch": budget})
    setup = make_setup(config, DEVICES["h100"], prompt_tokens=36)
    lengths = np.full(groups * size, 96)
    batch = random_batch(lengths, prompt_tokens=36, group_size=size, vocab_size=100, key=(0,))
    cost = CostModel.of(setup.model.shape, setup.model.parameters)
    assert choose_sizes(setup).training_tokens == plan_micro_batches(batch, budget, 1, cost, 10**6).largest_micro_batch


def test_a_micro_batch_is_never_larger_than_a_mini_batch() -> None:
    work = {"groups_per_step": 10, "group_size": 8, "max_new_tokens": 60}
    sizes = [
        choose_sizes(make_setup(recipe(rollouts=work, trainer={"mini_batches": count}), DEVICES["h200"], prompt_tokens=36))
        for count in (1, 4)
    ]
    assert [each.training_tokens for each in sizes] == [10 * (36 + 8 * 60), 3 * (36 + 8 * 60)]
    assert sizes[0].forward_tokens == sizes[1].forward_tokens


def test_micro_batches_are_dealt_evenly() -> None:
    assert [balanced(100, most) for most in (100, 99, 50, 49, 1)] == [100, 50, 50, 34, 1]


# ── how sizes move ─────────────────────────────────────────────────────────────────────────────────────────────────────

FIXED = {"engine": {"kv_cache_memory_bytes": 2 * GB}}


def test_more_tokens_at_once_take_more_memory() -> None:
    sizes = [worst(setup_of(trainer={"max_tokens_per_micro_batch": tokens}, **FIXED)) for tokens in (512, 2048, 8192, 32768)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("code", ["h100", "cpu"])
def test_what_is_computed_again_is_not_kept(code: str) -> None:
    kinds = ("none", "light", "selective", "full")
    setups = [
        setup_of(
            "builtin:smollm2-135m-instruct",
            trainer={"gradient_checkpointing": kind, "max_tokens_per_micro_batch": 8192},
            **FIXED,
        )
        for kind in kinds
    ]
    if code == "cpu":
        setups = [replace(setup, device=replace(setup.device, kind="cpu")) for setup in setups]
    none, light, selective, full = (estimate_memory(setup).phase("forward/backward").total for setup in setups)
    assert none > light > selective > full


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("rollouts.max_new_tokens", (64, 256, 1024)),
        ("rollouts.groups_per_step", (4, 16, 64)),
        ("engine.max_num_batched_tokens", (512, 2048, 8192)),
        ("trainer.kl_coef", (0.0, 0.1)),
    ],
)
def test_more_of_anything_takes_no_less(section: str, values: tuple[float, ...]) -> None:
    name, _, key = section.partition(".")
    base = {"trainer": {"max_tokens_per_micro_batch": 65536}, "engine": {"max_num_seqs": 512}}
    estimates = []
    for value in values:
        sections = {**base, name: {**base.get(name, {}), key: value}}
        setup = setup_of(**sections)
        estimates.append({phase.name: phase.total for phase in estimate_memory(setup).phases})
    for smaller, larger in itertools.pairwise(estimates):
        assert all(larger[phase] >= total for phase, total in smaller.items())


def test_offloaded_state_is_on_the_host_and_not_on_the_device() -> None:
    here, away = setup_of(SEVEN), setup_of(SEVEN, trainer={"offload_optimizer": True})
    parameters = here.model.parameters
    assert held_terms(here)["masters"] + held_terms(here)["moments"] == 12 * parameters
    assert "masters" not in held_terms(away)
    assert estimate_memory(away).host["offloaded state"] == 12 * parameters


def test_a_reference_a_critic_and_their_passes_are_counted() -> None:
    plain = estimate_memory(setup_of())
    with_reference = estimate_memory(setup_of(trainer={"kl_coef": 0.1}))
    with_critic = estimate_memory(
        setup_of(rollouts={"advantages": "gae"}, trainer={"critic": {"max_tokens_per_micro_batch": 512}})
    )
    names = [phase.name for phase in plain.phases]
    assert "logprob passes" not in names
    assert with_reference.phase("generation").terms["reference"] == 2 * setup_of().model.parameters
    assert with_reference.phase("logprob passes").terms["logits"] > 0
    assert with_critic.phase("critic step").terms["critic"] == 14 * setup_of().model.parameters
    assert "reference" not in estimate_memory(setup_of(trainer={"kl_coef": 0.1, "lora": {"rank": 8}})).phase("generation").terms


def test_processes_that_divide_the_state_hold_a_part_each() -> None:
    whole, part = setup_of(SEVEN, gpus=8), replace(setup_of(SEVEN, gpus=8), sharding="full")
    assert held_terms(part)["moments"] * 8 == pytest.approx(held_terms(whole)["moments"], rel=1e-6)
    assert held_terms(part)["engine weights"] == 2 * part.model.parameters  # which it can no longer share
    assert worst(part) < 0.52 * worst(whole)


def test_a_reference_is_divided_as_the_policy_is() -> None:
    whole = setup_of(SEVEN, gpus=8, trainer={"kl_coef": 0.1})
    for sharding in ("grad_op", "full"):
        part = replace(whole, sharding=sharding)
        assert held_terms(part)["reference"] * 8 == pytest.approx(held_terms(whole)["reference"], rel=1e-6)
        assert estimate_memory(part).phase("logprob passes").terms["gathered weights"] > 0, "a layer at a time, or all"


# ── families that transformers runs ────────────────────────────────────────────────────────────────────────────────────


def test_a_model_that_also_sees_images_is_planned_by_its_text(tmp_path: Path) -> None:
    text = {name: SHAPE[name] for name in SHAPE if name not in ("bos_token_id", "eos_token_id", "pad_token_id")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text | {"head_dim": 16}, vision_config=vision | {"image_size": 28, "patch_size": 14})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    model = describe_model(str(tmp_path))
    assert model.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert (model.shape.num_layers, model.shape.num_heads, model.shape.head_dim) == (2, 6, 16)
    assert check_folder(tmp_path, with_weights=False) == model.shape.max_positions == SHAPE["max_position_embeddings"]


MIXTRAL = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)
GEMMA = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, head_dim=16, sliding_window=64)
WITHOUT_ADAPTER = {"qwen3_moe": CONFIGS["qwen3_moe"], "mixtral": MIXTRAL, "gemma3": GEMMA}


@pytest.mark.parametrize("family", WITHOUT_ADAPTER)
def test_a_model_that_takes_no_adapter_is_planned_and_is_not_told_to_take_one(tmp_path: Path, family: str) -> None:
    WITHOUT_ADAPTER[family].save_pretrained(tmp_path)
    sizes = {"rollouts": {"max_new_tokens": 64}}
    for fitting in (True, False):
        device = replace(DEVICES["h100"], memory_bytes=DEVICES["h100"].memory_bytes if fitting else GB)
        setup = make_setup(recipe(str(tmp_path), **sizes), device, prompt_tokens=64)
        plan = plan_setup(setup, rates_of(device))
        assert plan.fits == fitting
        assert plan.time.step_s > 0
        assert plan.cuts
        assert "lora" not in json.dumps(plan.as_json()["cuts"])
    with pytest.raises(ModelError, match=r"trainer\.lora"):
        plan_of(str(tmp_path), "h100", trainer={"lora": {"rank": 8}}, **sizes)


def test_a_plan_counts_the_experts_of_transformers_as_the_network_does(tmp_path: Path) -> None:
    write_model(tmp_path, MIXTRAL)
    planned, there = network_cost(describe_model(str(tmp_path)), torch.float32), NetworkCost.of(load_decoder(tmp_path))
    assert planned == there
    assert planned.idle_params == 6 / 8 * 2 * 8 * 3 * 48 * 80
    assert make_plan(recipe(str(tmp_path), rollouts={"max_new_tokens": 64}), Hardware("h100")).left_out == ()


def test_a_plan_says_where_it_cannot_tell_a_familys_experts(tmp_path: Path) -> None:
    JetMoeConfig(**SHAPE, kv_channels=16).save_pretrained(tmp_path)
    plan = make_plan(recipe(str(tmp_path), rollouts={"max_new_tokens": 64}), Hardware("h100"))
    assert plan.left_out == ("experts of model family 'jetmoe': planned as if a token went through all of them",)


@pytest.mark.parametrize(
    ("config", "why"),
    [(MambaConfig(vocab_size=100, hidden_size=64), "no attention"), (T5Config(vocab_size=100), "no causal language model")],
    ids=["mamba", "t5"],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(config: PretrainedConfig, why: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=why):
        describe_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_a_reward_model_is_counted_as_the_classifier_that_it_is(kind: str, tmp_path: Path) -> None:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    encoder = DebertaV2Config(**{name: SHAPE[name] for name in names}, num_labels=1)  # transformers has no causal one of it
    config = encoder if kind == "encoder" else llama(num_labels=1)
    config.save_pretrained(tmp_path)
    network = AutoModelForSequenceClassification.from_config(config)
    judged = setup_of(rollouts={"reward_model": {"path": str(tmp_path)}})
    assert judged.reward_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert held_terms(judged)["reward model"] == judged.dtype.itemsize * judged.reward_parameters


# ── stages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_fullest_stage_is_counted_as_it_is_cut(tmp_path: Path, tied: bool, stages: int) -> None:
    write_model(tmp_path, llama(num_hidden_layers=5, tie_word_embeddings=tied), seed=1)
    decoder = load_decoder(tmp_path)
    counts = [sum(p.numel() for p in cut_stage(decoder, index, stages).parameters()) for index in range(stages)]
    norm = decoder.spec.hidden_size
    assert parameters_of(describe_model(str(tmp_path)), stages) == pytest.approx(max(counts), abs=norm)


@pytest.mark.parametrize("without_experts", [[0, 1], [2, 3], [0, 3]])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_fullest_stage_is_the_one_with_the_experts(tmp_path: Path, without_experts: list[int], stages: int) -> None:
    shape = {**SHAPE, "num_hidden_layers": 4, "mlp_only_layers": without_experts}
    write_model(tmp_path, Qwen3MoeConfig(**shape, **EXPERTS), seed=1)
    decoder = load_decoder(tmp_path)
    counts = [sum(p.numel() for p in cut_stage(decoder, index, stages).parameters()) for index in range(stages)]
    assert parameters_of(describe_model(str(tmp_path)), stages) == max(counts)


def staged(stages: int, gpus: int, **trainer: Any) -> Setup:
    return setup_of(SEVEN, gpus=gpus, trainer={"pipeline_parallel_size": stages, **trainer})


def test_stages_hold_their_layers_and_a_reference_of_them() -> None:
    whole, part = (held_terms(staged(stages, 4, kl_coef=0.1)) for stages in (1, 4))
    for name in ("weights", "masters", "moments", "reference"):
        assert 0.25 < part[name] / whole[name] < 0.35, "an embedding or the head beside a quarter of the layers"
    assert part["engine weights"] == whole["weights"], "which the trainer has no longer"


def test_messages_between_stages_are_counted_and_those_under_way_keep_their_activations() -> None:
    one, four = (estimate_memory(staged(stages, 4, max_tokens_per_micro_batch=2048)) for stages in (1, 4))
    each = [made.phase("forward/backward").terms["activations"] / made.sizes.training_tokens for made in (one, four)]
    assert each[1] == pytest.approx(each[0], rel=0.1), "four times a quarter of the layers"
    assert four.phase("forward/backward").terms["messages"] > 0
    assert "messages" not in one.phase("forward/backward").terms


def test_a_pipeline_waits_less_the_more_micro_batches_it_has() -> None:
    few, many = (training_cost(staged(4, 4), 10_000, count, rates_of(DEVICES["h100"])).products for count in (4, 32))
    assert few / many == pytest.approx((7 / 16) / (35 / 128))
    assert time_share(4, 10**6) == pytest.approx(1 / 4, rel=1e-4)
    assert time_share(1, 5) == 1


def test_a_plan_in_stages_says_so_and_advises_nothing_that_a_run_would_refuse() -> None:
    plan = make_plan(recipe(SEVEN, trainer={"pipeline_parallel_size": 4, "kl_coef": 0.1}), H100X4)
    assert choice(plan, "stages").value == "4"
    assert not [each for each in plan.choices if each.key == "sharding"]
    settings = " ".join(setting for cut in plan.cuts for setting in cut.settings)
    assert "offload" not in settings


@pytest.mark.parametrize(
    ("stages", "hardware", "message"),
    [
        (2, {"count": 1}, "= 2: does not divide the one device"),
        (3, {"count": 4}, "= 3: does not divide the 4 devices"),
        (4, {"count": 4, "sharding": "full"}, "stages divide the weights already"),
        (32, {"count": 32}, "the model has 28 layers, and every stage needs one"),
    ],
)
def test_stages_that_the_devices_cannot_make_are_refused(stages: int, hardware: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(recipe(SEVEN, trainer={"pipeline_parallel_size": stages}), Hardware("h100", **hardware))


def test_a_sharding_of_the_recipe_is_planned() -> None:
    plan = make_plan(recipe(HALF, trainer={"sharding": "full"}), H100X4)
    assert (choice(plan, "sharding").value, choice(plan, "sharding").why) == ("full", "as trainer.sharding says")


# ── the example that guides begin with ─────────────────────────────────────────────────────────────────────────────────


def test_seven_billion_parameters_take_91_gb_and_do_not_fit_80() -> None:
    phase = all_at_once(7e9, kv_cache=20 * GB, activations=10 * GB, gaps=5 * GB)
    assert {name: size / GB for name, size in phase.terms.items()} == {
        "weights": 14,
        "gradients": 14,
        "optimizer states": 28,
        "KV cache": 20,
        "activations": 10,
        "gaps": 5,
    }
    assert phase.total == 91 * GB
    assert phase.total > 80 * GB
    assert enough(phase, 80 * GB) == ["optimizer states in host memory", "LoRA"]
    checkpointing, half_cache, *_ = CHANGES
    assert after(phase, checkpointing, half_cache).total == 77 * GB  # neither is enough alone


def test_our_own_plan_of_it_says_what_to_change() -> None:
    plan = plan_of(SEVEN, "h100")
    assert not plan.fits
    assert plan.memory.worst.name == "forward/backward"
    assert "does not fit" in plan.verdict
    assert "moments" in plan.verdict
    cuts = {cut.settings[0]: cut for cut in plan.cuts if len(cut.settings) == 1}
    assert cuts["trainer.lora.rank=16"].fits
    assert not cuts["trainer.optimizer_states=int8"].fits
    assert cuts["trainer.offload_optimizer=true"].saves > 90 * GB
    assert cuts["trainer.lora.rank=16"].saves > 100 * GB


def test_a_cut_that_is_said_to_fit_fits() -> None:
    almost = plan_of(SEVEN, "h100", trainer={"offload_optimizer": True})
    assert not almost.fits
    assert ("trainer.gradient_checkpointing=light",) in [cut.settings for cut in almost.cuts if cut.fits]
    assert plan_of(SEVEN, "h100", trainer={"offload_optimizer": True, "gradient_checkpointing": "light"}).fits
    assert plan_of(SEVEN, "h100", trainer={"lora": {"rank": 16}}).fits
    assert not plan_of(SEVEN, "h100", trainer={"optimizer_states": "int8"}).fits


def test_where_one_cut_is_not_enough_several_are_proposed_together() -> None:
    plan = plan_of("random:llama-3-70b", "b200")
    (together,) = [cut for cut in plan.cuts if cut.fits]
    assert together is plan.cuts[-1]
    assert len(together.settings) > 1
    changed = recipe("random:llama-3-70b", trainer={"lora": {"rank": 16}})
    assert any("--gpus" in setting for setting in together.settings)
    assert make_plan(changed, Hardware("b200", 8)).fits


def test_a_model_that_is_too_large_for_anything_has_no_cut_that_fits() -> None:
    plan = plan_of("random:llama-3-70b", "l4")
    assert not any(cut.fits for cut in plan.cuts if "--gpus" not in " ".join(cut.settings))


def test_a_plan_names_the_stages_that_would_refuse_to_begin() -> None:
    assert estimate_memory(setup_of(HALF)).sizes.refused == ()
    whole = setup_of(SEVEN, "l4")
    assert estimate_memory(whole).sizes.refused == ("engine", "trainer")
    assert not fits(whole, estimate_memory(whole))
    given = whole.changed(engine={"kv_cache_memory_bytes": GB})
    assert estimate_memory(given).sizes.refused == ("trainer",)


def test_what_a_cut_saves_is_the_difference_of_two_plans() -> None:
    setup = setup_of(SEVEN, "h200", trainer={"max_tokens_per_micro_batch": 4096}, engine={"kv_cache_memory_bytes": GB})
    memory = estimate_memory(setup)
    cuts = {cut.settings: cut for cut in find_cuts(setup, rates_of(setup.device), memory)}
    cut = cuts[("trainer.gradient_checkpointing=full",)]
    assert cut.saves == worst(setup) - worst(setup.changed(trainer={"gradient_checkpointing": "full"}))
    assert cut.time_ratio > 1


# ── settings ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def choice(plan: Plan, key: str) -> Any:
    return next(choice for choice in plan.choices if choice.key == key)


def test_small_models_are_not_divided_and_large_ones_are() -> None:
    small, large = plan_of(HALF, "h100", 8), plan_of(SEVEN, "h100", 8)
    assert choice(small, "sharding").value == "none"
    assert choice(large, "sharding").value in ("grad_op", "full")
    assert "none" in choice(large, "sharding").why
    assert small.fits
    assert large.fits


@pytest.mark.parametrize("key", ["offload_optimizer", "reference_offload"])
def test_what_is_in_host_memory_is_planned_without_sharding_as_a_run_takes_it(key: str) -> None:
    trainer = {key: True, "kl_coef": 0.1}
    plan = make_plan(recipe(SEVEN, trainer=trainer), H100X4)
    assert choice(plan, "sharding").value == "none"
    assert f"trainer.{key}: with trainer.sharding" in choice(plan, "sharding").why
    refuse_offloads(plan.setup.config.trainer, Division(plan.setup.sharding))
    for asked in ({"sharding": "grad_op"}, {"sharding": "full"}):
        with pytest.raises(ConfigError, match=rf"trainer\.{key}: with trainer\.sharding"):
            make_plan(recipe(SEVEN, trainer=trainer), Hardware("h100", 4, **asked))
        with pytest.raises(ConfigError, match=rf"trainer\.{key}: with trainer\.sharding"):
            make_plan(recipe(SEVEN, trainer=trainer | asked), H100X4)
    with pytest.raises(ConfigError, match=rf"trainer\.{key}: with trainer\.pipeline_parallel_size"):
        make_plan(recipe(SEVEN, trainer=trainer | {"pipeline_parallel_size": 4}), H100X4)


def test_cuts_of_several_devices_are_those_that_a_run_takes() -> None:
    plan = make_plan(recipe(SEVEN, trainer={"kl_coef": 0.1}), H100X4)
    assert choice(plan, "sharding").value != "none"
    assert "offload" not in json.dumps([cut.as_json()["settings"] for cut in plan.cuts])


def test_layers_of_transformers_are_planned_undivided(tmp_path: Path) -> None:
    MIXTRAL.save_pretrained(tmp_path)
    short = recipe(str(tmp_path), rollouts={"max_new_tokens": 64})
    plan = make_plan(short, H100X4)
    assert (choice(plan, "sharding").value, choice(plan, "tensor parallel").value) == ("none", "1")
    for asked in ({"sharding": "full"}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match="'mixtral' is run by transformers, and its layers are not divided"):
            make_plan(short, Hardware("h100", 4, **asked))


def test_heads_that_devices_cannot_divide_are_refused_as_by_a_run() -> None:
    assert choice(make_plan(recipe(HALF), H100X4), "tensor parallel").value in ("1", "2"), "two key and value heads"
    with pytest.raises(ModelError, match="attention heads cannot be divided among 4 ranks"):
        make_plan(recipe(HALF), Hardware("h100", 4, tensor_parallel_size=4))


def test_a_critic_of_several_processes_is_said_to_be_none_of_a_run() -> None:
    plan = make_plan(recipe(HALF, rollouts={"advantages": "gae"}), H100X4)
    assert any(sentence.startswith("rollouts.advantages = gae") for sentence in plan.left_out)


def test_a_division_that_was_asked_for_is_not_chosen() -> None:
    plan = make_plan(recipe(HALF), Hardware("h100", 8, sharding="full", tensor_parallel_size=2))
    assert (choice(plan, "sharding").value, choice(plan, "tensor parallel").value) == ("full", "2")
    assert choice(plan, "sharding").why == "as --sharding says"
    assert choice(plan, "tensor parallel").why == "as --tensor-parallel says"


@pytest.mark.parametrize(
    ("gpus", "asked", "message"),
    [
        (1, {"sharding": "full"}, "one device divides nothing"),
        (1, {"tensor_parallel_size": 2}, "one device divides nothing"),
        (8, {"tensor_parallel_size": 3}, "--tensor-parallel 3: does not divide the 8 devices"),
    ],
)
def test_a_division_that_the_devices_cannot_make_is_refused(gpus: int, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(recipe(HALF), Hardware("h100", gpus, **asked))


def test_a_cache_that_nobody_fills_is_said() -> None:
    plan = plan_of(HALF, "h200")
    advised = choice(plan, "engine.kv_cache_memory_bytes")
    assert "would stay empty" in advised.why
    told = plan_of(HALF, "h200", engine={"kv_cache_memory_bytes": int(advised.value), "max_num_seqs": 128})
    assert told.memory.sizes.kv_tokens >= 128 * 256
    assert not any(choice.key == "engine.kv_cache_memory_bytes" for choice in told.choices)


def generation_s(**sections: dict[str, Any]) -> float:
    return plan_of(SEVEN, "h200", **sections).time.seconds_of("generation")


def test_a_cache_that_holds_fewer_attempts_makes_a_step_longer_and_dearer() -> None:
    plans = [
        make_plan(recipe(SEVEN, trainer={"offload_optimizer": True}, engine={"kv_cache_memory_bytes": size}), Hardware("h200"))
        for size in (3 * GB, GB, GB // 3)
    ]
    seconds = [plan.time.seconds_of("generation") for plan in plans]
    prices = [plan.dollars_per_million for plan in plans]
    assert seconds == sorted(set(seconds))
    assert prices == sorted(set(prices))


def test_the_rows_that_a_plan_chooses_take_the_time_that_it_says() -> None:
    cache = {"kv_cache_memory_bytes": GB}
    plan = plan_of(SEVEN, "h200", engine=cache)
    rows = int(choice(plan, "engine.max_num_seqs").value)
    assert rows < plan.setup.work.sequences
    assert "as many attempts as the cache holds" in choice(plan, "engine.max_num_seqs").why
    assert generation_s(engine=cache | {"max_num_seqs": rows}) == plan.time.seconds_of("generation")
    assert generation_s(engine=cache | {"max_num_seqs": rows // 2}) > plan.time.seconds_of("generation")


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 128])
def test_a_cache_of_what_some_rows_need_holds_them_and_no_more(rows: int) -> None:
    setup = setup_of(HALF).changed(engine={"max_num_seqs": rows})
    sizes = choose_sizes(setup.changed(engine={"kv_cache_memory_bytes": kv_bytes_needed(setup)}))
    assert rows_in(setup, sizes.kv_tokens, setup.work.max_new_tokens) == rows
    assert decoding_rows(setup, sizes) == rows
    assert rows_in(setup, sizes.kv_tokens - 64, setup.work.max_new_tokens) == max(1, rows - 1)


def test_the_micro_batch_is_the_one_the_trainer_would_find() -> None:
    setup = setup_of(SEVEN, "h200", trainer={"offload_optimizer": True}, rollouts={"groups_per_step": 256})
    memory = estimate_memory(setup)
    assert memory.worst.total <= setup.device.memory_bytes
    larger = setup.changed(trainer={"max_tokens_per_micro_batch": 2 * memory.sizes.training_tokens})
    assert worst(larger) > 0.95 * setup.device.memory_bytes


# ── money and mistakes ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_hour_costs_what_the_user_says() -> None:
    device = with_prices(find_device("h200"), ["h100=9", "h200=4.0"])
    assert device.price == 4.0
    dear, cheap = (make_plan(recipe(), Hardware("h200", prices=[f"h200={price}"])) for price in (4, 2))
    assert dear.dollars_per_million == pytest.approx(2 * cheap.dollars_per_million)
    assert dear.samples_per_hour == cheap.samples_per_hour
    expected = 1e6 / cheap.samples_per_hour * 2
    assert cheap.dollars_per_million == pytest.approx(expected)


@pytest.mark.parametrize("price", ["h200", "h200=", "h200=-1", "h200=nan", "h900=1"])
def test_a_price_that_is_none_is_refused(price: str) -> None:
    with pytest.raises(ConfigError):
        with_prices(find_device("h200"), [price])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_devices_are_known_by_the_names_that_drivers_use(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--gpu h300") as refused:
        find_device("h300")
    assert "did you mean" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        find_device("zzzzzz")
    assert all(name in refused.value.hint for name in DEVICES)


def test_prompts_that_the_model_cannot_read_are_refused() -> None:
    assert make_plan(recipe("builtin:small"), Hardware("h100"), prompt_tokens=1000).setup.longest == 1256
    with pytest.raises(ConfigError, match=r"--prompt-tokens 1024: builtin:small has 1,024 positions"):
        make_plan(recipe("builtin:small"), Hardware("h100"), prompt_tokens=1024)


def test_impossible_plans_are_refused() -> None:
    for tokens in (1000, 0.5):
        with pytest.raises(ConfigError, match="--new-tokens"):
            make_setup(recipe(), DEVICES["h100"], mean_new_tokens=tokens)
    with pytest.raises(ConfigError, match="--gpus"):
        make_setup(recipe(), replace(DEVICES["h100"], kind="cpu"), gpus=2)


def test_shorter_answers_take_less_time_and_no_less_memory() -> None:
    whole, half = (make_plan(recipe(), Hardware("h100"), mean_new_tokens=tokens) for tokens in (256, 128))
    assert half.time.step_s < whole.time.step_s
    assert half.memory.worst.total == whole.memory.worst.total


@pytest.mark.parametrize("mean", [1024, 100])
def test_rows_that_end_early_are_refilled(mean: int) -> None:
    """4,096 attempts in 256 rows are not 16 turns of the longest: what has to be decoded is a tenth of that."""
    few, many = ({"engine": {"max_num_seqs": rows}} for rows in (256, 4096))
    work = {"rollouts": {"groups_per_step": 256, "group_size": 16, "max_new_tokens": 1024}}
    seconds = []
    for engine in (few, many):
        plan = make_plan(recipe(**engine, **work), Hardware("h200"), mean_new_tokens=mean)
        lengths = np.full(256, mean) if mean == 1024 else np.array([1024] + [96] * 255)  # of each group
        load = Load(256, 128, 16, mean, plan.setup.config.engine.max_num_seqs, np.repeat(lengths, 16))
        cost = network_cost(plan.setup.model, plan.setup.dtype)
        read = read_context(128, mean, 16)
        step = decode_cost(cost, 24, plan.setup.model.shape.vocab_size, load.rows, read, plan.rates).times(load.steps)
        prompts = prompt_cost(cost, 24, 256, 128, plan.setup.config.engine.max_num_batched_tokens, plan.rates)
        expected = (step + prompts).seconds(plan.rates.generation)
        assert plan.time.seconds_of("generation") == pytest.approx(expected, rel=0.01)
        seconds.append(expected)
    assert seconds[0] > seconds[1]


def test_a_single_token_of_an_attempt_comes_with_its_prompt() -> None:
    one, two = (plan_of(HALF, "h200", rollouts={"max_new_tokens": tokens}) for tokens in (1, 2))
    assert 0 < one.time.seconds_of("generation") < two.time.seconds_of("generation")


def test_more_epochs_take_more_passes_and_more_mini_batches_more_updates() -> None:
    def seconds(**trainer: Any) -> dict[str, float]:
        return {phase.name: phase.seconds for phase in make_plan(recipe(trainer=trainer), Hardware("h100")).time.phases}

    one, divided, twice = seconds(), seconds(mini_batches=4), seconds(epochs=2)
    assert twice["forward/backward"] == pytest.approx(2 * one["forward/backward"])
    assert twice["optimizer step"] == pytest.approx(2 * one["optimizer step"])
    assert divided["optimizer step"] == pytest.approx(4 * one["optimizer step"])
    assert divided["forward/backward"] >= one["forward/backward"]
    assert "logprob passes" in divided.keys() & twice.keys()
    assert "logprob passes" not in one


def test_products_in_float32_do_not_have_the_rate_of_tensor_cores() -> None:
    """A data sheet has 989 TFLOP/s in bfloat16 and 67 in float32: a step that products bound takes 15 times as long."""
    sizes = {"rollouts": {"groups_per_step": 64}, "trainer": {"max_tokens_per_micro_batch": 16384}}
    half, whole = (plan_of(HALF, "h200", model={"path": HALF, "dtype": dtype}, **sizes) for dtype in ("bfloat16", "float32"))
    assert whole.rates.flops == 67e12
    assert whole.time.seconds_of("forward/backward") > 10 * half.time.seconds_of("forward/backward")
    assert FLOAT32_FLOPS.keys() == DEVICES.keys()


def test_what_a_plan_does_not_have_is_said() -> None:
    assert plan_of(HALF, "h200").left_out == ()
    apart = plan_of(HALF, "h200", placement={"engines": 2}, buffer={"max_lag": 1})
    assert [sentence.partition(" =")[0] for sentence in apart.left_out] == ["placement.engines", "buffer.max_lag"]
    assert apart.as_json()["left_out"] == list(apart.left_out)
    divided = plan_of(
        HALF, "h200", trainer={"sequence_parallel_size": 2}, engine={"tensor_parallel_size": 2}, placement={"engines": 1}
    )
    assert any("--tensor-parallel 2 asks for it" in sentence for sentence in divided.left_out)
    assert any("trainer.sequence_parallel_size = 2" in sentence for sentence in divided.left_out)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(apart))
    assert "not in this plan: buffer.max_lag = 1" in console.export_text()


@pytest.mark.parametrize("damaged", ["", "{", '{"flops": 1}', "[]"])
def test_a_damaged_measurement_of_this_machine_is_measured_again(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = cpu.Measured(1e12, 1e10, 5)
    monkeypatch.setattr(cpu, "plan_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu, "measure_cpu", lambda dtype, num_threads: measured)
    cpu.this_cpu(torch.float32, 1)
    [kept] = tmp_path.iterdir()
    kept.write_text(damaged)
    device, process_bytes = cpu.this_cpu(torch.float32, 1)
    assert (device.flops, process_bytes) == (1e12, 5)
    assert json.loads(kept.read_text())["process_bytes"] == 5


def test_a_plan_is_one_json_document_that_adds_up() -> None:
    plan = plan_of(HALF, "h100")
    document = json.loads(json.dumps(plan.as_json()))
    for phase in document["memory"].values():
        assert sum(phase["terms"].values()) == phase["total_bytes"] >= phase["allocated_bytes"]
    assert document["time"]["step_s"] == pytest.approx(sum(phase["seconds"] for phase in document["time"]["phases"]))
    assert {"generation", "forward/backward", "optimizer step", "weight sync", "wake-up"} <= document["memory"].keys()


def test_the_worst_phase_decides() -> None:
    plan = plan_of(HALF, "h100")
    assert isinstance(plan.memory, MemoryEstimate)
    assert plan.room == plan.setup.device.memory_bytes - max(phase.total for phase in plan.memory.phases)
    assert fits(plan.setup, plan.memory) == (plan.room >= 0)
    again = plan_setup(plan.setup, plan.rates)
    assert again.as_json() == plan.as_json()


def test_whole_numbers_are_planned_for_cpus_alone() -> None:
    with pytest.raises(ConfigError, match="it is for CPUs"):
        make_setup(recipe(engine={"quantization": "int16"}), DEVICES["h100"])


def test_whole_numbers_are_fewer_bytes_and_more_products_at_once() -> None:
    cost = NetworkCost(1000, 100, bytes_per_param=4, kv_bytes_per_token=0, attention_flops=0)
    int8 = cost.quantized("int8", torch.float32)
    assert (cost.product_flops(1, 1), int8.product_flops(1, 1)) == (2200, 550)
    assert (cost.weight_bytes(1), int8.weight_bytes(1)) == (4400, 1168)  # a scale for each 64 numbers
    assert cost.quantized("int16", torch.float32).product_flops(1, 1) == 1100
    assert cost.quantized("int16", torch.bfloat16).product_flops(1, 1) == 0  # what nobody knows bounds nothing
    assert cost.quantized("none", torch.float32) == cost


def test_8_bit_floating_point_is_planned_for_gpus_that_have_it() -> None:
    asked = recipe(engine={"quantization": "fp8"})
    for device, said in ((DEVICES["a100"], "a100 has no such products"), (cpu.this_cpu(torch.float32, 1)[0], "it is for GPUs")):
        with pytest.raises(ConfigError, match=said):
            make_setup(asked, device)
    setup, plain = make_setup(asked, DEVICES["h100"]), make_setup(recipe(), DEVICES["h100"])
    more = sum(held_terms(setup).values()) - sum(held_terms(plain).values())
    heads = setup.model.head_parameters * (1 if setup.model.tied else 2)
    assert more == setup.model.parameters - heads


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"path": HALF, "dtype": "float32"}}, "the rest is in bfloat16"),
        ({"engine": {"quantization": "fp8", "block_size": 48}}, "no power of two"),
    ],
)
def test_what_a_run_in_8_bits_is_refused_no_plan_says_yes_to(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        setup_of(device="h200", **({"engine": {"quantization": "fp8"}} | sections))


def test_heads_that_no_kernel_knows_are_not_planned_in_8_bits(tmp_path: Path) -> None:
    write_model(tmp_path, llama(head_dim=48, hidden_size=96, intermediate_size=160))
    with pytest.raises(ModelError, match="heads of 48"):
        setup_of(str(tmp_path), engine={"quantization": "fp8"})


def test_engines_in_fewer_bits_are_never_divided() -> None:
    asked = recipe("random:qwen2.5-7b", engine={"quantization": "fp8"})
    assert make_plan(asked, Hardware("h100", 8)).setup.tensor_parallel_size == 1
    with pytest.raises(ConfigError, match="needs the whole model in one process"):
        divided(make_setup(asked, DEVICES["h100"], 8), None, 4)


def test_a_copy_in_fewer_bits_is_made_when_the_model_has_been_loaded() -> None:
    found, plain = (estimate_memory(setup_of(engine={"quantization": kind})) for kind in ("fp8", "none"))
    assert found.phase("loading").total == plain.phase("loading").total
    assert found.worst.total > plain.worst.total


def test_8_bit_floating_point_leaves_the_head_as_it_is() -> None:
    cost = NetworkCost(1000, 100, bytes_per_param=2, kv_bytes_per_token=0, attention_flops=0).quantized("fp8", torch.bfloat16)
    assert (cost.product_flops(1, 1), cost.weight_bytes(1)) == (1200, 1200)
