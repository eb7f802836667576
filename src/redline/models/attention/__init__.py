"""Attention over packed segments."""
