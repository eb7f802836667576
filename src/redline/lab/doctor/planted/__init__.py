"""Runs with a known bottleneck: what the doctor's findings, and the gains that it predicts, are measured by."""
