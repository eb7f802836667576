"""The filter of system calls, run by hand: what the kernel would decide on both machines that it knows."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from redline.environments.code.inside import seccomp
from redline.environments.code.inside.seccomp import REFUSED, REFUSED_BESIDE_OTHERS

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
REFUSE, UNKNOWN, ALLOW, KILL = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000, 0x80000000
OWN = 4321


def decided(machine: str, number: int, first: int = 0, second: int = 0, *, may_fork: bool = True, alone: bool = True) -> int:
    """What the filter returns for a system call, as the kernel runs it."""
    data = {0: number, 4: MACHINES[machine][1], 16: first & 0xFFFFFFFF, 24: second & 0xFFFFFFFF}
    program = seccomp._filter(may_fork=may_fork, alone=alone, own_pid=OWN)
    at = held = 0
    while True:
        code, if_so, if_not, value = program[at]
        at += 1
        if code == 0x20:
            held = data[value]
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: held == value, 0x25: held > value, 0x45: bool(held & value)}[code]
            at += if_so if holds else if_not


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(seccomp, "MACHINE", request.param)
    return str(request.param)


def number(machine: str, pair: tuple[int | None, int | None]) -> int:
    found = pair[MACHINES[machine][0]]
    assert found is not None
    return found


def test_every_system_call_on_the_list_is_refused_and_others_are_not(machine: str) -> None:
    place = MACHINES[machine][0]
    always = {pair[place] for pair in REFUSED.values()}
    beside = {pair[place] for pair in REFUSED_BESIDE_OTHERS.values()}
    assert all(decided(machine, one) == REFUSE for one in always if one is not None)
    assert all(decided(machine, one) == ALLOW for one in beside if one is not None)
    assert all(decided(machine, one, alone=False) == REFUSE for one in beside if one is not None)
    assert decided(machine, 451) == UNKNOWN
    assert decided(machine, 0x40000000 | 1) == UNKNOWN


def test_a_call_for_another_machine_ends_the_process(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MACHINES, machine, (MACHINES[machine][0], 0x40000003))
    assert decided(machine, 1) == KILL


def test_arguments_decide_where_a_call_has_good_uses(machine: str) -> None:
    clone, pair, limits = (number(machine, one) for one in (seccomp._CLONE, seccomp._SOCKETPAIR, seccomp._PRLIMIT))
    fork, thread, users = 17, 0x3D0F00, 0x10000011
    assert [decided(machine, clone, flags) for flags in (fork, thread, users)] == [ALLOW, ALLOW, REFUSE]
    assert [decided(machine, clone, flags, may_fork=False) for flags in (fork, thread, users)] == [REFUSE, ALLOW, REFUSE]
    assert decided(machine, number(machine, seccomp._CLONE3)) == UNKNOWN
    assert [decided(machine, pair, 1, kind) for kind in (1, 0x80801, 2, 5)] == [ALLOW, ALLOW, REFUSE, REFUSE]
    assert decided(machine, pair, 2, 1) == REFUSE
    assert [decided(machine, limits, pid) for pid in (0, 1)] == [ALLOW, REFUSE]


def test_beside_other_processes_a_program_signals_itself_alone(machine: str) -> None:
    kill, control, options = (number(machine, one) for one in (seccomp._KILL, seccomp._FCNTL, seccomp._PRCTL))
    assert [decided(machine, kill, pid, 9, alone=False) for pid in (OWN, 0, -1, 1, OWN + 1)] == [ALLOW, ALLOW, *[REFUSE] * 3]
    assert [decided(machine, control, 3, what, alone=False) for what in (1, 3, 8, 10, 15)] == [ALLOW, ALLOW, *[REFUSE] * 3]
    assert [decided(machine, options, what, alone=False) for what in (15, 1, 4)] == [ALLOW, REFUSE, REFUSE]


def test_the_numbers_are_those_of_the_kernels_header() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")  # aarch64 has these
    if not header.exists():
        pytest.skip("no header of the kernel")
    numbers = {name: int(found) for name, found in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())}
    for name, (_, found) in {**REFUSED, **REFUSED_BESIDE_OTHERS}.items():
        if found is not None and name in numbers:
            assert numbers[name] == found, name
