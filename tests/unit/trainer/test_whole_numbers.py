"""Training in whole numbers, beside training in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.policy_training import gradient, make_bench, part_of, state_of
from support.small_models import CONFIGS
from torch import Tensor

from redline.config.processor import multiplies_in
from redline.errors import ConfigError, ModelError
from redline.kernels.cpu.quantized_training import training_products
from redline.models.files.hf import load_decoder
from redline.models.whole_numbers import in_whole_numbers, refuse_without_whole_numbers

KEYS = {"quantization": "int16"}
FAMILIES = [name for name in CONFIGS if "moe" not in name.lower() and "expert" not in name.lower()]
OFF = 5e-3
"""Of a gradient of such a network, in units of its norm."""


@pytest.fixture(autouse=True)
def _there() -> None:
    if not multiplies_in("int16") or training_products("int16") is None:
        pytest.skip("this CPU has no such products, or there is no compiler")


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], off: float = OFF) -> None:
    assert found.keys() == exact.keys()
    whole = torch.stack([each.norm() for each in exact.values()]).norm()
    for name, each in exact.items():
        assert (found[name] - each).norm() <= off * each.norm() + 1e-4 * whole, name
    assert any(not torch.equal(found[name], each) for name, each in exact.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_float32_but_for_rounding(family: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path, family)
    [batch] = bench.batches(1)
    assert_near(gradient(bench, batch, **KEYS), gradient(bench, batch))


def test_micro_batches_of_any_size_add_up(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    assert_near(gradient(bench, batch, max_tokens_per_micro_batch=40, **KEYS), gradient(bench, batch))


def test_entropy_and_a_reference_have_their_gradients(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    loss = {"entropy_coef": 0.1, "kl_coef": 0.1}
    assert_near(gradient(bench, batch, **loss, **KEYS), gradient(bench, batch, **loss))


def test_the_reference_is_the_policy_before_training_to_the_last_bit(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    for lora in ({}, {"lora": {"rank": 4}}):
        report = bench.trainer(kl_coef=0.1, **lora, **KEYS).step(batch)
        assert report.extra["kl"] == 0


@pytest.mark.parametrize("kind", ["light", "selective", "full"])
def test_what_is_made_again_in_the_backward_pass_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    kept, again = gradient(bench, batch, **KEYS), gradient(bench, batch, gradient_checkpointing=kind, **KEYS)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_step_multiplies_by_the_weights_of_the_step_before(tmp_path: Path) -> None:
    """A trainer that has taken steps goes on like one that was never at work before: nothing of a weight is kept."""
    bench = make_bench(tmp_path / "model")
    batches = bench.batches(3)
    used, fresh = bench.trainer(**KEYS), bench.trainer(**KEYS)
    for batch in batches[:2]:
        used.step(batch)
    used.save(tmp_path / "checkpoint")
    used.flush()
    fresh.load(tmp_path / "checkpoint")
    reports = [trainer.step(batches[2]) for trainer in (used, fresh)]
    assert reports[0].grad_norm == reports[1].grad_norm
    states = [state_of(trainer) for trainer in (used, fresh)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_weights_that_others_write_past_autograd_are_taken(tmp_path: Path) -> None:
    """As one writes who shares their memory: no version of a tensor tells of it."""
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    used, fresh = bench.trainer(**KEYS), bench.trainer(**KEYS)
    before = used.step(batch).grad_norm
    for parameter in used.network.parameters():
        parameter.detach().numpy()[...] *= 0.5
    for own, other in zip(fresh.network.parameters(), used.network.parameters(), strict=True):
        own.data.copy_(other)
    norms = [trainer.step(batch).grad_norm for trainer in (used, fresh)]
    assert norms[0] == norms[1] != before


def test_an_adapter_learns_beside_frozen_weights_in_whole_numbers(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    [batch] = bench.batches(1)
    lora = {"lora": {"rank": 4}}
    found, exact = (gradient(bench, batch, **lora, **keys) for keys in (KEYS, {}))
    assert all(name.endswith(("lora_a", "lora_b")) for name in found)
    assert_near(found, exact)


def test_the_network_to_sample_from_is_as_it_was_and_shares_its_weights(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    trainer = bench.trainer(**KEYS)
    assert trainer.network.quantization == "none"
    assert all(type(layer.qkv) is torch.nn.Linear for layer in trainer.network.layers)
    before = {name: value.clone() for name, value in trainer.network.named_parameters()}
    trainer.step(bench.batches(1)[0])
    assert part_of(state_of(trainer), "master/").keys() == before.keys()
    assert all(not torch.equal(value, before[name]) for name, value in trainer.network.named_parameters())


def test_second_derivatives_are_refused(tmp_path: Path) -> None:
    decoder = in_whole_numbers(load_decoder(make_bench(tmp_path).folder), "int16")
    x = torch.randn(3, decoder.spec.hidden_size, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(decoder.layers[0].o(x).sum(), x, create_graph=True)


def test_networks_that_cannot_be_trained_so_are_refused(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.quantization"):
        bench.trainer(torch.bfloat16, **KEYS)
    with pytest.raises(ModelError, match="transformers"):
        refuse_without_whole_numbers(None)
    experts = next((name for name in CONFIGS if name not in FAMILIES), None)
    if experts is not None:
        with pytest.raises(ModelError, match="experts"):
            make_bench(tmp_path / "experts", experts).trainer(**KEYS)
