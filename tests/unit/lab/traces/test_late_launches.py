"""Engines with a known serialisation stall, as torch.profiler and as nsys record them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import kineto_files, nsys_files
from support.late_launches import Recorded, Scenario

from redline.lab.traces.causes import Cause
from redline.lab.traces.diagnosis import Diagnosis, diagnose
from redline.lab.traces.text import lines_of


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Scenario().record()


@pytest.fixture(scope="module", params=["kineto", "kineto.gz", "nsys of graphs", "nsys of nodes"])
def diagnosis(request: pytest.FixtureRequest, recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    folder = tmp_path_factory.mktemp("traces")
    if "kineto" in request.param:
        kineto_files.write_ranks(recorded, folder, packed="gz" in request.param)
        return diagnose([folder])
    return diagnose([nsys_files.write(recorded, folder / "report.sqlite", graphs=request.param.split()[2].removesuffix("s"))])


def cause_of(diagnosis: Diagnosis, call: str, engine: int = 0) -> Cause:
    [found] = [cause for cause in diagnosis.engines[engine].causes if cause.call == call]
    return found


def pid_of(diagnosis: Diagnosis, process: int) -> int:
    return diagnosis.timeline.processes[process].pid


def near(ns: float) -> object:
    """Within 10% of what was planted: from the second step on, since a window begins with the first work of a device."""
    return pytest.approx(ns, rel=0.1)


def test_ranks_of_an_engine_are_found_by_what_they_do_together(diagnosis: Diagnosis) -> None:
    groups = [[pid_of(diagnosis, process) for process in found.lost.engine.processes] for found in diagnosis.engines]
    assert groups in ([[1000, 1001, 1002, 1003]], [[1000, 1001, 1002, 1003], [2000, 2001, 2002, 2003]])


def test_packing_is_found_in_the_process_that_the_late_rank_waited_for(diagnosis: Diagnosis, recorded: Recorded) -> None:
    cause = cause_of(diagnosis, "pickle.dumps")
    assert cause.kind == "serialisation"
    assert pid_of(diagnosis, cause.process) == 1000
    assert [pid_of(diagnosis, process) for process in cause.late] == [1003]
    assert cause.hops == 1
    assert cause.path == ("step", "gen_context", "zmq_bcast_ctx_meta")
    assert cause.lost == near(sum(recorded.packing[1:]))


def test_unpacking_is_found_in_the_late_rank(diagnosis: Diagnosis, recorded: Recorded) -> None:
    cause = cause_of(diagnosis, "pickle.loads")
    assert cause.kind == "serialisation"
    assert pid_of(diagnosis, cause.process) == 1003
    assert cause.lost == near(sum(recorded.unpacking[1:]))
    assert len(cause.stalls) == len(recorded.unpacking) - 1


def test_the_lost_time_is_that_of_the_causes(diagnosis: Diagnosis, recorded: Recorded) -> None:
    found = diagnosis.engines[0]
    assert sum(cause.lost for cause in found.causes) + found.rest == found.lost.total
    planted = sum(recorded.packing[1:]) + sum(recorded.unpacking[1:])
    around = 29 * 290_000  # scheduling, sending and what is between calls, of each step
    assert found.lost.total == near(planted + around)


def test_launches_are_lined_up_across_ranks_and_the_late_ones_counted(diagnosis: Diagnosis) -> None:
    first, *others = diagnosis.engines[0].lost.ranks
    assert (first.replays, first.late) == (30, 0)
    assert [(rank.replays, rank.late) for rank in others] == [(30, 30)] * 3
    assert others[2].late_by > others[0].late_by > 0
    assert first.waiting > others[2].waiting


def test_packing_grows_with_batch_times_length(diagnosis: Diagnosis, recorded: Recorded) -> None:
    growth = cause_of(diagnosis, "pickle.dumps").growth
    assert growth is not None
    assert growth.by == "size"
    assert growth.explained > 0.95
    assert growth.last_s == near(recorded.packing[-1] / 1e9)
    assert {point[0] for point in growth.points} <= set(map(float, recorded.sizes))


def test_scheduling_is_another_class(diagnosis: Diagnosis) -> None:
    assert cause_of(diagnosis, "schedule").kind == "scheduling"


def test_the_text_says_rank_call_and_time(diagnosis: Diagnosis) -> None:
    text = "\n".join(lines_of(diagnosis))
    assert "to serialisation, most of all `pickle.loads`" in text
    assert "gen_context → zmq_bcast_ctx_meta → pickle.dumps" in text
    assert "with the size that the capture records" in text


@pytest.mark.parametrize("in_names", [False, True])
def test_a_broadcast_without_ranges_inside_is_told_to_serialise_because_it_grows(tmp_path: Path, in_names: bool) -> None:
    """The model answer: a late launch, the preparation of a context, a long broadcast of an object that grows."""
    recorded = Scenario(inner_ranges=False, in_names=in_names, engines=1).record()
    diagnosis = diagnose([nsys_files.write(recorded, tmp_path / "report.sqlite")])
    sender, receiver = sorted(
        (cause for cause in diagnosis.engines[0].causes if cause.call == "zmq_bcast_ctx_meta"), key=lambda cause: cause.process
    )
    assert sender.kind == receiver.kind == "serialisation"
    assert "larger its object" in sender.basis
    assert sender.lost == near(sum(recorded.packing[1:]))
    assert receiver.lost == near(sum(recorded.unpacking[1:]))
    assert sender.path[-1] == "gen_context"


def test_an_engine_that_does_not_wait_has_nothing_worth_fixing(tmp_path: Path) -> None:
    recorded = Scenario(engines=1, steps=20).record()
    for index, kernel in enumerate(recorded.kernels):  # one kernel after the other, without a pause
        kernels = [k for k in recorded.kernels if k.pid == kernel.pid]
        place = kernels.index(kernel)
        after = kernels[place + 1].start if place + 1 < len(kernels) else kernel.end
        recorded.kernels[index] = type(kernel)(
            kernel.pid,
            kernel.device,
            kernel.stream,
            "gemm_bf16",
            kernel.start,
            max(kernel.end, after),
            kernel.correlation,
            5,
            1,
        )
    diagnosis = diagnose([nsys_files.write(recorded, tmp_path / "report.sqlite", graphs="node")])
    assert diagnosis.verdict.startswith("Nothing worth fixing")
