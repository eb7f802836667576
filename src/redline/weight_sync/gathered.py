"""The trainer's tensors, each put together when its bucket is packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from redline.weight_sync.buckets import Form, form_of
from redline.weight_sync.parts import timed


class Gathered(Mapping[str, Tensor]):
    """The trainer's tensors as they are asked for: of ranks that share them each is put together then. The last one is kept,
    since it may go on in the next bucket."""

    def __init__(self, tensors: Mapping[str, Tensor], forms: Mapping[str, Form], parts: dict[str, float]) -> None:
        self._tensors, self._forms, self._parts = tensors, forms, parts
        self._name: str | None = None
        self._last = torch.empty(0)

    def __getitem__(self, name: str) -> Tensor:
        if name != self._name:
            with timed("gather", self._parts):
                found = self._tensors[name]
            if not found.is_contiguous():
                with timed("convert", self._parts):
                    found = found.contiguous()
            self._last, self._name = found, name
            form = form_of(name, found)
            assert form == self._forms[name], f"the trainer has {form}, the engines were told of {self._forms[name]}"
        return self._last

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
