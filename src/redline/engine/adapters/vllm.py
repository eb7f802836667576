"""vLLM behind the port, in this process.

Every completion is a request of its own to vLLM, with a seed of its own; the prompt they share is found in vLLM's prefix
cache. vLLM decides what runs together; our session says when it steps. Logprobs are those of the distribution sampled from
(`processed_logprobs`). New weights come in two steps: `update_weights` brings them, `apply` says which version they are.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.config.installation import how_to_install
from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.limits import MAX_TOP_LOGPROBS, holds_tokenizer, limits_of
from redline.engine.adapters.pushed_weights import PushedWeights
from redline.engine.adapters.scoring import scored, wants_scores
from redline.engine.adapters.seeds import completion_seed
from redline.engine.adapters.stepped import Call, Came, Tokens
from redline.errors import EngineError, boundary
from redline.telemetry import span
from redline.types import Completion, FinishReason, SamplingParams, TopLogprobs, VersionSpan

if TYPE_CHECKING:
    from torch import Tensor

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that weights are handed over, not serialized
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""What vLLM reads, unless the user has said otherwise."""
SIZES = {
    "block_size",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
}


class VllmEngine(PushedWeights):
    """A `vllm.LLM`, stepped by our session. Implements `ports.Engine` and `ports.SteppedEngine`."""

    tells_progress = True

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        dtype: str = "auto",
        adapters: Mapping[str, Path] | None = None,
        **settings: Any,
    ) -> None:
        """A Hugging Face folder, LoRA adapters as PEFT folders by name, and whatever else `vllm.LLM` takes."""
        self._vllm = vllm = _import_vllm()
        self._refusals = (ValueError, vllm.exceptions.VLLMValidationError)
        self._adapters = {
            name: vllm.lora.request.LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate((adapters or {}).items(), start=1)
        }
        has_tokenizer, is_cpu = holds_tokenizer(folder), vllm.platforms.current_platform.is_cpu()
        arguments = {
            "dtype": dtype,
            "skip_tokenizer_init": not has_tokenizer,
            "generation_config": "vllm",  # requests say all there is to say
            "max_logprobs": MAX_TOP_LOGPROBS,
            **_sizes(config, is_cpu=is_cpu),
            **_lora_arguments(adapters or {}, is_cpu=is_cpu),
            **config.options,
            **settings,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": False,  # or there are no times
        }
        self._llm = self._make(str(folder), arguments)
        self._engine = self._llm.llm_engine
        network = self._llm.model_config
        limits = limits_of(network.max_model_len, network.get_vocab_size(), has_tokenizer=has_tokenizer)
        super().__init__(limits, config.max_num_seqs, self._adapters)
        self._running: dict[str, _Running] = {}
        """By the names that vLLM has for them."""
        self._names = itertools.count()
        self._ended: list[tuple[Call, Completion]] = []
        """What was ended since the last step."""

    def _make(self, folder: str, arguments: dict[str, Any]) -> Any:
        llm = None
        with boundary() as caught:
            llm = self._vllm.LLM(folder, **arguments)
        if caught.error is not None:
            raise EngineError(f"vLLM does not start: {caught.error}", "look at engine.options, and what vLLM logged")
        return llm

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their Hugging Face names. Calls under way go on with the keys they have; no later request finds
        those, as its prompt has another salt."""
        with span("engine.update_weights"):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights)})
            self._salt += 1
            self.reset_prefix_cache()
        self.weights_have_come()

    _salt = 0
    """Counts the weights that came: blocks computed with other weights have other names."""

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before. vLLM keeps the blocks of calls under way; another salt hides them."""
        if not self._llm.reset_prefix_cache():
            self._salt += 1

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: level 1 keeps the weights in host memory, level 2 nowhere, and then `update_weights`
        must follow `wake`. Raises EngineError while calls are under way: both levels forget their keys."""
        if self._running:
            raise EngineError("vLLM is asked to sleep while it samples", "finish or abort its requests first")
        with span("engine.sleep"):
            self._llm.sleep(level=level)

    def wake(self) -> None:
        """Take the memory back."""
        with span("engine.wake"):
            self._llm.wake_up()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, call: Call) -> None:
        params = self._params(call.request.sampling, call.index)
        self._add(_Running(call), call.request.prompt_ids, params)

    def end(self, request_id: int, index: int) -> None:
        """Abort one completion; what it has comes with the next step. One without a token, or with scores to come, goes on."""
        for name, running in list(self._running.items()):
            call = running.call
            if (call.request_id, call.index) == (request_id, index) and running.last and not wants_scores(call.request):
                del self._running[name]
                self._engine.abort_request([name])
                self._ended.append((call, running.whole(running.last, FinishReason.ABORT, self.versions_of)))

    def advance(self) -> Iterator[tuple[Call, Came]]:
        ended, self._ended = self._ended, []
        yield from ended
        if not self._running:
            return
        with span("engine.decode", version=self.version):
            outputs = self._engine.step()
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:  # it was cancelled
                continue
            if output.finished:
                del self._running[output.request_id]
            came = running.score(output) if running.completion is not None else running.take(output, self.versions_of)
            if isinstance(came, Completion) and running.completion is None and wants_scores(running.call.request):
                running.completion = came
                self._add(running, np.concatenate([running.call.request.prompt_ids, came.token_ids]), self._scoring_params())
            elif came is not None:
                yield running.call, came

    def cancel(self, calls: Sequence[Call]) -> None:
        names = [name for name, running in self._running.items() if running.call in calls]
        for name in names:
            del self._running[name]
        self._engine.abort_request(names)

    def _add(self, running: _Running, prompt: np.ndarray, params: Any) -> None:
        name, adapter = str(next(self._names)), running.call.request.adapter
        tokens = self._vllm.inputs.engine.tokens_input(prompt.tolist(), cache_salt=str(self._salt))
        lora = None if adapter is None else self._adapters[adapter]
        try:
            self._engine.add_request(name, tokens, params, lora_request=lora)
        except self._refusals as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error
        self._running[name] = running

    def _scoring_params(self) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, ignore_eos=True, detokenize=False
        )

    def _params(self, sampling: SamplingParams, index: int) -> Any:
        try:
            return self._vllm.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=completion_seed(sampling.seed, index),
                stop=list(sampling.stop),
                stop_token_ids=list(sampling.stop_token_ids),
                min_tokens=sampling.min_tokens,  # until then, vLLM also forbids the tokenizer's end token
                logit_bias=dict(sampling.logit_bias) or None,
                allowed_token_ids=None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
                logprobs=sampling.top_logprobs,
                flat_logprobs=True,
                ignore_eos=True,  # the request's own stop tokens are all there are
                detokenize=bool(sampling.stop),
                output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            )
        except self._refusals as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error


@dataclass(slots=True, eq=False)
class _Running:
    """A call as vLLM brings it forward."""

    call: Call
    tokens: list[Tokens] = field(default_factory=list)
    last: Any = None
    """The last output of vLLM that brought a token."""
    completion: Completion | None = None
    """The whole, while the model's own logprobs of it are still to come."""

    def take(self, output: Any, versions_of: Callable[[Call], VersionSpan]) -> Came | None:
        """What a step added; the whole once it has ended."""
        [sampled] = output.outputs
        self.tokens.append(_tokens(sampled))
        self.last = output if len(self.tokens[-1].token_ids) else self.last
        if not output.finished:
            return self.tokens[-1]
        if sampled.finish_reason not in set(FinishReason):
            return EngineError(f"vLLM ended a completion with {sampled.finish_reason!r}", "its log says why")
        return self.whole(output, FinishReason(sampled.finish_reason), versions_of)

    def whole(self, output: Any, reason: FinishReason, versions_of: Callable[[Call], VersionSpan]) -> Completion:
        """All tokens so far, of which an output brought the last."""
        [sampled] = output.outputs
        metrics, whole = output.metrics, _joined(self.tokens)
        return Completion(
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            finish_reason=reason,
            versions=versions_of(self.call),
            queue_s=max(0.0, metrics.scheduled_ts - self.call.began),
            prefill_s=metrics.first_token_ts - metrics.scheduled_ts,
            decode_s=metrics.last_token_ts - metrics.first_token_ts,
            cached_tokens=output.num_cached_tokens or 0,
            stop=sampled.stop_reason if isinstance(sampled.stop_reason, str) else None,
            top_logprobs=whole.top_logprobs,
        )

    def score(self, output: Any) -> Completion | None:
        """The completion with the model's own logprobs, once they are there."""
        assert self.completion is not None
        if not output.finished:
            return None
        return scored(self.completion, self.call.request, np.array([np.nan, *output.prompt_logprobs.logprobs], np.float32))


