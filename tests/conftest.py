"""What every test gets: no network, one thread per process, and a model cache of its own.

Set before anything imports torch or transformers, and inherited by the processes that end-to-end tests start."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the networks here are so small that a second thread only waits
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without a GPU, Triton's kernels run in its interpreter

# The first example of a property pays for imports and warm-up, and the machine may be busy; time is the suite's business, not
# an example's.
settings.register_profile("redline", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.register_profile("thorough", settings.get_profile("redline"), max_examples=100)  # `make test-all` has the time
settings.load_profile("redline")

_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:  # the processes of one run share what they compile and convert; workers inherit all three
    os.environ["REDLINE_TESTS_USERS_CACHE"] = os.environ.get("XDG_CACHE_HOME", "")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="redline-test-cache-")
_USERS_CACHE = os.environ["REDLINE_TESTS_USERS_CACHE"]
_CACHE = os.environ["XDG_CACHE_HOME"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector need not look through millions of objects again and again,
    while they are made or whenever a test asks for a collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        from support.interpreted import make_interpreter_quicker

        make_interpreter_quicker()
    if "support.forks" in sys.modules and not session.config.option.collectonly:
        from support.forks import start_the_origin

        start_the_origin()


def pytest_unconfigure() -> None:
    if not _IS_WORKER:
        shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture
def users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model cache of whoever runs the tests, for tests of models that take long to make."""
    if _USERS_CACHE:
        monkeypatch.setenv("XDG_CACHE_HOME", _USERS_CACHE)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")


@pytest.fixture
def no_calls_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of users' code that tests before have left behind are none of this test's."""
    from redline.telemetry.stalls import calls

    monkeypatch.setattr(calls, "_running", {})


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Triton's, which runs kernels on tensors of the CPU. Where there is a GPU, kernels are compiled for that."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the CPU in Triton's interpreter, which is not used where there is a GPU")


@pytest.fixture(autouse=True)
def no_dead_workers() -> Iterator[None]:
    """A thread that a test let die, or left behind, is no alert of the next one."""
    yield
    workers = sys.modules.get("redline.telemetry.workers")
    if workers is not None:
        for name, worker in list(workers._workers.items()):
            if isinstance(worker, threading.Thread) and not worker.is_alive():
                workers.forget_worker(name)
