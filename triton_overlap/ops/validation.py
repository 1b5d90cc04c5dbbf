"""What every operation checks before it communicates.

All of it is local and reads no device memory, so a mistake that one rank can see alone is an error there before any
peer hears of the call, and neither the buffer nor the group changes.

Functions check the types of their arguments first, which a compiler traces without a guard on a shape: ``handle_of``,
``text_of``, ``check_tensors`` and their kin. Everything else is checked in the operations' real kernels, which no
compiler traces: no symbolic token count gets a guard from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import check_int, described
from ..comm.user_buffers import Communicator, UserBuffer, inside_backward, user_buffer_by_handle
from ..errors import ActiveShapeError
from ..kernels.methods import APPLICABLE, Method, missing_part, parse_for
from .gemm_methods import GemmMethods, backward_operations

#: dtypes that a product beside a collective may have: what torch multiplies on every device, and can differentiate.
PRODUCT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# Types, in the functions ---------------------------------------------------------------------------------------------


def handle_of(operation: str, buffer: UserBuffer | Communicator) -> str:
    """The handle of ``buffer``; TypeError unless it is a user buffer, or a communicator of one."""
    if not isinstance(buffer, (UserBuffer, Communicator)):
        remedy = (
            f"user_buffer_by_handle({buffer!r}) finds a buffer by its handle"
            if isinstance(buffer, str)
            else "group.user_buffer(max_tokens, hidden, dtype) makes one"
        )
        raise TypeError(
            f"{operation}: buffer must be a UserBuffer or a communicator of get_ub, got {described(buffer)}; {remedy}"
        )
    return buffer.handle


def text_of(operation: str, method: str | Method | GemmMethods) -> str:
    """``method`` as operators take it; TypeError unless it is a string, a ``Method`` or a ``GemmMethods``."""
    if not isinstance(method, (str, Method, GemmMethods)):
        raise TypeError(
            f"{operation}: method must be a Method or the name of one, got {described(method)}; "
            f"methods that apply here: {', '.join(map(repr, APPLICABLE[operation]))}"
        )
    return str(method)


def check_tensors(operation: str, **tensors: Tensor) -> None:
    """TypeError for an argument that is no tensor, ValueError for a tensor that holds no dense data."""
    for name, value in tensors.items():
        if not _is_usable(value):
            raise _unusable(operation, name, value, "a torch.Tensor")


def check_optional_tensors(operation: str, **tensors: Tensor | None) -> None:
    """``check_tensors`` for arguments that may be None."""
    for name, value in tensors.items():
        if value is not None and not _is_usable(value):
            raise _unusable(operation, name, value, "a torch.Tensor or None")


def check_count_types(operation: str, active_tokens: Tensor | None, shards: int) -> None:
    """TypeError unless the count is a tensor or None, and ``shards`` an int."""
    check_optional_tensors(operation, active_tokens=active_tokens)
    check_int(operation, "shards", shards)


def listed_tensors(operation: str, name: str, values: Sequence[Tensor]) -> list[Tensor]:
    """``values``, the argument ``name`` that may be one tensor or several, as a list of checked tensors."""
    _check_sequence(operation, name, values)
    for index, value in enumerate(values):
        if not _is_usable(value):
            raise _unusable(operation, f"{name}[{index}]", value, "a torch.Tensor")
    return list(values)


def listed_optional_tensors(
    operation: str, name: str, values: Tensor | Sequence[Tensor | None] | None, count: int
) -> list[Tensor | None]:
    """As ``listed_tensors``, with one tensor or None for each of ``count`` b's; None stands for none at all."""
    if values is None:
        return [None] * count
    if isinstance(values, Tensor):
        raise ValueError(
            f"{operation}: {name} must be a tensor where b is one, and a list where b is a list; got one tensor for a "
            f"list of {count}"
        )
    _check_sequence(operation, name, values)
    check_one_per_b(operation, name, values, count)
    for index, value in enumerate(values):
        if value is not None and not _is_usable(value):
            raise _unusable(operation, f"{name}[{index}]", value, "a torch.Tensor or None")
    return list(values)


def refuse_list(operation: str, name: str, value: Tensor | Sequence[Tensor | None] | None) -> Tensor | None:
    """``value``, which goes with one b; ValueError where it is a list all the same."""
    if isinstance(value, (list, tuple)):
        raise ValueError(
            f"{operation}: {name} must be a tensor where b is one, and a list where b is a list; got a "
            f"{type(value).__name__} of {len(value)} for one b"
        )
    return value  # type: ignore[return-value]  # what else it may be, check_optional_tensors says


