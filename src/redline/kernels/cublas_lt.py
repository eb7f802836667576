"""cuBLASLt, as far as products of matrices need it: torch calls it as well, but takes whichever algorithm it names first.

Everything is row-major here. To cuBLASLt, which counts columns first, the same bytes are the transposes, and a product of
transposes has its factors the other way round.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that every matrix and every row of one has to begin on."""
MOST_ALGORITHMS = 32

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F = 68
_TRANSPOSE_A, _TRANSPOSE_B = 3, 4
_MAX_WORKSPACE, *_MIN_ALIGNMENTS = 1, 5, 6, 7, 8
_SUCCESS = 0

_Algorithm = c_uint64 * 8


class _Found(Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(slots=True, frozen=True)
class Matrix:
    """A factor as it lies in memory, with rows without gaps."""

    rows: int
    columns: int
    dtype: torch.dtype
    transposed: bool = False
    """In the product."""


class Product:
    """Two factors of certain shapes, whatever is in them."""

    def __init__(self, left: Matrix, right: Matrix, out: torch.dtype, device: int) -> None:
        """The products of float16 or bfloat16 are summed in float32, then rounded to `out`."""
        self._made: list[tuple[Any, c_void_p]] = []
        self._library, self._handle = _library(), _handle(device)
        rows = left.columns if left.transposed else left.rows
        columns = right.rows if right.transposed else right.columns
        self._description = self._make("MatmulDesc", _COMPUTE_32F, _TYPES[torch.float32])
        self._set("MatmulDesc", self._description, _TRANSPOSE_A, c_int(right.transposed))
        self._set("MatmulDesc", self._description, _TRANSPOSE_B, c_int(left.transposed))
        self._left, self._right, self._out = (
            self._make("MatrixLayout", _TYPES[dtype], c_uint64(width), c_uint64(height), c_int64(width))
            for height, width, dtype in (
                (left.rows, left.columns, left.dtype),
                (right.rows, right.columns, right.dtype),
                (rows, columns, out),
            )
        )

    def _make(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        _check(getattr(self._library, f"cublasLt{kind}Create")(byref(made), *arguments))
        self._made.append((getattr(self._library, f"cublasLt{kind}Destroy"), made))
        return made

    def _set(self, kind: str, what: c_void_p, attribute: int, value: Any) -> None:
        setter = getattr(self._library, f"cublasLt{kind}SetAttribute")
        _check(setter(what, attribute, byref(value), c_size_t(sizeof(value))))

    def __del__(self) -> None:
        for destroy, made in self._made:
            destroy(made)

    def algorithms(self, workspace: int = 0) -> list[Any]:
        """Those that need no more bytes of their own than these, by what cuBLASLt expects of them."""
        preference = self._make("MatmulPreference")
        self._set("MatmulPreference", preference, _MAX_WORKSPACE, c_uint64(workspace))
        for attribute in _MIN_ALIGNMENTS:
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNMENT))
        found, number = (_Found * MOST_ALGORITHMS)(), c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._description, self._right, self._left, self._out, self._out, preference,
            MOST_ALGORITHMS, found, byref(number),
        )  # fmt: skip
        if status != _SUCCESS:
            return []
        return [_Algorithm(*one.algorithm) for one in found[: number.value] if one.status == _SUCCESS]

    def run(
        self, algorithm: Any, left: Tensor, right: Tensor, out: Tensor, *, add: bool = False, workspace: Tensor | None = None
    ) -> bool:
        """Into `out`, or to what it holds; False, and nothing done, where an algorithm found for other shapes cannot. Products
        that share a workspace run one after the other."""
        pointer = out.data_ptr()
        room = (None, 0) if workspace is None else (workspace.data_ptr(), workspace.nbytes)
        status: int = self._library.cublasLtMatmul(
            self._handle, self._description, _ONE, right.data_ptr(), self._right, left.data_ptr(), self._left,
            _ONE if add else _ZERO, pointer, self._out, pointer, self._out,
            algorithm, *room, torch._C._cuda_getCurrentRawStream(out.get_device()),
        )  # fmt: skip
        return status == _SUCCESS


_ONE, _ZERO = byref(c_float(1.0)), byref(c_float(0.0))


def is_there() -> bool:
    return _find_library() is not None


@cache
def _find_library() -> Any | None:
    """The one that torch has loaded."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtMatmul.argtypes = [*[c_void_p] * 12, POINTER(_Algorithm), c_void_p, c_size_t, c_void_p]
    return library


def _library() -> Any:
    library = _find_library()
    assert library is not None, "ask is_there() first"
    return library


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status != _SUCCESS:
        raise RuntimeError(f"cuBLASLt: status {status}")
