"""What every operation checks before it communicates.

All of it is local and reads no device memory, so a mistake that one rank can see alone is an error there before any
peer hears of the call, and neither the buffer nor the group changes. Checks run in the operations' real kernels, not
while a compiler traces them: no symbolic token count gets a guard from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.user_buffers import UserBuffer, user_buffer_by_handle
from ..errors import ActiveShapeError
from ..kernels.methods import Method, parse_for


def world_size_of(handle: str) -> int:
    """Ranks of the buffer's group: all that a fake kernel has to know."""
    return user_buffer_by_handle(handle).group.world_size


def check_method(operation: str, buffer: UserBuffer, text: str) -> Method:
    """The method that ``text`` names.

    Raises:
        ValueError: unknown, or not for this operation; says which are.
        NotImplementedError: the buffer's backend lacks what it needs.
    """
    method = parse_for(operation, text)
    backend = buffer.group.backend
    if method.use_ce and backend.copies is None:
        raise NotImplementedError(
            f"{operation}: method {text!r} wants a copy engine, and the {backend.name} backend has none; "
            "give use_ce=False"
        )
    if method.name == "nccl" and buffer.group.world_size > 1 and backend.collectives is None:
        raise NotImplementedError(
            f"{operation}: method 'nccl' needs the collectives of a torch.distributed process group, and the "
            f"{backend.name} backend has none; use 'ring_exchange', or a group over rank processes"
        )
    return method


def check_activation(
    operation: str, buffer: UserBuffer, name: str, x: Tensor, *, is_shard: bool, is_hidden: bool
) -> int:
    """Check an activation against its buffer and return the token count T.

    Args:
        operation: for the message.
        buffer: the call's buffer.
        name: of the argument, for the message.
        x: [T, C], or [T/W, C] where ``is_shard``.
        is_shard: whether ``x`` holds this rank's tokens only.
        is_hidden: whether C has to be the buffer's hidden size.

    Raises:
        ActiveShapeError: a rule of the active shape is broken.
        ClosedError: the buffer was closed.
        ValueError: dtype or device differ from the buffer's.
    """
    if x.dim() != 2:
        raise ActiveShapeError(
            f"{operation}: {name} must have 2 dimensions, got {x.dim()} ({list(x.shape)}); flatten the leading ones"
        )
    tokens = x.shape[0] * buffer.group.world_size if is_shard else x.shape[0]
    hidden = x.shape[1] if is_hidden else buffer.capacity_shape[1]
    buffer.validate((tokens, hidden), x.dtype, x.device, forward=not _inside_backward())
    check_tensor(operation, buffer, name, x)
    return tokens


def check_tensor(operation: str, buffer: UserBuffer, name: str, x: Tensor) -> None:
    """ValueError unless dtype and device are the buffer's."""
    if x.dtype != buffer.dtype:
        raise ValueError(
            f"{operation}: {name} is {x.dtype}, the buffer is {buffer.dtype}; "
            "cast it or use a buffer registered with that dtype"
        )
    if x.device != buffer.group.device:
        raise ValueError(f"{operation}: {name} is on {x.device}, the group is on {buffer.group.device}; move it there")


def check_weight(operation: str, buffer: UserBuffer, b: Tensor, contracted: int, columns: int | None = None) -> None:
    """ValueError unless ``b`` is [contracted, columns] with the buffer's dtype and device; None takes any columns."""
    if b.dim() != 2:
        raise ValueError(f"{operation}: b must have 2 dimensions, got {b.dim()} ({list(b.shape)})")
    check_tensor(operation, buffer, "b", b)
    if b.shape[0] != contracted:
        raise ValueError(
            f"{operation}: b has {b.shape[0]} rows, the other operand has {contracted} columns; they must agree"
        )
    if b.shape[1] == 0 or contracted == 0:
        raise ValueError(f"{operation}: b must not be empty, got {list(b.shape)}")
    if columns is not None and b.shape[1] != columns:
        raise ValueError(
            f"{operation}: b has {b.shape[1]} columns, the buffer's hidden size is {columns}; "
            "use a buffer registered with that hidden size"
        )


def check_bias(operation: str, buffer: UserBuffer, bias: Tensor, b: Tensor) -> None:
    """ValueError unless ``bias`` is [N] for ``b`` [K, N], with the buffer's dtype and device."""
    check_tensor(operation, buffer, "bias", bias)
    if list(bias.shape) != [b.shape[1]]:
        raise ValueError(f"{operation}: bias must have shape [{b.shape[1]}], got {list(bias.shape)}")


def check_main_grad(operation: str, main_grad: Tensor, b: Tensor) -> None:
    """ValueError unless ``main_grad`` is a float32 tensor of ``b``'s shape and device that asks for no gradient."""
    if main_grad.dtype != torch.float32:
        raise ValueError(f"{operation}: main_grad must be torch.float32, got {main_grad.dtype}")
    if main_grad.shape != b.shape:
        raise ValueError(f"{operation}: main_grad must have b's shape {list(b.shape)}, got {list(main_grad.shape)}")
    if main_grad.device != b.device:
        raise ValueError(f"{operation}: main_grad is on {main_grad.device}, b is on {b.device}; move it there")
    if main_grad.requires_grad:
        raise ValueError(f"{operation}: main_grad must not require a gradient itself")


def check_one_per_b(operation: str, name: str, values: Sequence[object], count: int) -> None:
    """ValueError unless there is one of ``values`` for each of ``count`` b's."""
    if len(values) != count:
        raise ValueError(f"{operation}: {count} b were given but {len(values)} {name}; give one for each, or None")


def refuse_double_backward(operation: str) -> None:
    """NotImplementedError where autograd wants the gradient of a gradient."""
    # Grad mode inside a backward pass is create_graph.
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{operation} cannot be differentiated twice; call backward() or grad() without create_graph=True"
        )


def _inside_backward() -> bool:
    # Backward and recomputation use the count of their own forward, whatever active shape is set by now. Both run
    # inside the autograd engine on the thread that evaluates the graph; torch.utils.checkpoint asks the same question.
    return torch._C._current_graph_task_id() != -1
