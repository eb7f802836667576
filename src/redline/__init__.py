"""redline: reinforcement-learning post-training for language models, as fast as the hardware allows."""

__version__ = "0.1.0"
