from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from redline.config.sections.engine import EngineConfig
from redline.errors import ConfigError
from redline.lab.bench.cases.generate import completion_lengths
from redline.lab.bench.settings import GenerateSettings, NSamplingSettings, fit_engine, make_settings

TINY = "model=builtin:tiny"


def test_everything_left_open_is_filled_in() -> None:
    settings = make_settings("generate", [TINY])
    assert isinstance(settings, GenerateSettings)
    assert settings.device in ("cpu", "cuda")
    assert settings.dtype in ("float32", "bfloat16")
    assert settings.num_threads >= 1
    assert "transformers" in settings.peers


def test_numbers_lists_and_engine_keys_come_from_the_command_line() -> None:
    settings = make_settings(
        "generate", [TINY, "prompts=4", "n=2", "peers=transformers, redline", "engine.max_num_seqs=3", "pairs=9"]
    )
    assert (settings.prompts, settings.n, settings.pairs) == (4, 2, 9)
    assert settings.peers == ("transformers", "redline")
    assert settings.engine.max_num_seqs == 3


def test_a_bare_value_and_its_entries_make_one_mapping() -> None:
    settings = make_settings("trainer", [TINY, "trainer.mismatch=token_mask", "trainer.mismatch.high=3"])
    assert (settings.trainer.mismatch.kind, settings.trainer.mismatch.high) == ("token_mask", 3.0)


def test_a_value_in_the_place_of_a_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.betas is a value, not a section"):
        make_settings("trainer", [TINY, "trainer.betas=3", "trainer.betas.first=0.9"])


def test_a_key_of_an_earlier_version_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.warmup_steps is now trainer\.schedule\.warmup_steps") as caught:
        make_settings("trainer", [TINY, "trainer.warmup_steps=3"])
    assert caught.value.hint == "write trainer.schedule.warmup_steps"


def test_nobody_else_needs_to_take_part() -> None:
    assert make_settings("generate", [TINY, "peers=none"]).peers == ()


def test_numbers_of_samples_are_a_list() -> None:
    assert make_settings("n-sampling", [TINY, "n=1,3"]).n == (1, 3)
    assert make_settings("n-sampling", [TINY, "n=4"]).n == (4,)
    assert isinstance(make_settings("n-sampling", [TINY]), NSamplingSettings)


# ── workloads ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_workload_is_one_word_and_can_be_changed_in_part() -> None:
    settings = make_settings("generate", ["workload=w1", "device=cpu", "new_tokens=16", "engine.block_size=32"])
    assert settings.workload == "W1"
    assert settings.model == "random:qwen2.5-0.5b"
    assert (settings.prompts, settings.prompt_tokens, settings.new_tokens, settings.n) == (512, 128, 16, 1)
    assert settings.dtype == "bfloat16"
    assert (settings.engine.max_num_batched_tokens, settings.engine.block_size) == (32768, 32)


def test_the_long_tail_is_drawn_once_with_the_mean_and_the_longest_that_were_asked_for() -> None:
    settings = make_settings("generate", ["workload=W4", "device=cpu"])
    lengths, again = completion_lengths(settings), completion_lengths(settings)
    assert (lengths == again).all()
    assert (len(lengths), lengths.sum(), lengths.max()) == (512, 512 * 548, 4096)
    assert np.median(lengths) < 400
    assert (completion_lengths(make_settings("generate", ["workload=W1", "device=cpu"])) == 512).all()


def test_a_workload_of_another_case_is_unknown() -> None:
    with pytest.raises(ConfigError, match="n-sampling has no such workload"):
        make_settings("n-sampling", ["workload=W1"])


def test_a_shape_has_random_prompts_and_a_model_with_a_tokenizer_questions() -> None:
    assert make_settings("generate", ["model=random:qwen2.5-0.5b", "device=cpu"]).prompt_tokens == 128
    assert make_settings("generate", [TINY]).prompt_tokens is None


# ── what the engine gets ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_engine_fits_the_workload() -> None:
    fitted = fit_engine(EngineConfig(), num_sequences=64, longest=300)
    assert (fitted.max_num_seqs, fitted.max_model_len) == (64, 300)


def test_what_the_user_says_of_the_engine_stands() -> None:
    fitted = fit_engine(EngineConfig(max_num_seqs=8), num_sequences=64, longest=300)
    assert (fitted.max_num_seqs, fitted.max_model_len) == (8, 300)


@pytest.mark.parametrize("key", ["epochs=2", "mini_batches=2", "lora.rank=4", "kl_coef=0.1", "loss=gspo"])
def test_no_peer_takes_a_plain_update_beside_other_work(key: str) -> None:
    """All weights once, beside an adapter or two epochs: no ratio would compare them."""
    asked = [TINY, "device=cpu", f"trainer.{key}"]
    assert make_settings("trainer", asked).peers == ()
    assert make_settings("memory", [*asked, "limit_bytes=1000000000"]).peers == ()
    assert make_settings("trainer", [*asked, "peers=redline"]).peers == ("redline",)
    with pytest.raises(ConfigError, match="transformers would train otherwise"):
        make_settings("trainer", [*asked, "peers=transformers"])
    assert make_settings("trainer", [TINY, "device=cpu", "trainer.gradient_checkpointing=full"]).peers == ("transformers",)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("case", "override", "message", "hint"),
    [
        ("generte", TINY, "'generte' is no case", "generate"),
        ("generate", "prompts", "not of the form key=value", "prompts=16"),
        ("generate", "trainer.seed=1", "not of the form key=value", "engine.max_num_seqs=64"),
        ("generate", "promts=3", "promts: unknown key", "did you mean prompts?"),
        ("generate", "engine.max_num_seq=3", "engine.max_num_seq: unknown key", "did you mean max_num_seqs?"),
        ("generate", "prompts=0", "prompts = 0: input should be greater than 0", "submitted at once"),
        ("generate", "peers=trl", "peers = 'trl'", "A/A run"),
        ("generate", "longest=4096", "longest has no effect on lengths=equal", "change one of them"),
        ("trainer", "longest=4096", "longest has no effect on lengths=equal", "change one of them"),
        ("generate", "prompts=[", "not valid YAML", "quote"),
        ("generate", "prompts=2024-13-01", "not valid YAML", "quotes"),
        ("generate", "workload=W9", "workload = 'W9'", "W1"),
        ("generate", "model=random:gpt", "model = 'random:gpt': no such shape", "random:qwen2.5-0.5b"),
        ("generate", "model=builtin:huge", "no such built-in model", "builtin:tiny"),
        ("generate", "peers=vllm", "vllm is not installed here", "vllm_python="),
        ("generate", "vllm_python=/nowhere/python", "no such file", "path of a python"),
        ("n-sampling", "n=0,2", "n = '0'", "in turn"),
    ],
)
def test_a_wrong_word_is_refused_with_the_fix(case: str, override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_settings(case, [override])
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_vllm_of_another_environment_will_do() -> None:
    settings = make_settings("generate", [TINY, "peers=vllm", f"vllm_python={sys.executable}"])
    assert settings.vllm_python == Path(sys.executable)


def test_nothing_heavy_is_loaded_before_the_settings_are_right() -> None:
    code = "import sys, redline.lab.bench.settings; print(*({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
