"""The program of the other process in `redline bench weight-sync`: an engine that has weights and no network.

stdin    {"forms": [[name, dtype, shape], …], "device": "cuda"}, then an empty line for each question
stdout   {"address": "127.0.0.1:4711"}, then the sum of every tensor that it would read: {"sums": {name: number}}
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.child import take_stdout
from redline.errors import RedlineError
from redline.types import WeightUpdate
from redline.weight_sync import WeightReceiver
from redline.weight_sync.buckets import ALIGNMENT, flat_bytes, form_from_json
from redline.weight_sync.verify import checksum
from redline.wire import listen, token_from_environment

CONNECT_S = 120.0


class BetweenSteps:
    """An engine that is between two steps at any time. Implements `receiver.UpdatedEngine`."""

    def held(self) -> AbstractContextManager[None]:
        return nullcontext()

    def apply(self, update: WeightUpdate) -> None:
        pass

    def fail(self, error: RedlineError) -> None:
        raise error


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of each tensor by itself."""
    flats = {name: flat_bytes(tensor) for name, tensor in tensors.items()}
    return {name: int(checksum(F.pad(flat, (0, -flat.numel() % ALIGNMENT)))) for name, flat in flats.items()}


def main() -> None:
    reply, token = take_stdout(), token_from_environment()
    asked = json.loads(sys.stdin.readline())
    forms, device = [form_from_json(form) for form in asked["forms"]], torch.device(asked["device"])
    tensors = {form.name: torch.zeros(form.shape, dtype=form.dtype, device=device) for form in forms}
    receiver = WeightReceiver(tensors, BetweenSteps())
    with listen(token=token) as listener:
        reply({"address": listener.address})
        connection = listener.accept(CONNECT_S)
    threading.Thread(target=receiver.serve, args=(connection,), name="weights", daemon=True).start()
    for _ in sys.stdin:
        reply({"sums": sums_of(tensors)})


if __name__ == "__main__":
    main()
