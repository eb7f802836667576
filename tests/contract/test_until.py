"""Replies that an environment ends while they are sampled: at the same token in every engine and mode."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engine_benches import NativeBench, RedlineServeBench, RemoteBench, Size
from support.fakes import FakeEngine, FakeTasks, completion

from redline.config.schema import RolloutsConfig
from redline.config.sections.engine import EngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine.adapters.transformers_engine import TransformersEngine
from redline.environments.driver import Driver
from redline.environments.tools import Called, ToolEnvironment, tool
from redline.errors import EngineError
from redline.lab.environments.model_player import Manner, ModelPlayer
from redline.models.files.hf import load_decoder, load_recompute_model
from redline.models.files.tiny import tiny_tokenizer, write_tiny_model
from redline.ports import Environment, Policy, SteppedEngine
from redline.rollouts import Chat, Dispatcher, RolloutSetup
from redline.rollouts.streamed_reply import DECIDING_PIECE
from redline.types import Delta, FinishReason, GenerateRequest, ReplySoFar, Task, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.usefixtures("no_calls_of_others")

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
GROUP_SIZE = 3
NUM_GROUPS = 3
MAX_NEW_TOKENS = 24
SOON_S = 300.0


class WholeEngine:
    """An engine that can neither stream nor be told to stop, as one behind an API."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        return self._engine.submit(request)

    def end(self, request_id: int, index: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_tiny_model(made)
    return made


@pytest.fixture
def owned() -> Iterator[ExitStack]:
    with ExitStack() as owned:
        yield owned


def native(folder: Path) -> NativeEngine:
    return NativeBench(folder, Size()).engine


def session_of(kind: str, folder: Path, owned: ExitStack) -> EngineSession:
    if kind == "remote":
        bench: Any = RemoteBench(folder, Size(), owned)
        return bench.engine  # a session already
    if kind == "transformers":
        return EngineSession(TransformersEngine(load_recompute_model(folder), EngineConfig(), TOKENIZER))
    if kind == "speculating":
        return EngineSession(NativeEngine(load_decoder(folder), EngineConfig(speculation="always"), TOKENIZER))
    engine = native(folder)
    return EngineSession(WholeEngine(engine) if kind == "whole" else engine)  # type: ignore[arg-type]


@dataclass
class Spoken:
    """Plays two turns, each of which ends where its `until` says."""

    untils: Sequence[Callable[[ReplySoFar], object] | None]

    async def play(self, task: Task, policy: Policy) -> float:
        messages = [*task.messages]
        for until in self.untils:
            turn = await policy.say(messages, until=until)
            messages += [turn.message, {"role": "user", "content": "And now?"}]
        return float(turn.num_tokens)


BY_LETTERS: Sequence[Callable[[ReplySoFar], object]] = (
    lambda reply: len(reply.text) >= 5,
    lambda reply: sum(letter.isalpha() for letter in reply.text) >= 2,
)


def rollouts_of(owned: ExitStack, session: EngineSession, played_in: Environment, beside: bool, **keys: Any) -> Dispatcher:
    options = {"environment": {"name": "tests:Fake"}, "group_size": GROUP_SIZE, "max_new_tokens": MAX_NEW_TOKENS, **keys}
    config = RolloutsConfig(task={"kind": "import", "path": "tests:Fake"}, **options)  # type: ignore[arg-type]
    setup = RolloutSetup(FakeTasks(), lambda score: played_in, Chat(TOKENIZER, None, ""), config, (END,), 5)
    rollouts = Dispatcher(session, setup, beside=beside)
    owned.callback(rollouts.close)
    return rollouts


def played(rollouts: Dispatcher, count: int = NUM_GROUPS) -> list[TrajectoryGroup]:
    rollouts.begin(range(count), 0)
    groups: list[TrajectoryGroup] = []
    while len(groups) < count:
        groups += rollouts.finished(SOON_S)
    return sorted(groups, key=lambda group: group.index)


def trained_on(groups: Sequence[TrajectoryGroup]) -> list[dict[str, Any]]:
    """All that must be the same, sequence by sequence."""
    return [
        {
            "tokens": t.token_ids.tolist(),
            "mask": t.loss_mask.tolist(),
            "reward": t.reward,
            "turns": [(turn.start, turn.end, turn.text, turn.message, turn.finish_reason) for turn in t.turns],
            "failure": t.failure,
        }
        for group in groups
        for t in group.trajectories
    ]


def logprobs_of(groups: Sequence[TrajectoryGroup]) -> np.ndarray:
    return np.concatenate([t.logprobs for group in groups for t in group.trajectories])


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[TrajectoryGroup]:
    """What an engine that returns whole replies samples in lockstep."""
    with ExitStack() as owned:
        return played(rollouts_of(owned, session_of("whole", folder, owned), Spoken(BY_LETTERS), beside=False))


@pytest.mark.parametrize("beside", [False, True], ids=["lockstep", "beside"])
@pytest.mark.parametrize("kind", ["native", "whole", "remote", "transformers", "speculating"])
def test_a_reply_ends_at_the_same_token_in_every_engine_and_mode(
    kind: str, beside: bool, folder: Path, owned: ExitStack, expected: list[TrajectoryGroup]
) -> None:
    groups = played(rollouts_of(owned, session_of(kind, folder, owned), Spoken(BY_LETTERS), beside))
    assert trained_on(groups) == trained_on(expected)
    np.testing.assert_allclose(logprobs_of(groups), logprobs_of(expected), atol=1e-4)
    for group in groups:
        for t in group.trajectories:
            _is_cut_by_letters(t)


def test_a_model_that_plays_in_the_terminal_ends_its_replies_at_the_same_token(
    folder: Path, owned: ExitStack, expected: list[TrajectoryGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.config.processor.BFLOAT16_FLAGS", ())  # in float32, as what is expected
    player = ModelPlayer(str(folder), Manner(max_tokens=MAX_NEW_TOKENS, seed=5))
    owned.callback(player.close)
    driver = Driver(Spoken(BY_LETTERS))
    owned.callback(driver.close)
    for group in expected:
        t, task = group.trajectories[0], FakeTasks().train(group.index)
        episode = driver.play(task, player.begin(task, group.index), SOON_S)
        assert episode.error is None
        assert [(turn.start, turn.end, turn.text, turn.message, turn.finish_reason) for turn in t.turns] == [
            (turn.start, turn.end, turn.text, turn.message, turn.finish_reason)
            for turn in (exchange.turn for exchange in episode.exchanges)
        ]


def test_a_model_whose_engine_has_stopped_plays_no_further(folder: Path, owned: ExitStack) -> None:
    player, driver = ModelPlayer(str(folder), Manner(max_tokens=4)), Driver(Spoken(BY_LETTERS))
    owned.callback(driver.close)
    player.close()
    task = FakeTasks().train(0)
    episode = driver.play(task, player.begin(task, 0), SOON_S)
    assert isinstance(episode.error, EngineError)
    assert "has stopped" in episode.error.message


def _is_cut_by_letters(t: Trajectory) -> None:
    """The loss is on what was kept, and what was kept ends where the environment said."""
    first, second = t.turns
    assert t.loss_mask.sum() == first.num_tokens + second.num_tokens
    assert (t.logprobs[t.loss_mask] < 0).all()
    assert len(first.text) >= 5 or first.finish_reason == FinishReason.LENGTH or t.token_ids[first.end - 1] == END
    assert first.finish_reason == FinishReason.STOP or first.num_tokens == MAX_NEW_TOKENS


def test_what_is_kept_is_what_would_have_been_sampled_anyway_and_the_rest_is_not_sampled(
    folder: Path, owned: ExitStack
) -> None:
    engines = [native(folder), native(folder)]
    ended, whole = (
        played(rollouts_of(owned, EngineSession(engine), Spoken([until]), beside=False))
        for engine, until in zip(engines, (BY_LETTERS[0], None), strict=True)
    )
    kept = 0
    for one, other in zip(trained_on(ended), trained_on(whole), strict=True):
        assert one["tokens"] == other["tokens"][: len(one["tokens"])]
        kept += sum(one["mask"])
    assert kept < engines[1].stats.generated_tokens / 2
    assert engines[0].stats.generated_tokens < kept + NUM_GROUPS * GROUP_SIZE * DECIDING_PIECE


@pytest.mark.slow
def test_a_server_samples_no_more_of_a_reply_that_has_ended(folder: Path, owned: ExitStack) -> None:
    """`redline serve`, in a process of its own: the same replies, streamed and whole, and fewer tokens sampled for them."""
    engine: Any = RedlineServeBench(folder, Size(), owned).engine
    url = str(engine._client.url).removesuffix("/v1")
    found, sampled = [], [generated_tokens(url)]
    for one in (engine, WholeEngine(engine)):
        groups = played(rollouts_of(owned, EngineSession(one), Spoken(BY_LETTERS), beside=False, max_new_tokens=300))
        found.append(trained_on(groups))
        sampled.append(generated_tokens(url))
    assert found[0] == found[1]
    streamed, whole = np.diff(sampled)
    assert streamed < 0.8 * whole, "some are thrown away until the server hears of it"


def generated_tokens(url: str) -> int:
    """What a server says that it has sampled, once that is no longer more from one moment to the next."""
    counts = [-2, -1]
    while counts[-1] != counts[-2]:
        time.sleep(0.5)
        with urllib.request.urlopen(f"{url}/metrics", timeout=300) as response:
            found = re.search(r"generated_tokens_total(?:{.*})? ([\d.e+]+)", response.read().decode())
        assert found is not None
        counts.append(int(float(found[1])))
    return counts[-1]


def test_in_lockstep_a_reply_ends_in_the_same_step_each_time(folder: Path, owned: ExitStack) -> None:
    engines = [native(folder) for _ in range(3)]
    for engine in engines:
        played(rollouts_of(owned, EngineSession(engine), Spoken(BY_LETTERS), beside=False))
    assert len({(engine.stats.steps, engine.stats.generated_tokens, engine.stats.decoded_rows) for engine in engines}) == 1


def test_an_until_that_raises_fails_its_attempt_alone(folder: Path, owned: ExitStack) -> None:
    asked = iter(range(10**6))

    def until(reply: ReplySoFar) -> bool:
        if next(asked) == 7:
            raise ValueError("no such letter")
        return False

    once = {"name": "tests:Fake", "retries": 0}
    rollouts = rollouts_of(owned, EngineSession(native(folder)), Spoken([until]), beside=False, environment=once)
    [group] = played(rollouts, 1)
    [failure] = [t.failure for t in group.trajectories if t.failure is not None]
    assert "ValueError: no such letter" in failure.reason
    assert len(group.trajectories) == GROUP_SIZE


@pytest.mark.parametrize("beside", [False, True])
def test_a_next_that_finds_nothing_in_until_fails_its_attempt_alone(folder: Path, owned: ExitStack, beside: bool) -> None:
    asked = iter([False] * 3)
    spoken = Spoken([lambda reply: next(asked)])
    groups = played(rollouts_of(owned, session_of("native", folder, owned), spoken, beside), 1)
    reasons = [t.failure.reason for t in groups[0].trajectories if t.failure is not None]
    assert len(reasons) == GROUP_SIZE
    assert all("StopIteration" in reason for reason in reasons)


def test_what_is_no_function_is_refused_with_the_way_to_write_it(folder: Path, owned: ExitStack) -> None:
    [group] = played(rollouts_of(owned, EngineSession(native(folder)), Spoken(["\n"]), beside=False), 1)  # type: ignore[list-item]
    failure = group.trajectories[0].failure
    assert failure is not None
    assert "`policy.say` was given until" in failure.reason
    assert "until=lambda reply" in failure.hint


def test_what_an_ended_reply_did_not_use_is_left_in_the_budget(folder: Path, owned: ExitStack) -> None:
    """A reply that may have 24 tokens and ends after 5 leaves room for a second one."""
    keys = {"environment": {"name": "tests:Fake", "max_tokens": 160, "max_turns": 2}}
    groups = played(rollouts_of(owned, EngineSession(native(folder)), Spoken(BY_LETTERS), beside=False, **keys))
    assert all(len(t.turns) == 2 and not t.truncated for group in groups for t in group.trajectories)


def test_replies_that_nobody_reads_meanwhile_are_not_streamed(folder: Path, owned: ExitStack) -> None:
    asked: list[int] = []

    class Watched(WholeEngine):
        def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
            asked.append(streaming)
            return super().submit(request)

    engine: Any = Watched(native(folder))
    played(rollouts_of(owned, EngineSession(engine), Spoken([None]), beside=False), 1)
    assert asked == [0]


# ── tools ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é"}}\n</tool_call>'


@dataclass
class SpeakingEngine(FakeEngine):
    """Says a text that depends on the turn, a token of each reply in a step, and ends a reply where it is told to."""

    texts: Sequence[str] = ()
    said: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens of each completion so far."""
    wanted: dict[int, tuple[GenerateRequest, int]] = field(default_factory=dict)
    ended: set[tuple[int, int]] = field(default_factory=set)
    num_said: int = 0

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        self.requests.append(request)
        number = len(self.requests)
        self.wanted[number] = request, streaming
        self.said |= {(number, index): 0 for index in request.sampling.indices}
        return number

    def end(self, request_id: int, index: int) -> None:
        if (request_id, index) in self.said:
            self.ended.add((request_id, index))

    def abort(self, request_id: int) -> None:
        self.said = {key: count for key, count in self.said.items() if key[0] != request_id}

    @property
    def has_work(self) -> bool:
        return bool(self.said)

    def step(self) -> list[tuple[int, Delta]]:
        return [(number, self._piece(number, index)) for number, index in list(self.said)]

    def _piece(self, number: int, index: int) -> Delta:
        request, streaming = self.wanted[number]
        turn = TOKENIZER.decode(request.prompt_ids).count("<tool_response>")
        tokens = [*TOKENIZER.encode(self.texts[turn], add_special_tokens=False), END]
        count = self.said[number, index] + ((number, index) not in self.ended)
        self.num_said += count - self.said[number, index]
        fresh = np.array(tokens[self.said[number, index] : count] if streaming else [], np.int32)
        self.said[number, index] = count
        is_over = count == len(tokens) or (number, index) in self.ended
        if is_over:
            del self.said[number, index]
        whole = completion(tokens[:count]) if is_over else None
        return Delta(index, fresh, np.zeros(len(fresh), np.float32), completion=whole)


class Dictionary(ToolEnvironment):
    def __init__(self, engine: SpeakingEngine) -> None:
        super().__init__()
        self.engine = engine
        self.begun: list[int] = []
        """What the engine had said when a call began."""

    @tool(early=True)
    async def look_up(self, word: str) -> str:
        """What a word means.

        Args:
            word: The word.
        """
        self.begun.append(self.engine.num_said)
        await asyncio.sleep(0)
        return f"{word} is a letter"

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> Mapping[str, float]:
        return {"early": float(sum(call.began_early for call in calls)), "calls": float(len(calls))}


class BriefDictionary(Dictionary):
    ends_at_call = True


@pytest.mark.parametrize("beside", [False, True], ids=["lockstep", "beside"])
def test_a_tool_that_may_begin_early_begins_while_the_reply_goes_on(beside: bool, owned: ExitStack) -> None:
    engine = SpeakingEngine(texts=[f"Well. {CALL} I wait for it.", "A letter."])
    environment = Dictionary(engine)
    rollouts = rollouts_of(owned, EngineSession(engine), environment, beside, group_size=1, max_new_tokens=200)
    [group] = played(rollouts, 1)
    [t] = group.trajectories
    assert t.reward_parts == {"early": 1.0, "calls": 1.0}
    assert [turn.finish_reason for turn in t.turns] == [FinishReason.STOP] * 2
    assert "é is a letter" in TOKENIZER.decode(t.token_ids)
    assert TOKENIZER.decode(t.token_ids[t.turns[0].start : t.turns[0].end]) == f"Well. {CALL} I wait for it.<|im_end|>"
    if not beside:  # there the engine waits for what is decided by a piece
        assert environment.begun == [len(TOKENIZER.encode(f"Well. {CALL}"))]


def test_an_early_call_of_a_reply_that_ends_with_a_problem_is_not_used(owned: ExitStack) -> None:
    engine = SpeakingEngine(texts=[f"{CALL} <tool_call>{{ no JSON"])
    environment = Dictionary(engine)
    environment.max_calls = 1
    [group] = played(rollouts_of(owned, EngineSession(engine), environment, False, group_size=1, max_new_tokens=200), 1)
    [t] = group.trajectories
    assert environment.begun, "it began"
    assert t.reward_parts == {"early": 0.0, "calls": 1.0}, "and what was wrong with the reply is the result"
    assert "is a letter" not in TOKENIZER.decode(t.token_ids)


@pytest.mark.parametrize("beside", [False, True], ids=["lockstep", "beside"])
def test_an_environment_with_tools_may_end_replies_with_their_first_call(beside: bool, owned: ExitStack) -> None:
    engine = SpeakingEngine(texts=[f"Well. {CALL} It says: nonsense. {CALL}", "A letter."])
    rollouts = rollouts_of(owned, EngineSession(engine), BriefDictionary(engine), beside, group_size=2, max_new_tokens=300)
    [group] = played(rollouts, 1)
    for t in group.trajectories:
        assert t.turns[0].text == f"Well. {CALL}"
        assert t.turns[0].finish_reason == FinishReason.STOP
        assert t.reward_parts["calls"] == 1.0
        np.testing.assert_array_equal(
            t.logprobs[t.turns[0].start : t.turns[0].end], completion(range(t.turns[0].num_tokens)).logprobs
        )


def test_the_time_to_read_a_reply_is_counted_where_it_is_read(owned: ExitStack) -> None:
    engine = SpeakingEngine(texts=[f"Well. {CALL}", "A letter."])
    [group] = played(rollouts_of(owned, EngineSession(engine), Dictionary(engine), False, group_size=1, max_new_tokens=200), 1)
    assert all(turn.parse_s > 0 for t in group.trajectories for turn in t.turns)
