"""Answers that are programs: an environment, its problems, and the sandbox in which the programs run."""
