"""LoRA adapters in the engine, held against transformers and PEFT."""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_models import CONFIGS, VOCAB_SIZE, llama, write_model
from torch import Tensor, nn
from transformers import PretrainedConfig

from redline.config.sections.engine import ServedEngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine.native.lora import make_bank
from redline.errors import EngineBusyError, EngineError, ModelError, RedlineError
from redline.kernels.segments import Segments
from redline.models.attention.packed import PackedAttention
from redline.models.files.hf import load_decoder
from redline.types import Completion, Delta, GenerateRequest, SamplingParams

ADAPTERS: dict[str, dict[str, Any]] = {
    "thin": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "whole": {"r": 8, "lora_alpha": 6, "target_modules": "all-linear"},
    "stable": {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"]},
    "uneven": {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": ["gate_proj", "o_proj", "q_proj"],
        "rank_pattern": {"o_proj": 5, "layers.1.self_attn.q_proj": 1},
        "alpha_pattern": {"o_proj": 9, r".*\.0\.mlp\.gate_proj": 2},
    },
}
"""Different ranks, scales and targets."""


def engine_on(decoder: Any, **config: Any) -> NativeEngine:
    """With room for adapters, as `redline serve` makes one."""
    settings = ServedEngineConfig(**config)
    return NativeEngine(decoder, settings, bank=make_bank(decoder, settings))


@dataclass
class Setup:
    """A model and adapters as PEFT has them, and as the folders it wrote."""

    oracle: peft.PeftModel
    folder: Path
    answers: dict[tuple[bytes, str | None, int], list[int]] = field(default_factory=dict)

    def engine(self, load: tuple[str, ...] = tuple(ADAPTERS), **config: Any) -> NativeEngine:
        settings = {"max_num_seqs": 8, "max_loras": 4, "max_lora_rank": 8, **config}
        engine = engine_on(load_decoder(self.folder / "model"), **settings)
        for name in load:
            engine.load_adapter(name, self.folder / name)
        return engine

    def tensors(self, name: str) -> dict[str, Tensor]:
        """By PEFT's names, in memory."""
        return peft.get_peft_model_state_dict(self.oracle, adapter_name=name)

    def greedy(self, request: GenerateRequest) -> list[int]:
        """What PEFT generates."""
        key = request.prompt_ids.tobytes(), request.adapter, request.sampling.max_tokens
        if key not in self.answers:
            self.answers[key] = self._generate(request)
        return self.answers[key]

    @torch.no_grad()
    def _generate(self, request: GenerateRequest) -> list[int]:
        ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with self._under(request.adapter):
            out = self.oracle.generate(input_ids=ids, max_new_tokens=request.sampling.max_tokens, **options)
        return out[0, ids.shape[1] :].tolist()

    def _under(self, adapter: str | None) -> AbstractContextManager[None]:
        if adapter is None:
            return self.oracle.disable_adapter()
        self.oracle.set_adapter(adapter)
        return nullcontext()

    @torch.no_grad()
    def logprobs(self, adapter: str | None, tokens: np.ndarray) -> np.ndarray:
        """Of every token but the first, by PEFT."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        with self._under(adapter):
            logprobs = torch.log_softmax(self.oracle(input_ids=ids[None]).logits[0, :-1].double(), dim=-1)
        return logprobs.gather(1, ids[1:, None]).squeeze(1).numpy()


def make_setup(folder: Path, shape: PretrainedConfig, std: float = 0.3) -> Setup:
    model: Any = write_model(folder / "model", shape, seed=5, std=std)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, settings in ADAPTERS.items():
            config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
            if isinstance(model, peft.PeftModel):
                model.add_adapter(name, config)
            else:
                model = peft.get_peft_model(model, config, adapter_name=name)
        model.eval().save_pretrained(folder)
    return Setup(model, folder)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("llama"), CONFIGS["llama, all biases"])


def ask(length: int, adapter: str | None = None, max_tokens: int = 10, seed: int = 0, **sampling: Any) -> GenerateRequest:
    prompt = np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}), adapter)


def answer(engine: NativeEngine, request: GenerateRequest) -> Completion:
    return engine.generate([request])[0][0]


def finish(engine: NativeEngine) -> dict[int, list[Completion | EngineError]]:
    """Step until nothing is left; what became of each request."""
    found: dict[int, list[Completion | EngineError]] = {}
    while engine.has_work:
        for number, event in engine.step():
            if isinstance(event, Delta) and event.completion is not None:
                found.setdefault(number, []).append(event.completion)
            elif isinstance(event, EngineError):
                found.setdefault(number, []).append(event)
    return found


def same(one: Completion, other: Completion) -> bool:
    """Bit for bit."""
    return bool(np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs))


def mixed() -> list[GenerateRequest]:
    """Every adapter twice and the bare model twice, with prompts of all lengths."""
    names = [None, *ADAPTERS, None, *ADAPTERS]
    return [ask(3 + 7 * index, name, 8, seed=index) for index, name in enumerate(names)]


# ── the same tokens as PEFT ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama, all biases", "qwen2, untied", "qwen3, own head size"])
def test_one_batch_of_many_adapters_and_the_bare_model_gives_what_peft_gives(family: str, tmp_path: Path) -> None:
    setup, requests = make_setup(tmp_path, CONFIGS[family]), mixed()
    found = [group[0].token_ids.tolist() for group in setup.engine(max_num_seqs=16).generate(requests)]
    assert found == [setup.greedy(request) for request in requests]
    assert answer(setup.engine(), replace(requests[1], adapter=None)).token_ids.tolist() != found[1]


@pytest.mark.parametrize("config", [{"max_num_batched_tokens": 8}, {"kv_cache_memory_bytes": 80_000}, {"max_num_seqs": 2}])
def test_chunks_preemptions_and_waiting_change_nothing(setup: Setup, config: dict[str, Any]) -> None:
    requests = mixed()
    engine = setup.engine(**config)
    found, expected = engine.generate(requests), setup.engine(max_num_seqs=16).generate(requests)
    assert [c[0].token_ids.tolist() for c in found] == [c[0].token_ids.tolist() for c in expected]
    assert ("kv_cache_memory_bytes" in config) == (engine.stats.preemptions > 0)


def test_logprobs_of_prompt_and_samples_are_those_under_the_adapter(setup: Setup) -> None:
    request = ask(30, "whole", n=3, temperature=1.0, prompt_logprobs=True)
    for completion in setup.engine().generate([request])[0]:
        assert completion.prompt_logprobs is not None
        found = np.concatenate([completion.prompt_logprobs[1:], completion.logprobs])
        expected = setup.logprobs("whole", np.concatenate([request.prompt_ids, completion.token_ids]))
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["thin", "whole", "stable"])
def test_tensors_give_what_their_folder_gives(setup: Setup, name: str) -> None:
    engine = setup.engine(())
    engine.load_adapter(name, setup.tensors(name), alpha=ADAPTERS[name]["lora_alpha"], use_rslora=name == "stable")
    assert same(answer(engine, ask(20, name)), answer(setup.engine((name,)), ask(20, name)))


def test_tensors_without_alpha_have_the_scale_one(setup: Setup) -> None:
    default, explicit = setup.engine(()), setup.engine(())
    default.load_adapter("thin", setup.tensors("thin"))
    explicit.load_adapter("thin", setup.tensors("thin"), alpha=ADAPTERS["thin"]["r"])
    assert same(answer(default, ask(20, "thin")), answer(explicit, ask(20, "thin")))


def test_names_of_a_live_state_dict_are_understood(setup: Setup) -> None:
    live = {name: tensor for name, tensor in setup.oracle.state_dict().items() if ".lora_" in name and ".thin." in name}
    assert all(".thin.weight" in name for name in live)
    engine = setup.engine(())
    engine.load_adapter("thin", live, alpha=ADAPTERS["thin"]["lora_alpha"])
    assert same(answer(engine, ask(20, "thin")), answer(setup.engine(("thin",)), ask(20, "thin")))


def test_requests_under_way_survive_sleep(setup: Setup) -> None:
    engine, request = setup.engine(), ask(20, "whole")
    number = engine.submit(request)
    for _ in range(4):
        engine.step()
    engine.sleep()
    engine.wake()
    completion = finish(engine)[number][0]
    assert isinstance(completion, Completion)
    assert completion.token_ids.tolist() == setup.greedy(request)


# ── who else notices ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_without_adapters_runs_the_bare_network(setup: Setup) -> None:
    engine, plain = setup.engine(), setup.engine((), max_loras=0)
    arguments: list[int] = []
    engine.decoder.register_forward_pre_hook(lambda module, args: arguments.append(len(args)))
    assert same(answer(engine, ask(20)), answer(plain, ask(20)))
    assert set(arguments) == {3}
    answer(engine, ask(20, "thin"))
    assert set(arguments) == {3, 4}


def test_the_bare_model_answers_the_same_beside_adapters(setup: Setup) -> None:
    requests = mixed()
    together = setup.engine(max_num_seqs=16).generate(requests)
    for request, (completion,) in zip(requests, together, strict=True):
        if request.adapter is None:
            alone = answer(setup.engine((), max_loras=0), request)
            assert completion.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(completion.logprobs, alone.logprobs, atol=1e-5)


def test_the_trainer_never_sees_an_adapter(setup: Setup) -> None:
    engine = setup.engine(())
    decoder, tokens = engine.decoder, torch.arange(2, 42)

    def forward() -> Tensor:
        attend = PackedAttention(Segments.independent([25, 15]), torch.device("cpu"))
        return decoder.logits(decoder(tokens, attend.positions_T, attend))

    names, before = list(decoder.state_dict()), forward()
    for name in ADAPTERS:
        engine.load_adapter(name, setup.folder / name)
        engine.submit(ask(20, name))
    for _ in range(3):
        engine.step()
        assert torch.equal(forward(), before)
    assert list(decoder.state_dict()) == names
    before.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_two_engines_on_one_network_keep_their_adapters_apart(setup: Setup) -> None:
    one = setup.engine(("thin",))
    other = engine_on(one.decoder, max_num_seqs=4, max_loras=1)
    other.load_adapter("thin", setup.folder / "whole")
    assert answer(one, ask(20, "thin")).token_ids.tolist() == setup.greedy(ask(20, "thin"))
    assert answer(other, ask(20, "thin")).token_ids.tolist() == setup.greedy(ask(20, "whole"))


# ── versions and cached prefixes ───────────────────────────────────────────────────────────────────────────────────────


def test_a_known_version_is_not_read_again(setup: Setup) -> None:
    engine = setup.engine(("thin",))
    before = replace(engine.adapter_counts)
    engine.load_adapter("thin", Path("nowhere"))
    assert engine.adapter_counts == before
    with pytest.raises(ModelError, match="nowhere"):
        engine.load_adapter("thin", Path("nowhere"), version=1)
    assert engine.adapters == {"thin": 0}


def test_a_new_version_replaces_the_old_one_and_its_cached_prefixes(setup: Setup) -> None:
    engine, request = setup.engine(("thin",)), ask(40, "thin")
    assert answer(engine, request).cached_tokens == 0
    assert answer(engine, request).cached_tokens == 32
    engine.load_adapter("thin", setup.folder / "whole", version=1)
    renewed = answer(engine, request)
    assert renewed.token_ids.tolist() == setup.greedy(replace(request, adapter="whole"))
    assert renewed.cached_tokens == 0
    assert engine.adapters == {"thin": 1}
    assert engine.stats.adapters == 1


def test_what_was_cached_for_an_unloaded_adapter_is_never_found_again(setup: Setup) -> None:
    engine, request = setup.engine(("thin",)), ask(40, "thin")
    answer(engine, request)
    engine.unload_adapter("thin")
    engine.load_adapter("thin", setup.folder / "whole")
    renewed = answer(engine, request)
    assert renewed.token_ids.tolist() == setup.greedy(replace(request, adapter="whole"))
    assert renewed.cached_tokens == 0


def test_a_new_version_reaches_requests_under_way_and_what_they_computed_is_not_shared(setup: Setup) -> None:
    engine, request = setup.engine(("thin",)), ask(40, "thin", max_tokens=30)
    number = engine.submit(request)
    for _ in range(8):
        engine.step()
    engine.load_adapter("thin", setup.folder / "whole", version=1)
    completion = finish(engine)[number][0]
    assert isinstance(completion, Completion)
    assert completion.token_ids[:7].tolist() == setup.greedy(request)[:7]
    assert completion.token_ids.tolist() != setup.greedy(request)
    again = answer(engine, request)
    assert again.cached_tokens == 0
    assert again.token_ids.tolist() == setup.greedy(replace(request, adapter="whole"))


def test_adapters_do_not_share_prefixes_with_each_other_or_the_bare_model(setup: Setup) -> None:
    engine = setup.engine()
    for adapter in (None, *ADAPTERS):
        assert answer(engine, ask(40, adapter)).cached_tokens == 0
    for adapter in (None, *ADAPTERS):
        assert answer(engine, ask(40, adapter)).cached_tokens == 32


def test_what_the_caller_does_to_its_tensors_later_changes_nothing(setup: Setup) -> None:
    engine, tensors = setup.engine(("thin",), max_loras=1), {n: t.clone() for n, t in setup.tensors("whole").items()}
    engine.load_adapter("own", tensors, alpha=6)
    for tensor in tensors.values():
        tensor.zero_()
    answer(engine, ask(20, "thin"))
    assert engine.adapter_counts.evictions == 2
    assert answer(engine, ask(20, "own")).token_ids.tolist() == setup.greedy(ask(20, "whole"))


# ── slots ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_adapter_used_longest_ago_gives_its_slot_and_comes_back_by_a_copy(setup: Setup, tmp_path: Path) -> None:
    engine = setup.engine((), max_loras=2)
    for name in ("thin", "whole"):
        shutil.copytree(setup.folder / name, tmp_path / name)
        engine.load_adapter(name, tmp_path / name)
        shutil.rmtree(tmp_path / name)
    answer(engine, ask(9, "thin"))
    engine.load_adapter("stable", setup.folder / "stable")  # takes the slot of "whole"
    assert (engine.stats.adapters, engine.adapter_counts.evictions) == (2, 1)
    copies = engine.adapter_counts.copies
    answer(engine, ask(9, "thin"))
    assert engine.adapter_counts.copies == copies
    back = answer(engine, ask(9, "whole"))
    assert back.token_ids.tolist() == setup.greedy(ask(9, "whole"))
    assert engine.adapter_counts.copies == copies + 1
    assert engine.adapters == {"stable": 0, "thin": 0, "whole": 0}


def test_an_evicted_adapter_finds_its_cached_prefixes_again(setup: Setup) -> None:
    engine = setup.engine(("thin", "whole"), max_loras=1)
    for name in ("thin", "whole"):
        assert answer(engine, ask(40, name)).cached_tokens == 0
    assert answer(engine, ask(40, "thin")).cached_tokens == 32


def test_a_smaller_adapter_leaves_nothing_of_the_one_before_it(setup: Setup) -> None:
    engine = setup.engine(("whole", "thin"), max_loras=1)
    assert answer(engine, ask(20, "thin")).token_ids.tolist() == setup.greedy(ask(20, "thin"))


def test_no_slot_is_taken_from_a_request_under_way(setup: Setup) -> None:
    engine = setup.engine(("thin", "whole"), max_loras=1)
    number = engine.submit(ask(20, "thin"))
    engine.step()
    for refused in (
        lambda: engine.submit(ask(5, "whole")),
        lambda: engine.load_adapter("stable", setup.folder / "stable"),
        lambda: engine.generate([ask(5), ask(5, "whole")]),
    ):
        with pytest.raises(EngineBusyError, match="use all 1 adapters") as caught:
            refused()
        assert "engine.max_loras" in caught.value.hint
    found = finish(engine)
    completion = found.pop(number)[0]
    assert isinstance(completion, Completion)
    assert completion.token_ids.tolist() == setup.greedy(ask(20, "thin"))
    assert not found
    assert answer(engine, ask(5, "whole")).token_ids.tolist() == setup.greedy(ask(5, "whole"))


def test_an_adapter_in_use_is_not_unloaded(setup: Setup) -> None:
    engine = setup.engine(("thin",))
    number = engine.submit(ask(20, "thin", n=2))
    with pytest.raises(EngineError, match="'thin' is used by 1 unfinished request"):
        engine.unload_adapter("thin")
    engine.step()
    engine.abort(number)
    engine.unload_adapter("thin")
    assert (engine.adapters, engine.stats.adapters) == ({}, 0)
    with pytest.raises(EngineError, match="unknown adapter 'thin'"):
        engine.submit(ask(20, "thin"))
    with pytest.raises(EngineError, match="unknown adapter 'thin'"):
        engine.unload_adapter("thin")
    finish(engine)


def test_an_adapter_joins_while_others_stream(setup: Setup) -> None:
    """What is slow happens on another thread; the engine's own only copies."""
    engine = setup.engine(("thin",))
    requests = ask(20, "thin", max_tokens=40), ask(20, "whole")

    async def serve() -> tuple[Completion, Completion]:
        with EngineSession(engine) as running:
            first = asyncio.create_task(running.complete(requests[0]))
            prepared = await asyncio.to_thread(engine.prepare_adapter, setup.folder / "whole")
            await running.run(lambda engine: engine.load_adapter("whole", prepared))
            second = await running.complete(requests[1])
            return (await first)[0], second[0]

    found = asyncio.run(serve())
    assert [c.token_ids.tolist() for c in found] == [setup.greedy(request) for request in requests]


# ── numbers nobody can use ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adapter_with_nan_is_refused_and_the_version_before_it_stays(setup: Setup) -> None:
    engine = setup.engine(("thin",))
    for value in (float("nan"), float("inf")):
        tensors = {name: tensor.clone() for name, tensor in setup.tensors("thin").items()}
        next(tensor for name, tensor in tensors.items() if "lora_B" in name)[0, 0] = value
        with pytest.raises(ModelError, match="NaN or infinite"):
            engine.load_adapter("thin", tensors, version=1)
    assert engine.adapters == {"thin": 0}
    assert answer(engine, ask(20, "thin")).token_ids.tolist() == setup.greedy(ask(20, "thin"))


def test_an_adapter_that_overflows_harms_only_its_own_requests(setup: Setup) -> None:
    engine = setup.engine(("whole",), kv_cache_memory_bytes=80_000)
    # Every token of a batch goes through every A, and overflows in this one.
    huge = {name: torch.full_like(t, 3e38) if "lora_A" in name else t for name, t in setup.tensors("whole").items()}
    engine.load_adapter("huge", huge)
    for seed in range(3):  # the blocks it spoiled serve others afterwards
        good = [ask(20, "whole", seed=seed), ask(17, seed=seed)]
        bad = engine.submit(ask(21, "huge", n=2))
        numbers = [engine.submit(request) for request in good]
        found = finish(engine)
        (error,) = found[bad]
        assert isinstance(error, EngineError)
        assert "NaN" in error.message
        assert "'huge'" in error.message
        for number, request in zip(numbers, good, strict=True):
            (completion,) = found[number]
            assert isinstance(completion, Completion)
            assert completion.token_ids.tolist() == setup.greedy(request)
    engine.unload_adapter("huge")


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_adapter_is_refused_with_the_known_ones(setup: Setup) -> None:
    with pytest.raises(EngineError, match="unknown adapter 'thick'; resident: thin, whole"):
        setup.engine(("thin", "whole")).submit(ask(5, "thick"))


def test_without_max_loras_there_are_no_adapters(setup: Setup) -> None:
    with pytest.raises(EngineError, match="LoRA is off") as caught:
        setup.engine(("thin",), max_loras=0)
    assert "engine.max_loras" in caught.value.hint


def test_an_adapter_above_the_largest_rank_is_refused(setup: Setup) -> None:
    with pytest.raises(EngineError, match=r"rank 8 exceeds engine\.max_lora_rank = 4") as caught:
        setup.engine(("whole",), max_lora_rank=4)
    assert caught.value.hint == "set engine.max_lora_rank=8"


def test_a_network_of_another_kind_takes_no_adapters() -> None:
    assert make_bank(nn.Identity(), ServedEngineConfig()) is None
    with pytest.raises(EngineError, match="takes no LoRA adapters"):
        make_bank(nn.Identity(), ServedEngineConfig(max_loras=1))


def test_adapters_and_tensor_parallelism_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="LoRA adapters need the whole model in one process"):
        ServedEngineConfig(max_loras=1, tensor_parallel_size=2)


