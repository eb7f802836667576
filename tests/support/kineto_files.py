"""Writes what torch.profiler writes: the text of libkineto's Chrome trace, from what its source and its files look like."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

from support.late_launches import Call, Kernel, Recorded

BASE = 1_763_000_000_000_000_000
"""Where the relative times of a file begin, in nanoseconds since 1970."""

HEAD = """
{{
  "schemaVersion": 1,
  "deviceProperties": [
    {{
      "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150122135552,
      "computeMajor": 9, "computeMinor": 0, "maxThreadsPerBlock": 1024, "numSms": 132
    }}
  ],
  "cupti_version": 26,
  "cuda_runtime_version": 12080,
  "with_flops": 0,
  "record_shapes": 0,
  "cuda_driver_version": 12080,
  "profile_memory": 0,
  "trace_id": "5B2E1B5E36AB4F0BB9E0CC2B25A2D9D1",{distributed}
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": {base},
  "traceEvents": ["""
EVENT = """
  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts}, "dur": {dur}{args}
  }},"""
FLOW = """
  {{
    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts},
    "cat": "ac2g", "name": "ac2g"{bp}
  }},"""
NAMED = """
  {{
    "name": "process_name", "ph": "M", "ts": {ts}, "pid": {pid}, "tid": 0,
    "args": {{
      "name": "{name}"
    }}
  }},
  {{
    "name": "thread_name", "ph": "M", "ts": {ts}, "pid": {pid}, "tid": {tid},
    "args": {{
      "name": "{thread}"
    }}
  }},"""
TAIL = """
  {{
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": {ts}
  }}
  ],
  "traceName": "{path}"
}}"""


def us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03}"


def write_ranks(
    recorded: Recorded, folder: Path, *, engine: int = 0, packed: bool = False, ahead: dict[int, int] | None = None
):
    """Write a file for each rank of one engine. `ahead` says by how much the clock of a rank is ahead. Returns the files."""
    paths = []
    size = sum(1 for found in recorded.ranks.values() if found[0] == engine)
    for pid, (its_engine, rank) in recorded.ranks.items():
        if its_engine == engine:
            path = folder / f"host_{pid}.{BASE // 1000}.pt.trace.json{'.gz' if packed else ''}"
            text = "".join(lines(recorded, pid, rank, size, (ahead or {}).get(rank, 0)))
            path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
            paths.append(path)
    return paths


def lines(recorded: Recorded, pid: int, rank: int, size: int, ahead: int = 0) -> Iterable[str]:
    info = (
        f'"backend": "nccl", "rank": {rank}, "world_size": {size}, "pg_count": 1, "pg_config": [{{"pg_name": "0", '
        f'"pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": {size}, "ranks": {list(range(size))}}}], '
        '"nccl_version": "2.27.5"'
    )
    yield HEAD.format(base=BASE + ahead - 500_000, distributed=f'\n  "distributedInfo": {{{info}}},')
    kernels = [kernel for kernel in recorded.kernels if kernel.pid == pid]
    yield NAMED.format(ts="500.000", pid=pid, tid=pid + 7, name="python3", thread=f"thread {pid + 7} (python3)")
    for device in sorted({kernel.device for kernel in kernels}):
        yield NAMED.format(ts="500.000", pid=device, tid=7, name="python3", thread="stream 7 7")
    for call in recorded.calls:
        if call.pid == pid:
            yield from call_lines(call)
    for kernel in kernels:
        yield kernel_line(kernel)
    yield TAIL.format(ts=us(max((call.end for call in recorded.calls), default=0) + 500_000), path="trace.json")


def call_lines(call: Call) -> Iterable[str]:
    category = {"range": "user_annotation", "cuda": "cuda_runtime"}[call.kind]
    arguments = f'"External id": {call.start % 100_000}'
    if call.kind == "cuda":
        arguments = f'"External id": 7,"cbid": 311, "correlation": {call.correlation}'
    elif call.payload is not None:
        # c10d writes the message of a collective into the arguments of `record_param_comms`
        elements = f'"In msg nelems": {call.payload}, "Out msg nelems": {call.payload}'
        group = '"Group size": 4, "dtype": "Byte", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]"'
        inside = f'"External id": 9,"Collective name": "broadcast", {elements}, {group}'
        yield event("cpu_op", "record_param_comms", call.pid, call.tid, call.end - 2_000, call.end - 1_000, inside)
    yield event(category, call.name, call.pid, call.tid, call.start, call.end, arguments)
    if call.name == "cudaGraphLaunch":
        yield FLOW.format(ph="s", id=call.correlation, pid=call.pid, tid=call.tid, ts=us(call.start + 500_000), bp="")


def kernel_line(kernel: Kernel) -> str:
    where = f'"device": {kernel.device}, "context": 1, "stream": {kernel.stream}, "correlation": {kernel.correlation}'
    shape = '"registers per thread": 90, "shared memory": 0, "blocks per SM": 1.93, "grid": [255, 1, 1], "block": [256, 1, 1]'
    arguments = f'"queued": 0, {where}, {shape}, "graph id": {kernel.graph}, "graph node id": {kernel.node}'
    return event("kernel", kernel.name, kernel.device, kernel.stream, kernel.start, kernel.end, arguments)


def event(category: str, name: str, pid: int, tid: int, start: int, end: int, arguments: str) -> str:
    inside = f',\n    "args": {{\n      {arguments}\n    }}' if arguments else ""
    return EVENT.format(cat=category, name=name, pid=pid, tid=tid, ts=us(start + 500_000), dur=us(end - start), args=inside)
