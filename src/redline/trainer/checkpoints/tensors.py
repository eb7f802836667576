"""The tensors of a checkpoint, read when they are asked for, and what one process holds of them.

    file 1   exp_avg/embed, rows 0 to 31        a process that holds rows 20 to 39 reads
    file 2   exp_avg/embed, rows 32 to 60       20 to 31 from the first and 32 to 39 from the second

The files are mapped into memory, so that a run of rows is read without the rest: what a resume holds in host memory is one
tensor's part at a time, whatever the number of processes was and is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from redline.kernels.flat_state import BLOCK
from redline.trainer.optimizer.quantized_states import decode_moment, encode_moment

SCALE = "_scale"
"""What the kind of an 8-bit moment's scales ends in."""
Rows = tuple[int, int]
"""First row and end."""


class SavedTensors(Mapping[str, Tensor]):
    """Whole tensors by name. One that processes have divided lies in several files, its rows one file after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: dict[str, list[safe_open]] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118
                self._files.setdefault(key, []).append(file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, key: str) -> Tensor:
        parts = [file.get_tensor(key) for file in self._files[key]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def part_rows(self, key: str) -> list[Rows]:
        """The rows that each file holds, in order."""
        found, end = [], 0
        for file in self._files[key]:
            start, end = end, end + file.get_slice(key).get_shape()[0]
            found.append((start, end))
        return found

    def part(self, key: str, index: int) -> Tensor:
        """What the `index`-th of the files that hold it has of a tensor."""
        return self._files[key][index].get_tensor(key)

    def pieces(self, key: str, rows: Rows) -> Iterator[tuple[int, Rows]]:
        """For a run of rows of the whole tensor: which of its files has how much of it, in rows of that file."""
        for index, (start, end) in enumerate(self.part_rows(key)):
            begin, stop = max(rows[0], start), min(rows[1], end)
            if begin < stop:
                yield index, (begin - start, stop - start)

    def rows(self, key: str, rows: Rows) -> Tensor:
        """A run of rows of the whole tensor."""
        files = self._files[key]
        found = [files[index].get_slice(key)[start:end] for index, (start, end) in self.pieces(key, rows)]
        return torch.cat(found) if len(found) > 1 else found[0] if found else files[0].get_slice(key)[0:0]


class OwnState(Mapping[str, Tensor]):
    """What a process holds of a saved optimizer's state (`kind/name`).

    Moments in 8 bits have a scale for every block of a part. Where parts are cut in other places than those that were saved,
    they are decoded and encoded anew, which rounds them once more, as every step does.
    """

    def __init__(self, saved: SavedTensors, rows: Mapping[str, Rows], num_rows: Mapping[str, int]) -> None:
        """`rows` of each parameter are this process's, out of `num_rows` of the whole."""
        self._saved, self._rows, self._num_rows = saved, rows, num_rows
        self._encoded: tuple[str, dict[str, Tensor]] = ("", {})
        """The last moment that was encoded anew: its codes and scales are asked for one after the other."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, key: str) -> Tensor:
        kind, _, name = key.partition("/")
        if key not in self._saved:
            raise KeyError(key)
        if name not in self._rows:
            return self._saved[key]
        moment = kind.removesuffix(SCALE)
        if not self._is_ours(moment, name):
            return self._saved[key]  # of another model, which the optimizer will say
        if f"{moment}{SCALE}/{name}" not in self._saved:
            return self._saved.rows(key, self._rows[name])
        return self._quantized(moment, name)[kind]

    def like(self, key: str) -> Tensor | None:
        """What `get` returns, or a tensor of its shape and dtype where the values would have to be encoded."""
        kind, _, name = key.partition("/")
        moment = kind.removesuffix(SCALE)
        codes, scales = f"{moment}/{name}", f"{moment}{SCALE}/{name}"
        is_quantized = name in self._rows and scales in self._saved and self._is_ours(moment, name)
        if not is_quantized or self._rows[name] in self._saved.part_rows(codes):
            return self.get(key)
        rows = self._saved.rows(codes, self._rows[name])
        blocks = -(-rows.numel() // BLOCK)
        return rows if kind == moment else torch.empty(blocks, dtype=self._saved.part(scales, 0).dtype, device="meta")

    def _is_ours(self, moment: str, name: str) -> bool:
        """Whether the parameter has as many rows as were saved."""
        return self._saved.part_rows(f"{moment}/{name}")[-1][1] == self._num_rows[name]

    def _quantized(self, moment: str, name: str) -> dict[str, Tensor]:
        """Codes and scales of this process's rows, by their kinds."""
        codes, scales, rows = f"{moment}/{name}", f"{moment}{SCALE}/{name}", self._rows[name]
        if rows in (parts := self._saved.part_rows(codes)):
            index = parts.index(rows)
            return {moment: self._saved.part(codes, index), f"{moment}{SCALE}": self._saved.part(scales, index)}
        if self._encoded[0] != codes:
            self._encoded = codes, self._encoded_anew(moment, name)
        return self._encoded[1]

    def _encoded_anew(self, moment: str, name: str) -> dict[str, Tensor]:
        codes, scales, rows = f"{moment}/{name}", f"{moment}{SCALE}/{name}", self._rows[name]
        decoded = []
        for index, (start, end) in self._saved.pieces(codes, rows):
            part = self._saved.part(codes, index)
            columns = part[:1].numel()
            decoded.append(decode_moment(moment, part[start:end].flatten(), self._saved.part(scales, index), start * columns))
        like = self._saved.rows(codes, rows)
        values = torch.cat(decoded) if decoded else torch.zeros(0)
        found, found_scales = encode_moment(moment, values, seed=zlib.crc32(f"{codes}/{rows[0]}".encode()))
        return {moment: found.view_as(like), f"{moment}{SCALE}": found_scales}
