"""A model that scores conversations, as one part of the reward."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch import Tensor

from redline.errors import ModelError
from redline.models.files.hf import load_config, load_tokenizer
from redline.models.sizes.in_use import weight_bytes
from redline.models.spec import position_limit
from redline.telemetry import span
from redline.types import Failure, Message

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class RewardModel:
    """A sequence classifier of transformers with one label, whose logit is the score."""

    def __init__(self, folder: Path, device: torch.device | str, dtype: torch.dtype, max_tokens: int) -> None:
        self._model = _load_classifier(folder).to(device, dtype).eval()
        self._tokenizer = load_tokenizer(folder)
        self._max_tokens = max_tokens
        self._longest = min(position_limit(self._model.config), self._tokenizer.model_max_length)
        # Where the model has no padding token, it reads its score off the last token, whatever that is.
        self._pad_token_id: int | None = self._model.config.get_text_config().pad_token_id

    def memory(self) -> dict[str, int]:
        """Bytes by kind."""
        return {"weights": weight_bytes([self._model]).total()}

    def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float | Failure]:
        """One for each conversation, whose last message is the answer; a failure where the model has none to give."""
        with span("rollouts.reward_model"):
            return self.scores_of_tokens([self._encode(messages) for messages in conversations])

    def scores_of_tokens(self, sequences: Sequence[Sequence[int]]) -> list[float | Failure]:
        scores: dict[int, float] = {}
        fitting = [number for number, tokens in enumerate(sequences) if 0 < len(tokens) <= self._longest]
        for numbers in _batches(fitting, [len(tokens) for tokens in sequences], self._max_tokens):
            found = self._forward([sequences[number] for number in numbers])
            scores |= dict(zip(numbers, found.tolist(), strict=True))
        return [self._judge(tokens, scores.get(number)) for number, tokens in enumerate(sequences)]

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """By the model's own chat template; one without a template gets the messages as paragraphs."""
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False)
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.encode("\n\n".join(message["content"] for message in messages))

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """float32[sequences], padded on the right."""
        pad = self._pad_token_id if self._pad_token_id is not None else _unused_token(sequences)
        self._model.config.get_text_config().pad_token_id = pad
        longest = max(len(tokens) for tokens in sequences)
        ids = torch.tensor([[*tokens, *[pad] * (longest - len(tokens))] for tokens in sequences])
        mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in sequences])
        device = self._model.device
        return self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, 0].float()

    def _judge(self, tokens: Sequence[int], score: float | None) -> float | Failure:
        if score is None:
            return Failure("reward", f"reward model: {len(tokens)} tokens, but it takes 1 to {self._longest}")
        return score if math.isfinite(score) else Failure("reward", f"reward model: the score is {score}")


def _batches(numbers: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batches of similar length, longest first, each at most `max_tokens` with its padding; a longer one goes alone."""
    batch: list[int] = []
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _unused_token(sequences: Sequence[Sequence[int]]) -> int:
    """The smallest id that no sequence has, so that padding cannot be taken for text."""
    used = {token for tokens in sequences for token in tokens}
    return next(token for token in range(len(used) + 1) if token not in used)


# ── loading ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_classifier(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForSequenceClassification

    _refuse_others(folder, load_config(folder))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the progress bars of others would cut through our own display
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{folder}: transformers cannot load it: {error}", "give the folder of a reward model") from error
    if report["missing_keys"]:
        raise ModelError(
            f"{folder}: the weights lack {', '.join(sorted(report['missing_keys']))}",
            "the weights do not belong to this config.json",
        )
    return model


def check_classifier(folder: Path) -> None:
    """Raise `ModelError` where a folder's config.json is not that of a reward model. Reads no weights."""
    _refuse_others(folder, load_config(folder))


def _refuse_others(folder: Path, config: PretrainedConfig) -> None:
    hint = "rollouts.reward_model.path takes a sequence classifier with one label"
    made_for = ", ".join(config.architectures or ["nothing that config.json names"])
    if "ForSequenceClassification" not in made_for:
        raise ModelError(f"{folder}: not a reward model: it is made for {made_for}", hint)
    if config.num_labels != 1:
        raise ModelError(f"{folder}: not a reward model: it tells {config.num_labels} labels apart", hint)
