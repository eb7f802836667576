"""A trainer process that follows rank 0: it has no rollouts, engine, buffer or run folder, and imports none of them.

join ──► order "begin": the resolved recipe ──► load the model ──► one order after the other ──► order "end"
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from redline.config import Config
from redline.errors import RankLostError, RunFolderError, in_words
from redline.launch.models import load_trainable_policy
from redline.launch.process import prepare_process
from redline.launch.rank_samples import RankSamples
from redline.launch.rank_spans import recording_rank, sees
from redline.launch.trainers import connect_ranks, make_following_trainer
from redline.telemetry.machine.hosts import HostSampling, sampling_host
from redline.trainer.parallel.checkpoint_parts import ALL_MUST_SEE, WHY_ALL
from redline.trainer.parallel.led import follow as follow_orders
from redline.trainer.parallel.orders import END, Order
from redline.trainer.parallel.place import Division
from redline.trainer.parallel.ranks import Ranks, join
from redline.watch.awake import staying_awake

LAUNCHER_S = 2.0
"""A launcher that ends a run sends the signal to every rank; rank 0 is not told a second time by us before it has got it."""


def follow() -> None:
    """Take part in the run of rank 0 until it is over. Raises what ended this rank, or `RankLostError` where another did, once
    rank 0 has closed the run, where it does."""
    ranks = join()
    try:
        with _passing_signals_on(ranks):
            begin = ranks.orders.take()
            if begin.kind != END:
                _take_part(ranks, begin)
    except RankLostError:
        ranks.wait_for_rank_0()
        raise
    except Exception as error:
        ranks.pulse.ended(in_words(error))
        ranks.wait_for_rank_0()
        raise
    except BaseException as error:
        ranks.pulse.ended(in_words(error))
        raise
    ranks.leave()


def _take_part(ranks: Ranks, begin: Order) -> None:
    config, folder = Config.model_validate(begin.fields["config"]), Path(begin.fields["folder"])
    mark = begin.fields["mark"]
    if Division.of(config.trainer).divides_weights and not sees(folder, mark):
        raise RunFolderError(f"{folder}: this machine does not see this folder, {WHY_ALL}", ALL_MUST_SEE)
    sampling = HostSampling(**begin.fields["sampling"]) if begin.fields["sampling"] else None
    send = RankSamples(ranks.connection).send
    recording = recording_rank(ranks.rank, folder, mark, ranks.connection)
    with recording as recorder, sampling_host(sampling, f"rank {ranks.rank}", send):
        if recorder is not None:
            ranks.pulse.doing = lambda: next((lane.innermost for lane in recorder.lane_states() if lane.name == "main"), "")
        prepare_process(config)
        parallel = connect_ranks(config, ranks)
        trainer = make_following_trainer(config, load_trainable_policy(config), parallel)
        try:
            follow_orders(trainer, ranks)
        finally:
            trainer.close()


@contextmanager
def _passing_signals_on(ranks: Ranks) -> Iterator[None]:
    """Inside the block the first Ctrl-C, SIGTERM or SIGHUP asks rank 0, which decides for all, to end the run after its step.
    The second ends this process at once. A SIGHUP that is ignored (nohup) stays so."""
    heard = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]

    is_asked = is_passed_on = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        for each in heard:
            signal.signal(each, signal.default_int_handler if each is signal.SIGINT else signal.SIG_DFL)

    def pass_on() -> None:
        nonlocal is_passed_on
        if is_asked and not is_passed_on:
            is_passed_on = True
            later = threading.Timer(LAUNCHER_S, ranks.ask_to_stop)
            later.daemon = True
            later.start()

    before = {number: signal.signal(number, ask) for number in heard}
    try:
        with staying_awake(pass_on):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
