"""What engines of others can serve. Completions are requests of their own there, and wait for a place."""

from __future__ import annotations

from pathlib import Path

from redline.engine.native.admission import Limits

MAX_TOP_LOGPROBS = 20
UNLIMITED = 2**31
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def limits_of(max_len: int, vocab_size: int = UNLIMITED, *, has_tokenizer: bool = True) -> Limits:
    """`max_len` counts prompt and completion."""
    return Limits(
        vocab_size=vocab_size,
        max_len=max_len,
        max_num_seqs=UNLIMITED,
        cache_tokens=max_len,
        max_stops=UNLIMITED,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        has_tokenizer=has_tokenizer,
    )


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)
