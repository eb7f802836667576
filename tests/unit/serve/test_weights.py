"""Weights that come in over HTTP, while a real engine samples."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest
import torch
from support.small_models import CONFIGS, write_model
from support.weight_servers import MAX_BYTES, TOKEN, ServedPolicy, served

from redline.errors import ConfigError, WeightSyncError
from redline.models.files.hf import load_decoder
from redline.serve.settings import make_settings
from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.tensor_bytes import pack
from redline.weight_sync.transports.http import HttpWeights
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.transports.redline_server import RedlineServer

FAMILY = "llama, untied"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS[FAMILY])
    return folder


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[ServedPolicy]:
    with served(load_decoder(model)) as policy:  # type: ignore[arg-type]
        yield policy


@pytest.fixture
def here(shared: ServedPolicy, model: Path) -> ServedPolicy:
    """The server, at some version, with the weights of the model's folder."""
    with torch.no_grad():
        for name, parameter in load_decoder(model).named_parameters():
            shared.tensors[name].copy_(parameter)
    return shared


def client(policy: ServedPolicy, token: str = TOKEN) -> httpx2.Client:
    return httpx2.Client(base_url=policy.url, headers={"authorization": f"Bearer {token}"}, timeout=120)


def transport(*policies: ServedPolicy) -> HttpWeights:
    servers = [RedlineServer(HttpServer(policy.url, TOKEN, 20), bucket_bytes=2000) for policy in policies]
    return HttpWeights(servers, policies[0].tensors)


def next_version(policy: ServedPolicy) -> int:
    with client(policy) as http:
        return http.get("/weights").json()["version"] + 1


def move(http: HttpWeights, version: int, tensors: dict[str, torch.Tensor]) -> int:
    weights = WeightSet(version, tensors)
    moved = http.move(TransferPlan(version, tuple(tensors)), weights)
    http.verify(weights)
    return moved


def completion(policy: ServedPolicy, prompt: Sequence[int] = (5, 6, 7)) -> dict:
    body = {"model": "m", "prompt": list(prompt), "max_tokens": 6, "logprobs": 0, "seed": 3, "temperature": 1.0}
    answer = httpx2.post(f"{policy.url}/v1/completions", json=body, timeout=120).json()
    return answer["choices"][0]


def put(http: httpx2.Client, version: int, body: bytes, digest: str | None = None) -> httpx2.Response:
    digest = hashlib.sha256(body).hexdigest() if digest is None else digest
    return http.put(f"/weights/{version}/tensors", content=body, headers={"x-sha256": digest})


def test_weights_that_were_sent_are_sampled_from_once_they_are_adopted(here: ServedPolicy) -> None:
    version, before = next_version(here), completion(here)
    tensors = {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in here.tensors.items()}
    http = transport(here)
    assert move(http, version, tensors) == sum(tensor.nbytes for tensor in tensors.values())
    assert completion(here) == before, "the engine goes on with its old version"
    http.adopt()
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in tensors.items())
    assert completion(here)["logprobs"] != before["logprobs"]
    assert httpx2.get(f"{here.url}/health").json() == {"status": "ok", "version": version}
    assert httpx2.get(f"{here.url}/v1/models").json()["data"][0]["version"] == version
    http.revert(version)
    assert completion(here) == before, "whole, and the cached keys of the other version are not used"
    assert httpx2.get(f"{here.url}/health").json()["version"] == version - 1


def test_a_version_is_taken_back_where_the_weights_before_had_its_number(here: ServedPolicy) -> None:
    version, before = next_version(here) - 1, completion(here)
    tensors = {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in here.tensors.items()}
    http = transport(here)
    move(http, version, tensors)
    http.adopt()
    assert completion(here)["logprobs"] != before["logprobs"]
    http.revert(version)
    assert completion(here) == before
    move(http, version, tensors)
    http.adopt()
    after = completion(here)
    move(http, version + 1, {**tensors, "norm": 2 * tensors["norm"]})
    http.revert(version + 1)  # was sent and not adopted
    assert completion(here) == after


