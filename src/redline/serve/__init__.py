"""The engine behind an OpenAI-compatible HTTP API: `redline serve MODEL`."""
