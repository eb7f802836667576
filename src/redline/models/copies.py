"""A second network with the weights of a first: frozen, to compare with, or to be trained on its own."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

Network = TypeVar("Network", bound=nn.Module)


def copy_network(
    network: Network, dtype: torch.dtype, *, trainable: bool, parameters_on: torch.device | str | None = None
) -> Network:
    """Its parameters as they are now, in `dtype`, on their device or another; buffers stay where and as they are."""
    copies = {
        id(parameter): nn.Parameter(parameter.detach().to(parameters_on, dtype, copy=True), requires_grad=trainable)
        for parameter in network.parameters()
    }
    # deepcopy takes what it finds here for a copy already made, so that no weight ever exists twice in the old dtype.
    return copy.deepcopy(network, copies)


def empty_copy(network: Network, dtype: torch.dtype, device: torch.device) -> Network:
    """A frozen network of the same shape, whose parameters are still to be written; buffers are copied."""
    empty = {
        id(parameter): nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
        for parameter in network.parameters()
    }
    return copy.deepcopy(network, empty)


def second_network(network: Network) -> Network:
    """Another network on the very same parameters: modules of its own, no memory for weights."""
    shared = {id(parameter): parameter for parameter in network.parameters()}
    return copy.deepcopy(network, shared)
