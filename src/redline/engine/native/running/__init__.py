"""Runs what the scheduler decided, on a CPU or a GPU."""
