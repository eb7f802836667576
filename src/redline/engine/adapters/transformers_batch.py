"""Rows that are sampled together from a plain network of transformers: prompts in, logits of the next token out. Rows that
continue one prompt share its pass through the network.

`CachedBatch` lets the network keep what it keeps between tokens: keys and values, or whatever state its layers have.
`RecomputedBatch` puts every row through it whole for each token. Padding stands on the right there, where a causal network does
not see it. What a network can be trusted with is found out by trying (`abilities_of`); a row that is alone and recomputed needs
no trust at all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from redline.errors import boundary
from redline.models.generic import TOLERANCE, in_float32, logits_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIED_LENGTHS = (9, 5)
"""Tokens of the sequences with which abilities are tried."""


class Batch(Protocol):
    """P prompts, and B rows that continue them. `first`, then `next` as often as there are tokens."""

    prompt_logprobs: list[np.ndarray]
    """float32[prompt tokens] of each row, once `first` was asked for them."""

    def first(self, *, score: bool) -> Tensor:
        """Logits [B, V] after each row's prompt."""
        ...

    def next(self, tokens_B: Tensor) -> Tensor:
        """Logits [B, V] after one more token each."""
        ...


class CachedBatch:
    """transformers' own generation loop, one token at a time. Prompts are padded on the left."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[np.ndarray], prompt_B: Sequence[int]) -> None:
        self._model = model
        self._prompts = prompts
        self._prompt_B = torch.tensor(prompt_B, device=model.device)
        longest = max(map(len, prompts))
        padded = np.stack([np.pad(prompt.astype(np.int64), (longest - len(prompt), 0)) for prompt in prompts])
        visible = np.stack([np.arange(longest) >= longest - len(prompt) for prompt in prompts])
        self._tokens_BN = torch.from_numpy(padded).to(model.device)
        mask_BN = torch.from_numpy(visible).long().to(model.device)
        self._kept: dict[str, Any] = {"use_cache": True, "attention_mask": mask_BN}
        if "position_ids" in _parameters(model):
            self._kept["position_ids"] = (mask_BN.cumsum(dim=-1) - 1).clamp(min=0)
        self.prompt_logprobs: list[np.ndarray] = []

    def first(self, *, score: bool) -> Tensor:
        logits_PNV = self._forward(keep=0 if score else 1)
        if score:
            pairs = zip(logits_PNV, self._prompts, strict=True)
            scores = [_score(logits_NV[-len(prompt) :], prompt) for logits_NV, prompt in pairs]
            self.prompt_logprobs = [scores[prompt] for prompt in self._prompt_B.tolist()]
        if self._prompt_B.tolist() != list(range(len(self._prompts))):
            self._share()
        return logits_PNV[self._prompt_B, -1]

    def _share(self) -> None:
        """A row for each continuation. Beam search moves rows of a cache in the same way."""
        self._tokens_BN = self._tokens_BN[self._prompt_B]
        for name, value in self._kept.items():
            if isinstance(value, Tensor):
                self._kept[name] = value[self._prompt_B]
            elif not isinstance(value, bool):
                value.reorder_cache(self._prompt_B)

    def next(self, tokens_B: Tensor) -> Tensor:
        self._tokens_BN = torch.cat((self._tokens_BN, tokens_B[:, None]), dim=1)
        return self._forward(next_sequence_length=1)[:, -1]

    def _forward(self, next_sequence_length: int | None = None, keep: int = 1) -> Tensor:
        """What `generate` does around a forward, so that every family finds its inputs as it expects them."""
        first = next_sequence_length is None
        inputs = self._model.prepare_inputs_for_generation(
            self._tokens_BN, next_sequence_length=next_sequence_length, is_first_iteration=first, **self._kept
        )
        if "logits_to_keep" in _parameters(self._model):
            inputs["logits_to_keep"] = keep
        output = self._model(**inputs, return_dict=True)
        self._kept = self._model._update_model_kwargs_for_generation(output, self._kept)
        return output.logits


class RecomputedBatch:
    """Whole sequences every time."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[np.ndarray], prompt_B: Sequence[int]) -> None:
        self._model = model
        self._prompts = prompts
        self._prompt_B = prompt_B
        self._rows = [torch.from_numpy(prompt.astype(np.int64)).to(model.device) for prompt in prompts]
        self.prompt_logprobs: list[np.ndarray] = []

    def first(self, *, score: bool) -> Tensor:
        if score:
            pairs = list(zip(self.whole(), self._prompts, strict=True))
            scores = [_score(logits_NV[: len(prompt)], prompt) for logits_NV, prompt in pairs]
            self.prompt_logprobs = [scores[prompt] for prompt in self._prompt_B]
            logits_PV = torch.stack([logits_NV[len(prompt) - 1] for logits_NV, prompt in pairs])
        else:
            logits_PV = self._last()
        self._rows = [self._rows[prompt] for prompt in self._prompt_B]
        return logits_PV[torch.tensor(self._prompt_B)]

    def next(self, tokens_B: Tensor) -> Tensor:
        self._rows = [torch.cat((row, token)) for row, token in zip(self._rows, tokens_B.split(1), strict=True)]
        return self._last()

    def whole(self, **options: Any) -> Tensor:
        """Logits [B, N, V] of every token."""
        padded_BN = torch.nn.utils.rnn.pad_sequence(self._rows, batch_first=True)
        return self._model(input_ids=padded_BN, use_cache=False, return_dict=True, **options).logits

    def _last(self) -> Tensor:
        """Only the columns where a row ends, where the network can leave the others out."""
        ends_B = torch.tensor([len(row) - 1 for row in self._rows], device=self._model.device)
        columns_C, column_B = ends_B.unique(return_inverse=True)
        if "logits_to_keep" in _parameters(self._model):
            return self.whole(logits_to_keep=columns_C)[torch.arange(len(ends_B)), column_B]
        return self.whole()[torch.arange(len(ends_B)), ends_B]


