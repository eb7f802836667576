"""Environments outside a run: what there is, whether one keeps its promises, and playing in one."""
