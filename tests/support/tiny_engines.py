"""Engines on a tiny random network, requests for them, and what must be so whatever they were asked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from transformers import PreTrainedModel

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.models.files.hf import load_decoder
from redline.types import Completion, Delta, GenerateRequest, SamplingParams

FAMILY = "llama, untied"
BLOCK_SIZE = 4
BYTES_PER_BLOCK = 2 * 2 * BLOCK_SIZE * 2 * 8 * 4
"""Keys and values, layers, tokens, key heads, head size, bytes."""


@dataclass
class Model:
    """One set of weights: transformers' network, and engines on it."""

    oracle: PreTrainedModel
    folder: Path
    known: dict[str, list[Completion]] = field(default_factory=dict)

    def engine(
        self, num_blocks: int | None = None, tokenizer: Any = None, kind: type[NativeEngine] = NativeEngine, **config: Any
    ) -> NativeEngine:
        if num_blocks is not None:
            config["kv_cache_memory_bytes"] = (num_blocks + 1) * BYTES_PER_BLOCK
        return kind(load_decoder(self.folder), EngineConfig(**{"block_size": BLOCK_SIZE, **config}), tokenizer)

    def generate(self, requests: Sequence[GenerateRequest], **config: Any) -> list[list[Completion]]:
        return self.engine(**config).generate(requests)

    def alone(self, request: GenerateRequest) -> list[Completion]:
        """What it gives in an engine of its own with room for everything; worked out once."""
        key = f"{request.prompt_ids.tolist()} {request.sampling}"
        if key not in self.known:
            [self.known[key]] = self.generate([request])
        return self.known[key]

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64[tokens, V]: the whole sequence in one pass, without a cache."""
        return self.oracle(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double().numpy()

    def greedy(self, prompt: np.ndarray, max_tokens: int) -> list[int]:
        """What transformers generates."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = self.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


def make_model(folder: Path) -> Model:
    # Weights this wide give distributions with a few likely tokens each, so that choices are choices.
    return Model(write_model(folder, CONFIGS[FAMILY], seed=5, std=0.3), folder)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)


def ask(length: int, max_tokens: int = 12, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt(length, seed), SamplingParams(max_tokens=max_tokens, **{"seed": seed, **sampling}))


def changed(request: GenerateRequest, **sampling: Any) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, **sampling))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, and logprobs that differ by no more than the order of a sum."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        assert one.stop == other.stop
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def steps(engine: NativeEngine) -> Iterator[tuple[int, Delta | EngineError]]:
    """Until nothing is left to do."""
    while engine.has_work:
        yield from engine.step()


def finish(engine: NativeEngine) -> dict[int, list[Completion]]:
    """Step until nothing is left to do; the completions of every request."""
    found: dict[int, dict[int, Completion]] = {}
    for number, piece in steps(engine):
        assert isinstance(piece, Delta)
        if piece.completion is not None:
            found.setdefault(number, {})[piece.index] = piece.completion
    return {number: [one[index] for index in sorted(one)] for number, one in found.items()}


def assert_nothing_held(engine: NativeEngine) -> None:
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert sorted(engine._scheduler._free_rows) == list(range(engine._config.max_num_seqs))
    assert not engine.has_work


PREFIX = prompt(22, seed=99)
SETTINGS: dict[str, dict[str, Any]] = {
    "plenty of everything": {},
    "without prefix caching": {"enable_prefix_caching": False},
    "prompts in chunks": {"max_num_batched_tokens": 7},
    "chunks without prefix caching": {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
    "a cache too small for all": {"num_blocks": 24},
    "too small, without prefix caching": {"num_blocks": 24, "enable_prefix_caching": False},
    "too small, in chunks": {"num_blocks": 24, "max_num_batched_tokens": 7},
    "too small, in chunks, without prefix caching": {
        "num_blocks": 24,
        "max_num_batched_tokens": 7,
        "enable_prefix_caching": False,
    },
    "three rows": {"max_num_seqs": 3},
    "blocks of sixteen": {"block_size": 16},
    "blocks of one": {"block_size": 1},
}
FEW = {
    name: SETTINGS[name]
    for name in (
        "plenty of everything",
        "prompts in chunks",
        "too small, in chunks, without prefix caching",
        "blocks of sixteen",
    )
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        centred = logits - logits.max(axis=-1, keepdims=True)
        return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))


class Letters:
    """Tokens of two letters each; the second counts the first, so that no two are the same."""

    def piece(self, token: int) -> str:
        return chr(ord("a") + token % 26) + chr(ord("A") + token // 26)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(self.piece, token_ids))


def text_of(completion: Completion) -> str:
    return Letters().decode(completion.token_ids.tolist(), skip_special_tokens=True)


MIXED = [
    ask(5, 30, seed=1, n=3),
    ask(1, 1, seed=2),
    ask(40, 7, seed=3, n=2, temperature=0.7),
    ask(17, 30, seed=4, temperature=1.3, top_k=9, min_p=0.01),
    ask(4, 9, seed=5, n=4, top_p=0.8),
    ask(60, 25, seed=6, temperature=0.0),
    ask(8, 30, seed=7, n=2, stop_token_ids=(3, 30, 60, 90, 120)),
    ask(8, 30, seed=8, logit_bias={7: 3.0, 9: -math.inf}, allowed_token_ids=tuple(range(2, 60))),
]
"""Requests with nothing in common."""
