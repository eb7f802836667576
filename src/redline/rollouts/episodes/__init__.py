"""Attempts of several turns: an event loop in which every attempt is a task, and a broker between them and the engine."""
