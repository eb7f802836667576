"""An engine that works as on a GPU, without one: several steps per launch, rows that advance and die on their own, and a host
that looks at a launch only after the next one."""

from __future__ import annotations

import numpy as np
import torch

from redline.engine import NativeEngine
from redline.engine.native.cache.attention import GatherAttention, Runs
from redline.engine.native.cache.prefixes import Prefixes
from redline.engine.native.running.runner import Runner, Samples
from redline.engine.native.sequence import Wants

STEPS = 4


class AheadRunner(Runner):
    max_steps = STEPS
    runs_ahead = True

    def decode(
        self, rows_B: np.ndarray, positions_B: np.ndarray, num_steps: int, wants: Wants, prefixes: Prefixes | None = None
    ) -> Samples:
        steps = [self._step(torch.from_numpy(rows_B), wants) for _ in range(num_steps)]
        return Samples(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*steps, strict=True)))

    def _step(self, rows_B: torch.Tensor, wants: Wants) -> tuple[torch.Tensor | None, ...]:
        """Whoever is alive advances. What stands in the places of the dead is anything but a token."""
        alive_B = self.rows.alive_R[rows_B]
        rows, positions = rows_B[alive_B], self.rows.position_R[rows_B[alive_B]].numpy()
        out = Samples(
            torch.full((1, len(rows_B)), -7),
            torch.full((1, len(rows_B)), 7.0),
            torch.full((1, len(rows_B)), 7.0) if wants.raw else None,
            torch.full((1, len(rows_B), wants.top), -7) if wants.top else None,
            torch.full((1, len(rows_B), wants.top), 7.0) if wants.top else None,
        )
        if len(rows):
            runs = Runs(positions, np.ones_like(positions), self.rows.tables_RN[rows].numpy())
            attend = GatherAttention(self.cache, runs, self._dtype)
            sampled = Samples.of(self._decode_once(rows, attend.positions_T, attend, wants))
            for whole, part in zip(out.parts, sampled.parts, strict=True):
                if whole is not None and part is not None:
                    whole[:, alive_B] = part
        return tuple(out.parts)


class AheadEngine(NativeEngine):
    def _make_runner(self) -> Runner:
        runner = super()._make_runner()
        ahead = AheadRunner(self.decoder, runner.cache, runner.rows)
        ahead.lora = runner.lora
        return ahead
