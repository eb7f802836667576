"""Which budgets ended the attempts of a run, and what to do about each: what a run that learned nothing says of them."""

from __future__ import annotations

from collections.abc import Iterator

from redline.config.sections.rollouts import RolloutsConfig
from redline.telemetry.summary.learning import Learning


def budget_remark(config: RolloutsConfig, context: int, learning: Learning) -> str:
    """The budgets at which attempts ended, as far as rows of metrics tell, each with its key. `context`: tokens of the longest
    sequence that the engine takes."""
    return f"the budget: {'; or '.join(_budgets(config, context, learning))}"


def _budgets(config: RolloutsConfig, context: int, learning: Learning) -> Iterator[str]:
    if learning.num_used_up < learning.num_at_a_budget:
        yield (
            f"a reply has at most rollouts.max_new_tokens = {config.max_new_tokens} tokens; raise it, or ask for shorter"
            " replies"
        )
    if not learning.num_used_up:
        return
    wanted = config.environment
    if wanted.max_turns is not None and learning.most_turns >= wanted.max_turns:
        yield (
            f"an attempt has at most rollouts.environment.max_turns = {wanted.max_turns} replies; raise it, or end `play`"
            " sooner"
        )
    elif wanted.max_tokens is not None and wanted.max_tokens < context:
        yield (
            f"an attempt has at most rollouts.environment.max_tokens = {wanted.max_tokens} tokens; raise it, or show the policy"
            " less"
        )
    else:
        yield (
            f"a conversation has at most {context} tokens, the model's context, of which its last reply may need"
            f" rollouts.max_new_tokens = {config.max_new_tokens}; end `play` sooner, show the policy less, or set"
            " rollouts.environment.max_turns"
        )
