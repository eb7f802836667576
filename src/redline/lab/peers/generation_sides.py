"""Sides that generate: our engine, and transformers. Each does the same work: completions of given lengths, temperature 1, and
the logprob of every sampled token on the host at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from redline.errors import EngineError
from redline.lab.measure.machine import Moment, moment, seconds_between, synchronize
from redline.ports import Engine, SteppedEngine
from redline.types import Delta, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")


@dataclass(slots=True, frozen=True)
class Batch:
    """The work of one run."""

    prompts: Sequence[np.ndarray]
    n: int
    new_tokens: int
    """Tokens of each completion, where `lengths` does not say otherwise."""
    seed: int
    lengths: Sequence[int] | None = None
    """Tokens of each prompt's completions, in the order of the prompts."""

    @property
    def all_lengths(self) -> Sequence[int]:
        """Tokens of each prompt's completions."""
        return [self.new_tokens] * len(self.prompts) if self.lengths is None else self.lengths

    @property
    def num_tokens(self) -> int:
        """n · sum of the lengths."""
        return self.n * sum(self.all_lengths)

    def requests(self) -> list[GenerateRequest]:
        first = self.seed * len(self.prompts)
        return [
            GenerateRequest(prompt, SamplingParams(max_tokens=length, n=self.n, seed=(first + i) % 2**31))
            for i, (prompt, length) in enumerate(zip(self.prompts, self.all_lengths, strict=True))
        ]


@dataclass(slots=True, frozen=True)
class Run:
    """What one side did with a batch."""

    seconds: float
    num_tokens: int
    mean_logprob: float
    """Mean over all sampled tokens: with the same weights, nearly the same on every side."""
    first_token_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64[sequences]: from the start; empty where the side does not say."""
    inter_token_s: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64: between one token of a sequence and the next; empty where the side does not say."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def as_json(self) -> dict[str, float]:
        return {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s, "mean_logprob": self.mean_logprob}


class Side(Protocol):
    """Keeps its model loaded and runs when told to."""

    def run(self, batch: Batch) -> Run: ...

    def close(self) -> None: ...


class BenchEngine(Engine, SteppedEngine, Protocol):
    """Any engine that can be asked for whole batches and for pieces."""


class EngineSide:
    """The engine under test, all requests at once."""

    def __init__(self, engine: BenchEngine, device: torch.device = CPU) -> None:
        self._engine = engine
        self._device = device

    def run(self, batch: Batch) -> Run:
        device, requests = self._device, batch.requests()
        self._engine.reset_prefix_cache()  # what an earlier run cached must not help this one
        synchronize(device)
        started = time.perf_counter()
        groups = self._engine.generate(requests)
        synchronize(device)
        seconds = time.perf_counter() - started
        completions = [completion for group in groups for completion in group]
        logprobs = np.concatenate([completion.logprobs for completion in completions])
        first_token_s = np.array([completion.first_token_s for completion in completions])
        return Run(seconds, len(logprobs), float(logprobs.mean()), first_token_s)

    def close(self) -> None:
        pass


class StreamSide:
    """The engine under test, watched token by token as a user who streams would."""

    def __init__(self, engine: BenchEngine) -> None:
        self._engine = engine

    def run(self, batch: Batch) -> Run:
        requests = batch.requests()
        self._engine.reset_prefix_cache()
        started = time.perf_counter()
        for request in requests:
            self._engine.submit(request, streaming=True)
        read: list[tuple[float, list[int], list[int], list[np.ndarray]]] = []
        while self._engine.has_work:
            events = self._engine.step()
            read.append((time.perf_counter() - started, *_read(events)))
        seconds = time.perf_counter() - started
        arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)
        logprobs: list[np.ndarray] = []
        for came_s, numbers, indices, pieces in read:
            for number, index, piece in zip(numbers, indices, pieces, strict=True):
                arrivals[number, index] += [came_s] * len(piece)
            logprobs += pieces
        sampled = np.concatenate(logprobs)
        first_token_s = np.array([times[0] for times in arrivals.values()])
        gaps = np.concatenate([np.diff(times) for times in arrivals.values()])
        return Run(seconds, len(sampled), float(sampled.mean()), first_token_s, gaps)

    def close(self) -> None:
        pass


def _read(events: Sequence[tuple[int, Delta | EngineError]]) -> tuple[list[int], list[int], list[np.ndarray]]:
    """Of each piece: its request, its completion and its logprobs. The piece itself is let go, as a reader lets it go: kept to
    the end, 262,144 of them make Python's collector look through all there is, 0.3 s at a time, instead of stepping."""
    numbers, indices, logprobs = [], [], []
    for number, event in events:
        if isinstance(event, EngineError):
            raise event
        numbers.append(number)
        indices.append(event.index)
        logprobs.append(event.logprobs)
    return numbers, indices, logprobs


class TransformersSide:
    """`generate` on one padded batch, which ends with its longest completion: what it computes beyond a completion's length is
    not counted. Logprobs are gathered step by step: all scores of W1 would take 159 GB."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers import GenerationConfig

        self._model = model
        # Its own would bring stop tokens, and defaults such as top_k = 50.
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, bos_token_id=None, eos_token_id=None
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> Run:
        from transformers import LogitsProcessorList

        device = self._model.device
        torch.manual_seed(batch.seed)
        synchronize(device)
        started, watch = time.perf_counter(), _Watch(device)
        tokens_BN, mask_BN = _pad_left(batch.prompts, device)
        sequences = self._model.generate(
            tokens_BN,
            attention_mask=mask_BN,
            max_new_tokens=max(batch.all_lengths),
            num_return_sequences=batch.n,
            logits_processor=LogitsProcessorList([watch]),
        )
        logprobs_BN = watch.logprobs(sequences).cpu().numpy()
        seconds = time.perf_counter() - started
        wanted_BN = np.arange(logprobs_BN.shape[1]) < np.repeat(batch.all_lengths, batch.n)[:, None]
        logprobs = logprobs_BN[wanted_BN]
        step_s = np.array(watch.step_seconds())
        first_token_s, gaps = np.full(len(sequences), step_s[0]), np.diff(step_s).repeat(wanted_BN[:, 1:].sum(0))
        return Run(seconds, len(logprobs), float(logprobs.mean()), first_token_s, gaps)

    def close(self) -> None:
        pass


class _Watch:
    """A logits processor that changes nothing. At every step it takes the time, and the logprob of the token before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = moment(device)
        self._steps: list[Moment] = []
        self._newest_BV: Tensor | None = None
        self._chosen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._steps.append(moment(self._device))
        self._gather(input_ids)
        self._newest_BV = torch.log_softmax(scores, dim=-1)
        return scores

    def logprobs(self, sequences_BN: Tensor) -> Tensor:
        """[B, new tokens], once the last token is known."""
        self._gather(sequences_BN)
        self._newest_BV = None
        return torch.stack(self._chosen, dim=1)

    def step_seconds(self) -> list[float]:
        """From the start to each step's logits."""
        return [seconds_between(self._started, step) for step in self._steps]

    def _gather(self, input_ids: Tensor) -> None:
        if self._newest_BV is not None:
            self._chosen.append(self._newest_BV.gather(1, input_ids[:, -1:]).squeeze(1))


def _pad_left(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    tokens_BN = np.stack([np.pad(prompt.astype(np.int64), (longest - len(prompt), 0)) for prompt in prompts])
    mask_BN = np.stack([np.arange(longest) >= longest - len(prompt) for prompt in prompts]).astype(np.int64)
    return torch.from_numpy(tokens_BN).to(device), torch.from_numpy(mask_BN).to(device)
