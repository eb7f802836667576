"""The processes that take a step together."""
