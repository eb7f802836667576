"""`engine.kind` of a training run: another engine samples from the same policy, version by version."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.crashing_runs import newest_run, output, run_to_end
from support.processes import REDLINE, redline, rows, write_letters
from support.small_models import write_model
from transformers import LlamaConfig

from redline.models.files.tiny import tiny_tokenizer

STEPS = 4
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


def write(cwd: Path, **sections: dict[str, Any]) -> None:
    cwd.mkdir()
    write_letters(cwd, **{"run": {"steps": STEPS}, "rollouts": {"evaluation": {"num_tasks": 2}}, **sections})


def train(cwd: Path, **sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a run."""
    write(cwd, **sections)
    assert run_to_end(cwd, "train", "letters.yaml", is_profiled=False) == 0, output(cwd)
    return rows(newest_run(cwd).metrics)


def refusal(cwd: Path, *arguments: str) -> str:
    """What a dry run says against a recipe."""
    write_letters(cwd)
    assert run_to_end(cwd, "train", "letters.yaml", "--dry-run", *arguments, is_profiled=False) == 2, output(cwd)
    assert not (cwd / "runs").exists()
    return output(cwd)


def assert_same_training(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same tokens at every step, and gradients that differ by the order of a sum."""
    assert len(ours) == len(theirs) == STEPS
    for one, other in zip(ours, theirs, strict=True):
        assert one["engine/generated_tokens"] == other["engine/generated_tokens"]
        assert one["rollouts/reward_mean"] == other["rollouts/reward_mean"]
        assert one["trainer/grad_norm"] == pytest.approx(other["trainer/grad_norm"], rel=1e-4)
        assert one["trainer/loss"] == pytest.approx(other["trainer/loss"], abs=1e-6)
        assert (other["trainer/mismatch_kl"] or 0.0) < 1e-9
    assert any(row["trainer/mismatch_kl"] is not None for row in theirs)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("native") / "run")


def test_transformers_trains_as_the_native_engine_does(native: list[dict[str, Any]], tmp_path: Path) -> None:
    theirs = train(tmp_path / "run", engine={"kind": "transformers"})
    assert_same_training(native, theirs)
    assert {row["weight_sync/bytes_moved"] for row in theirs} == {0}  # it reads the trainer's own tensors


@pytest.mark.slow
def test_transformers_trains_beside_the_trainer_within_the_lag(tmp_path: Path) -> None:
    theirs = train(tmp_path / "run", engine={"kind": "transformers"}, buffer={"max_lag": 1})
    assert len(theirs) == STEPS
    assert all((row["trainer/mismatch_kl"] or 0.0) < 0.5 for row in theirs)
    assert max(row["buffer/policy_lag_steps"] for row in theirs) <= 1


@pytest.mark.slow
def test_an_adapter_in_training_reaches_transformers_merged(tmp_path: Path) -> None:
    lora: dict[str, dict[str, Any]] = {"trainer": {"lora": {"rank": 4}}}
    ours = train(tmp_path / "ours", **lora)
    theirs = train(tmp_path / "theirs", engine={"kind": "transformers"}, **lora)
    assert_same_training(ours, theirs)
    assert all(row["weight_sync/bytes_moved"] > 0 for row in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_transformers_in_processes_of_their_own_train_as_the_native_engine_does(
    native: list[dict[str, Any]], tmp_path: Path, lora: int
) -> None:
    adapter: dict[str, dict[str, Any]] = {"trainer": {"lora": {"rank": lora}}} if lora else {}
    ours = train(tmp_path / "ours", **adapter) if lora else native
    theirs = train(tmp_path / "theirs", engine={"kind": "transformers"}, placement={"engines": 2}, **adapter)
    for row in theirs[1:]:
        row["engine/generated_tokens"] -= 2  # each engine samples a token to compute the probe of an update
    assert_same_training(ours, theirs)
    assert all(row["weight_sync/bytes_moved"] > 0 for row in theirs if row["trainer/grad_norm"])


def test_a_server_that_keeps_its_weights_is_refused_before_anything_loads(tmp_path: Path) -> None:
    said = refusal(tmp_path, "engine.kind=openai", "engine.url=http://127.0.0.1:1/v1")
    assert "engine.kind = openai" in said
    assert "takes no new weights" in said
    assert "hint: " in said


# ── a server ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def serving(cwd: Path, token_env: str) -> Iterator[str]:
    """The address of a `redline serve` of the run's model."""
    log = cwd / "serve.log"
    arguments = ["serve", "builtin:tiny", "--port", "0", "--device", "cpu", "--dtype", "float32", "run.num_threads=1"]
    with log.open("wb") as stream:
        command = [REDLINE, *arguments, "--weights-token-env", token_env]
        process = subprocess.Popen(command, cwd=cwd, stderr=stream, stdout=stream)
    try:
        deadline = time.monotonic() + 120
        while (found := re.search(r"http://[\d.]+:\d+", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_server_that_takes_weights_is_trained(max_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setenv("KINDS_TOKEN", "a-secret-of-this-test")
    with serving(tmp_path, "KINDS_TOKEN") as address:
        engine = {"kind": "openai", "url": f"{address}/v1", "weights_token_env": "KINDS_TOKEN", "max_num_seqs": 32}
        write(tmp_path / "run", engine=engine, buffer={"max_lag": max_lag})
        ended = redline("train", "letters.yaml", cwd=tmp_path / "run")  # forked ones have the environment of their server
    assert ended.returncode == 0, ended.stderr
    found = rows(newest_run(tmp_path / "run").metrics)
    assert len(found) == STEPS
    # The server's logprobs are the trainer's own, version by version: the weights came.
    mismatches = [row["trainer/mismatch_kl"] for row in found if row["trainer/mismatch_kl"] is not None]
    assert len(mismatches) > 1
    assert max(mismatches) < (0.5 if max_lag else 1e-9)


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of a width that vLLM's CPU attention has."""
    folder = tmp_path_factory.mktemp("wide")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    write_model(folder, config, seed=3, std=0.1)
    return folder


def vllm_sections(model: Path, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "model": {"path": str(model)},
        "engine": {"kind": "vllm", "kv_cache_memory_bytes": 2**26, "options": {"enforce_eager": True}},
        "rollouts": {"evaluation": {"num_tasks": 0}},
        **more,
    }


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_vllm_runs_a_whole_training_job(wide: Path, max_lag: int, tmp_path: Path) -> None:
    found = train(tmp_path / "run", **vllm_sections(wide, run={"steps": 12}, buffer={"max_lag": max_lag}))
    assert [row["step"] for row in found] == list(range(1, 13))
    assert all(row["weight_sync/bytes_moved"] > 0 for row in found)
    # Version by version it samples from what the trainer has: the trainer's own logprobs of the same tokens say so.
    assert all((row["trainer/mismatch_kl"] or 0.0) < (0.5 if max_lag else 1e-6) for row in found)
    model = load_file(newest_run(tmp_path / "run").path / "model" / "model.safetensors")
    before = load_file(wide / "model.safetensors")
    assert any(not model[name].equal(before[name]) for name in before)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [0, 1])
def test_two_vllm_engines_in_processes_of_their_own_are_trained(wide: Path, max_lag: int, tmp_path: Path) -> None:
    sections = vllm_sections(wide, run={"steps": 6}, buffer={"max_lag": max_lag}, placement={"engines": 2})
    found = train(tmp_path / "run", **sections)
    assert [row["step"] for row in found] == list(range(1, 7))
    assert all((row["trainer/mismatch_kl"] or 0.0) < (0.5 if max_lag else 1e-6) for row in found)


@contextlib.contextmanager
def vllm_serving(model: Path, cwd: Path) -> Iterator[str]:
    """The address of vLLM's own server, with the calls by which it takes weights."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # Not `vllm serve`, which wants a distribution of that name, and vLLM for CPUs comes under another.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    options = ["--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill", "--generation-config", "vllm"]
    more = ["--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", str(2**26)]
    with (cwd / "vllm.log").open("wb") as log:
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen([*command, *options, *more], cwd=cwd, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            assert process.poll() is None, (cwd / "vllm.log").read_text()
            assert time.monotonic() < deadline, (cwd / "vllm.log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_vllms_own_server_trains_from_a_folder(wide: Path, lora: int, tmp_path: Path) -> None:
    with vllm_serving(wide, tmp_path) as address:
        folder = {"weights_folder": str(tmp_path / "weights"), "weights_server": "vllm"}
        engine = {"kind": "openai", "url": f"{address}/v1", "max_num_seqs": 32, **folder}
        sections = vllm_sections(wide, engine=engine, trainer={"learning_rate": 3e-3, "lora": {"rank": lora}})
        write(tmp_path / "run", **sections)
        ended = redline("train", "letters.yaml", cwd=tmp_path / "run")
        with urllib.request.urlopen(f"{address}/weight_info", timeout=5) as answer:
            assert json.load(answer)["weight_version"].startswith(f"{STEPS:06}-")
    assert ended.returncode == 0, ended.stderr
    found = rows(newest_run(tmp_path / "run").metrics)
    assert len(found) == STEPS
    mismatches = [row["trainer/mismatch_kl"] for row in found if row["trainer/mismatch_kl"] is not None]
    assert len(mismatches) > 1
    assert max(mismatches) < 1e-6


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_its_package_vllm_is_refused_with_the_command_that_brings_it(tmp_path: Path) -> None:
    said = refusal(tmp_path, "engine.kind=vllm")
    assert "the package vllm is not installed" in said
    assert sys.executable in said.replace("\n", "")
