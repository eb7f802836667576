"""SGLang behind the port, in this process.

Every completion is a request of its own to SGLang, with a seed of its own; the prompt they share is found in its radix cache.
Seeds count only under deterministic inference, so that is what it runs. SGLang's logprobs know temperature and logit bias but
no filter, so a request with top_k, top_p or min_p is refused: its logprobs would not be those it was sampled with. New
weights come in two steps: `update_weights` brings them, `apply` says which version they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.limits import holds_tokenizer, limits_of
from redline.engine.adapters.pushed_weights import PushedWeights
from redline.engine.adapters.scoring import add_scores
from redline.engine.adapters.seeds import completion_seed
from redline.engine.adapters.stepped import Call, Came
from redline.errors import EngineError
from redline.models.files.hf import load_config
from redline.telemetry import span
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, TopLogprobs

if TYPE_CHECKING:
    from torch import Tensor


class SglangEngine(PushedWeights):
    """A `sglang.Engine`. Implements `ports.Engine` and `ports.SteppedEngine`; a step samples whole completions."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        dtype: str = "auto",
        adapters: Mapping[str, Path] | None = None,
        **settings: Any,
    ) -> None:
        """A Hugging Face folder, LoRA adapters as PEFT folders by name, and whatever else `sglang.Engine` takes."""
        self._adapters = dict(adapters or {})
        network = load_config(folder).get_text_config()
        has_tokenizer = holds_tokenizer(folder)
        max_len = min(config.max_model_len or network.max_position_embeddings, network.max_position_embeddings)
        limits = limits_of(max_len, network.vocab_size, has_tokenizer=has_tokenizer)
        super().__init__(limits, config.max_num_seqs, self._adapters)
        self._waiting: list[Call] = []
        lora = {"lora_paths": {name: str(path) for name, path in self._adapters.items()}} if self._adapters else {}
        arguments = {
            "dtype": dtype,
            "skip_tokenizer_init": not has_tokenizer,
            "context_length": max_len,
            **_sizes(config),
            **lora,
            **config.options,
            **settings,
            "enable_deterministic_inference": True,
        }
        self._engine = _import_sglang().Engine(model_path=str(folder), **arguments)

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their Hugging Face names, and forget everything computed with the old ones."""
        with span("engine.update_weights"):
            succeeded, reason = self._engine.update_weights_from_tensor(list(weights), flush_cache=True)[:2]
        if not succeeded:
            raise EngineError(f"SGLang did not take the weights: {reason}", "its log may say why")
        self.weights_have_come()

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before."""
        self._engine.flush_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back: level 1 that of the KV cache, level 2 that of the weights too, and then
        `update_weights` must follow `wake`. SGLang must run with `engine.options: {enable_memory_saver: true}`."""
        with span("engine.sleep"):
            self._asleep = ["kv_cache", "weights"] if level > 1 else ["kv_cache"]
            self._engine.release_memory_occupation(tags=self._asleep)

    def wake(self) -> None:
        """Take the memory back that `sleep` gave."""
        with span("engine.wake"):
            self._engine.resume_memory_occupation(tags=self._asleep)

    _asleep: Sequence[str] = ()

    def close(self) -> None:
        """End SGLang's processes."""
        self._engine.shutdown()

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self, request: GenerateRequest) -> None:
        super().check(request)
        _check_sampling(request.sampling)

    def begin(self, call: Call) -> None:
        self._waiting.append(call)

    def cancel(self, calls: Sequence[Call]) -> None:
        self._waiting = [call for call in self._waiting if call not in calls]

    def advance(self) -> list[tuple[Call, Came]]:
        """Sample all calls that wait, whole: SGLang's engine in this process has no step of its own."""
        calls, self._waiting = self._waiting, []
        for call in calls:
            call.version = self.version  # it waited until now
        try:
            return list(zip(calls, self._complete(calls), strict=True))
        except EngineError as error:
            return [(call, error) for call in calls]

    def _complete(self, calls: Sequence[Call]) -> list[Completion]:
        with span("engine.generate", version=self.version):
            answers = self._run(
                [call.request.prompt_ids for call in calls],
                [_sampling_fields(call.request.sampling, call.index) for call in calls],
                [call.request for call in calls],
                top_logprobs_num=[call.request.sampling.top_logprobs for call in calls],
            )
        completions = [[self._completion(answer, call)] for answer, call in zip(answers, calls, strict=True)]
        return [completion for [completion] in add_scores([call.request for call in calls], completions, self._score)]

    def _run(
        self, prompts: list[np.ndarray], sampling: list[dict[str, Any]], requests: list[GenerateRequest], **fields: Any
    ) -> list[dict[str, Any]]:
        if not prompts:
            return []
        lora = {"lora_path": [request.adapter for request in requests]} if self._adapters else {}
        ids = [prompt.tolist() for prompt in prompts]
        try:
            return self._engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True, **lora, **fields)
        except ValueError as error:
            raise EngineError(f"SGLang refuses the request: {error}") from error

    def _score(self, sequences: list[np.ndarray], requests: list[GenerateRequest]) -> list[np.ndarray]:
        answers = self._run(sequences, [{"max_new_tokens": 1}] * len(sequences), requests, logprob_start_len=0)
        return [
            np.array([np.nan, *(logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:])], np.float32)
            for answer in answers
        ]

    def _completion(self, answer: Mapping[str, Any], call: Call) -> Completion:
        about = answer["meta_info"]
        finish = about["finish_reason"]
        if finish["type"] not in (FinishReason.STOP, FinishReason.LENGTH):
            raise EngineError(f"SGLang ended a completion: {finish.get('message', finish)}", "its log may say why")
        # (logprob, id, text) of every sampled token, the stop token included, which `output_ids` may leave out.
        sampled = about["output_token_logprobs"]
        matched, total_s = finish.get("matched"), about["e2e_latency"]
        queue_s, first_token_s = about.get("queue_time", 0.0), about.get("first_token_latency", total_s)
        return Completion(
            token_ids=np.array([token for _, token, *_ in sampled], np.int32),
            logprobs=np.array([logprob for logprob, *_ in sampled], np.float32),
            finish_reason=FinishReason(finish["type"]),
            versions=self.versions_of(call),
            queue_s=queue_s,
            prefill_s=first_token_s - queue_s,
            decode_s=total_s - first_token_s,
            cached_tokens=about.get("cached_tokens", 0),
            stop=matched if isinstance(matched, str) else None,
            top_logprobs=_top_logprobs(about.get("output_top_logprobs")),
        )


