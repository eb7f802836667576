"""What a step of the engine does between its products, on a CPU, in one pass over memory each: `steps.c`.

torch does each of these in several, and gathers keys and values before it attends to them. They round where eager torch rounds,
have no gradient, and give a row the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redline.kernels.cpu.compiled import DTYPES, library
from redline.kernels.cpu.products import Products
from redline.kernels.cpu.quantized import QuantizedProducts

SOURCE = Path(__file__).with_suffix(".c")
LANES = 16
"""Numbers that rows are multiples of; the longest vector's."""
MOST_GROUPED = 16
"""Query heads of a key/value head. Both are `steps.c`'s."""


@cache
def steps_for(dtype: torch.dtype, head_dim: int, grouped: int) -> Steps | None:
    """The functions for such heads; None where there are none here. Compiles them, where it is asked for the first time."""
    if dtype not in DTYPES or head_dim % (2 * LANES) or grouped > MOST_GROUPED:
        return None
    compiled = library(SOURCE, f"-DD={head_dim}", f"-DBFLOAT16={DTYPES[dtype]}")
    return None if compiled is None else Steps(compiled)


class Layer(NamedTuple):
    """The tensors of a layer, as `steps.c` has them; None is what the layer does not have."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    keys: Tensor
    values: Tensor


class Steps:
    """All tensors are contiguous, of one dtype, and rows multiples of `LANES` long."""

    def __init__(self, compiled: object) -> None:
        self._compiled = compiled
        pointers, sizes = [c_void_p] * 5, [c_long] * 2
        compiled.add_rms_norm.argtypes = [*pointers, *sizes, c_float, c_int]  # type: ignore[attr-defined]
        compiled.silu_mul.argtypes = [c_void_p, c_void_p, *sizes, c_int]  # type: ignore[attr-defined]
        compiled.attend.argtypes = [*[c_void_p] * 10, *[c_long] * 6, c_float, c_float, c_int]  # type: ignore[attr-defined]
        arguments = [c_void_p, c_void_p, c_long, *[c_void_p] * 8, *[c_long] * 8, c_float, c_float, c_int]
        compiled.hidden.argtypes = arguments  # type: ignore[attr-defined]

    def add_rms_norm(self, x_TE: Tensor, delta_TE: Tensor | None, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual stream after `delta`, and its RMS norm. Without a delta the stream is returned as it came."""
        sum_TE, normed_TE = x_TE if delta_TE is None else torch.empty_like(x_TE), torch.empty_like(x_TE)
        pointers = _pointers(x_TE, delta_TE, weight_E, sum_TE, normed_TE)
        self._compiled.add_rms_norm(*pointers, *x_TE.shape, eps, torch.get_num_threads())  # type: ignore[attr-defined]
        return sum_TE, normed_TE

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        """silu(gate) · up, [T, I], from the two side by side, [T, 2 · I]."""
        T, both = gate_up_TI.shape
        out_TI = gate_up_TI.new_empty(T, both // 2)
        self._compiled.silu_mul(*_pointers(gate_up_TI, out_TI), T, both // 2, torch.get_num_threads())  # type: ignore[attr-defined]
        return out_TI

    def attend(
        self,
        heads_TND: Tensor,
        keys: Tensor,
        values: Tensor,
        positions_T: Tensor,
        lines_T: Tensor,
        tables_LN: Tensor,
        rotary: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        norm_eps: float,
    ) -> Tensor:
        """[T, H, D]: attention of each token to itself and all before it in its line, from the fused projection on.

        `keys` and `values` are one layer's cache [blocks, block size, K, D], and the tokens' are written there; `tables_LN`
        int64, the blocks of a line; `rotary` cos and sin [2, positions, D / 2]. A position is never negative."""
        (T, N, D), (_, block, K, _) = heads_TND.shape, keys.shape
        out_THD = heads_TND.new_empty(T, N - 2 * K, D)
        pointers = _pointers(
            heads_TND, keys, values, *(norms or (None, None)), rotary, positions_T, lines_T, tables_LN, out_THD
        )
        sizes = (T, N - 2 * K, K, block, tables_LN.shape[1], rotary.shape[1])
        self._compiled.attend(*pointers, *sizes, norm_eps, D**-0.5, torch.get_num_threads())  # type: ignore[attr-defined]
        return out_THD

    def hidden(
        self,
        products: Products | QuantizedProducts,
        layers: Sequence[Layer],
        norm_E: Tensor,
        x_TE: Tensor,
        places: tuple[Tensor, Tensor, Tensor],
        rotary: Tensor,
        norm_eps: float,
        sizes: tuple[int, int],
    ) -> Tensor:
        """[T, E]: the network from the embedded tokens, which are used up, to its last norm, by products of its dtype.
        `places` are positions, lines and tables as of `attend`, `sizes` the query heads and the MLP's inner numbers. The
        weights of `layers` are what `products` takes."""
        (T, E), (_, block, K, D), (H, inner) = x_TE.shape, layers[0].keys.shape, sizes
        normed_TE = torch.empty_like(x_TE)
        scratch = x_TE.new_empty(T * (E + (H + 2 * K) * D + H * D + 3 * inner))
        pointers = [pointer for layer in layers for pointer in _pointers(*layer)]
        self._compiled.hidden(  # type: ignore[attr-defined]
            products.address,
            (c_void_p * len(pointers))(*pointers),
            len(layers),
            *_pointers(norm_E, x_TE, normed_TE, scratch, rotary, *places),
            *(T, E, inner, H, K, block, places[2].shape[1], rotary.shape[1]),
            *(norm_eps, D**-0.5, torch.get_num_threads()),
        )
        return normed_TE


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
