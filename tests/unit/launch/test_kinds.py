"""Engines of others by `engine.kind`: what is refused before anything loads, and which weights they sample from."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.generic_models import ROUTED
from support.small_models import CONFIGS, write_model
from support.tiny_engines import ask, assert_same
from torch import Tensor

from redline.config import Config, EngineRecipe, refuse_without_effect, resolve, resolve_engine, validate, validate_engine
from redline.config.sections.engine import EngineConfig
from redline.engine.adapters import json_client
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.errors import ConfigError, EngineError, WeightSyncError
from redline.launch import kinds
from redline.launch.engines import engine_of, load_engine, make_engine
from redline.launch.kinds import check_kind, make_other_engine, named_for, own_logprobs
from redline.launch.models import LoadedModel, load_policy
from redline.models.files.hf import load_decoder, load_recompute_model
from redline.models.prompt_logprobs import prompt_logprobs
from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.transports.pushed import PushedTensors
from redline.weight_sync.verify import Probe


def config(lora: int = 0, **engine: Any) -> Config:
    return resolve(
        validate(
            {
                "run": {"device": "cpu"},
                "model": {"path": "builtin:tiny", "dtype": "float32"},
                "rollouts": {"task": {"kind": "import", "path": "letters:Letters"}},
                "trainer": {"lora": {"rank": lora}},
                "engine": engine,
            }
        )
    ).config


def recipe(**engine: Any) -> EngineRecipe:
    values = {"run": {"device": "cpu"}, "model": {"path": "builtin:tiny", "dtype": "float32"}, "engine": engine}
    return resolve_engine(validate_engine(values, "a test")).recipe


class Trained:
    """A trainer as far as weights go."""

    def __init__(self, model: LoadedModel) -> None:
        self._decoder = model.decoder
        self.version = 0

    def weights(self) -> WeightSet:
        return WeightSet(self.version, {name: p.detach() for name, p in self._decoder.named_parameters()})


# ── refused ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_server_without_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="kind openai needs the address"):
        config(kind="openai")


def test_training_with_a_server_that_keeps_its_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no new weights"):
        check_kind(config(kind="openai", url="http://127.0.0.1:1/v1"))


SERVER = {"kind": "openai", "url": "http://127.0.0.1:1/v1", "weights_token_env": "KINDS_TOKEN"}


def test_a_token_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINDS_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="the environment variable is not set"):
        check_kind(config(**SERVER))
    monkeypatch.setenv("KINDS_TOKEN", "secret")
    check_kind(config(**SERVER))


def test_a_folder_for_a_server_says_whose_it_is() -> None:
    with pytest.raises(ConfigError, match="weights_folder and weights_server belong together"):
        config(kind="openai", url="http://127.0.0.1:1/v1", weights_folder="weights")
    check_kind(config(kind="openai", url="http://127.0.0.1:1/v1", weights_folder="weights", weights_server="vllm"))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_whose_package_is_not_there_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"the package {kind} is not installed"):
        check_kind(config(kind=kind))


def test_sglang_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="sglang: it needs a GPU"):
        check_kind(config(kind="sglang"))


def test_a_type_that_would_end_vllms_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kinds, "bfloat16_flags", list)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    plain = config(kind="vllm")
    check_kind(plain)
    with pytest.raises(ConfigError, match="vLLM's kernels for ARM"):
        check_kind(plain.model_copy(update={"model": plain.model.model_copy(update={"dtype": "bfloat16"})}))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"url": "http://127.0.0.1:1/v1"}, "engine.url"),
        ({"api_key_env": "KEY"}, "engine.api_key_env"),
        ({"served_model": "policy"}, "engine.served_model"),
        ({"timeout_s": 5.0}, "engine.timeout_s"),
        ({"weights_token_env": "KEY"}, "engine.weights_token_env"),
        ({"options": {"enforce_eager": True}}, "engine.options"),
        ({"kind": "transformers", "block_size": 16}, "engine.block_size"),
        ({"kind": "transformers", "kv_cache_memory_bytes": 2**20}, "engine.kv_cache_memory_bytes"),
        ({"kind": "openai", "url": "http://127.0.0.1:1/v1", "max_model_len": 64}, "engine.max_model_len"),
    ],
)
def test_a_key_that_the_engine_does_not_read_is_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_without_effect(config(**engine))


def test_adapters_for_an_engine_that_loads_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it loads no adapters"):
        load_engine(recipe(kind="transformers"), {"poet": tmp_path})


def test_a_server_that_is_not_there_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "FIRST_PAUSE_S", 0.001)
    with pytest.raises(EngineError, match="cannot reach"):
        load_engine(recipe(kind="openai", url="http://127.0.0.1:1/v1"), tell=lambda text: None)


def test_where_only_our_engine_will_do_another_is_refused() -> None:
    settings = config(max_num_seqs=8)
    with pytest.raises(ConfigError, match="only redline's own engine"):
        make_engine(load_policy(settings).decoder, config(kind="transformers").engine)


# ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def change(model: LoadedModel) -> None:
    for parameter in model.decoder.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))


def test_transformers_reads_the_trainers_own_tensors() -> None:
    settings = config(kind="transformers", max_num_seqs=8)
    model = load_policy(settings)
    trainer = Trained(model)
    other, ours = make_other_engine(settings, model, trainer), make_engine(model.decoder, config(max_num_seqs=8).engine)  # type: ignore[arg-type]
    assert other.transport.shares_storage
    before = other.engine.generate([ask(9, 12)])[0]  # type: ignore[attr-defined]
    assert_same(before, ours.generate([ask(9, 12)])[0])
    change(model)
    other.transport.verify(trainer.weights())
    after = other.engine.generate([ask(9, 12)])[0]  # type: ignore[attr-defined]
    ours.reset_prefix_cache()
    assert_same(after, ours.generate([ask(9, 12)])[0])
    assert before[0].token_ids.tolist() != after[0].token_ids.tolist()


def test_a_policy_that_is_not_trained_is_sampled_from_by_the_engine_that_is_named() -> None:
    model = load_policy(config())
    native, other = engine_of(model, config(max_num_seqs=8).engine), engine_of(model, config(kind="transformers").engine)
    assert isinstance(other, TransformersEngine)
    assert_same(native.generate([ask(9, 12)])[0], other.generate([ask(9, 12)])[0])


def test_tensors_that_the_trainer_replaced_are_found_out() -> None:
    settings = config(kind="transformers", max_num_seqs=8)
    model = load_policy(settings)
    trainer = Trained(model)
    other = make_other_engine(settings, model, trainer)  # type: ignore[arg-type]
    tensors = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()}
    with pytest.raises(AssertionError, match="replaced its tensors"):
        other.transport.verify(WeightSet(1, tensors))


class FakeSglang:
    """An `sglang.Engine` that remembers how it was made and what it was told."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.told: list[tuple[str, ...]] = []

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.told.append(("release", *tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.told.append(("resume", *tags))


@pytest.mark.parametrize("sleep", [False, True])
def test_an_engine_that_is_to_sleep_is_made_so_that_it_can(sleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeSglang] = []

    def make(**arguments: Any) -> FakeSglang:
        made.append(FakeSglang(**arguments))
        return made[-1]

    module = ModuleType("sglang")
    module.Engine = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    settings = config(kind="sglang")
    settings = settings.model_copy(update={"placement": settings.placement.model_copy(update={"sleep": sleep})})
    model = load_policy(settings)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    other = make_other_engine(settings, model, Trained(model))  # type: ignore[arg-type]
    assert made[0].arguments.get("enable_memory_saver", False) is sleep
    assert (other.sleeper is not None) is sleep
    if other.sleeper is not None:
        other.sleeper.sleep()
        other.sleeper.wake()
        assert made[0].told == [("release", "kv_cache"), ("resume", "kv_cache")]


class Loading:
    """An engine that keeps what it was given."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Tensor]] = []

        self.fails = False
        self.stopped = ""

    def update_weights(self, weights: Any) -> None:
        if self.fails:
            raise EngineError("out of memory")
        self.loaded = list(weights)

    def stop_sampling(self, reason: str) -> None:
        self.stopped = reason


def test_pushed_weights_are_loaded_when_the_engine_is_held_and_not_before() -> None:
    engine = Loading()
    weights = WeightSet(3, {"w": torch.ones(4)})
    transport = PushedTensors(engine, weights.tensors, lambda tensors: [(f"their.{name}", t) for name, t in tensors.items()])
    assert transport.move(TransferPlan(3, ("w",)), weights) == 16
    transport.verify(weights)
    assert engine.loaded == []
    transport.adopt()
    assert [name for name, _ in engine.loaded] == ["their.w"]


def pushed(engine: Loading, found: list[float]) -> PushedTensors:
    return PushedTensors(engine, {"w": torch.ones(4)}, lambda tensors: list(tensors.items()), lambda tokens: found)


def test_an_engine_that_failed_to_load_samples_no_more() -> None:
    engine = Loading()
    transport, weights = pushed(engine, []), WeightSet(3, {"w": torch.ones(4)})
    transport.move(TransferPlan(3, ("w",)), weights)
    transport.revert(3)
    assert engine.stopped == ""  # nothing was loaded yet
    engine.fails = True
    transport.move(TransferPlan(3, ("w",)), weights)
    with pytest.raises(EngineError, match="out of memory"):
        transport.adopt()
    transport.revert(3)
    assert "part of version 3" in engine.stopped


def test_an_engine_that_computes_otherwise_than_the_trainer_is_found_out() -> None:
    probe, weights = Probe((5, 6, 7), (-1.0, -2.0), tolerance=0.01), WeightSet(3, {"w": torch.ones(4)})
    right, wrong = pushed(Loading(), [-1.0, -2.05]), pushed(Loading(), [-1.0, -2.5])
    for transport in (right, wrong):
        transport.move(TransferPlan(3, ("w",)), weights)
    right.adopt(probe)
    with pytest.raises(WeightSyncError, match="logprobs of a fixed prompt"):
        wrong.adopt(probe)


def test_a_weight_that_transformers_does_not_have_is_an_error() -> None:
    loaded = load_engine(recipe(kind="transformers", max_num_seqs=8))
    assert isinstance(loaded.engine, TransformersEngine)
    with pytest.raises(EngineError, match=r"has no weight model\.other"):
        loaded.engine.update_weights([("model.other", torch.ones(2))])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt2"])
def test_transformers_loads_weights_that_its_network_holds_otherwise_than_checkpoints_do(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, (CONFIGS | ROUTED)[family])
    engine, decoder = TransformersEngine(load_recompute_model(tmp_path), EngineConfig()), load_decoder(tmp_path)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    engine.update_weights(named_for(engine, decoder)({}))
    tokens = [5, 9, 3, 17, 4, 8]
    assert own_logprobs(engine, tokens) == pytest.approx(prompt_logprobs(decoder, tokens), abs=1e-3)
