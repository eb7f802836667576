"""vLLM as a peer, run the way its users run it: its own process, its own batching, no seeds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from redline.child import Child, ChildError
from redline.config.sections.engine import EngineConfig
from redline.errors import EngineError
from redline.lab.peers.generation_sides import Batch, Run

PROGRAM = Path(__file__).with_name("vllm_process.py")
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""What vLLM reads, unless the user has said otherwise."""
SHARE_OF_FREE_MEMORY = 0.9
PATIENCE_S = 60
"""For the process to end once its input has."""


class VllmSide:
    """Speaks with `vllm_process.py`, which keeps the model loaded and waits."""

    def __init__(self, arguments: Mapping[str, Any], python: Path | None = None, program: Path = PROGRAM) -> None:
        """Starts it and blocks until the model is loaded. `arguments` are those of `vllm.LLM`."""
        self._child = Child(
            # -P: no module of that folder may stand in for one of the standard library.
            [str(python or sys.executable), "-P", str(program), json.dumps(dict(arguments))],
            {name: value for name, value in ENVIRONMENT.items() if name not in os.environ},
            patience_s=PATIENCE_S,
        )
        try:
            with _explained():
                self.version = str(self._child.read()["version"])
        except EngineError:
            self.close()
            raise

    def run(self, batch: Batch) -> Run:
        prompts = [prompt.tolist() for prompt in batch.prompts]
        work = {"prompts": prompts, "n": batch.n, "new_tokens": list(batch.all_lengths)}
        with _explained():
            return Run(**self._child.ask(json.dumps(work)))

    def close(self) -> None:
        self._child.close()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ChildError as failed:
        raise EngineError(f"vLLM {failed}", "run without it: peers=transformers") from None


def vllm_arguments(
    folder: Path, *, has_weights: bool, dtype: str, engine: EngineConfig, device: torch.device
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the same sizes as ours."""
    return {
        "model": str(folder),
        "load_format": "auto" if has_weights else "dummy",
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": max(engine.max_num_batched_tokens, engine.max_model_len or 0),
        "max_model_len": engine.max_model_len,
        "enable_prefix_caching": engine.enable_prefix_caching,
        **_memory(device),
    }


def _memory(device: torch.device) -> dict[str, float]:
    """The share of the device's memory it may take: most of what others have left."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"gpu_memory_utilization": round(SHARE_OF_FREE_MEMORY * free / total, 3)}
