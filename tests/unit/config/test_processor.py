"""What CPUs are taken to have, by the flags that Linux shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from redline.config import EngineRecipe
from redline.config.algorithms import recomputes_old_logprobs
from redline.config.load import validate_engine
from redline.config.processor import multiplies_in
from redline.config.resolve import resolve_engine
from redline.config.sections.engine import Quantization, ServedEngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.lab.bench.settings import make_settings

CASCADE_LAKE = "flags\t\t: fpu sse2 avx2 avx512f avx512bw avx512_vnni"
ALDER_LAKE = "flags\t\t: fpu sse2 avx2 avx_vnni"
HASWELL = "flags\t\t: fpu sse2 avx2 fma"
NEOVERSE_N1 = "Features\t: fp asimd asimdhp asimddp"
CORTEX_A72 = "Features\t: fp asimd"


@pytest.mark.parametrize(
    ("line", "int8", "int16"),
    [
        (CASCADE_LAKE, True, True),
        (ALDER_LAKE, True, True),
        (HASWELL, False, True),
        (NEOVERSE_N1, True, False),
        (CORTEX_A72, False, False),
    ],
)
def test_a_cpu_that_multiplies_whole_numbers_is_known_by_its_flags(tmp_path: Path, line: str, int8: bool, int16: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{line}\n")
    assert (multiplies_in("int8", cpuinfo), multiplies_in("int16", cpuinfo)) == (int8, int16)
    assert multiplies_in("none", cpuinfo)
    assert not multiplies_in("int16", tmp_path / "none")


def test_a_cpu_without_them_and_a_gpu_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipe(device: str) -> EngineRecipe:
        return validate_engine(
            {
                "run": {"device": device},
                "model": {"path": "builtin:tiny", "dtype": "float32"},
                "engine": {"quantization": "int8"},
            },
            "here",
        )

    monkeypatch.setattr(sys.modules["redline.config.resolve"], "multiplies_in", lambda kind: False)
    with pytest.raises(ConfigError, match="this CPU has none of avx512_vnni, avx_vnni, asimddp") as caught:
        resolve_engine(recipe("cpu"))
    assert caught.value.hint == "set engine.quantization=none"
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "multiplies_in", lambda kind: True)
    assert resolve_engine(recipe("cpu")).recipe.engine.quantization == "int8"
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "_device", lambda asked: (asked, ""))
    with pytest.raises(ConfigError, match="it is for CPUs"):
        resolve_engine(recipe("cuda"))


def test_products_of_a_gpu_are_refused_on_a_cpu_and_known_to_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"model": {"path": "builtin:tiny"}, "engine": {"quantization": "fp8"}}
    with pytest.raises(ConfigError, match="it is for GPUs, and this is on cpu") as caught:
        resolve_engine(validate_engine({"run": {"device": "cpu"}, **asked}, "here"))
    assert caught.value.hint == "set engine.quantization=none"
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "_device", lambda asked: (asked, ""))
    on_gpu = {"run": {"device": "cuda"}, "engine": {"quantization": "fp8"}}
    wide = {"model": {"path": "builtin:tiny", "dtype": "float32"}}
    with pytest.raises(ConfigError, match="the rest is in bfloat16, and the dtype is float32"):
        resolve_engine(validate_engine(on_gpu | wide, "here"))
    narrow = {"model": {"path": "builtin:tiny", "dtype": "bfloat16"}}
    assert resolve_engine(validate_engine(on_gpu | narrow, "here")).recipe.engine.quantization == "fp8"
    assert not multiplies_in("fp8")


@pytest.mark.parametrize("other", [{"max_loras": 1}, {"tensor_parallel_size": 2}])
def test_what_needs_the_weights_as_they_are_is_refused_beside_it(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        ServedEngineConfig(quantization="int16", **other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("quantization", "recomputes"), [("none", False), ("int16", True), ("int8", True), ("fp8", True)])
def test_rounding_is_no_ratio_that_gspo_clips(quantization: Quantization, recomputes: bool) -> None:
    trainer = TrainerConfig(loss="gspo")
    found, why = recomputes_old_logprobs(trainer, "float32", quantization)
    assert found is recomputes
    assert quantization == "none" or quantization in why


@pytest.mark.parametrize(("quantization", "recomputes"), [("none", False), ("int16", False), ("int8", True), ("fp8", True)])
def test_coarse_rounding_is_no_ratio_that_any_loss_clips(quantization: Quantization, recomputes: bool) -> None:
    found, why = recomputes_old_logprobs(TrainerConfig(), "bfloat16", quantization)
    assert found is recomputes
    assert not recomputes or quantization in why
    assert not recomputes_old_logprobs(TrainerConfig(loss="cispo"), "bfloat16", quantization)[0]
    assert not recomputes_old_logprobs(TrainerConfig(recompute_old_logprobs=False), "bfloat16", quantization)[0]


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
@pytest.mark.parametrize("case", ["generate", "rollout", "e2e"])
def test_a_bench_of_another_engine_is_refused_what_ours_alone_does(case: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantization = 'int16': without effect here"):
        make_settings(case, ["model=builtin:tiny", "device=cpu", f"engine.kind={kind}", "engine.quantization=int16"])


@pytest.mark.parametrize("case", ["generate", "n-sampling", "rollout", "e2e"])
def test_a_bench_is_refused_where_a_run_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "multiplies_in", lambda kind: False)
    with pytest.raises(ConfigError, match="this CPU has none of"):
        make_settings(case, ["model=builtin:tiny", "device=cpu", "engine.quantization=int8"])
