"""vLLM as a peer, run the way its users run it: its own process, its own batching, no seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from redline.config.sections.engine import EngineConfig
from redline.errors import EngineError
from redline.lab.peers.generation_sides import Batch, Run

PROGRAM = Path(__file__).with_name("vllm_process.py")
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""What vLLM reads, unless the user has said otherwise."""
SHARE_OF_FREE_MEMORY = 0.9
PATIENCE_S = 60
"""For the process to end once its input has."""
LINES_SHOWN = 15


class VllmSide:
    """Speaks with `vllm_process.py`, which keeps the model loaded and waits."""

    def __init__(self, arguments: Mapping[str, Any], python: Path | None = None, program: Path = PROGRAM) -> None:
        """`arguments` are those of `vllm.LLM`."""
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            # -P: this folder's `statistics` must not stand in for the standard library's.
            [str(python or sys.executable), "-P", str(program), json.dumps(dict(arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=ENVIRONMENT | os.environ,
        )
        try:
            self.version = str(self._read()["version"])
        except EngineError:
            self.close()
            raise

    def run(self, batch: Batch) -> Run:
        assert self._process.stdin is not None
        prompts = [prompt.tolist() for prompt in batch.prompts]
        work = {"prompts": prompts, "n": batch.n, "new_tokens": batch.new_tokens}
        print(json.dumps(work), file=self._process.stdin, flush=True)
        return Run(**self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            said = "".join(self._log.readlines()[-LINES_SHOWN:])
            raise EngineError(f"vLLM ended with exit code {code}:\n{said}", "run without it: peers=transformers")
        document: dict[str, Any] = json.loads(line)
        return document


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