def _score(logits_NV: Tensor, prompt: np.ndarray) -> np.ndarray:
    """The logprob of every prompt token but the first, under the model."""
    targets = torch.from_numpy(prompt[1:].astype(np.int64)).to(logits_NV.device)
    logprobs = torch.log_softmax(logits_NV[:-1].float(), dim=-1).gather(1, targets[:, None]).squeeze(1)
    return np.concatenate([[np.nan], logprobs.cpu().numpy()]).astype(np.float32)


def _parameters(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


# ── what a network can be trusted with ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Abilities:
    caches: bool
    """Rows whose tokens come one at a time have the logits of whole sequences."""
    pads: bool
    """So have prompts with padding before them."""
    shares: bool
    """So have several rows that continue one prompt."""
    is_causal: bool
    """Whole sequences have the logits they have alone, whatever follows them as padding."""
    vocab_size: int
    """Logits per token."""


@torch.no_grad()
def abilities_of(model: PreTrainedModel) -> Abilities:
    """Held against the network itself, on whole sequences that are alone."""
    highest = min(1000, len(model.get_input_embeddings().weight))
    drawn = np.random.default_rng(0).integers(5, highest, sum(TRIED_LENGTHS))
    sequences = np.split(drawn, np.cumsum(TRIED_LENGTHS)[:-1])
    short = min(TRIED_LENGTHS)
    with in_float32(model):
        alone = [RecomputedBatch(model, [tokens], [0]).whole()[0] for tokens in sequences]
        equal, equal_alone = [tokens[:short] for tokens in sequences], [logits_NV[:short] for logits_NV in alone]
        return Abilities(
            caches=_agrees(CachedBatch, model, equal, equal_alone, [0, 1]),
            pads=_agrees(CachedBatch, model, sequences, alone, [0, 1]),
            shares=_agrees(CachedBatch, model, equal, equal_alone, [0, 0, 1]),
            is_causal=_agrees(RecomputedBatch, model, sequences, alone, [0, 1]),
            vocab_size=alone[0].shape[-1],
        )


def _agrees(
    batch_type: type[CachedBatch | RecomputedBatch],
    model: PreTrainedModel,
    sequences: Sequence[np.ndarray],
    alone: Sequence[Tensor],
    prompt_B: list[int],
) -> bool:
    """Whether all but the last three tokens as prompts, and those one at a time, give the logits of whole sequences."""
    error = math.inf
    with boundary():
        batch = batch_type(model, [tokens[:-3] for tokens in sequences], prompt_B)
        found = [batch.first(score=False)]
        for place in (-3, -2, -1):
            found.append(batch.next(torch.tensor([int(sequences[prompt][place]) for prompt in prompt_B], device=model.device)))
        ours_TV = torch.stack(found, dim=1).flatten(0, 1)
        theirs_TV = torch.cat([alone[prompt][-4:] for prompt in prompt_B])
        error = logits_error(ours_TV, theirs_TV, model.dtype)
    return error <= TOLERANCE[model.dtype]
