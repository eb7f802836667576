"""Whatever the fields of events hold, a capture is read or refused, and never ends in a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from redline.errors import TraceError
from redline.lab.traces.diagnosis import diagnose
from redline.lab.traces.evidence import document_of
from redline.lab.traces.text import lines_of

ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)
TIMES = st.one_of(st.integers(0, 400), st.floats(0, 400), ANY)
ARGUMENTS = st.one_of(
    ANY,
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(st.integers(0, 5), ANY)
            for name in ("correlation", "stream", "device", "Group size", "Input Dims", "In msg nelems")
        },
    ),
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "X", "X", "B", "E", "M", "i"]), "ts": TIMES},
    optional={
        "cat": st.one_of(st.sampled_from(["kernel", "gpu_memcpy", "cuda_runtime", "cpu_op", "user_annotation"]), ANY),
        "name": st.one_of(
            st.sampled_from(["cudaGraphLaunch", "ncclDevKernel", "zmq.recv", "send", "gloo:broadcast", "thread_name"]), ANY
        ),
        "pid": st.one_of(st.integers(0, 3), st.sampled_from(["[TP0] 7", "[TP1] 7"]), ANY),
        "tid": st.one_of(st.integers(0, 3), ANY),
        "dur": TIMES,
        "args": ARGUMENTS,
    },
)
HEADS = st.fixed_dictionaries({}, optional={"baseTimeNanoseconds": ANY, "distributedInfo": ARGUMENTS, "WARNING": ANY})


@settings(max_examples=30, deadline=None)
@given(st.lists(EVENTS, max_size=25), HEADS)
def test_odd_events_are_counted_and_never_a_traceback(events: list[dict], head: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({**head, "traceEvents": events}))
        try:
            found = diagnose([path])
        except TraceError:
            return
    assert list(lines_of(found))
    json.dumps(document_of(found), allow_nan=False)
