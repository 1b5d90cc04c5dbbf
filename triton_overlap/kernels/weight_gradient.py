"""Weight gradient: a GEMM that contracts over the tokens, optionally into an existing fp32 gradient.

Shapes, T tokens::

    a [T, K]   g [T, N]   ->   out [K, N] = a^T @ g, or out += a^T @ g in fp32

T is the contracted dimension, so both operands are zeroed past it: a NaN in one times a zero in the other is a NaN.
Where T is the host's, it ends the descriptors too, and TMA fills in the zeros. Where it is a scalar on the device, the
descriptors go on to the capacity, so the last, partial step reads through masks.
"""

import torch
import triton
import triton.language as tl

from ..comm.device import INTERPRETED
from .config import TileConfig, tile_config
from .launching import launch_kernel_on
from .operands import descriptor, fits_descriptor, input_precision, is_row_major
from .rows import active_rows
from .tiles import MAX_STORE_COLUMNS, dot, split_columns, tile_position


@triton.jit
def store_gradient(out_ptr, stride_ok, stride_on, value, ks, ns, K, N, ACCUMULATE: tl.constexpr):
    """Store rows ``ks`` and columns ``ns`` of a [K, N] gradient of any strides, or add to what is there."""
    mask = (ks < K)[:, None] & (ns < N)[None, :]
    pointers = out_ptr + ks.to(tl.int64)[:, None] * stride_ok + ns.to(tl.int64)[None, :] * stride_on
    if ACCUMULATE:
        value += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, stride, ts, T, columns, num_columns):
    """Rows ``ts`` of a row-major [T, num_columns], zeros where they or the columns end."""
    pointers = ptr + ts.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=(ts < T)[:, None] & (columns < num_columns)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens_ptr", "shards", "T"])
def weight_gradient_kernel(
    tokens_ptr, shards,  # int32 on the device, of which 1 / shards are the rows here, or None; T is the room then
    a_ptr, a_desc, stride_a,  # [T, K]
    g_ptr, g_desc, stride_g,  # [T, N]
    out_ptr, stride_ok, stride_on,  # [K, N], any strides
    T, K, N,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_position(tl.program_id(0), tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    ks = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    ns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    steps = tl.cdiv(T, BLOCK_K)
    if tokens_ptr is not None:
        T = active_rows(tokens_ptr, shards, T)
        steps = T // BLOCK_K  # the partial one comes last
    for step in range(steps):
        if a_desc is not None:
            a = a_desc.load([step * BLOCK_K, tile_m * BLOCK_M])
            g = g_desc.load([step * BLOCK_K, tile_n * BLOCK_N])
        else:
            ts = step * BLOCK_K + tl.arange(0, BLOCK_K)
            a = load_rows(a_ptr, stride_a, ts, T, ks, K)
            g = load_rows(g_ptr, stride_g, ts, T, ns, N)
        acc = dot(a.T, g, acc, PRECISION)
    if tokens_ptr is not None:
        if steps * BLOCK_K < T:
            ts = steps * BLOCK_K + tl.arange(0, BLOCK_K)
            a = load_rows(a_ptr, stride_a, ts, T, ks, K)
            g = load_rows(g_ptr, stride_g, ts, T, ns, N)
            acc = dot(a.T, g, acc, PRECISION)
    if BLOCK_N > MAX_STORE_COLUMNS:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        ns = tile_n * BLOCK_N + tl.arange(0, HALF)
        store_gradient(out_ptr, stride_ok, stride_on, left, ks, ns, K, N, ACCUMULATE)
        store_gradient(out_ptr, stride_ok, stride_on, right, ks, ns + HALF, K, N, ACCUMULATE)
    else:
        store_gradient(out_ptr, stride_ok, stride_on, acc, ks, ns, K, N, ACCUMULATE)


def launch(
    a: torch.Tensor,
    g: torch.Tensor,
    accumulate_into: torch.Tensor | None = None,
    *,
    active_tokens: torch.Tensor | None = None,
    shards: int = 1,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """``a^T @ g``.

    Args:
        a: [T, K].
        g: [T, N] in the dtype of ``a``.
        accumulate_into: fp32 [K, N] of any strides, to which the product is added in fp32; returned. By default the
            product is a fresh [K, N] tensor in the dtype of ``a``.
        active_tokens: int32 scalar on the device: T times ``shards``; T is up to the rows of ``a`` and ``g``, of which
            others have no effect.
        shards: ranks that the tokens are split over.
        config: tile sizes; BLOCK_M runs over K, BLOCK_N over N and BLOCK_K over T.
    """
    k, n = a.shape[1], g.shape[1]
    a = a if is_row_major(a) else a.contiguous()
    g = g if is_row_major(g) else g.contiguous()
    # The contracted length changes from call to call; no tile size may follow it.
    config = config or tile_config(a.dtype, n, 512, interpreted=INTERPRETED.value)
    out = torch.empty(k, n, dtype=a.dtype, device=a.device) if accumulate_into is None else accumulate_into
    descriptors = config.descriptors and fits_descriptor(a) and fits_descriptor(g)
    launch_kernel_on(
        a.device,
        weight_gradient_kernel,
        triton.cdiv(k, config.BLOCK_M) * triton.cdiv(n, config.BLOCK_N),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
        tokens_ptr=active_tokens,
        shards=shards,
        a_ptr=a,
        a_desc=descriptor(a, [config.BLOCK_K, config.BLOCK_M], descriptors),
        stride_a=a.stride(0),
        g_ptr=g,
        g_desc=descriptor(g, [config.BLOCK_K, config.BLOCK_N], descriptors),
        stride_g=g.stride(0),
        out_ptr=out,
        stride_ok=out.stride(0),
        stride_on=out.stride(1),
        T=a.shape[0],
        K=k,
        N=n,
        ACCUMULATE=accumulate_into is not None,
        PRECISION=input_precision(a.dtype),
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        BLOCK_K=config.BLOCK_K,
        GROUP_M=config.GROUP_M,
    )
    return out
