"""`redline train` on a system that is not Linux, as far as Linux can play one: no /proc and no /sys, none of the calls that
macOS lacks, and `sys.platform` says darwin. What a real one may do besides is not seen here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import TIMEOUT_S, only_run, rows, write_letters

OTHER = '''
"""Takes away what Linux has, then does what `redline` does."""

import os, platform, socket, sys, sysconfig, time, traceback, zoneinfo

import numpy, psutil, pyarrow, pydantic, rich, torch, transformers, typer, yaml  # these know which system they are on

sysconfig.get_config_vars()

for module, names in {
    os: ["sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "posix_fallocate", "pidfd_open", "eventfd",
         "splice", "getrandom", "fdatasync", "sched_getscheduler", "unshare", "setns"],
    time: ["CLOCK_BOOTTIME", "CLOCK_MONOTONIC_RAW_COARSE"],
    socket: ["TCP_KEEPIDLE", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "SO_BINDTODEVICE"],
    psutil.Process: ["io_counters", "cpu_affinity", "ionice", "rlimit", "cpu_num", "memory_maps"],
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

LINUX = ("/proc", "/sys", "/dev/shm")


def refuse(event, arguments):
    """Of our own code alone: libraries know better."""
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(arguments[0])
        if path.startswith(LINUX):
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1))]
            asking = next((file for file in files if "site-packages" in file or "/lib/python" not in file), "")
            if "/redline/" in asking:
                raise FileNotFoundError(2, "No such file or directory", path)
    if event == "ctypes.dlsym" and arguments[1] in ("prctl", "mallopt", "malloc_trim"):
        raise AttributeError(arguments[1])


sys.addaudithook(refuse)
sys.platform = "darwin"
platform.machine, platform.system, platform.processor = (lambda: "arm64"), (lambda: "Darwin"), (lambda: "arm")

import pathlib

real_stat = pathlib.Path.stat


def stat(path, **named):
    if str(path).startswith(LINUX):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real_stat(path, **named)


pathlib.Path.stat = stat

from redline.cli import main

sys.argv[0] = "redline"
main()
'''


def other(*arguments: str, cwd: Path) -> str:
    (cwd / "other.py").write_text(OTHER)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "other.py", *arguments]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1], ids=["in lockstep", "beside the trainer"])
def test_a_run_needs_nothing_of_linux(lag: int, tmp_path: Path) -> None:
    sections = {"run": {"steps": 2, "checkpoint_every": 1}, "buffer": {"max_lag": lag}, "telemetry": {"sample_every_s": 0.2}}
    other("train", write_letters(tmp_path, **sections).name, cwd=tmp_path)
    found = only_run(tmp_path)
    assert len(rows(found.metrics)) == 2
    samples = rows(found.samples)
    assert samples
    assert all("host/disk_read_bytes_per_s" not in sample for sample in samples)
    assert all(sample["host/rss_bytes"] > 0 for sample in samples)
    assert (found.path / "model" / "model.safetensors").exists()
    other("train", str(found.path), "--resume", "run.steps=3", cwd=tmp_path)
    assert len(rows(found.metrics)) == 3
    other("report", str(found.path), "-o", "report.html", cwd=tmp_path)
    other("show", str(found.path), cwd=tmp_path)


def test_the_other_system_is_one(tmp_path: Path) -> None:
    """What the runs above are told is what they see."""
    probe = OTHER.partition("from redline.cli")[0] + (
        "from redline.config.resolve import bfloat16_flags\n"
        "from redline.telemetry.machine.host import Host, waits_for_cores\n"
        "from redline.telemetry.spans import process_start_ns\n"
        "from redline.telemetry.machine.environment import describe_environment\n"
        "assert describe_environment()['cpu']\n"
        "assert bfloat16_flags() == [] and waits_for_cores() == {} and process_start_ns() > 0\n"
        "found = Host()()\n"
        "assert 'host/rss_bytes' in found and 'host/disk_read_bytes_per_s' not in found\n"
        "print('seen')\n"
    )
    (tmp_path / "probe.py").write_text(probe)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "probe.py"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("seen", 0), done.stderr
