"""What ranks do in the tests of activations and residuals inside the fused kernels."""

from __future__ import annotations

import torch

from triton_overlap.comm.group import Group
from triton_overlap.kernels import activation, all_gather_matmul, matmul_reduce_scatter
from triton_overlap.kernels.epilogue import Epilogue

#: (function, gated)
EPILOGUES = (("gelu_tanh", False), ("silu", True), ("gelu_erf", False), ("gelu_tanh", True))


def activations(group: Group, rows: int, k: int, features: int, dtype: torch.dtype, device_count: bool) -> None:
    """Fused with its activation, a product has the bits of the activation's own kernel on the plain product."""
    capacity = (rows + 3) * group.world_size
    tokens = rows * group.world_size
    buffer = group.user_buffer(capacity, k, dtype, device_count=device_count)
    count = torch.full((), tokens, dtype=torch.int32, device=group.device) if device_count else None
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(rows, k, generator=generator).to(group.device, dtype)
    if device_count:
        x = torch.cat([x, torch.full((3, k), float("nan"), dtype=dtype, device=group.device)])
    for number, (function, gated) in enumerate(EPILOGUES):
        # Both layouts of b, with a bias and without, the product kept and not: all pairs of them, not all together.
        n = 2 * features if gated else features
        weight = torch.randn(n, k, generator=generator).to(group.device, dtype) / k**0.5
        b = weight.t() if number % 2 else weight.t().contiguous()
        bias = weight[:, 0].clone() if number // 2 else None
        plain = all_gather_matmul.launch(buffer, x, b, bias, active_tokens=count)[:tokens]
        expected = activation.launch(plain, function, gated=gated)
        product = torch.full((x.shape[0] * group.world_size, n), float("nan"), dtype=dtype, device=group.device)
        kept = product if number in (0, 3) else None
        epilogue = Epilogue(function, gated, kept)
        out = all_gather_matmul.launch(buffer, x, b, bias, epilogue=epilogue, active_tokens=count)
        assert torch.equal(out[:tokens], expected), f"{function}, gated {gated}"
        assert out[tokens:].isnan().all()
        if kept is not None:
            assert torch.equal(kept[:tokens], plain)
            assert kept[tokens:].isnan().all()


def residuals(group: Group, rows: int, k: int, n: int, dtype: torch.dtype) -> None:
    """A residual is added in float32 before the one rounding: in float32 the bits of adding it afterwards."""
    tokens = rows * group.world_size
    buffer = group.user_buffer(tokens, n, dtype)
    generator = torch.Generator().manual_seed(group.rank)
    a = torch.randn(tokens, k, generator=generator).to(group.device, dtype)
    b = torch.randn(k, n, generator=generator).to(group.device, dtype)
    residual = torch.randn(rows, n, generator=generator).to(group.device, dtype)
    out = matmul_reduce_scatter.launch(buffer, a, b, residual=residual)
    plain = matmul_reduce_scatter.launch(buffer, a, b)
    if dtype == torch.float32:
        assert torch.equal(out, plain + residual)
    else:
        step = 2 * torch.finfo(dtype).eps  # of the sum, and of the sum with the residual; twice, where they are cut off
        assert bool(((out - (plain + residual)).abs() <= step * (plain.abs() + residual.abs())).all())
    strided = torch.cat([residual, residual], dim=1)[:, :n]
    assert torch.equal(matmul_reduce_scatter.launch(buffer, a, b, residual=strided), out)
