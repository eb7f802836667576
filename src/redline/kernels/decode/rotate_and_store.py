"""What happens to a prompt's heads between the fused projection and attention, in one pass: norm, rotation, cache write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.decode.rotary import angles, rotated


def rotate_and_store(
    heads_TND: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    rotary: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    norm_eps: float = 0.0,
    *,
    in_place: bool = True,
) -> None:
    """Norm and rotate the H query and K key heads of every token in place, and store its keys and values at its slot. Not
    `in_place`, the heads are left as they are.

    `heads_TND` is the output of the fused projection, N = H + 2 · K. `keys` and `values` are one layer's cache
    [blocks, K, block size, D]. The rest is as in `decode_attention`."""
    (T, N, D), (_, K, page, _) = heads_TND.shape, keys.shape
    assert all(tensor.is_contiguous() for tensor in (heads_TND, keys, values))
    q_norm, k_norm = norms or (None, None)
    if T:
        _rotate_and_store[(T,)](
            heads_TND, keys, values, positions_T, slots_T, rotary, rotary.shape[1], q_norm, k_norm, norm_eps,
            H=N - 2 * K, K=K, D=D, PAGE=page, IN_PLACE=in_place, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_positions"])
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads, keys, values, positions, slots, rotary, num_positions, q_norm, k_norm, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    own = heads + token * (H + 2 * K) * D
    d = tl.arange(0, D)
    head_K = tl.arange(0, triton.next_power_of_2(K))
    cos_D, sin_D = angles(tl.load(positions + token), rotary, num_positions, D)
    k_KD = rotated(own, H + head_K, head_K < K, k_norm, eps, cos_D, sin_D, D)
    v_KD = tl.load(own + (H + K + head_K)[:, None] * D + d[None, :], mask=(head_K < K)[:, None], other=0.0)
    if IN_PLACE:
        query_Q = tl.arange(0, triton.next_power_of_2(H))
        q_QD = rotated(own, query_Q, query_Q < H, q_norm, eps, cos_D, sin_D, D)
        # A head's halves are read by other threads than those that write them.
        tl.debug_barrier()
        tl.store(own + query_Q[:, None] * D + d[None, :], q_QD, mask=(query_Q < H)[:, None])
        tl.store(own + (H + head_K)[:, None] * D + d[None, :], k_KD, mask=(head_K < K)[:, None])
    slot = tl.load(slots + token)
    at_KD = ((slot // PAGE * K + head_K) * PAGE + slot % PAGE)[:, None] * D + d[None, :]
    tl.store(keys + at_KD, k_KD, mask=(head_K < K)[:, None])
    tl.store(values + at_KD, v_KD, mask=(head_K < K)[:, None])