def test_alpha_of_a_folder_is_its_own(setup: Setup) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        setup.engine(()).load_adapter("thin", setup.folder / "thin", alpha=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 1], [0, 2]]),
        ("init_lora_weights", "pissa"),
        ("peft_type", "VERA"),
        ("invented_tomorrow", {"rank": 3}),
    ],
)
def test_what_peft_can_do_beyond_plain_lora_is_refused(setup: Setup, tmp_path: Path, key: str, value: Any) -> None:
    folder = shutil.copytree(setup.folder / "thin", tmp_path / "thin")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ModelError, match="not a LoRA adapter" if key == "peft_type" else key):
        setup.engine(()).load_adapter("thin", folder)


PREFIX = "base_model.model.model.layers.0.self_attn"
EDITS: dict[str, Callable[[dict[str, Tensor]], Mapping[str, Tensor]]] = {
    "lora_embedding_A is not LoRA's A or B": lambda t: (
        t | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}
    ),
    "lora_magnitude_vector": lambda t: t | {f"{PREFIX}.q_proj.lora_magnitude_vector": torch.ones(48)},
    "LoRA on lm_head is not supported": lambda t: {
        name.replace("model.layers.0.self_attn.q_proj", "lm_head"): tensor for name, tensor in t.items()
    },
    "only one of lora_A and lora_B": lambda t: {n: x for n, x in t.items() if n != f"{PREFIX}.q_proj.lora_B.weight"},
    "do not fit": lambda t: t | {f"{PREFIX}.q_proj.lora_A.weight": torch.ones(3, 48)},
    "another model: it changes a 48 × 7 q_proj in layer 0": lambda t: t | {f"{PREFIX}.q_proj.lora_A.weight": torch.ones(2, 7)},
    "in layer 9": lambda t: {name.replace("layers.1.", "layers.9."): tensor for name, tensor in t.items()},
    "there are no LoRA tensors": lambda t: {},
}


