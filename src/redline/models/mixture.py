"""The experts of a network that transformers runs, as its config and the names of its parameters tell them.

transformers keeps the routed experts of every family in modules called `experts`: one tensor for all of a layer, whose first
dimension is the expert, or a list of modules with a number each. Experts that all tokens go through have other names
(`shared_expert`). A network that looks otherwise has experts of which nothing can be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from redline.models.spec import Mixture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names in config.json of a layer's experts."""
MODULE = "experts"
SIGNS = ("expert", "moe", "router")
"""Parts of names that parameters of experts have, however a family calls them."""


def mixture_of(network: PreTrainedModel) -> Mixture | None:
    """The experts of a network, which may be on the meta device; None where all its tokens go through all its weights."""
    named = [(name.split("."), parameter) for name, parameter in network.named_parameters()]
    if not any(sign in part for parts, _ in named for part in parts for sign in SIGNS):
        return None
    config = network.config.get_text_config(decoder=True)
    count, per_token = _first(config, COUNTS), _first(config, ("num_experts_per_tok",))
    routed = [(parts, parameter) for parts, parameter in named if MODULE in parts]
    size = sum(parameter.numel() for _, parameter in routed)
    is_told = routed and count and per_token and all(_is_of_experts(*each, count) for each in routed)
    return Mixture(size, per_token / count if is_told else None)


def _first(config: Any, names: Sequence[str]) -> int:
    return next((found for name in names if isinstance(found := getattr(config, name, None), int) and found > 0), 0)


def _is_of_experts(parts: Sequence[str], parameter: nn.Parameter, count: int) -> bool:
    """Whether it belongs to one expert of a numbered list, or to all of them in order."""
    after = parts[parts.index(MODULE) + 1]
    return after.isdigit() or parameter.shape[0] == count
