"""CUDA C++ compiled where it runs, by NVRTC, which torch brings along; launched through the driver.

For kernels that Triton cannot say: whose blocks wait for each other, and whose warps have different jobs.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.cache import get_cache_manager

_SUCCESS, _OUT_OF_MEMORY = 0, 2
_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BEGINS_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_TYPES = {torch.bfloat16: 9, torch.float8_e4m3fn: 0}  # of CUtensorMapDataType; 8 bits of any kind are its UINT8
_SWIZZLE_128, _PROMOTE_128 = 3, 2  # of CUtensorMapSwizzle and CUtensorMapL2promotion
_MAP_ALIGNMENT = 64
_SWIZZLED_BYTES = 128


class CompileError(RuntimeError):
    """The source does not compile; its message is NVRTC's."""


def is_there() -> bool:
    return _nvrtc() is not None


def compiled(source: str, name: str, architecture: str, sizes: Mapping[str, int]) -> bytes:
    """A cubin of the source with these macros, from Triton's cache of kernels if it was compiled before."""
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{key}={value}" for key, value in sizes.items())]
    key = "\0".join((source, str(torch.version.cuda), *options))
    cached = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if (file := cached.get_file(f"{name}.cubin")) is not None:
        return Path(file).read_bytes()
    cubin = _compile(source, name, options)
    cached.put(cubin, f"{name}.cubin", binary=True)
    return cubin


def _compile(source: str, name: str, options: list[str]) -> bytes:
    library = _nvrtc()
    assert library is not None, "ask is_there() first"
    program = c_void_p()
    library.nvrtcCreateProgram(byref(program), source.encode(), name.encode(), 0, None, None)
    status = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*(o.encode() for o in options)))
    try:
        if status != _SUCCESS:
            raise CompileError(_text(program, "ProgramLog").decode(errors="replace"))
        return _text(program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(program: c_void_p, what: str) -> bytes:
    library, size = _nvrtc(), c_size_t()
    assert library is not None
    getattr(library, f"nvrtcGet{what}Size")(program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, text)
    return text.raw


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`, of whose values only whole numbers are used here."""

    _fields_ = [("id", c_uint), ("unused", c_uint), ("value", c_int), ("rest", c_int * 15)]


class _Launch(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


TensorMap = c_uint64 * 16
"""`CUtensorMap`: what the copy engine of Hopper knows of a tensor."""


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> ctypes.Array[c_uint64]:
    """For a tensor in bfloat16 or 8 bits that is copied a box at a time: of its last dimension, a contiguous one, 128 bytes,
    which lie in shared memory swizzled, as tensor cores want them. What lies outside the tensor is zeros."""
    assert tensor.stride(-1) == 1
    assert box[-1] * tensor.element_size() == _SWIZZLED_BYTES
    dims = tensor.dim()
    sizes, strides = tensor.shape[::-1], [stride * tensor.element_size() for stride in tensor.stride()[-2::-1]]
    room = ctypes.create_string_buffer(2 * ctypes.sizeof(TensorMap))
    place = -(-ctypes.addressof(room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    status = _driver().cuTensorMapEncodeTiled(
        place, _MAP_TYPES[tensor.dtype], dims, tensor.data_ptr(), (c_uint64 * dims)(*sizes), (c_uint64 * (dims - 1))(*strides),
        (c_uint * dims)(*box[::-1]), (c_uint * dims)(*[1] * dims), 0, _SWIZZLE_128, _PROMOTE_128, 0,
    )  # fmt: skip
    _check(status)
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))


class Kernel:
    """One function of a cubin."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        torch.cuda.current_stream()  # a context
        self._driver, self._module, self._function = _driver(), c_void_p(), c_void_p()
        _check(self._driver.cuModuleLoadData(byref(self._module), cubin))
        _check(self._driver.cuModuleGetFunction(byref(self._function), self._module, name.encode()))
        _check(self._driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_MEMORY, shared_bytes))
        self._shared_bytes = shared_bytes

    def launch_grid(
        self, grid: tuple[int, int], threads: int, arguments: ctypes.Structure, device: int, *, early: bool = False
    ) -> None:
        """On the current stream; can be captured in a CUDA graph. With `early` it begins before the launch in front of it has
        ended, for which its code waits where it has to."""
        attribute = _Attribute(_BEGINS_EARLY, 0, 1)
        stream, size = torch._C._cuda_getCurrentRawStream(device), self._shared_bytes
        launch = _Launch((*grid, 1), (threads, 1, 1), size, stream, ctypes.pointer(attribute), int(early))
        parameters = (c_void_p * 1)(ctypes.addressof(arguments))
        _check(self._driver.cuLaunchKernelEx(byref(launch), self._function, parameters, None))

    def launch(self, blocks: int, threads: int, arguments: ctypes.Structure, device: int) -> None:
        """Blocks that are all on the device at once: they may wait for each other. Otherwise the same."""
        parameters = (c_void_p * 1)(ctypes.addressof(arguments))
        stream = c_void_p(torch._C._cuda_getCurrentRawStream(device))
        size = self._shared_bytes
        _check(self._driver.cuLaunchCooperativeKernel(self._function, blocks, 1, 1, threads, 1, 1, size, stream, parameters))


def _check(status: int) -> None:
    if status != _SUCCESS:
        said = c_char_p()
        _driver().cuGetErrorString(status, byref(said))
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"CUDA: {(said.value or b'unknown error').decode()}")


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchCooperativeKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p)]
    library.cuLaunchKernelEx.argtypes = [POINTER(_Launch), c_void_p, POINTER(c_void_p), c_void_p]
    library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    library.cuTensorMapEncodeTiled.argtypes = [c_void_p, c_int, c_uint, *[c_void_p] * 5, *[c_int] * 4]
    return library


@cache
def _nvrtc() -> Any | None:
    """The one of torch's CUDA, wherever that lies."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    beside_torch = Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}")
    for library in (name, *map(str, beside_torch)):
        try:
            return ctypes.CDLL(library)
        except OSError:
            continue
    return None
