"""A game of seven roles, played without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diplomacy")

from diplomacy import Game
from support.diplomacy_games import order_giver, read_compact, read_full

from redline.environments.diplomacy.environment import Diplomacy, Years
from redline.environments.diplomacy.position import POWERS, Holding, Position, from_bytes
from redline.environments.driver import Asked, Driver, Episode, Reply, Speaker
from redline.environments.states import write_states
from redline.errors import BudgetError, ConfigError, TaskError


def play(environment: Diplomacy, speak: Speaker, index: int = 0) -> Episode:
    driver = Driver(environment)
    try:
        return driver.play(environment.train(index), speak, limit_s=60)
    finally:
        driver.close()


def orders_in(episode: Episode) -> list[tuple[str, str]]:
    """Who said what, phase by phase."""
    return sorted((exchange.asked.role, exchange.turn.text) for exchange in episode.exchanges)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "diplomacy.states"
    write_states(path, Diplomacy(warm_up=6), 12, held_out_share=0.25)
    return path


def test_every_power_is_scored_by_the_centres_that_it_gained() -> None:
    episode = play(Diplomacy(years=1), order_giver(1))
    assert episode.error is None
    assert set(episode.score) == set(POWERS)
    assert {tuple(parts) for parts in episode.score.values()} == {("centres", "illegal", "eliminated", "won")}
    assert sum(parts["centres"] for parts in episode.score.values()) > 0
    assert all(parts["illegal"] == 0 for parts in episode.score.values())


def test_a_power_that_says_nothing_of_use_holds_and_is_told_so_by_its_reward() -> None:
    legal, nonsense = order_giver(1), Reply("I would rather not")
    episode = play(Diplomacy(years=1), lambda asked: nonsense if asked.role == "FRANCE" else legal(asked))
    assert episode.score["FRANCE"]["illegal"] == -1
    assert episode.score["TURKEY"]["illegal"] == 0
    last = [exchange.asked for exchange in episode.exchanges if exchange.asked.role == "FRANCE"][-1]
    assert read_compact(str(last.messages[-1]["content"])).units["FRANCE"] == {"A MAR", "A PAR", "F BRE"}


def test_all_powers_of_a_phase_are_asked_before_any_has_answered() -> None:
    asked_at_once = most_at_once(gather=True)
    assert asked_at_once == 7
    assert most_at_once(gather=False) == 1


def most_at_once(**params: Any) -> int:
    waiting = most = 0
    legal = order_giver(1)

    async def speak(asked: Asked) -> Reply:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        for _ in range(20):
            await asyncio.sleep(0)
        waiting -= 1
        return legal(asked)  # type: ignore[return-value]

    assert play(Diplomacy(phases=2, **params), speak).error is None
    return most


NAIVE = [
    {"memoise": False},
    {"keep_prompts": False},
    {"gather": False},
    {"clone": "deepcopy"},
    {"memoise": False, "keep_prompts": False, "gather": False, "clone": "deepcopy"},
]


@pytest.mark.parametrize("params", NAIVE, ids=lambda params: ",".join(params))
def test_what_makes_it_fast_does_not_change_the_game(params: dict[str, Any]) -> None:
    fast = play(Diplomacy(years=1, warm_up=4), order_giver(3))
    plain = play(Diplomacy(years=1, warm_up=4, **params), order_giver(3))
    assert plain.error is None
    assert orders_in(plain) == orders_in(fast)
    assert plain.score == fast.score


@pytest.mark.slow
def test_worker_processes_play_the_same_game() -> None:
    environment = Diplomacy(years=2, workers=2)
    try:
        played = play(environment, order_giver(3))
    finally:
        environment.close()
    assert played.error is None
    here = play(Diplomacy(years=2), order_giver(3))
    assert orders_in(played) == orders_in(here)
    assert played.score == here.score


@pytest.mark.parametrize(("memoise", "asked"), [(True, 2), (False, 14)])
def test_legal_orders_are_asked_once_per_phase_or_once_per_power(
    memoise: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Diplomacy(phases=2, memoise=memoise)
    calls = []
    ask = Game.get_all_possible_orders
    monkeypatch.setattr(Game, "get_all_possible_orders", lambda game: calls.append(game) or ask(game))
    play(environment, order_giver(1))
    assert len(calls) == asked


def test_attempts_at_one_task_share_what_was_asked_for_the_first() -> None:
    environment = Diplomacy(phases=1)
    for attempt in range(4):
        play(environment, order_giver(attempt))
    assert environment._rules.legal.cache_info().misses == 1  # type: ignore[attr-defined]


def test_each_phase_stands_by_itself_or_goes_on_from_the_last() -> None:
    alone = play(Diplomacy(phases=2), order_giver(1))
    assert {len(exchange.asked.messages) for exchange in alone.exchanges} == {2}
    spoken = play(Diplomacy(phases=2, conversation=True), order_giver(1))
    first, second = [exchange for exchange in spoken.exchanges if exchange.asked.role == "FRANCE"]
    assert second.asked.messages[:3] == [*first.asked.messages, first.turn.message]
    assert second.asked.messages[2] is first.turn.message


def test_a_policy_that_copies_what_is_suggested_gives_legal_orders() -> None:
    def copy(asked: Asked) -> Reply:
        return Reply(str(asked.messages[-1]["content"]).partition("Reply like this:\n")[2])

    first, second = (play(Diplomacy(years=2, suggest=True), copy) for _ in range(2))
    assert all(parts["illegal"] == 0 for parts in first.score.values())
    assert sum(parts["centres"] for parts in first.score.values()) > 0
    assert orders_in(first) == orders_in(second)


def test_the_prompt_in_json_can_be_played_from() -> None:
    seen = []

    def speak(asked: Asked) -> Reply:
        said = read_full(str(asked.messages[-1]["content"]))
        seen.append(said)
        return Reply("\n".join(sorted(orders)[0] for orders in said.legal.values()))

    episode = play(Diplomacy(phases=1, compact=False), speak)
    assert len(seen) == 7
    assert all(parts["illegal"] == 0 for parts in episode.score.values())


def test_a_power_that_fails_takes_its_attempt_with_it_and_leaves_no_other_waiting() -> None:
    cancelled = 0

    async def speak(asked: Asked) -> Reply:
        nonlocal cancelled
        if asked.role == "ITALY":
            raise TaskError("the engine is gone")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError

    episode = play(Diplomacy(), speak)
    assert isinstance(episode.error, TaskError)
    assert cancelled == 6


def test_a_game_without_turns_left_is_scored_as_it_stands() -> None:
    legal, asked_before = order_giver(1), []

    def speak(asked: Asked) -> Reply:
        asked_before.append(asked)
        if len(asked_before) > 10:
            raise BudgetError("the attempt has had its 10 turns")
        return legal(asked)  # type: ignore[return-value]

    episode = play(Diplomacy(), speak)
    assert episode.error is None
    assert set(episode.score) == set(POWERS)
    assert len(asked_before) <= 14


def test_a_game_ends_at_its_horizon_in_years_or_phases() -> None:
    def phases(**params: Any) -> list[str]:
        episode = play(Diplomacy(**params), lambda asked: Reply(""))
        return sorted({read_compact(str(exchange.asked.messages[-1]["content"])).phase for exchange in episode.exchanges})

    assert phases(years=1) == ["F1901M", "S1901M"]
    assert phases(years=3) == ["F1901M", "F1902M", "F1903M", "S1901M", "S1902M", "S1903M"]
    assert phases(years=3, phases=1) == ["S1901M"]
    assert phases(years=9, quiet_years=1) == ["F1901M", "S1901M"]
    assert phases(years=2, quiet_years=0) == ["F1901M", "F1902M", "S1901M", "S1902M"]


def test_a_year_is_quiet_when_no_centre_changed_hands_in_it() -> None:
    def position(phase: str, centres: tuple[str, ...]) -> Position:
        return Position(phase, (Holding(centres=centres), *[Holding()] * 6))

    years = Years(1901, position("S1901M", ("VIE", "BUD")).ownership())
    for phase, centres, quiet in [
        ("F1901M", ("VIE", "BUD"), 0),
        ("W1901A", ("BUD", "VIE", "SER"), 0),
        ("S1902M", ("BUD", "VIE", "SER"), 0),
        ("S1903M", ("SER", "VIE", "BUD"), 1),
        ("S1904M", ("SER", "VIE", "BUD"), 2),
        ("S1905M", ("VIE", "BUD"), 0),
    ]:
        years.look(position(phase, centres))
        assert years.quiet == quiet


def starts(environment: Diplomacy, tasks: Any) -> Iterator[Position]:
    for task in tasks:
        yield environment.start(task)


def test_games_begin_at_states_of_the_file_and_held_out_ones_at_others(states: Path) -> None:
    environment = Diplomacy(states=str(states))
    trained = set(starts(environment, (environment.train(index) for index in range(60))))
    held_out = set(starts(environment, environment.held_out(100)))
    assert len(trained) == 9
    assert len(held_out) == 3
    assert not trained & held_out
    assert environment.train(7) == Diplomacy(states=str(states)).train(7)
    episode = play(environment, order_giver(0))
    assert episode.error is None
    first = read_compact(str(episode.exchanges[0].asked.messages[-1]["content"]))
    assert first.phase == environment.start(environment.train(0)).phase


def test_held_out_games_begin_where_no_training_game_does_also_where_a_script_plays_there() -> None:
    environment = Diplomacy(warm_up=1)
    trained = set(starts(environment, (environment.train(index) for index in range(40))))
    held_out = list(starts(environment, environment.held_out(10)))
    assert len(set(held_out)) == len(held_out) == 10
    assert not trained & set(held_out)
    assert len(trained) > 5
    assert "S1901M" not in {position.phase for position in held_out}


def test_other_states_have_another_fingerprint(states: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 50)):
        write_states(tmp_path / name, Diplomacy(warm_up=6), 12, held_out_share=0.25, seed=seed)
    known, same, other = (Diplomacy(states=str(path)).fingerprint() for path in (states, tmp_path / "same", tmp_path / "other"))
    assert known == same != other
    assert not Diplomacy().fingerprint()


def test_states_are_at_movement_phases_of_several_years() -> None:
    environment = Diplomacy()
    positions = [from_bytes(environment.make_state(seed)) for seed in range(12)]
    assert {position.kind for position in positions} == {"M"}
    assert len({position.year for position in positions}) > 3
    assert Diplomacy().make_state(5) == environment.make_state(5)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"horizon": 4}, "no such param"),
        ({"years": 0}, "years"),
        ({"clone": "pickle"}, "clone"),
        ({"states": "x", "warm_up": 3}, "warm_up"),
        ({"clone": "deepcopy", "workers": 2}, "workers"),
    ],
)
def test_a_param_that_cannot_be_is_refused_by_its_name(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Diplomacy(**params)
    assert refused.value.hint


def test_states_that_are_not_there_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file") as refused:
        Diplomacy(states=str(tmp_path / "none.states"))
    assert "redline env warm diplomacy" in refused.value.hint
