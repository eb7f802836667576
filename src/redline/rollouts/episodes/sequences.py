"""What an attempt's turns are trained as: one sequence for each unbroken conversation of each role."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from redline.types import UNKNOWN_EXPERT, Completion, Trajectory, Turn, VersionSpan


@dataclass(slots=True, eq=False)
class SequenceUnderWay:
    """A sequence that grows with every turn. The prompt of a turn holds all that came before it in the sequence."""

    role: str
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """int32: up to the last reply, which is included."""
    completions: list[Completion] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def goes_on_with(self, prompt_ids: np.ndarray) -> bool:
        """Whether a prompt begins with all that the sequence holds."""
        length = len(self.token_ids)
        return len(prompt_ids) >= length and bool(np.array_equal(prompt_ids[:length], self.token_ids))

    def take(self, prompt_ids: np.ndarray, completion: Completion, turn: Turn) -> None:
        self.token_ids = np.concatenate([prompt_ids, completion.token_ids])
        self.completions.append(completion)
        self.turns.append(turn)

    def trajectory(self, attempt: int, retries: int, score_s: float) -> Trajectory:
        """The sequence as it is trained on, without a reward."""
        loss_mask = np.zeros(len(self.token_ids), dtype=np.bool_)
        logprobs = np.zeros(len(self.token_ids), dtype=np.float32)
        for turn, completion in zip(self.turns, self.completions, strict=True):
            loss_mask[turn.start : turn.end] = True
            logprobs[turn.start : turn.end] = completion.logprobs
        spans = [turn.versions for turn in self.turns]
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=VersionSpan(min(s.oldest for s in spans), max(s.newest for s in spans)),
            finish_reason=self.turns[-1].finish_reason,
            text="\n".join(turn.text for turn in self.turns),
            turns=tuple(self.turns),
            attempt=attempt,
            role=self.role,
            retries=retries,
            score_s=score_s,
            routing=self._routing(),
        )

    def _routing(self) -> np.ndarray | None:
        """The routes of each token when the first reply after it was sampled: a later turn may have computed it again."""
        if any(completion.routing is None for completion in self.completions):
            return None
        *earlier, last = (completion.routing for completion in self.completions)
        assert last is not None
        whole = last.copy()
        for routing in reversed(earlier):
            assert routing is not None
            known = routing[:, 0] != UNKNOWN_EXPERT
            whole[: len(routing)][known] = routing[known]
        return whole
