"""What names of calls and kernels mean: classes of CPU work, waiting and sending, collectives and launches."""

from __future__ import annotations

import functools
import re

CLASSES = {
    "serialisation": r"pickle|\bdumps\b|\bloads\b|seriali[sz]|marshal|msgpack|msgspec|orjson|to_?json|from_?json|"
    r"SerializeToString|ParseFromString|__reduce|__[gs]etstate__|consolidate|_object_to_tensor|_tensor_to_object|deepcopy",
    "tokenisation": r"tokeni[sz]|encode_batch|chat_template|batch_decode|convert_ids|convert_tokens|incremental_decode",
    "gil": r"\bgil\b|take_gil|drop_gil|PyEval_(Acquire|Restore)|PyGILState",
    "copy": r"memcpy|memset|\baten::(to|copy_|_to_copy|clone|contiguous|pin_memory)\b|pin_memory|HostAlloc|HostRegister",
    "synchronisation": r"synchroni[sz]e|_local_scalar_dense|\baten::(item|nonzero|is_nonzero|equal)\b|barrier|EventQuery|"
    r"StreamWaitEvent|\bwait\b",
    "ipc": r"zmq|bcast|broadcast(?!_tensors|_to\b|_shapes|able|ed)|send|recv|receive|socket|"
    r"\bshm|shared_memory|message_?queue|\bpipes?\b|epoll|"
    r"\bp?poll\b|\bselect\b|queue|\brpc|\bray::|\bsem_|futex|pthread_cond|\breadv?\b|\bwritev?\b|^_?c10d|^(gloo|mpi|ucc):|"
    r"scatter_object|gather_object",
    "scheduling": r"sched|prepare|(gen|make|build|init)_?context|(next|new|build|filter|merge|running)_batch|metadata|\bplan\b|"
    r"block_table|slot_?mapping|allocate_|admit|preempt",
}
"""Class → what names of such calls hold. A name belongs to the first that fits: the more specific ones come first."""
HOST_WORK = "host work"
"""The class of CPU work whose name says nothing."""
_CLASSES = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in CLASSES.items()}
_WAITS = re.compile(
    r"recv|receive|\bp?poll\b|epoll|\bselect\b|\bwait\b|\bwait(_for|pid|id)|_wait\b|\bacquire\b|\bsem_|futex|pthread_cond|"
    r"pthread_mutex_lock|queue.*\bget\b|\bget_nowait|\bread\b|\baccept4?\b|^gloo:|\bbarrier\b|\bresult\b",
    re.IGNORECASE,
)
_SENDS = re.compile(
    r"send|bcast|broadcast(?!_tensors|_to\b|_shapes|able|ed)|publish|\bput\b|enqueue|\bwrite\b|notify|\bpost\b|sem_post|\bset\b",
    re.IGNORECASE,
)
_PLUMBING = re.compile(r"(^|/)(_?contextlib|functools|_ops|_classes)\.py\(|nn\.Module: ")
"""Python's frames around the call of another function, which are not what it does."""
_CUDA = re.compile(r"^(cuda|cu[A-Z]|hip)")
_TENSOR = re.compile(r"^aten::|^<built-in method \w+ of (Tensor|type) object")
"""Operations on tensors: `select` and `broadcast_to` among them have nothing to do with messages."""
_COLLECTIVE = re.compile(
    r"nccl(?!.*(init|destroy|comm_|group))|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem|"
    r"one_?shot|two_?shot|lamport",
    re.IGNORECASE,
)
_GRAPH_LAUNCH = re.compile(r"^(cuda|cu|hip)GraphLaunch")
_CPU_COLLECTIVE = re.compile(r"^_?c10d(_functional)?::(?!.*(send|recv|wait))")
_TRANSFER = re.compile(r"^(gloo|mpi|ucc):")
_DIGITS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_BATCH = re.compile(r"(?:batch(?:_?size)?|\bbs|num_seqs|num_reqs|reqs|rows|generation)[\s_=:(#]*(\d+)", re.IGNORECASE)
_LENGTH = re.compile(r"(?:seq_?len|length|\blen|context_len|tokens|kv_len|ctx_len)[\s_=:(#]*(\d+)", re.IGNORECASE)


@functools.lru_cache(maxsize=100_000)
def class_of(name: str) -> str | None:
    """Return the class of a call by its name, or None where the name does not tell."""
    if _PLUMBING.search(name):
        return None
    found = next((found for found, pattern in _CLASSES.items() if pattern.search(name)), None)
    return None if found == "ipc" and _TENSOR.match(name) else found


@functools.lru_cache(maxsize=100_000)
def waits(name: str) -> bool:
    """Whether a call of this name waits for another thread or process; a call that waits for the device does not."""
    return bool(_WAITS.search(name)) and not _CUDA.match(name) and not _TENSOR.match(name)


@functools.lru_cache(maxsize=100_000)
def sends(name: str) -> bool:
    """Whether a call of this name hands something to another thread or process."""
    return bool(_SENDS.search(name)) and not _CUDA.match(name) and not _TENSOR.match(name)


def is_collective(name: str) -> bool:
    """Whether a kernel of this name needs its peers on other devices."""
    return bool(_COLLECTIVE.search(name))


def is_graph_launch(name: str) -> bool:
    return bool(_GRAPH_LAUNCH.match(name))


def is_cpu_collective(name: str) -> bool:
    """Whether a range of this name is the call of a collective, on the thread that makes it."""
    return bool(_CPU_COLLECTIVE.match(name))


def is_transfer(name: str) -> bool:
    """Whether a range of this name is what a backend does for such a call, in a thread of its own."""
    return bool(_TRANSFER.match(name))


@functools.lru_cache(maxsize=100_000)
def normal(name: str) -> str:
    """Return a name without its numbers, by which calls of different steps are the same call."""
    return _DIGITS.sub("#", name)


def short(name: str, most: int = 64) -> str:
    """Return a name that fits into a line: a file without its folders, and the end left out where it is long."""
    name = re.sub(r"^.*/(?=[^/]+\.py\(\d+\): )", "", name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


@functools.lru_cache(maxsize=100_000)
def size_in(name: str) -> float | None:
    """Return batch × length where a name has both, such as `decode batch=8 seq_len=1024`; one of them where it has one."""
    batch, length = _BATCH.search(name), _LENGTH.search(name)
    if not batch and not length:
        return None
    return float(batch[1] if batch else 1) * float(length[1] if length else 1)