def test_who_gives_up_a_version_leaves_what_another_sender_has_sent(here: ServedPolicy) -> None:
    version, one, two = next_version(here), transport(here), transport(here)
    theirs = other_weights(here)
    move(one, version, other_weights(here))
    move(two, version, theirs)
    one.revert(version)
    two.adopt()
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in theirs.items())


def test_a_number_that_another_run_had_used_finds_none_of_its_cached_keys(here: ServedPolicy) -> None:
    version, prompt = next_version(here), list(range(2, 50))
    other = {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in here.tensors.items()}
    mine = {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in here.tensors.items()}
    found = []
    for number, tensors in ((version, other), (version + 1, other), (version, mine), (version + 5, mine)):
        http = transport(here)
        move(http, number, tensors)
        http.adopt()
        found.append(completion(here, prompt))
    assert found[2]["logprobs"] == found[3]["logprobs"]
    assert found[2]["logprobs"] != found[0]["logprobs"]


def test_only_tensors_whose_bytes_changed_are_sent(here: ServedPolicy) -> None:
    version, http = next_version(here), transport(here)
    tensors = {name: tensor.clone() for name, tensor in here.tensors.items()}
    move(http, version, tensors)
    http.adopt()
    tensors["norm"] = tensors["norm"] * 2
    assert move(http, version + 1, tensors) == tensors["norm"].nbytes
    http.adopt()
    assert torch.equal(here.tensors["norm"], tensors["norm"])
    assert move(http, version + 2, tensors) == 0
    http.adopt()
    assert next_version(here) == version + 3
    tensors["norm"] = tensors["norm"] * 2
    move(http, version + 3, tensors)
    http.revert(version + 3)  # was sent and not adopted
    assert move(http, version + 3, tensors) == tensors["norm"].nbytes


def test_a_server_that_was_started_again_gets_everything(here: ServedPolicy) -> None:
    version, http = next_version(here), transport(here)
    tensors = {name: tensor.clone() for name, tensor in here.tensors.items()}
    move(http, version, tensors)
    http.adopt()
    other = transport(here)  # brings the server elsewhere
    move(other, version + 7, {name: tensor * 0 for name, tensor in tensors.items()})
    other.adopt()
    assert move(http, version + 1, tensors) == sum(tensor.nbytes for tensor in tensors.values())
    http.adopt()
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in tensors.items())


def other_weights(policy: ServedPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in policy.tensors.items()}


def test_two_senders_of_one_version_do_not_mix(here: ServedPolicy) -> None:
    version, before = next_version(here), completion(here)
    one, two = transport(here), transport(here)
    first, second = other_weights(here), other_weights(here)
    move(one, version, first)
    move(two, version, second)
    with pytest.raises(WeightSyncError, match="another sender has begun to send a version"):
        one.adopt()
    assert completion(here) == before
    two.adopt()
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in second.items())


def test_a_version_that_builds_on_weights_which_another_sender_replaced_is_refused(here: ServedPolicy) -> None:
    version, one, two = next_version(here), transport(here), transport(here)
    mine = other_weights(here)
    move(one, version, mine)
    one.adopt()
    mine["norm"] = mine["norm"] * 2
    move(one, version + 1, mine)  # of the norm alone
    theirs = other_weights(here)
    with client(here) as http:
        http.post(f"/weights/{version}/revert")  # drops what was sent, as another sender's first bucket would
    move(two, version + 2, theirs)
    two.adopt()
    move(one, version + 3, mine)
    one.adopt()
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in mine.items()), "everything was sent again"
    with client(here) as http:
        body = b"".join(pack({"norm": mine["norm"]}))
        assert put(http, version + 4, body).status_code == 200
        asked = {"names": ["norm"], "base": "of another", "digest": "x"}
        answer = http.post(f"/weights/{version + 4}/adopt", json=asked)
    assert (answer.status_code, "weights that the engine does not have" in answer.text) == (409, True)


