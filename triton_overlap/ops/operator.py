"""How the library's operators are registered: ``torch.library.custom_op``, without what it costs at each call.

A custom operator's kernel runs behind wrappers that check its results for aliases and switch ``torch.compile``'s tracer
off, which imports the tracer first: three seconds in every process, compiled or not, and some microseconds a call.
Here the function itself is the kernel of both devices. ``torch.library.opcheck`` looks for aliases in the tests, and
the tracer is told once to leave the function, and whatever it calls, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._library.custom_ops import CustomOpDef

__all__ = ["COMMUNICATES", "operator"]

#: Of operators that communicate. The host counts their epochs, so ``torch.compile(mode="reduce-overhead")`` must keep
#: them out of its CUDA graphs: with this tag it calls them between two. A graph that one makes by hand can have them,
#: with the count on the device.
COMMUNICATES = (torch.Tag.cudagraph_unsafe,)

_NAMESPACE = "triton_overlap"
_DEVICES = ("CPU", "CUDA")
# Its registrations last as long as it does.
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def _leave_untraced(fn: Callable[..., Any]) -> None:
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))


def operator(
    name: str, *, mutates_args: Iterable[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register the decorated function as ``torch.ops.triton_overlap.<name>`` on CPUs and GPUs.

    Args:
        name: of the operator; one that changes an argument ends in an underscore.
        mutates_args: names of the arguments that it changes.
        tags: of ``torch.Tag``.

    Returns:
        The operator, with ``register_fake`` and ``register_autograd``; the schema follows from the annotations.
    """

    def register(fn: Callable[..., Any]) -> CustomOpDef:
        defined = torch.library.custom_op(f"{_NAMESPACE}::{name}", fn, mutates_args=tuple(mutates_args), tags=tags)
        _leave_untraced(fn)
        for device in _DEVICES:
            _library.impl(name, fn, device)
        return defined

    return register