def _tokens(sampled: Any) -> Tokens:
    """At each position the sampled token comes first, then the likeliest ones in order."""
    token_ids = np.array(sampled.token_ids, np.int32)
    shape = (len(token_ids), -1) if len(token_ids) else (0, 1)
    ids = np.array(sampled.logprobs.token_ids, np.int32).reshape(shape)
    logprobs = np.array(sampled.logprobs.logprobs, np.float32).reshape(shape)
    return Tokens(token_ids, logprobs[:, 0], TopLogprobs(ids[:, 1:], logprobs[:, 1:]) if ids.shape[1] > 1 else None)


def _joined(parts: Sequence[Tokens]) -> Tokens:
    parts = [part for part in parts if len(part.token_ids)] or list(parts)
    tops = [part.top_logprobs for part in parts if part.top_logprobs is not None]
    top = TopLogprobs(np.concatenate([t.token_ids for t in tops]), np.concatenate([t.logprobs for t in tops])) if tops else None
    return Tokens(np.concatenate([p.token_ids for p in parts]), np.concatenate([p.logprobs for p in parts]), top)


def _import_vllm() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.exceptions
        import vllm.inputs.engine
        import vllm.lora.request
        import vllm.platforms
        import vllm.sampling_params
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise EngineError("the engine vllm needs the package of that name", how_to_install("vllm")) from error
    return vllm


def _sizes(config: EngineConfig, *, is_cpu: bool) -> dict[str, Any]:
    """Our names are vLLM's; what is None is left to it."""
    sizes = config.model_dump(include=SIZES, exclude_none=True)
    if is_cpu:
        # Its CPU worker cannot rewind the generator of a seeded request, as it does after each chunk of a prompt. Without
        # chunks, a step must have room for the longest prompt, and vLLM chooses the budget itself.
        del sizes["max_num_batched_tokens"]
        sizes["enable_chunked_prefill"] = False
    return sizes


def _lora_arguments(adapters: Mapping[str, Path], *, is_cpu: bool) -> dict[str, Any]:
    if not adapters:
        return {}
    rank = max(json.loads((path / "adapter_config.json").read_text())["r"] for path in adapters.values())
    # On a CPU, vLLM gives the adapter in the last slot to rows that asked for none: that slot stays empty.
    slots = len(adapters) + is_cpu
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": max(8, 1 << (rank - 1).bit_length())}
