"""``ExpertBuffer``: dispatch of tokens to the ranks of their experts, and combine of what these made of them.

buffer.py     the buffer and its calls
handle.py     what a dispatch leaves for its combine
memory.py     symmetric memory, signals and the tables that kernels get
rules.py      what the arguments of a call must be
settings.py   what a buffer is made from, and the layout that follows
"""

from __future__ import annotations

from .buffer import ExpertBuffer, expert_buffer_by_handle
from .handle import EpHandle

__all__ = ["EpHandle", "ExpertBuffer", "expert_buffer_by_handle"]
