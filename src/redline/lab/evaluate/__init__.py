"""`redline eval`: what a model makes of held-out tasks, with intervals.

MODEL ──policy──► which weights ─┐
TASK, KEY=VALUE ──asked──► a recipe each ─┴─answers──► attempts ──figures──► a document

The recipe is a training recipe's, and so is everything that is done with it: questions, prompts, randomness, sampling and
rewards are those of the evaluations inside a run.
"""