def _check_sequence(operation: str, name: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, (Sequence, torch.nn.ParameterList)):
        given = f"{described(values)}{_from_numpy(values)}"
        raise TypeError(f"{operation}: {name} must be a torch.Tensor or a list of them, got {given}")


def _is_usable(value: object) -> bool:
    # Tensors without data, and nested ones, reach no real kernel that could refuse them.
    return isinstance(value, Tensor) and not value.is_meta and not value.is_nested


def _unusable(operation: str, name: str, value: object, allowed: str) -> Exception:
    """The error for an argument that is not usable, with the remedy."""
    if not isinstance(value, Tensor):
        return TypeError(f"{operation}: {name} must be {allowed}, got {described(value)}{_from_numpy(value)}")
    if value.is_nested:
        return ValueError(
            f"{operation}: {name} must be a dense tensor, got a nested one; give its rows one after another, as "
            "torch.cat(x.unbind()) does"
        )
    return ValueError(
        f"{operation}: {name} must hold data, got a tensor on the meta device; materialize it first, for instance with "
        "Module.to_empty"
    )


def _from_numpy(value: object) -> str:
    return "; torch.from_numpy makes a tensor of it" if type(value).__module__ == "numpy" else ""


# Values, in the real kernels -----------------------------------------------------------------------------------------


def world_size_of(handle: str) -> int:
    """Ranks of the buffer's group: all that a fake kernel has to know."""
    return user_buffer_by_handle(handle).group.world_size


def check_method(operation: str, buffer: UserBuffer, text: str, active_tokens: Tensor | None = None) -> Method:
    """The method that ``text`` names.

    Raises:
        ValueError: unknown, or not for this operation; says which are. Or the buffer wants a count on the device and
            there is none, or the other way round.
        NotImplementedError: the buffer's backend lacks what it needs, or it takes its sizes from the host.
    """
    method = parse_for(operation, text)
    check_count(operation, buffer, active_tokens)
    if active_tokens is not None:
        if method.name == "auto":
            return Method("fused")  # the only one that can: tables go by the host's count
        if method.name != "fused" or method.use_ce:
            raise NotImplementedError(
                f"{operation}: method {text!r} takes its sizes from the host, and active_tokens is on the device; "
                "use 'fused'"
            )
    backend = buffer.group.backend
    missing = missing_part(
        method,
        backend.world_size,
        copies=backend.copies is not None,
        collectives=backend.collectives is not None,
    )
    if missing == "copies":
        raise NotImplementedError(
            f"{operation}: method {text!r} wants a copy engine, and the {backend.name} backend has none; "
            "give use_ce=False"
        )
    if missing == "collectives":
        raise NotImplementedError(
            f"{operation}: method 'nccl' needs the collectives of a torch.distributed process group, and the "
            f"{backend.name} backend has none; use 'ring_exchange', or a group over rank processes"
        )
    return method


def check_methods(operation: str, buffer: UserBuffer, text: str, active_tokens: Tensor | None = None) -> Method:
    """The method of a product's forward pass, where ``text`` may name those of its backward pass too.

    Raises:
        ValueError: unknown, or not for the operation that it would do; says which are. Or as ``check_count``.
        NotImplementedError: the buffer's backend lacks what one needs, or it takes its sizes from the host.
    """
    if ";" not in text:
        return check_method(operation, buffer, text, active_tokens)
    methods = GemmMethods.parse(text)
    for backward_operation, method in backward_operations(operation, methods):
        check_method(backward_operation, buffer, method, active_tokens)
    return check_method(operation, buffer, methods.fprop, active_tokens)


def check_count(operation: str, buffer: UserBuffer, active_tokens: Tensor | None) -> None:
    """ValueError unless ``active_tokens`` is what the buffer's calls want (``UserBuffer.check_count``)."""
    try:
        buffer.check_count(active_tokens)
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None


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
    check_tensor(operation, buffer, name, x)
    tokens = x.shape[0] * buffer.group.world_size if is_shard else x.shape[0]
    hidden = x.shape[1] if is_hidden else buffer.capacity_shape[1]
    # Backward and recomputation use the count of their own forward, whatever active shape is set by now.
    forward = not inside_backward()
    try:
        buffer.validate((tokens, hidden), x.dtype, x.device, forward=forward)
    except ActiveShapeError as error:
        raise ActiveShapeError(f"{operation}: {name} {list(x.shape)}: {error}") from None
    return tokens


