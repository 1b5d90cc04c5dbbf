"""What compilers must know of operators beyond their schemas."""

from __future__ import annotations

import torch

__all__ = ["COMMUNICATES"]

#: Of operators that communicate. The host counts their epochs, so ``torch.compile(mode="reduce-overhead")`` must keep
#: them out of its CUDA graphs: with this tag it calls them between two. A graph that one makes by hand can have them,
#: with the count on the device.
COMMUNICATES = (torch.Tag.cudagraph_unsafe,)
