from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from redline.errors import ConfigError
from redline.serve.listener import bind
from redline.serve.requests.limits import body_limits
from redline.serve.settings import ServeSettings, make_settings


def settings(*overrides: str, **options: Any) -> ServeSettings:
    defaults: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "device": "cpu",
        "dtype": "float32",
        "api_key_env": "A_KEY",
        "served_model_name": None,
    }
    return make_settings("builtin:tiny", overrides, **defaults | options)


def test_the_engine_is_configured_as_in_a_recipe() -> None:
    config = settings("max_num_seqs=8", "engine.enable_prefix_caching=false", "run.num_threads=1").config
    assert (config.engine.max_num_seqs, config.engine.enable_prefix_caching, config.run.num_threads) == (8, False, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_num_seqs", "not of the form key=value"),
        ("trainer.eps=1", "not of the form key=value"),
        ("max_num_seqs=2024-13-01", "not valid YAML"),
        ("max_num_seqs=0", "engine.max_num_seqs = 0: must be more than 0"),
        ("max_num_seq=4", "engine.max_num_seq: unknown key"),
        ("max_num_seqs=[", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(override)


def test_keys_that_need_each_other_may_come_in_any_order() -> None:
    keys = ["engine.kind=openai", "engine.url=http://127.0.0.1:1/v1"]
    assert settings(*keys).config.engine == settings(*reversed(keys)).config.engine


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["url=http://127.0.0.1:1/v1"], "engine.url = .*: without effect here"),
        (["timeout_s=3"], "engine.timeout_s = 3.0: without effect here"),
        (["options={a: 1}"], "engine.options = .*: without effect here"),
        (["weights_token_env=A"], "engine.weights_token_env = 'A': without effect here: only training sends weights"),
        (["weights_folder=/x", "weights_server=vllm"], "2 keys without effect"),
        (["kind=openai", "url=http://127.0.0.1:1/v1", "weights_token_env=A"], "only training sends weights"),
        (["kind=openai", "url=http://127.0.0.1:1/v1", "block_size=16"], "engine.block_size = 16: without effect here"),
        (["kind=openai", "url=127.0.0.1:1/v1"], "no address of a server"),
    ],
)
def test_a_key_without_effect_is_refused(override: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*override)


@pytest.mark.parametrize("mistake", ["kind=openai", "kind=native", "weights_folder=/x"])
@pytest.mark.parametrize("url", ["http://me:s3cret@127.0.0.1:1/v1", "http://s3cret@host", "http://me:s3cret/1@host/v1"])
def test_a_password_in_the_address_of_a_server_is_refused_without_showing_it(mistake: str, url: str) -> None:
    with pytest.raises(ConfigError, match="url holds a name or a password") as caught:
        settings(f"url={url}", mistake)
    assert "s3cret" not in str(caught.value)


def test_secrets_that_no_client_could_send_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "s3cret\n")
    with pytest.raises(ConfigError, match="A_KEY: the API key has a character") as caught:
        settings()
    assert "s3cret" not in str(caught.value)


def test_limits_are_keys_of_their_own() -> None:
    limits = settings("serve.max_stops=16", "serve.max_choices=64", "max_num_seqs=8").limits
    assert (limits.max_stops, limits.max_choices, limits.max_biases) == (16, 64, 4096)


@pytest.mark.parametrize(("positions", "expected"), [(2048, (2**18, 2**14)), (32_768, (2**21, 2**16)), (2**20, (2**22, 2**17))])
def test_a_body_may_be_as_large_as_the_models_context_asks_for(positions: int, expected: tuple[int, int]) -> None:
    assert body_limits(settings().limits, positions) == expected
    assert body_limits(settings("serve.max_body_bytes=99", "serve.max_body_values=7").limits, positions) == (99, 7)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("serve.max_stop=3", "serve.max_stop: unknown key", "did you mean serve.max_stops"),
        ("serve.max_stops=0", "serve.max_stops = 0: Input should be greater than 0", "as in OpenAI's API"),
        ("serve.max_stops=many", "serve.max_stops = 'many'", "Stop strings"),
    ],
)
def test_a_wrong_limit_is_refused(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings(override)
    assert hint in caught.value.hint


def test_the_address_and_the_hosts_that_were_named_are_answered_to() -> None:
    assert settings(host="127.8.8.8", allowed_hosts=["a.example"]).allowed_hosts == ("127.8.8.8", "a.example")


def test_a_model_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such built-in model"):
        make_settings(
            "builtin:huge", host="::1", port=0, device="cpu", dtype="float32", api_key_env="A_KEY", served_model_name=None
        )


def test_the_model_is_called_what_it_was_asked_for_as() -> None:
    assert settings().name == "builtin:tiny"
    assert settings(served_model_name="small").name == "small"


# ── who may reach it ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="it is no host's name"):
        bind(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert settings(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_other_machines_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} is reachable") as caught:
        settings(host=host)
    assert "export A_KEY=" in caught.value.hint
    monkeypatch.setenv("A_KEY", "")
    with pytest.raises(ConfigError):
        settings(host=host)
    monkeypatch.setenv("A_KEY", "sesame")
    assert settings(host=host).api_key == "sesame"


def test_a_key_that_is_set_is_asked_for_on_this_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sesame")
    assert settings().api_key == "sesame"


# ── adapters ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_adapters_are_names_and_folders(tmp_path: Path) -> None:
    served = settings(adapters=[f"poet={tmp_path}", f"cook={tmp_path}"])
    assert (served.adapters, served.config.engine.max_loras) == ({"poet": tmp_path, "cook": tmp_path}, 2)
    assert settings("max_loras=1", adapters=[f"poet={tmp_path}"]).config.engine.max_loras == 1


@pytest.mark.parametrize("given", [["poet"], ["=x"], ["poet=/no/such/folder"], ["builtin:tiny=."], ["a=.", "a=."]])
def test_an_adapter_that_cannot_be_served_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="--lora"):
        settings(adapters=given)


def test_a_dtype_that_this_cpu_has_no_instructions_for_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["redline.config.resolve"], "bfloat16_flags", list)
    assert "model.dtype=auto" in settings(device="cpu", dtype="bfloat16").warnings[0]
    assert settings(device="cpu", dtype="auto").warnings == ()
