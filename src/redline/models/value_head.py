"""A value network: a decoder's layers and a linear head that gives one number per position."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.config.sections.lora import LoraConfig
from redline.models.copies import copy_network
from redline.models.decoder import Attend, Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.layers.rows import selected_rows
from redline.models.lora.trainable import add_adapter, without_adapter


class ValueNetwork(nn.Module):
    """Packed token ids → values. The head begins at zero: an untrained critic has no opinion."""

    def __init__(self, trunk: AnyDecoder) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.spec.hidden_size, 1, device=trunk.output_weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        _drop_language_head(trunk)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, from_M: Tensor) -> Tensor:
        """float32[M]: the values of the positions `from_M`."""
        hidden_ME = selected_rows(self.trunk(tokens_T, positions_T, attend), from_M)
        # In float32: returns differ by less than bfloat16 can tell apart.
        return F.linear(hidden_ME.float(), self.head.weight.float(), self.head.bias.float()).squeeze(1)


def value_network(policy: AnyDecoder, lora: LoraConfig, dtype: torch.dtype, seed: int) -> ValueNetwork:
    """A critic that begins with the policy's layers: a copy of them, or an adapter of its own beside the policy's frozen
    weights where `lora` has a rank. The optimizer takes its trainable parameters from there, as it does the policy's."""
    if not lora.rank:
        return ValueNetwork(copy_network(policy, torch.float32, trainable=True))
    trunk = without_adapter(policy)
    add_adapter(trunk, lora, dtype, seed)
    return ValueNetwork(trunk)


def _drop_language_head(trunk: AnyDecoder) -> None:
    """It predicts no tokens. Where head and embedding are one tensor, the layers still need it."""
    if isinstance(trunk, Decoder):
        trunk.lm_head = None
    elif trunk.output_weight is not trunk.network.get_input_embeddings().weight:
        trunk.output_weight.requires_grad_(False)