def test_part_of_the_tensors_is_no_version_by_itself(here: ServedPolicy) -> None:
    version, norm = next_version(here), here.tensors["norm"]
    with client(here) as http:
        assert put(http, version, b"".join(pack({"norm": norm * 3}))).status_code == 200
        answer = http.post(f"/weights/{version}/adopt", json={"names": ["norm"]})
    assert (answer.status_code, "is not whole" in answer.text) == (409, True)
    server = RedlineServer(HttpServer(here.url, TOKEN, 20))
    with pytest.raises(WeightSyncError, match="tensors that the trainer does not have"):
        move(HttpWeights([server], {"norm": norm}), version, {"norm": norm})


def test_a_server_without_the_weights_that_it_was_left_with_is_noticed_and_gets_them_again(here: ServedPolicy) -> None:
    version, http, other = next_version(here), transport(here), transport(here)
    mine = other_weights(here)
    move(http, version, mine)
    http.adopt()
    assert http.look()
    move(other, version, other_weights(here))  # under the same number
    assert http.look(), "sent and not adopted"
    other.adopt()
    assert not http.look()
    http.restore(WeightSet(version, mine))
    assert http.look()
    assert http.num_losses == 1
    assert all(torch.equal(here.tensors[name], tensor) for name, tensor in mine.items())


def test_a_version_that_is_no_number_is_not_there(here: ServedPolicy) -> None:
    for version in ("9" * 5000, "-1", "x", "½"):
        assert httpx2.post(f"{here.url}/weights/{version}/adopt").status_code == 401
        with client(here) as http:
            assert http.post(f"/weights/{version}/adopt", json={"names": []}).status_code == 404


def test_versions_come_and_go_while_requests_are_answered(here: ServedPolicy) -> None:
    http, version = transport(here), next_version(here)
    tensors = {name: tensor.clone() for name, tensor in here.tensors.items()}
    answers, stopped = list[dict](), threading.Event()

    def ask() -> None:
        while not stopped.is_set():
            answers.append(completion(here))

    asking = threading.Thread(target=ask)
    asking.start()
    for step in range(4):
        tensors = {name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in tensors.items()}
        move(http, version + step, tensors)
        http.adopt()
    stopped.set()
    asking.join()
    assert answers
    assert all(len(answer["logprobs"]["token_logprobs"]) == 6 or answer["finish_reason"] == "stop" for answer in answers)


def test_what_does_not_fit_is_refused_and_the_engine_keeps_its_version(here: ServedPolicy) -> None:
    before, version = completion(here), next_version(here)
    norm = here.tensors["norm"]
    good = b"".join(pack({"norm": norm * 3}))
    with client(here) as http:
        assert put(http, version, good, "0" * 64).status_code == 422
        assert put(http, version, b"\x80\x04cos\nsystem\n.").status_code == 409
        assert put(http, version, b"".join(pack({"other": norm}))).status_code == 409
        assert put(http, version, b"".join(pack({"norm": norm.bfloat16()}))).status_code == 409
        assert put(http, version, b"".join(pack({"norm": norm[:-1]}))).status_code == 409
        assert put(http, version, bytes(MAX_BYTES + 1)).status_code == 413
        assert put(http, version, good).json()["names"] == ["norm"]
        assert http.post(f"/weights/{version}/adopt", json={"names": ["norm", "embed"]}).status_code == 409
        assert http.post(f"/weights/{version + 1}/adopt", json={"names": ["norm"]}).status_code == 409
        assert http.post(f"/weights/{version}/adopt", json=["norm"]).status_code == 400
        assert http.post(f"/weights/{version - 5}/revert").status_code == 409
    assert completion(here) == before
    assert next_version(here) == version
    server = RedlineServer(HttpServer(here.url, TOKEN, 20))
    with pytest.raises(WeightSyncError, match="no such tensor"):
        move(HttpWeights([server], {"other": norm}), version, {"other": norm})


