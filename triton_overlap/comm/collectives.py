"""Collectives of a ``torch.distributed`` process group, as backends offer them (``comm.backend.Collectives``)."""

from __future__ import annotations

import torch
import torch.distributed as dist


class ProcessGroupCollectives:
    """Over ``process_group``, whose ranks are those of the group.

    A gloo group moves GPU tensors through host memory, with a synchronisation: right, but of no use for speed.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self._through_host = dist.get_backend(process_group) == dist.Backend.GLOO

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self._through_host and x.device.type != "cpu":
            gathered = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            dist.all_gather_into_tensor(gathered, x.cpu(), group=self._group)
            out.copy_(gathered)
        else:
            dist.all_gather_into_tensor(out, x, group=self._group)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        if self._through_host and x.device.type != "cpu":
            part = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            dist.reduce_scatter_tensor(part, x.cpu(), group=self._group)
            out.copy_(part)
        else:
            dist.reduce_scatter_tensor(out, x, group=self._group)
