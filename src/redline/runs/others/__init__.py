"""Runs of other frameworks, read from what they log.

run-….wandb      ─► wandb_files ┐
events.tfevents… ─► tensorboard ├─► Log (their names) ─► trl · verl · prime_rl ─► rows (ours) ─► OtherRun ─► report, doctor
….json, .jsonl   ─► text_files  ┘      sources.py says which framework wrote it, and refuses what is not one run
"""

from redline.runs.others.run import OtherRun, open_run
from redline.runs.others.sources import is_log

__all__ = ["OtherRun", "is_log", "open_run"]