def test_an_error_in_the_middle_of_an_adoption_leaves_the_old_weights_under_the_old_number(
    here: ServedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, before, http = next_version(here), completion(here), transport(here)
    tensors = {name: tensor + 0.25 * torch.randn_like(tensor) for name, tensor in here.tensors.items()}
    move(http, version, tensors)
    copies, plain = iter(range(100)), torch._foreach_copy_

    def failing(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        if next(copies) == 1:  # the second of three: what the engine reads is being overwritten
            plain(into[:1], values[:1])
            raise torch.OutOfMemoryError("planted")
        plain(into, values)

    with monkeypatch.context() as planted:
        planted.setattr(torch, "_foreach_copy_", failing)
        with pytest.raises(WeightSyncError, match="/adopt"):
            http.adopt()
    assert next(copies) > 1, "it did not happen"
    assert completion(here) == before
    assert next_version(here) == version


def test_other_bodies_keep_their_limit(here: ServedPolicy) -> None:
    body = b'{"prompt": "' + b"x" * (MAX_BYTES // 2) + b'"}'
    response = httpx2.post(f"{here.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 413)
    assert "serve.max_body_bytes" in response.text or "tokens" in response.text


@pytest.mark.parametrize("call", ["GET /weights", "PUT /weights/1/tensors", "POST /weights/1/adopt", "POST /weights/1/revert"])
def test_without_the_token_nothing_is_shown_or_taken(here: ServedPolicy, call: str) -> None:
    method, _, path = call.partition(" ")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
        response = httpx2.request(method, here.url + path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_weights_token")


def test_the_token_of_weights_and_the_key_of_requests_are_two(model: Path) -> None:
    with served(load_decoder(model), api_key="key") as policy:  # type: ignore[arg-type]
        assert httpx2.get(f"{policy.url}/weights", headers={"authorization": "Bearer key"}).status_code == 401
        assert httpx2.get(f"{policy.url}/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 401
        assert httpx2.get(f"{policy.url}/weights", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_a_server_that_is_not_there_or_does_not_know_the_token_is_named(here: ServedPolicy) -> None:
    with pytest.raises(WeightSyncError, match=r"127\.0\.0\.1:9 did not take GET /weights"):
        RedlineServer(HttpServer("http://127.0.0.1:9", TOKEN, 5))
    with pytest.raises(WeightSyncError, match=rf"{here.url} refuses GET /weights \(401\)"):
        RedlineServer(HttpServer(here.url, "wrong", 5))
    with pytest.raises(ConfigError, match="no address of a server"):
        RedlineServer(HttpServer("127.0.0.1:9", "wrong", 5))


def test_weights_are_taken_only_where_a_token_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cpu", "dtype": "float32", "api_key_env": "A_KEY", "served_model_name": "m", "host": "127.0.0.1"}
    assert make_settings("builtin:tiny", port=0, **options).weights_token is None  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="A_TOKEN: the variable holds no token"):
        make_settings("builtin:tiny", port=0, weights_token_env="A_TOKEN", **options)  # type: ignore[arg-type]
    monkeypatch.setenv("A_TOKEN", "secret")
    settings = make_settings("builtin:tiny", port=0, weights_token_env="A_TOKEN", **options)  # type: ignore[arg-type]
    assert settings.weights_token == "secret"
    monkeypatch.setenv("A_KEY", "secret")
    with pytest.raises(ConfigError, match="the token is the API key"):
        make_settings("builtin:tiny", port=0, weights_token_env="A_TOKEN", **options)  # type: ignore[arg-type]
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="several processes"):
        make_settings(
            "builtin:tiny",
            ["tensor_parallel_size=2"],
            port=0,
            weights_token_env="A_TOKEN",
            **options,  # type: ignore[arg-type]
        )
