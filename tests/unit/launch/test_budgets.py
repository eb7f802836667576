"""A run whose attempts were cut off says at which budget, with the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from redline.config.sections.rollouts import RolloutsConfig
from redline.launch.budgets import budget_remark
from redline.telemetry.summary.learning import Learning

CONTEXT = 1024


def remark(used_up: int, turns: float = 3, **environment: Any) -> str:
    """What is said where all of eight attempts were cut off, `used_up` of them by a budget of the whole attempt."""
    config = RolloutsConfig.model_validate(
        {"environment": environment, "max_new_tokens": 12, "task": {"kind": "import", "path": "a:B"}}
    )
    row = {
        "rollouts/groups": 1,
        "rollouts/groups_with_signal": 0,
        "rollouts/attempts": 8,
        "rollouts/truncated_fraction": 1.0,
        "rollouts/truncated": used_up,
        "rollouts/turns_max": turns,
    }
    return budget_remark(config, CONTEXT, Learning([row], 8))


@pytest.mark.parametrize(
    ("used_up", "environment", "said"),
    [
        (0, {}, "a reply has at most rollouts.max_new_tokens = 12 tokens; raise it"),
        (8, {"name": "a:B", "max_turns": 3}, "an attempt has at most rollouts.environment.max_turns = 3 replies; raise it"),
        (
            8,
            {"name": "a:B", "max_tokens": 500},
            "an attempt has at most rollouts.environment.max_tokens = 500 tokens; raise it",
        ),
        (8, {"name": "a:B"}, "a conversation has at most 1024 tokens, the model's context, of which"),
        (8, {"name": "a:B", "max_turns": 9, "max_tokens": 5000}, "a conversation has at most 1024 tokens, the model's context"),
    ],
)
def test_the_budget_that_ended_attempts_is_named(used_up: int, environment: dict[str, Any], said: str) -> None:
    assert remark(used_up, **environment).startswith(f"the budget: {said}")


def test_both_are_named_where_replies_and_whole_attempts_were_cut_off() -> None:
    said = remark(4, name="a:B", max_turns=3)
    assert "rollouts.max_new_tokens = 12" in said
    assert "; or an attempt has at most rollouts.environment.max_turns = 3" in said
