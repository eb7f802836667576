"""Tokens that the engine could have guessed."""

from __future__ import annotations

import numpy as np

from redline.lab.doctor.facts import Facts, Parts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding, Gain

PAYS = 0.2
"""Share of the time of decoding that guesses must be likely to save before they are proposed. Where they turn out not to pay,
an engine that tries them loses some 2%."""


def speculation_off(facts: Facts) -> Answer:
    """Attempts repeat each other, and every token of them is computed in a step of its own."""
    guesses = facts.guesses
    if guesses is None:
        return None
    if guesses.cannot:
        return Abstention("speculation_off", guesses.cannot)
    gain = gain_of_guesses(facts)
    if gain is None or float(np.mean([pair.saved for pair in guesses.likely])) < PAYS:
        return None
    return Finding(
        cause="speculation_off",
        title=f"Nothing is guessed, and {guesses.right:.0%} of the guesses would be right.",
        why="Attempts repeat their siblings, earlier attempts and themselves; every token of them is a step of the engine.",
        evidence=(
            Evidence("engine.speculation", "off", "nothing is guessed"),
            Evidence("guesses", guesses.right, f"share that is right, of {guesses.num_attempts} stored attempts replayed"),
            Evidence("tokens a step", guesses.tokens_a_step, "for each row, with guesses; 1 without"),
            Evidence("plain step", guesses.plain_s, f"seconds of the engine, with {guesses.rows:.3g} rows"),
            Evidence("decoding", float(_decoding(facts).mean()), "seconds a step, without prompts"),
        ),
        gain=gain,
        change={"engine.speculation": "auto"},
        advice="Samples are the same but for rounding; a run that must repeat itself to the bit keeps it off.",
    )


def gain_of_guesses(facts: Facts) -> Gain | None:
    """What guesses would save, however little that is; None where no attempts were replayed."""
    guesses = facts.guesses
    if guesses is None or guesses.cannot:
        return None
    likely, careful = ([max(0.0, pair.saved) for pair in pairs] for pairs in (guesses.likely, guesses.careful))
    return facts.saved(
        "rollouts",
        _decoding(facts),
        "generation",
        Parts(min(careful), float(np.mean(likely)), max(likely)),
        "attempts go on repeating as they did, and a token more in a step costs little more than a row",
    )


def _decoding(facts: Facts) -> np.ndarray:
    """Seconds of each step in which rows get tokens."""
    return np.maximum(0.0, facts.phase("generation", "rollouts") - facts.column("engine/prefill_s"))
