"""A trainer of several processes: rank 0 decides, and the others do the same at the same time.

    rank 0    LeadingTrainer.step(batch) ── order "step", the batch ──► every other rank: PolicyTrainer.step(batch)
              save, load, masters                                       the same, each with its part of the weights

Only rank 0 knows of rollouts, the buffer and the run folder. A follower learns everything from orders.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from redline.trainer.checkpoints.folder import load_checkpoint, open_checkpoint
from redline.trainer.parallel.orders import END, Order
from redline.trainer.parallel.ranks import Ranks
from redline.trainer.trainer import PolicyTrainer
from redline.types import Flat, StepReport, TrainBatch, VersionSpan

STEP, SAVE, LOAD, SHARE, MASTERS = "step", "save", "load", "share", "masters"


class LeadingTrainer(PolicyTrainer):
    """The trainer of rank 0, where there are others. Implements `ports.Trainer`."""

    def __init__(self, ranks: Ranks, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ranks = ranks

    def step(self, batch: TrainBatch) -> StepReport:
        with self._together(batch_order(batch)):
            report = super().step(batch)
        self._ranks.orders.met()
        self._stop_where_asked()
        return report

    def _stop_where_asked(self) -> None:
        """Have a signal that another rank got end the run after its step, unless this process has got one already: what listens
        to the first ends the process at once at the second."""
        if callable(signal.getsignal(signal.SIGTERM)) and self._ranks.is_asked_to_stop:
            signal.raise_signal(signal.SIGTERM)

    def save(self, folder: Path) -> None:
        if not self._parallel.is_divided:
            super().save(folder)
            return
        self.flush()
        with self._together(Order(SAVE, {"folder": str(folder.absolute())})):
            super().save(folder)

    def load(self, folder: Path) -> None:
        saved = load_checkpoint(folder)
        if self._parallel.is_divided:
            with self._together(Order(LOAD, {"folder": str(folder.absolute())})):
                self.load_state(saved)
            return
        self.load_state(saved)
        with self._together(Order(SHARE, {"version": saved.version, "random": saved.random})):
            self.share_state(saved.version, saved.random)

    @property
    def masters(self) -> dict[str, Tensor]:
        with self._together(Order(MASTERS)):
            return super().masters

    def queues(self) -> dict[str, float]:
        return self._ranks.pulse.silences() | self._ranks.pulse.stuck()

    def close(self) -> None:
        try:
            self._writer.flush()  # while the pulse listens: a rank that is lost with its part of a checkpoint is noticed
        finally:
            self._ranks.dismiss()
            super().close()
        self._ranks.wait_until_left()

    @contextmanager
    def _together(self, order: Order) -> Iterator[None]:
        """Inside the block every rank obeys the order. Whatever leaves it with an error ends the run."""
        try:
            self._ranks.pulse.check()
            with self._ranks.naming_who_is_lost():
                self._ranks.orders.give(order)
                yield
        except BaseException:
            self._ranks.closes()
            raise


def follow(trainer: PolicyTrainer, ranks: Ranks) -> None:
    """Do what rank 0 says, until it says that it is over. A run that rank 0 ends in the middle of an order is over, too: rank 0
    says why."""
    while (order := ranks.orders.take()).kind != END:
        try:
            with ranks.naming_who_is_lost():
                _obey(trainer, order)
        except RuntimeError:
            if not ranks.orders.is_over:
                raise
            return


def _obey(trainer: PolicyTrainer, order: Order) -> None:
    if order.kind == STEP:
        trainer.step(ordered_batch(order))
    elif order.kind == SAVE:
        trainer.save(Path(order.fields["folder"]))
    elif order.kind == LOAD:
        trainer.load_state(open_checkpoint(Path(order.fields["folder"])))
    elif order.kind == SHARE:
        trainer.share_state(**order.fields)
    elif order.kind == MASTERS:
        _ = trainer.masters
    else:
        raise AssertionError(f"unknown order {order.kind!r}")


def batch_order(batch: TrainBatch) -> Order:
    """A batch as JSON and arrays."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {name: np.ascontiguousarray(value) for name, value in values.items() if isinstance(value, Flat)}
    others = {name: value for name, value in values.items() if name not in arrays}
    return Order(STEP, others | {"versions": dataclasses.asdict(batch.versions)}, arrays)


def ordered_batch(order: Order) -> TrainBatch:
    """The batch that `batch_order` was given."""
    listed = {name: tuple(value) for name, value in order.fields.items() if isinstance(value, list)}  # JSON knows no tuples
    versions = VersionSpan(**order.fields["versions"])
    return TrainBatch(**{**order.fields, **listed, **order.arrays, "versions": versions})
