"""vLLM behind the port, in this process.

Every completion is a request of its own to vLLM, with a seed of its own; the prompt they share is found in vLLM's prefix
cache. Logprobs are those of the distribution sampled from (`processed_logprobs`). New weights come in two steps:
`update_weights` brings them, `apply` says which version they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.config.installation import how_to_install
from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.limits import MAX_TOP_LOGPROBS, holds_tokenizer, limits_of
from redline.engine.adapters.pushed_weights import PushedWeights
from redline.engine.adapters.scoring import add_scores, check_room
from redline.engine.adapters.seeds import completion_seed
from redline.engine.native.admission import check_request
from redline.errors import EngineError
from redline.telemetry import span
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, TopLogprobs, VersionSpan

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
    """A `vllm.LLM`. Implements `ports.Engine`."""

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
        vllm = _import_vllm()
        super().__init__()
        self._make_params = vllm.SamplingParams
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
            **settings,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": False,  # or there are no times
        }
        self._llm = vllm.LLM(str(folder), **arguments)
        network = self._llm.model_config
        self._limits = limits_of(network.max_model_len, network.get_vocab_size(), has_tokenizer=has_tokenizer)

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their Hugging Face names, and forget everything computed with the old ones."""
        with span("engine.update_weights"):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights)})
            if not self._llm.reset_prefix_cache():
                raise EngineError("vLLM kept its prefix cache", "update weights only while nothing is generated")
        self.weights_have_come()

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked."""
        for request in requests:
            check_request(request, self._limits, self._adapters)
            check_room(request, self._limits.max_len)
        pairs = [(request, index) for request in requests for index in request.sampling.indices]
        params = [self._params(request.sampling, index) for request, index in pairs]
        submitted = time.monotonic()
        with span("engine.generate", version=self.version):
            outputs = iter(self._run([request.prompt_ids for request, _ in pairs], params, [r for r, _ in pairs]))
        completions = [[self._completion(next(outputs), submitted) for _ in range(r.sampling.n)] for r in requests]
        return add_scores(requests, completions, self._score)

    def _params(self, sampling: SamplingParams, index: int) -> Any:
        try:
            return self._make_params(
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
            )
        except self._refusals as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error

    def _run(self, prompts: list[np.ndarray], params: list[Any], requests: list[GenerateRequest]) -> list[Any]:
        lora = [self._adapters[r.adapter] if r.adapter is not None else None for r in requests] if self._adapters else None
        tokens = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        try:
            return self._llm.generate(tokens, params, lora_request=lora, use_tqdm=False)
        except self._refusals as error:
            raise EngineError(f"vLLM refuses the request: {error}") from error

    def _score(self, sequences: list[np.ndarray], requests: list[GenerateRequest]) -> list[np.ndarray]:
        params = self._make_params(
            max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, ignore_eos=True, detokenize=False
        )
        outputs = self._run(sequences, [params] * len(sequences), requests)
        return [np.array([np.nan, *output.prompt_logprobs.logprobs], np.float32) for output in outputs]

    def _completion(self, output: Any, submitted: float) -> Completion:
        [sampled], metrics = output.outputs, output.metrics
        if sampled.finish_reason not in set(FinishReason):
            raise EngineError(f"vLLM ended a completion with {sampled.finish_reason!r}", "its log says why")
        token_ids = np.array(sampled.token_ids, np.int32)
        # At each position the sampled token comes first, then the likeliest ones in order.
        shape = (len(sampled.logprobs), -1)
        ids = np.array(sampled.logprobs.token_ids, np.int32).reshape(shape)[: len(token_ids)]
        logprobs = np.array(sampled.logprobs.logprobs, np.float32).reshape(shape)[: len(token_ids)]
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs[:, 0],
            finish_reason=FinishReason(sampled.finish_reason),
            versions=VersionSpan(self.version, self.version),
            queue_s=max(0.0, metrics.scheduled_ts - submitted),
            prefill_s=metrics.first_token_ts - metrics.scheduled_ts,
            decode_s=metrics.last_token_ts - metrics.first_token_ts,
            cached_tokens=output.num_cached_tokens or 0,
            stop=sampled.stop_reason if isinstance(sampled.stop_reason, str) else None,
            top_logprobs=TopLogprobs(ids[:, 1:], logprobs[:, 1:]) if ids.shape[1] > 1 else None,
        )


def _import_vllm() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
        import vllm.exceptions
        import vllm.lora.request
        import vllm.platforms
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
