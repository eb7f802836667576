"""What we call of SGLang, held against the sources of the SGLang that is installed. They are read, not imported: importing them
takes a GPU's libraries. Skipped where there is none."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redline.config.sections.engine import EngineConfig
from redline.engine.adapters import openai_requests, sglang
from redline.types import SamplingParams

SPEC = importlib.util.find_spec("sglang")
pytestmark = pytest.mark.skipif(SPEC is None, reason="sglang is not installed")


@cache
def source(path: str) -> ast.Module:
    assert SPEC is not None
    assert SPEC.submodule_search_locations
    return ast.parse((Path(SPEC.submodule_search_locations[0]) / path).read_text())


def definition(module: ast.AST, name: str) -> Any:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return next(node for node in ast.walk(module) if isinstance(node, kinds) and node.name == name)


def parameters(method: str) -> list[str]:
    arguments = definition(definition(source("srt/entrypoints/engine.py"), "Engine"), method).args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def fields(module: ast.AST, *names: str) -> set[str]:
    """Annotated fields of these classes; of the whole module where none is named."""
    places = [definition(module, name) for name in names] or [module]
    found = (node for place in places for node in ast.walk(place))
    return {node.target.id for node in found if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def server_arguments() -> set[str]:
    assert SPEC is not None
    assert SPEC.submodule_search_locations
    groups = Path(SPEC.submodule_search_locations[0]) / "srt/arg_groups/fields"
    known = fields(source("srt/server_args.py"), "ServerArgs")
    return known.union(*(fields(ast.parse(path.read_text())) for path in groups.glob("*.py")))


def routes() -> set[tuple[str, str]]:
    """Method and path of every route of SGLang's server."""
    found = set()
    for node in ast.walk(source("srt/entrypoints/http_server.py")):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if node.func.attr in ("get", "post", "api_route") and isinstance(first, ast.Constant):
                found.add((node.func.attr, str(first.value)))
    return found


def test_the_engine_has_the_methods_and_arguments_that_we_use() -> None:
    used = {"input_ids", "sampling_params", "return_logprob", "lora_path", "top_logprobs_num", "logprob_start_len"}
    assert used <= set(parameters("generate"))
    assert parameters("update_weights_from_tensor")[1] == "named_tensors"
    assert "flush_cache" in parameters("update_weights_from_tensor")
    assert parameters("flush_cache") == parameters("shutdown") == ["self"]
    assert "tags" in parameters("release_memory_occupation")
    assert "tags" in parameters("resume_memory_occupation")


def test_the_engine_is_made_with_arguments_that_there_are() -> None:
    config = EngineConfig(block_size=16)
    made = {"model_path", "dtype", "skip_tokenizer_init", "context_length", "lora_paths", "tp_size", *sglang._sizes(config)}
    assert made | {"enable_deterministic_inference", "enable_memory_saver"} <= server_arguments()


def test_sampling_is_asked_for_by_names_that_there_are() -> None:
    asked = sglang._sampling_fields(SamplingParams(max_tokens=2, stop_token_ids=(1,)), 0)
    assert set(asked) <= fields(source("srt/sampling/sampling_params.py"), "SamplingParams")


def test_a_server_is_asked_by_fields_that_there_are() -> None:
    sampling = SamplingParams(max_tokens=2, stop=("x",), stop_token_ids=(1,), min_tokens=1, logit_bias={3: -np.inf})
    asked = set(openai_requests.sampling_fields(sampling, 0)) | {"model", "prompt", "return_token_ids", "ignore_eos", "echo"}
    assert asked <= fields(source("srt/entrypoints/openai/protocol.py"), "CompletionRequest")


def test_a_server_takes_weights_by_calls_that_there_are() -> None:
    posts = {"/pause_generation", "/continue_generation", "/update_weights_from_disk"}
    assert {("get", "/model_info"), *(("post", path) for path in posts)} <= routes()
    structs = source("srt/managers/io_struct.py")
    assert {"model_path", "flush_cache", "weight_version"} <= fields(structs, "UpdateWeightFromDiskReqInput")
    assert "mode" in fields(structs, "PauseGenerationReqInput")
    assert "retract" in ast.dump(definition(structs, "PauseGenerationReqInput"))
