"""`redline bench e2e` on a tiny model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from redline.errors import ConfigError
from redline.lab.bench.cases import e2e
from redline.lab.bench.cases.e2e import E2ERun
from redline.lab.bench.cases.e2e_lengths import Lengths, length_results
from redline.lab.bench.settings import E2ESettings, make_settings
from redline.lab.evidence.document import Bound, PeerFigure
from redline.lab.material import workloads
from redline.lab.material.random_folders import as_path
from redline.lab.material.tasks import Words
from redline.lab.plan.devices import CPU_PRICE
from redline.models.files.hf import load_tokenizer
from redline.rollouts.chat import Chat

COMMON = [
    "model=builtin:tiny",
    "device=cpu",
    "groups_per_step=2",
    "group_size=2",
    "max_new_tokens=4",
    "warmup_steps=1",
    "steps=3",
]


def run(**values: object) -> E2ERun:
    known = {"step_s": 1.0, "trainer_wait_s": 0.0, "rollouts_wait_s": 0.0, "tokens_per_s": 1.0, "max_lag": 0}
    known |= {"samples_per_s": 1.0, "sampling_flops": 1.0, "training_flops": 1.0}
    known |= {"lengths": Lengths(0.0, 10.0, 10.0)}
    return E2ERun(**{"ends_s": [1.0, 2.0, 3.0], "rewards": [0.1, 0.2, 0.6], **known, **values})  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_lag_is_measured_and_compared_with_lockstep() -> None:
    settings = make_settings("e2e", [*COMMON, "pairs=2", "lags=0,2"])
    assert isinstance(settings, E2ESettings)
    said = io.StringIO()
    results = {result.name: result for result in e2e.measure(settings, Console(file=said, width=200)).results}
    kinds = [
        "a step",
        "rollouts at work",
        "trainer at work",
        "tokens",
        "samples",
        "a million samples",
        "groups trained on",
        "tokens of an attempt trained on",
        "reward after equal time",
    ]
    assert list(results) == [f"lag {lag}: {kind}" for lag in (0, 2) for kind in kinds]
    assert results["lag 0: a step"].peer is None
    assert results["lag 2: a step"].peer.name == "lockstep"
    assert results["lag 0: a step"].details["max_lag_seen"] == 0
    assert results["lag 2: a step"].details["max_lag_seen"] <= 2
    assert "round 2/2" in said.getvalue()
    assert said.getvalue().count("0.0% of the groups dropped") == 2 * len(settings.lags), "beside every speed"
    for result in results.values():
        if result.name.endswith(("a step", "tokens", "samples")):
            assert result.details["dropped_fraction"] == 0, "nothing is dropped unless one asks for it"
            assert 0 < result.details["trained_tokens_mean"] <= settings.max_new_tokens
            assert "0.0% of the groups dropped" in result.details["beside"]
    assert results["lag 2: groups trained on"].value == 100
    for result in results.values():
        assert 0 < result.fraction_of_bound <= 1 + 1e-9 or result.unit == ""
        assert json.dumps(result.as_json(), allow_nan=False)


def test_lengths_of_what_was_dropped_and_trained_are_told_apart() -> None:
    trained = {"buffer/trained_groups": 8, "buffer/trained_tokens_mean": 100.0}
    late = {"buffer/dropped_late": 2, "buffer/dropped_attempts": 4, "buffer/dropped_tokens_mean": 500.0}
    found = Lengths.of([{**trained, "buffer/dropped_late": 0}, {**trained, **late}], group_size=2)
    assert found.dropped == pytest.approx(2 / 18)
    assert (found.trained_tokens, found.sampled_tokens) == (100.0, pytest.approx((32 * 100 + 4 * 500) / 36))
    assert str(found) == "11.1% of the groups dropped, 100.0 tokens an attempt trained on"
    kept, tokens = length_results("lag 1: ", [found])
    assert kept.fraction_of_bound == pytest.approx(16 / 18)
    assert tokens.fraction_of_bound < 0.7


def test_late_groups_are_dropped_where_one_asks_for_it() -> None:
    settings = make_settings("e2e", [*COMMON, "late_groups=drop"])
    assert isinstance(settings, E2ESettings)
    assert [e2e.recipe(settings, lag, 0).buffer.late_groups for lag in (0, 2)] == ["wait", "drop"]


@pytest.mark.slow
def test_in_lockstep_the_two_sides_share_the_step_between_them() -> None:
    settings = make_settings("e2e", [*COMMON, "pairs=1", "lags=0"])
    result = e2e.measure(settings, Console(file=io.StringIO())).results[0]  # type: ignore[arg-type]
    waits = result.details["parts"]
    assert waits["trainer waits"] + waits["rollouts wait"] == pytest.approx(result.value, rel=0.05)


def test_in_lockstep_rollouts_and_trainer_are_the_whole_step() -> None:
    settings = make_settings("e2e", [*COMMON, "pairs=1", "lags=0"])
    step, rollouts, trainer, *_ = e2e.measure(settings, Console(file=io.StringIO())).results  # type: ignore[arg-type]
    assert 0.5 < (rollouts.value + trainer.value) / step.value < 1.05, "but for moments between them"


def test_a_million_samples_cost_what_their_hours_do() -> None:
    samples, cost = e2e.sample_results("", [10.0], Bound(20.0, "no waiting"), price=3.6, peer=PeerFigure("trl", 5.0, 2.0))
    assert (samples.value, samples.peer.value, samples.bound.value) == (36_000, 18_000, 72_000)
    assert (cost.value, cost.peer.value, cost.bound.value) == pytest.approx((100.0, 200.0, 50.0))
    assert cost.fraction_of_bound == samples.fraction_of_bound == 0.5
    assert "$3.6 an hour" in cost.bound.why


def test_the_price_is_what_was_given_or_that_of_the_table() -> None:
    assert e2e.price_of(make_settings("e2e", [*COMMON, "price=2.5"])) == 2.5  # type: ignore[arg-type]
    assert e2e.price_of(make_settings("e2e", COMMON)) == CPU_PRICE  # type: ignore[arg-type]


def test_reward_is_taken_when_the_fastest_is_done() -> None:
    slow = run(ends_s=[2.0, 4.0, 6.0])
    assert slow.reward_by(3.0) == pytest.approx(0.1)
    assert slow.reward_by(6.0) == pytest.approx(0.3)
    assert slow.reward_by(1.0) == 0.0


# ── models that are made for it ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> str:
    shape = {"vocab_size": 500, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    monkeypatch.setitem(workloads.SHAPES, "little", {**workloads.SHAPES["qwen2.5-0.5b"], **shape})  # type: ignore[arg-type]
    return "random:little"


def test_a_shape_is_trained_on_prompts_of_the_length_asked_for(little: str) -> None:
    values = [*COMMON, f"model={little}", "task=words", "prompt_tokens=7", "pairs=1", "lags=0"]
    settings = make_settings("e2e", values)
    assert isinstance(settings, E2ESettings)
    results = {result.name: result for result in e2e.measure(settings, Console(file=io.StringIO())).results}
    assert 0 < results["lag 0: reward after equal time"].value < 1
    with as_path(little, torch.device("cpu"), torch.float32, 0) as path:
        tokenizer = load_tokenizer(Path(path))
        task = Words(7).train(3)
        assert len(Chat(tokenizer, None, "").prompt_ids(task)) == 7
        assert tokenizer.decode([7, 499, 8], skip_special_tokens=True) == "w7 w8"
    assert not Path(path).exists()


def test_words_are_for_models_whose_words_are_numbers() -> None:
    with pytest.raises(ConfigError, match="task=words needs a model whose words are numbers"):
        make_settings("e2e", [*COMMON, "task=words"])
    assert Words(3).score(Words(3).train(0), "w1 w2 w3 x") == {"odd": 2 / 3}