@pytest.mark.parametrize("reason", EDITS)
def test_tensors_that_make_no_adapter_for_this_model_are_refused(setup: Setup, tmp_path: Path, reason: str) -> None:
    folder = shutil.copytree(setup.folder / "thin", tmp_path / "thin")
    tensors = EDITS[reason](load_file(folder / "adapter_model.safetensors"))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    for source in (folder, str(folder), tensors):
        with pytest.raises(ModelError, match=reason):
            setup.engine(()).load_adapter("thin", source)


def test_tensors_of_two_adapters_are_refused(setup: Setup) -> None:
    live = {name: tensor for name, tensor in setup.oracle.state_dict().items() if ".lora_" in name}
    with pytest.raises(ModelError, match="has two lora_"):
        setup.engine(()).load_adapter("both", live)


@pytest.mark.parametrize("damaged", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_a_damaged_folder_is_refused_with_the_file(setup: Setup, tmp_path: Path, damaged: str, content: bytes | None) -> None:
    folder = shutil.copytree(setup.folder / "thin", tmp_path / "thin")
    (folder / damaged).unlink()
    if content is not None:
        (folder / damaged).write_bytes(content)
    with pytest.raises(RedlineError, match=damaged):
        setup.engine(()).load_adapter("thin", folder)


# ── on a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
def test_graphs_compute_what_peft_computes(tmp_path: Path) -> None:
    wide = llama(hidden_size=256, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2)
    setup = make_setup(tmp_path, wide, std=0.1)
    decoder = load_decoder(tmp_path / "model", "cuda", torch.bfloat16)
    engine = engine_on(decoder, max_num_seqs=16, max_loras=4, max_lora_rank=8)
    for name in ADAPTERS:
        engine.load_adapter(name, tmp_path / name)
    requests = [replace(request, sampling=replace(request.sampling, temperature=1.0, max_tokens=40)) for request in mixed()]
    for request, (completion,) in zip(requests, engine.generate(requests), strict=True):
        whole, begin = np.concatenate([request.prompt_ids, completion.token_ids]), len(request.prompt_ids) - 1
        errors = {name: np.abs(completion.logprobs - setup.logprobs(name, whole)[begin:]).mean() for name in (None, *ADAPTERS)}
        assert min(errors, key=lambda name: errors[name]) == request.adapter, errors
        assert errors[request.adapter] < 0.1