def check_tensor(operation: str, buffer: UserBuffer, name: str, x: Tensor) -> None:
    """ValueError unless ``x`` is dense, and dtype and device are the buffer's."""
    check_dense(operation, name, x)
    if x.dtype != buffer.dtype:
        remedy = "dequantize it" if x.is_quantized else "cast it or use a buffer registered with that dtype"
        raise ValueError(f"{operation}: {name} is {x.dtype}, the buffer is {buffer.dtype}; {remedy}")
    if x.device != buffer.group.device:
        raise ValueError(f"{operation}: {name} is on {x.device}, the group is on {buffer.group.device}; move it there")


def check_dense(operation: str, name: str, x: Tensor) -> None:
    """ValueError unless ``x`` is an ordinary strided tensor: kernels read memory by strides."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"{operation}: {name} must be a dense tensor, its layout is {x.layout}; x.to_dense() makes one"
        )


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
    """ValueError unless ``main_grad`` is a float32 tensor of ``b``'s shape and device, with memory for each element,
    that asks for no gradient."""
    check_dense(operation, "main_grad", main_grad)
    if main_grad.dtype != torch.float32:
        raise ValueError(
            f"{operation}: main_grad must be torch.float32, got {main_grad.dtype}; "
            "it accumulates gradients of any dtype in float32"
        )
    if main_grad.shape != b.shape:
        raise ValueError(f"{operation}: main_grad must have b's shape {list(b.shape)}, got {list(main_grad.shape)}")
    if main_grad.device != b.device:
        raise ValueError(f"{operation}: main_grad is on {main_grad.device}, b is on {b.device}; move it there")
    if main_grad.requires_grad:
        raise ValueError(f"{operation}: main_grad must not require a gradient itself")
    if any(size > 1 and stride == 0 for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)):
        raise ValueError(f"{operation}: main_grad must not be expanded, which would add up in one place; clone it")


def check_residual(operation: str, buffer: UserBuffer, residual: Tensor, shape: tuple[int, int]) -> None:
    """ValueError unless ``residual`` has ``shape``, and the buffer's dtype and device."""
    check_tensor(operation, buffer, "residual", residual)
    if tuple(residual.shape) != shape:
        raise ValueError(
            f"{operation}: residual must be [T/W, N] = {list(shape)}, this rank's rows, got {list(residual.shape)}"
        )


def check_right_operand(
    operation: str,
    buffer: UserBuffer,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    contracted: int,
    columns: int | None = None,
) -> None:
    """``check_weight``, with the bias and the main gradient that belong to ``b``."""
    check_weight(operation, buffer, b, contracted, columns)
    if bias is not None:
        check_bias(operation, buffer, bias, b)
    if main_grad is not None:
        check_main_grad(operation, main_grad, b)


def check_reduced_product(
    operation: str,
    buffer: UserBuffer,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    main_grad: Tensor | None,
    method: str,
    active_tokens: Tensor | None = None,
) -> tuple[int, Method]:
    """Check the operands of a product whose result goes through the buffer; the token count T and the method."""
    by = check_methods(operation, buffer, method, active_tokens)
    tokens = check_activation(operation, buffer, "a", a, is_shard=False, is_hidden=False)
    check_right_operand(operation, buffer, b, bias, main_grad, a.shape[1], buffer.capacity_shape[1])
    return tokens, by


def check_local_product(operation: str, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """ValueError unless ``a @ b + bias`` can be computed on the device of ``x``, whatever else goes on there."""
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"{operation}: a [M, K] and b [K, N] expected, got {list(a.shape)} and {list(b.shape)}")
    if bias is not None and list(bias.shape) != [b.shape[1]]:
        raise ValueError(f"{operation}: bias must have shape [{b.shape[1]}], got {list(bias.shape)}")
    for name, tensor in (("a", a), ("b", b), ("bias", bias)):
        if tensor is None:
            continue
        check_dense(operation, name, tensor)
        if tensor.dtype != a.dtype:
            raise ValueError(f"{operation}: a is {a.dtype}, {name} is {tensor.dtype}; they must agree")
        if tensor.device != x.device:
            raise ValueError(f"{operation}: {name} is on {tensor.device}, the tensor to move is on {x.device}")
    if a.dtype not in PRODUCT_DTYPES:
        raise ValueError(f"{operation}: a must be one of {', '.join(map(str, PRODUCT_DTYPES))}, got {a.dtype}; cast it")


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
