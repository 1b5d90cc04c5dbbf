"""What ranks do in the tests of token counts on the device."""

from __future__ import annotations

import torch

from triton_overlap.comm.group import Group
from triton_overlap.kernels import all_gather, all_gather_matmul, gathered, matmul_reduce_scatter, reduce_scatter


def launches(group: Group, counts: list[int], capacity: int = 64, k: int = 48, n: int = 40) -> None:
    """Every kernel at each count gives the bits of the same kernel told the count by the host, and nothing past it."""
    device, world = group.device, group.world_size
    generator = torch.Generator().manual_seed(7 + group.rank)
    count = torch.zeros((), dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        counted = {h: group.user_buffer(capacity, h, dtype, device_count=True) for h in (k, n)}
        plain = {h: group.user_buffer(capacity, h, dtype) for h in (k, n)}
        for tokens in counts:
            rows = tokens // world
            x = torch.full((capacity // world, k), float("nan"), dtype=dtype, device=device)
            x[:rows] = torch.randn(rows, k, generator=generator).to(dtype)
            a = torch.full((capacity, k), float("nan"), dtype=dtype, device=device)
            a[:tokens] = torch.randn(tokens, k, generator=generator).to(dtype)
            b = torch.randn(k, n, generator=generator).to(device, dtype)
            count.fill_(tokens)
            out = all_gather_matmul.launch(counted[k], x, b, active_tokens=count, gather=True)
            rows_out = gathered.launch(counted[k], capacity, count)
            expected = all_gather_matmul.launch(plain[k], x[:rows], b, gather=True, sender="programs")
            expected_rows = gathered.launch(plain[k], tokens)
            assert torch.equal(out[:tokens], expected)
            assert torch.equal(rows_out[:tokens], expected_rows)
            assert out[tokens:].isnan().all()
            assert rows_out[tokens:].isnan().all()
            out = matmul_reduce_scatter.launch(counted[n], a, b, active_tokens=count)
            expected = matmul_reduce_scatter.launch(plain[n], a[:tokens], b)
            assert torch.equal(out[:rows], expected)
            assert out[rows:].isnan().all()
            all_gather.launch(counted[k], x, active_tokens=count)
            assert torch.equal(gathered.launch(counted[k], capacity, count)[:tokens], expected_rows)
            out = reduce_scatter.launch(counted[k], a, active_tokens=count)
            assert torch.equal(out[:rows], reduce_scatter.launch(plain[k], a[:tokens]))
            assert out[rows:].isnan().all()
