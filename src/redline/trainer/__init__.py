"""Stage 3: improving the policy."""

from redline.trainer.sampling import Sampling
from redline.trainer.trainer import PolicyTrainer

__all__ = ["PolicyTrainer", "Sampling"]
