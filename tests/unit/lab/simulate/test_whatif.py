"""A what-if from a recording: its costs are found again, what it cannot support is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from redline.errors import ConfigError
from redline.lab.simulate.costs import Prompts, Range, Replies, engine_cost, trainer_cost
from redline.lab.simulate.events import Loop, Simulator
from redline.lab.simulate.recorded import Group, Recording, _began_together, _rows_of_steps
from redline.lab.simulate.whatif import _changed_groups, _predicted, changed, recorded_settings, simulate

CONFIG = {
    "placement": {"engines": 0},
    "engine": {"max_num_seqs": 64},
    "rollouts": {"groups_per_step": 4, "group_size": 4},
    "buffer": {"max_lag": 0},
}


@cache
def recording(step_s: float | None = None) -> Recording:
    """A run that took what its costs say, of answers of 50 to 150 tokens."""
    draw = Random(0)
    groups = tuple(Group(tuple(draw.randint(50, 150) for _ in range(4)), (0.0,) * 4, 10) for _ in range(100))
    steps, tokens = np.array([150, 140, 160.0]), np.array([1600, 1500, 1900.0])
    engine = engine_cost(0.01 * steps + 0.001 * tokens, steps, tokens, Prompts(0.2, 100, 1), 16)
    trainer = trainer_cost(0.2 + 0.0005 * tokens, tokens)
    loop = Loop(groups, engine, 1, 64, 4, 0, trainer.token_s, trainer.step_s + 0.1, 0.01, 200)
    measured = step_s or float(np.mean(Simulator(loop).run().step_s))
    return Recording(groups, engine, trainer, 0.01, 0.1, 1.0, CONFIG, np.full(10, measured))


def test_costs_are_found_again_and_none_is_negative() -> None:
    found = recording()
    assert (found.engine.step_s, found.engine.row_s) == pytest.approx((0.01, 0.001))
    assert (found.engine.pass_s, found.engine.prompt_token_s) == pytest.approx((0.01, 0.0019)), "0.2 s for 100 tokens"
    assert (found.trainer.step_s, found.trainer.token_s) == pytest.approx((0.2, 0.0005))
    falling = trainer_cost(np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0]))
    assert (falling.step_s, falling.token_s) == (pytest.approx(2.0), 0.0)


def test_where_all_steps_train_on_as_many_tokens_training_costs_in_proportion_to_them() -> None:
    """Noise of a tenth, tokens within 3%: the slope of the steps alone is anything from none to several times too steep."""
    draw = np.random.default_rng(0)
    for _ in range(20):
        tokens = draw.normal(3000, 90, 20)
        seconds = 4e-5 * tokens * draw.normal(1, 0.1, 20)
        found = trainer_cost(seconds, tokens)
        assert found.seconds(tokens.mean()) == pytest.approx(seconds.mean())
        assert found.seconds(6000) == pytest.approx(0.24, rel=0.25)
    told_apart = trainer_cost(0.2 + 1e-5 * np.arange(1000.0, 6000, 500), np.arange(1000.0, 6000, 500))
    assert (told_apart.step_s, told_apart.token_s) == pytest.approx((0.2, 1e-5), rel=0.01)


def test_where_all_steps_decode_as_many_rows_a_pass_over_prompts_tells_what_a_row_costs() -> None:
    steps, noise = np.full(20, 16.0), np.random.default_rng(0).normal(1.0, 0.02, 20)
    prompts = Prompts(seconds=0.01 + 200 * 0.0001, tokens=200, passes=1)
    found = engine_cost(noise * 16 * (0.01 + 64 * 0.0001), steps, 64 * steps, prompts, 64)
    assert found.row_s == pytest.approx(0.0001, rel=0.1)
    assert found.decode_s(64) == pytest.approx(0.0164, rel=0.02)
    assert (found.pass_s, found.prompt_token_s) == pytest.approx((0.01, 0.0001), rel=0.1)
    told_apart = engine_cost(0.01 * steps + 0.0003 * steps * np.arange(20), steps, steps * np.arange(20), prompts, 64)
    assert told_apart.row_s == pytest.approx(0.0003, rel=0.01)


def test_replies_that_began_together_tell_what_a_row_costs_whatever_prompts_took() -> None:
    lengths = np.arange(8.0, 72.0)
    rows = np.array([sum((lengths >= number).sum() for number in range(1, int(length) + 1)) for length in lengths])
    replies = Replies(0.01 * lengths + 0.0002 * rows, lengths, rows)
    steps, tokens = np.full(8, lengths.max()), np.full(8, lengths.sum())
    seconds = 1.1 * (0.01 * steps + 0.0002 * tokens)  # the engine's own time, and a tenth for what lies around it
    found = engine_cost(seconds, steps, tokens, Prompts(10.0, 10, 1), 64, replies)
    assert (found.step_s, found.row_s) == pytest.approx((0.011, 0.00022))
    assert found.tells_rows


def test_a_reply_of_one_token_does_not_hide_that_all_began_together() -> None:
    def reply(tokens: int, queue_s: float) -> dict[str, Any]:
        return {"turns": [{"start": 4, "end": 4 + tokens, "queue_s": queue_s, "decode_s": 0.01 * (tokens - 1)}]}

    rows = [reply(1, 0.001), *(reply(tokens, 0.001) for tokens in range(2, 40))]
    assert _began_together(rows)
    assert not _began_together([*rows, reply(20, 0.2)]), "one that waited for another to end"
    seconds, steps, _ = _rows_of_steps(rows, engines=1)
    np.testing.assert_allclose(seconds, 0.01 * steps)


def test_the_replay_is_the_measurement_and_longer_answers_take_longer() -> None:
    answer = simulate(recording(), ["lengths=2"])
    assert abs(answer.error) < 0.02
    assert 1.7 < answer.simulated.step_s / answer.replayed.step_s < 2.0
    assert answer.assumptions == (
        "the KV cache holds every row: none gives way to another and begins anew",
        "training on 2 times the tokens of a step costs what the recorded steps say",
        "all answers are longer or shorter by the same factor",
    )


def test_larger_groups_have_the_longest_answer_of_so_many_and_those_of_like_tasks() -> None:
    """Lengths of half of the tasks are about 100, of the others about 1000: groups of 16 stay apart, and use every answer."""
    draw = Random(1)
    groups = [Group(tuple(draw.randint(size, size + 50) for _ in range(4)), (0.0,) * 4, 9) for size in (100, 1000) * 20]
    found = _changed_groups(groups, replace(recorded_settings(CONFIG), group_size=16), Random(0))
    assert [max(group.tokens) > 500 for group in found] == [False, True] * 20
    assert all(min(group.tokens) > 500 or max(group.tokens) < 500 for group in found)
    assert all(set(own.tokens) <= set(group.tokens) for own, group in zip(groups, found, strict=True))
    assert np.mean([len(set(group.tokens)) for group in found]) > 12, "no answer four times"
    fewer = _changed_groups(groups, replace(recorded_settings(CONFIG), group_size=3), Random(0))
    assert all(Counter(group.tokens) <= Counter(own.tokens) for own, group in zip(groups, fewer, strict=True))
    alone = _changed_groups(groups[:1], replace(recorded_settings(CONFIG), group_size=6), Random(0))
    assert len(alone[0].tokens) == 6


def test_more_engines_and_a_lag_are_faster_and_what_is_assumed_is_said() -> None:
    answer = simulate(recording(), ["placement.engines=4", "buffer.max_lag=1", "trainers=2"])
    assert answer.speedup > 1.5
    assert any("trainers" in assumption for assumption in answer.assumptions)


@pytest.mark.parametrize(
    ("placement", "device", "slower"),
    [
        ({}, "cuda", 2.0),
        ({"engines": 1}, "cpu", 1.4),
        ({"engines": 1}, "cuda", None),
        ({"engines": 1, "cluster": "local"}, "cpu", None),
        ({"engines": 2, "remote_engines": 1}, "cpu", None),
    ],
)
def test_what_shares_a_device_or_a_cpu_is_slower_beside_each_other(placement: dict, device: str, slower: float | None) -> None:
    """A recording in lockstep does not tell by how much, so it is assumed."""
    made = replace(recording(), config={**CONFIG, "placement": placement, "run": {"device": device}})
    assumptions = " ".join(simulate(made, ["buffer.max_lag=1"]).assumptions)
    assert (f"training takes {slower:g} times as long" in assumptions) if slower else "as long" not in assumptions


def test_a_recording_with_a_lag_tells_itself_how_trainer_and_engine_slow_each_other_down() -> None:
    made = replace(recording(), config={**CONFIG, "placement": {"engines": 1}, "run": {"device": "cpu"}})
    step_s = simulate(made, ["buffer.max_lag=1"]).simulated.step_s
    lagging = replace(made, config={**made.config, "buffer": {"max_lag": 1}}, step_s=np.full(9, step_s))
    assert "as long" not in " ".join(simulate(lagging, ["buffer.max_lag=2"]).assumptions)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_rate=1", "cannot be simulated"),
        ("lengths", "cannot be simulated"),
        ("lengths=long", "not a number"),
        ("lengths=nan", "not a number"),
        ("lengths=1000", "were not recorded"),
        ("failure_every_h=0.001", "faster than they come back"),
        ("placement.engines=1.5", "not a whole number"),
        ("rollouts.group_size=0", "less than 1"),
        ("rollouts.groups_per_step=400", "rows at once"),
        ("rollouts.groups_per_step=1000000", "4,000,000 attempts at once"),
        (f"rollouts.groups_per_step=1{400 * '0'}", "more than 1,000,000"),
        ("placement.engines=1000", "about 0.016 rows at once"),
        ("buffer.max_lag=1000000", "more than 100"),
        ("trainers=1000000", "more than 1,024"),
    ],
)
def test_what_cannot_be_answered_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(recording(), ["engine.max_num_seqs=4000", override])


def test_engines_that_are_lost_before_attempts_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="lost more than 20 times a step"):
        simulate(recording(), ["failure_every_h=1e-7", "recovery_s=1e-6"])


def test_a_pipeline_that_fills_or_empties_is_no_part_of_an_answer() -> None:
    """Sampling takes all rows as long as one, so that the trainer sets the pace and every group waits its turn."""
    found = recording()
    groups = tuple(Group((10,) * 4, (0.0,) * 4, 0) for _ in found.groups)
    steady = replace(found, groups=groups, engine=replace(found.engine, row_s=0.0), config={**CONFIG, "buffer": {"max_lag": 6}})
    loop = Loop(groups, steady.engine, 1, 64, 4, 6, found.trainer.token_s, found.trainer.step_s + 0.1, 0.01, 100)
    measured = Simulator(loop).run().step_s[50]
    answer = simulate(replace(steady, step_s=np.full(10, measured)), [])
    assert answer.simulated.lags == {6: 1.0}


def test_fewer_rows_than_all_recorded_steps_had_rest_on_an_assumption() -> None:
    found = recording()
    alike = simulate(found, ["engine.max_num_seqs=4"]).assumptions
    assert alike == ("of a step of 4 rows, 29% is for its rows; all recorded steps had about as many rows",)
    told_apart = replace(found, engine=replace(found.engine, usual_rows=Range(4, 16)))
    assert simulate(told_apart, ["engine.max_num_seqs=4"]).assumptions == ()
    assert simulate(found, []).assumptions == ()


@pytest.mark.parametrize(
    ("changes", "override", "words"),
    [
        ({}, "placement.engines=4", "each of 4 engines is as fast as recorded"),
        ({}, "placement.engines=1", "as fast in the trainer's process as in one of its own"),
        ({"placement": {"engines": 1}}, "placement.engines=0", "as fast in the trainer's process as in one of its own"),
        ({"buffer": {"max_lag": 1}}, "buffer.max_lag=0", "alone they may be faster"),
    ],
)
def test_what_works_elsewhere_or_beside_others_than_recorded_rests_on_an_assumption(
    changes: dict, override: str, words: str
) -> None:
    config = {**CONFIG, **changes}
    made = replace(recording(), config=config)
    if changes.get("buffer"):
        made = replace(made, step_s=np.full(9, _predicted(made, recorded_settings(config), recorded_settings(config)).step_s))
    assert words in " ".join(simulate(made, [override]).assumptions)
    assert words not in " ".join(simulate(made, []).assumptions)


def test_rewards_of_a_source_beside_the_trainer_rest_on_an_assumption() -> None:
    scored = replace(recording(), is_scored_last=True)
    assert "rewards of all attempts are computed at once" in " ".join(simulate(scored, ["buffer.max_lag=1"]).assumptions)
    assert "rewards" not in " ".join(simulate(recording(), ["buffer.max_lag=1"]).assumptions)


@pytest.mark.parametrize(("override", "times"), [("rollouts.groups_per_step=8", 2), ("rollouts.group_size=2", 0.5)])
def test_twice_the_attempts_take_twice_as_long_to_score(override: str, times: float) -> None:
    def after(seconds: float, *, is_scored_last: bool) -> float:
        made = replace(
            recording(),
            groups=tuple(replace(group, environment_s=(seconds,) * 4) for group in recording().groups),
            is_scored_last=is_scored_last,
        )
        recorded = recorded_settings(CONFIG)
        return _predicted(made, recorded, changed(recorded, [override])).step_s

    assert after(2.0, is_scored_last=True) - after(0.0, is_scored_last=True) == pytest.approx(2 * times)
    assert after(2.0, is_scored_last=False) - after(0.0, is_scored_last=False) == pytest.approx(2), "environments play at once"


def test_few_groups_that_the_store_kept_are_said() -> None:
    found = recording()
    few = simulate(replace(found, groups=found.groups[:3]), [])
    assert few.assumptions == ("all groups are like the 3 that the store kept",)


def test_a_run_that_the_model_does_not_explain_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be explained"):
        simulate(recording(step_s=9.0), [])


def test_an_engine_in_the_trainers_process_is_one() -> None:
    assert changed(recorded_settings(CONFIG), ["placement.engines=0"]).engines == 1


def test_larger_groups_than_recorded_ones_of_one_rest_on_an_assumption() -> None:
    found = recording()
    alone = tuple(Group(group.tokens[:1], (0.0,), 10) for group in found.groups)
    config = {**CONFIG, "rollouts": {"groups_per_step": 16, "group_size": 1}}
    step_s = _predicted(replace(found, groups=alone), recorded_settings(config), recorded_settings(config)).step_s
    answer = simulate(
        replace(found, groups=alone, config=config, step_s=np.full(10, step_s)),
        ["rollouts.group_size=4", "rollouts.groups_per_step=4"],
    )
    assert any("groups of one do not tell" in assumption for assumption in answer.assumptions)
