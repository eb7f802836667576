"""Clocks, rates and warm-up: how a time is taken on this machine."""
