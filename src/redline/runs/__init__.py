"""A recorded run, read in one place. Nothing here writes into a run's folder, and the run may still be going on.

metrics.jsonl …  ──► RunReader ──► a document (JSON), or what is new in it since a cursor   → report, dash
trajectories/    ──► StoredRun ──► groups and their attempts                                → show, report, dash, bench
"""

from redline.runs.run import Run

__all__ = ["Run"]
