"""vLLM as a process of its own, told what to do by lines of JSON. Run by `VllmSide` with the python that has vllm; imports no
redline, so that any environment will do.

    python vllm_process.py '{"model": FOLDER, ...}'     what vllm.LLM takes  →  {"version": ...}
    {"prompts": [[1, 2], ...], "n": 1, "new_tokens": [8, ...]}  →  {"seconds": ..., "num_tokens": ..., "mean_logprob": ...}
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # Whatever vLLM and its workers print belongs to stderr; answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import vllm  # type: ignore[import-not-found,unused-ignore]

    llm = vllm.LLM(**json.loads(sys.argv[1]))
    _say(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        _say(answers, _generate(vllm, llm, json.loads(line)))


def _generate(vllm: Any, llm: Any, batch: dict[str, Any]) -> dict[str, float]:
    prompts = [{"prompt_token_ids": ids} for ids in batch["prompts"]]
    llm.reset_prefix_cache()
    # No seed per request: vLLM samples requests with one each by themselves, which is much slower.
    params = [
        vllm.SamplingParams(
            n=batch["n"],
            max_tokens=new_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )
        for new_tokens in batch["new_tokens"]
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    logprobs = [value for output in outputs for sampled in output.outputs for value in _sampled_logprobs(sampled)]
    return {"seconds": seconds, "num_tokens": len(logprobs), "mean_logprob": sum(logprobs) / len(logprobs)}


def _sampled_logprobs(sampled: Any) -> list[float]:
    """At each position the sampled token comes first."""
    flat = sampled.logprobs.logprobs
    return flat[:: len(flat) // len(sampled.token_ids)]


def _say(answers: Any, document: dict[str, Any]) -> None:
    print(json.dumps(document), file=answers, flush=True)


if __name__ == "__main__":
    main()
