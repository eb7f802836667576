"""A replay guesses what an engine guesses, step by step, and takes its time from what steps cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from support.tiny_engines import Model, ask, changed, make_model

from redline.engine.native.speculation.replay import CPU, Attempt, Machine, Replay, Replayed, Reply


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


REQUESTS = {
    "alone": [ask(9, 48, seed=3, temperature=0.0)],
    "siblings": [ask(9, 40, seed=3, n=4, temperature=0.3), ask(12, 30, seed=4, n=3, temperature=0.3)],
    "of several lengths": [ask(9, length, seed=3, n=2, temperature=0.3) for length in (13, 29, 40)],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_engine_that_verifies_every_guess_takes_the_steps_of_its_replay(model: Model, name: str) -> None:
    """The second round has the attempts of the first to guess from."""
    requests = [replace(request, task=f"task/{place}") for place, request in enumerate(REQUESTS[name])]
    again = [changed(request, seed=request.sampling.seed + 1) for request in requests]
    engine, replay = model.engine(speculation="always"), Replay(machine(16), 64, "always")
    for asked in (requests, again):
        before = engine.stats
        attempts = [
            Attempt(request.task, [Reply(request.prompt_ids, completion.token_ids, completion.finish_reason == "stop")])
            for request, found in zip(asked, engine.generate(asked), strict=True)
            for completion in found
        ]
        done, after = replay.run(attempts), engine.stats
        assert done.steps == after.decode_steps - before.decode_steps
        assert done.drafted == after.drafted_tokens - before.drafted_tokens
        assert done.accepted == after.accepted_tokens - before.accepted_tokens
    assert engine.stats.accepted_tokens > 0


def machine(num_rows: int, step_s: float = 0.1, token_s: float = 1e-4, times: float = 1.0) -> Machine:
    return Machine(num_rows, lambda tokens: step_s + token_s * tokens, CPU, times)


def song(length: int = 60, period: int = 10) -> np.ndarray:
    return (np.arange(length, dtype=np.int32) % period) + 20


def noise(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, length).astype(np.int32)


def attempts(texts: Sequence[np.ndarray]) -> list[Attempt]:
    return [Attempt("task", [Reply(np.arange(3, dtype=np.int32), text)]) for text in texts]


def both(made: Sequence[Attempt], on: Machine) -> tuple[Replayed, Replayed]:
    return Replay(on, 64, "off").run(made), Replay(on, 64).run(made)


def test_without_guesses_every_row_gets_a_token_a_step() -> None:
    plain, _ = both(attempts([song(11), song(21)]), machine(8))
    assert (plain.steps, plain.rows, plain.tokens, plain.drafted) == (20, 30, 30, 0)
    assert plain.seconds == pytest.approx(20 * 0.1 + 30 * 1e-4)


def test_texts_that_repeat_take_a_fraction_of_the_time_and_the_same_each_time() -> None:
    made = attempts([song() for _ in range(4)])
    plain, guessed = both(made, machine(8))
    assert guessed.tokens == plain.tokens
    assert guessed.seconds < 0.4 * plain.seconds
    assert both(made, machine(8)) == (plain, guessed)


def test_texts_that_do_not_repeat_cost_a_few_looks() -> None:
    plain, guessed = both(attempts([noise(60, seed) for seed in range(4)]), machine(8, step_s=0.005))
    assert guessed.drafted == 0
    assert plain.seconds < guessed.seconds < 1.03 * plain.seconds


def test_nothing_is_guessed_where_a_token_more_costs_as_much_as_a_row() -> None:
    plain, guessed = both(attempts([song() for _ in range(4)]), machine(8, step_s=0.0, token_s=0.01))
    assert guessed.seconds > 0.9 * plain.seconds
    assert guessed.drafted == 0


def test_rows_that_stand_for_more_than_guess_at_once_guess_nothing() -> None:
    made = attempts([song() for _ in range(4)])
    assert both(made, machine(8, times=CPU.rows / 4))[1].drafted > 0
    assert both(made, machine(8, times=CPU.rows / 4 + 1))[1].drafted == 0


def test_an_attempt_of_a_step_before_is_guessed_from() -> None:
    made = attempts([noise(60, 1)])
    fresh, told = Replay(machine(8), 64), Replay(machine(8), 64)
    told.remember("task", np.concatenate([np.arange(3, dtype=np.int32), noise(60, 1)]))
    assert told.run(made).steps < 0.3 * fresh.run(made).steps


def test_replies_of_an_attempt_follow_each_other_and_attempts_wait_for_rows() -> None:
    talk = Attempt("talk", [Reply(np.arange(3, dtype=np.int32), noise(11, 1)), Reply(noise(20, 2), noise(6, 3))])
    assert both([talk], machine(1))[0].steps == 10 + 5
    assert both([talk, talk], machine(1))[0].steps == 2 * (10 + 5)
    assert both([talk, talk], machine(2))[0].steps == 10 + 5


def test_a_stream_of_attempts_ends_when_none_waits_for_a_row() -> None:
    made = attempts([noise(11, seed) for seed in range(3)])
    assert Replay(machine(1), 64, "off").run(made, to_the_end=False).steps == 2 * 10


def test_replies_without_a_token_to_decode_take_no_step() -> None:
    empty = Attempt("task", [Reply(np.arange(3, dtype=np.int32), noise(1, 1))])
    assert both([empty], machine(1))[0] == Replayed()


def test_looking_needs_no_torch() -> None:
    code = "import sys, redline.engine.native.speculation.replay, redline.lab.doctor.doctor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
