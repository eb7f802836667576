"""Processes of a run beside its own: how each is started, watched and ended."""
