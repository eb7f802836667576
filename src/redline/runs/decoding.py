"""Tokens of a run → text and messages for people, where the run's tokenizer is at hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from redline.runs.run import Run, setting

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BEGINNINGS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|observation|>"),
)
"""Control tokens with which a message begins in the chat templates of common models."""
_HEADER = re.compile(
    r"<\|(?:im_start|start)\|>(\w+)\s*|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\s*|<\|(\w+)\|>\s*"
)
_ENDINGS = re.compile(
    r"\s*(?:<\|(?:im_end|eot_id|eom_id|end|endoftext|end_of_text|return|call)\|>|<end_of_turn>|<eos>|</s>)\s*$"
)


class Texts:
    """Turns tokens into text with the tokenizer of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = (tokenizer.token_to_id(name) for name in _BEGINNINGS)
        self._beginnings = {token for token in found if token is not None}

    @classmethod
    def of(cls, run: Run) -> Texts | None:
        """None where the tokenizer is not at hand, since nothing is fetched to show a page."""
        from tokenizers import Tokenizer

        config = run.config
        path = _tokenizer_file(run.path, str(setting(config, "model", "path", "")), int(setting(config, "run", "seed", 0)))
        return None if path is None else cls(Tokenizer.from_file(str(path)))

    def text(self, tokens: Sequence[int], *, plain: bool = False) -> str:
        """What the tokens say; control tokens too, unless it is to be plain."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=plain)

    def said(self, tokens: Sequence[int]) -> str:
        """A reply, without the control token that ended it."""
        return _ENDINGS.sub("", self.text(tokens))

    def messages(self, tokens: Sequence[int], otherwise: str) -> list[tuple[str, str]]:
        """Role and text of each message. They are cut at control tokens alone, so that no text can pretend to be one; what
        belongs to no message that is recognised is under the name `otherwise`. The opening of a reply is no message."""
        starts = [place for place, token in enumerate(tokens) if token in self._beginnings]
        cuts = [0, *(start for start in starts if start), len(tokens)]
        parts = [self._message(tokens[start:end], otherwise) for start, end in pairwise(cuts)]
        return [(by, text) for by, text in parts if text]

    def _message(self, tokens: Sequence[int], otherwise: str) -> tuple[str, str]:
        text = self.text(tokens)
        header = _HEADER.match(text) if tokens and tokens[0] in self._beginnings else None
        role = next(filter(None, header.groups()), otherwise) if header else otherwise
        body = text[header.end() :] if header else text
        while (shorter := _ENDINGS.sub("", body)) != body:
            body = shorter
        return role, body.strip("\n") if body.strip() else ""


def _tokenizer_file(run: Path, model: str, seed: int) -> Path | None:
    for folder in (run / "model", Path(model).expanduser()):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    return _cached_tokenizer(model, seed)


def _cached_tokenizer(model: str, seed: int) -> Path | None:
    """The tokenizer of a built-in model, a converted .gguf file or a hub id, if it lies in the user's cache."""
    from redline.models.files.sources import cached_folder

    folder = cached_folder(model, seed)
    if folder is not None:
        return folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
