"""Tensors that lie in several files, and what a process reads of them, however many wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.kernels.flat_state import BLOCK
from redline.trainer.checkpoints.tensors import OwnState, SavedTensors
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.quantized_states import decode_moment, encode_moment
from redline.trainer.parallel.place import part_rows

ROWS, COLUMNS = 61, 24


def saved_in(folder: Path, parts: int, whole: dict[str, Tensor]) -> SavedTensors:
    """Each tensor cut as so many processes cut it, a file each; moments in 8 bits, in blocks of each part."""
    paths = []
    for part in range(parts):
        tensors: dict[str, Tensor] = {"step": torch.tensor(3.0)} if part == 0 else {}
        for key, tensor in whole.items():
            start, stop = part_rows(len(tensor), part, parts)
            piece = tensor[start:stop].clone()
            kind, _, name = key.partition("/")
            if kind == "master":
                tensors[key] = piece
            else:
                codes, tensors[f"{kind}_scale/{name}"] = encode_moment(kind, piece.flatten(), seed=part)
                tensors[key] = codes.view_as(piece)
        paths.append(folder / f"{part}-of-{parts}.safetensors")
        save_file({key: tensor for key, tensor in tensors.items() if tensor.numel()}, paths[-1])
    return SavedTensors(paths)


@pytest.fixture
def whole() -> dict[str, Tensor]:
    drawn = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    return {"master/a": drawn, "master/b": torch.arange(3.0), "exp_avg/a": drawn * 1e-3, "exp_avg_sq/a": drawn.square()}


def own_state(saved: SavedTensors, part: int, parts: int) -> OwnState:
    rows = {"a": ROWS, "b": 3}
    return OwnState(saved, {name: part_rows(count, part, parts) for name, count in rows.items()}, rows)


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.parametrize("before", [1, 3, 4])
def test_any_number_of_processes_reads_what_any_number_wrote(
    before: int, after: int, whole: dict[str, Tensor], tmp_path: Path
) -> None:
    saved = saved_in(tmp_path, before, whole)
    states = [own_state(saved, part, after) for part in range(after)]
    for key in ("master/a", "master/b"):
        assert torch.equal(torch.cat([state[key] for state in states]), whole[key])
    assert [float(state["step"]) for state in states] == [3.0] * after
    for kind in ("exp_avg", "exp_avg_sq"):
        found = torch.cat([decoded(state, kind) for state in states])
        expected = whole[f"{kind}/a"].flatten()
        apart = (found - expected).abs() / expected.abs().clamp(min=float(expected.abs().max()) / 2**14)
        assert float(apart.max()) < 0.3, "two roundings, each to a level 9 % away at most"


def decoded(state: OwnState, kind: str) -> Tensor:
    codes, scales = state[f"{kind}/a"], state[f"{kind}_scale/a"]
    assert len(scales) == -(-codes.numel() // BLOCK)
    return decode_moment(kind, codes.flatten(), scales, 0)


def test_8_bit_moments_of_as_many_processes_as_before_are_not_touched(whole: dict[str, Tensor], tmp_path: Path) -> None:
    saved = saved_in(tmp_path, 3, whole)
    for part in range(3):
        state = own_state(saved, part, 3)
        assert torch.equal(state["exp_avg/a"], saved.part("exp_avg/a", part))
        assert torch.equal(state["exp_avg_scale/a"], saved.part("exp_avg_scale/a", part))


def test_a_moment_is_encoded_anew_once_where_a_state_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(optimizer_states="int8")
    save_file(MasterAdamW({"a": nn.Parameter(torch.ones(ROWS, COLUMNS))}, torch.float32, config).state(), tmp_path / "whole")
    own = OwnState(SavedTensors([tmp_path / "whole"]), {"a": (0, 31)}, {"a": ROWS})
    encoded: list[str] = []

    def count(kind: str, values_N: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        encoded.append(kind)
        return encode_moment(kind, values_N, seed)

    monkeypatch.setattr("redline.trainer.checkpoints.tensors.encode_moment", count)
    MasterAdamW({"a": nn.Parameter(torch.zeros(31, COLUMNS))}, torch.float32, config).load_state(own, own.like)
    assert encoded == ["exp_avg", "exp_avg_sq"]


def test_a_part_that_is_decoded_anywhere_is_that_of_the_whole() -> None:
    values = torch.randn(5 * BLOCK + 7, generator=torch.Generator().manual_seed(2))
    codes, scales = encode_moment("exp_avg", values, seed=1)
    everything = decode_moment("exp_avg", codes, scales, 0)
    for start, stop in ((0, 3), (100, 700), (BLOCK, 2 * BLOCK), (700, len(values))):
        assert torch.equal(decode_moment("exp_avg", codes[start:stop], scales, start), everything[start:stop])


def test_what_is_not_there_is_missing(whole: dict[str, Tensor], tmp_path: Path) -> None:
    state = own_state(saved_in(tmp_path, 2, whole), 0, 2)
    assert state.get("exp_avg/c") is None
    assert state.get("master_scale/a") is None
