"""From hidden states to logprobs: what several trained tokens have in common is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.small_models import VOCAB_SIZE, llama, write_model

from redline.models.files.hf import AnyDecoder, load_decoder
from redline.trainer.loss import logprobs
from redline.trainer.passes import forward
from redline.trainer.passes.forward import predicted


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> AnyDecoder:
    folder: Path = tmp_path_factory.mktemp("model")
    write_model(folder, llama(), seed=1)
    return load_decoder(folder)


def inputs(*pairs: tuple[int, int]) -> dict[str, torch.Tensor]:
    """(the token that predicts, the token that is predicted)."""
    return {"predicted_from": torch.tensor([a for a, _ in pairs]), "targets": torch.tensor([b for _, b in pairs])}


def test_tokens_predicted_alike_have_the_logprobs_and_gradients_of_each(decoder: AnyDecoder) -> None:
    given = inputs((3, 7), (0, 5), (3, 7), (3, 8), (0, 5), (2, 5))
    hidden = torch.randn(4, decoder.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = predicted(decoder, ours, given, 0.7)
    expected = logprobs.selected_logprobs(theirs[given["predicted_from"]], decoder.output_weight, given["targets"], 0.7)
    weights = torch.arange(1.0, 7.0)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
    (found[0] * weights + found[1]).sum().backward()
    (expected[0] * weights + expected[1]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_head_is_computed_once_for_each_pair(decoder: AnyDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    def count(hidden_ME: torch.Tensor, *others: object) -> object:
        rows.append(len(hidden_ME))
        return logprobs.selected_logprobs(hidden_ME, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "selected_logprobs", count)
    hidden = torch.randn(4, decoder.spec.hidden_size)
    predicted(decoder, hidden, inputs((3, 7), (3, 7), (3, VOCAB_SIZE - 1), (2, 7)), 1.0)
    predicted(decoder, hidden, inputs((3, 7), (2, 7)), 1.0)
    predicted(decoder, hidden, inputs((3, 7), (2, VOCAB_SIZE - 1), (3, 0)), 1.0)
    assert rows == [3, 2, 3]
