"""Diplomacy: seven powers, one board, orders given at the same time. The policy plays all seven.

A phase of an attempt, from the board to the next one:

    Position ──legal──► Options ──prompts──► policy.say (seven at once) ──orders──► Adjudicator.advance ──► Position

`Position` is the whole board in a few tuples, so that nothing is ever cloned; `adjudicator.py` alone knows the package
`diplomacy`, which is an extra of its own.
"""
