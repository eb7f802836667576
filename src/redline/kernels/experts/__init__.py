"""A layer of experts without gradients: routing, and products over the tokens of each expert.

This package needs triton; only code that runs on a CUDA device may import it.
"""

from __future__ import annotations

from redline.kernels.experts.layer import ExpertWeights, run_experts

__all__ = ["ExpertWeights", "run_experts"]
