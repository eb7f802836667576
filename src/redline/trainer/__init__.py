"""Stage 3: improving the policy."""

from redline.trainer.trainer import PolicyTrainer, Sampling

__all__ = ["PolicyTrainer", "Sampling"]
