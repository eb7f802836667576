from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes import Attempt, train_batch

from redline.errors import RedlineError, RunFolderError
from redline.trainer.optimizer.finite import (
    BadStep,
    BadSteps,
    BadToken,
    NonFiniteError,
    bad_tokens,
    gradient_norms,
    load_batch,
    save_batch,
)
from redline.types import TrainBatch

BAD = BadStep(7, math.nan, math.inf, ("embed", "norm"), (BadToken(2, 5, "logprob"),))


def batch() -> TrainBatch:
    attempts = [Attempt([([5, 6, 7], False), ([20, 30 + i], True)], 1.0 - i, [-5.0, math.nan]) for i in range(3)]
    return train_batch([attempts, attempts[:2]], num_sequences_sampled=9)


def assert_same_batch(found: TrainBatch, expected: TrainBatch) -> None:
    for field in dataclasses.fields(TrainBatch):
        mine, right = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(right, np.ndarray):
            assert mine.dtype == right.dtype, field.name
            np.testing.assert_array_equal(mine, right)
        else:
            assert mine == right, field.name


# ── found ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("each", "loss", "skip", "bad"),
    [
        ([3.0, 4.0], 1.0, 0.0, []),
        ([3.0, math.nan], 1.0, 1.0, ["b"]),
        ([math.inf, math.nan], 1.0, 1.0, ["a", "b"]),
        ([3.0, 4.0], math.nan, 1.0, []),
        ([3.0, 4.0], -math.inf, 1.0, []),
    ],
)
def test_a_step_is_skipped_where_its_loss_or_any_gradient_is_not_finite(
    each: list[float], loss: float, skip: float, bad: list[str]
) -> None:
    norms_P = torch.tensor(each)
    norms = gradient_norms(norms_P.norm(), ("a", "b"), lambda: norms_P, torch.tensor(loss))
    assert float(norms.skip) == skip
    assert norms.bad_parameters() == bad
    if not bad:
        assert float(norms.total) == 5.0


def test_bad_tokens_are_named_by_sequence_and_place_in_it() -> None:
    sequence_M = torch.tensor([4, 4, 9, 9, 9])
    quantities = {
        "logprob": torch.tensor([0.0, math.nan, 0.0, 0.0, -math.inf]),
        "advantage": torch.tensor([0.0, 0.0, math.inf, 0.0, 0.0]),
    }
    assert bad_tokens(quantities, sequence_M) == [
        BadToken(4, 1, "logprob"),
        BadToken(9, 2, "logprob"),
        BadToken(9, 0, "advantage"),
    ]


def test_the_explanation_names_a_few_and_counts_the_rest() -> None:
    told = str(dataclasses.replace(BAD, parameters=tuple(f"layers.{i}.qkv" for i in range(20))))
    assert "step 8: loss nan, gradient norm inf; the weights are unchanged" in told
    assert "logprob of token 5 of sequence 2" in told
    assert "layers.7.qkv and 12 more" in told
    assert "layers.8" not in told


# ── counted ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_ends_after_so_many_bad_steps_in_a_row_and_not_before(tmp_path: Path) -> None:
    steps = BadSteps(3, tmp_path)
    steps.bad(BAD, batch())
    steps.bad(BAD, batch())
    steps.good()
    assert (steps.total, steps.in_a_row) == (2, 0)
    steps.bad(BAD, batch())
    steps.bad(BAD, batch())
    assert not any(tmp_path.iterdir())
    with pytest.raises(NonFiniteError, match="3 steps in a row that are not finite") as caught:
        steps.bad(BAD, batch())
    assert isinstance(caught.value, RedlineError)
    assert str(tmp_path / "step-000008") in caught.value.message
    assert "trainer.learning_rate" in caught.value.hint
    assert (steps.total, steps.in_a_row) == (5, 3)
    assert_same_batch(load_batch(tmp_path / "step-000008"), batch())


# ── kept ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("empty", [False, True])
def test_a_batch_that_is_saved_comes_back_whole(tmp_path: Path, empty: bool) -> None:
    expected = train_batch([], num_sequences_sampled=4) if empty else batch()
    save_batch(tmp_path / "kept", expected)
    assert_same_batch(load_batch(tmp_path / "kept"), expected)


def test_the_reason_is_beside_the_batch_as_json(tmp_path: Path) -> None:
    save_batch(tmp_path, batch(), BAD)
    why = json.loads((tmp_path / "why.json").read_text(), parse_constant=pytest.fail)
    assert (why["loss"], why["grad_norm"], why["parameters"]) == ("nan", "inf", ["embed", "norm"])
    assert why["tokens"] == [{"sequence": 2, "token": 5, "quantity": "logprob"}]


def test_a_folder_without_a_batch_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no batch to replay"):
        load_batch(tmp_path)