def _import_sglang() -> Any:
    try:
        import sglang
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        raise EngineError("the engine sglang needs the package of that name", "pip install 'sglang>=0.5.23'") from error
    return sglang


def _sizes(config: EngineConfig) -> dict[str, Any]:
    """In SGLang's names; what is None is left to it."""
    if config.kv_cache_memory_bytes is not None:
        raise EngineError("SGLang cannot be told engine.kv_cache_memory_bytes", "use engine.gpu_memory_utilization")
    sizes = {
        "max_running_requests": config.max_num_seqs,
        "chunked_prefill_size": config.max_num_batched_tokens,
        "disable_radix_cache": not config.enable_prefix_caching,
        "page_size": config.block_size,
        "mem_fraction_static": config.gpu_memory_utilization,
    }
    return {name: value for name, value in sizes.items() if value is not None}


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.temperature and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise EngineError("SGLang's logprobs leave out top_k, top_p and min_p", "sample without them, or with another engine")
    if sampling.allowed_token_ids is not None:
        raise EngineError("SGLang knows no allowed_token_ids", "use logit_bias, or another engine")


def _sampling_fields(sampling: SamplingParams, index: int) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "sampling_seed": completion_seed(sampling.seed, index),
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        # With it, SGLang heeds no stop token at all; without, the model's own end token counts among them.
        "ignore_eos": not sampling.stop_token_ids,
        "min_new_tokens": sampling.min_tokens,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
    }


def _top_logprobs(rows: Sequence[Sequence[tuple[float, int, Any]]] | None) -> TopLogprobs | None:
    if not rows:
        return None
    ids = [[token for _, token, *_ in row] for row in rows]
    return TopLogprobs(np.array(ids, np.int32), np.array([[logprob for logprob, *_ in row] for row in rows], np.float32))
