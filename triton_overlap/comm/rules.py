"""What a timeout, the capacity of a user buffer, an active shape and a count on the device must be. A broken rule is an
error that names it, what was given and what is allowed; nothing is allocated or sent then."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from ..errors import ActiveShapeError
from .layout import BufferLayout

#: Rows and columns at most: kernels, headers and descriptors count both in 32 bits.
_MOST_ROWS = 2**31 - 1
#: Bytes at most: what a process can address. Backends refuse less, where they find no room.
_MOST_BYTES = 2**47
#: A month. The device counts a wait's nanoseconds in 64 bits.
LONGEST_TIMEOUT_S = 30 * 86400.0
#: dtypes that a buffer may have, and the rows that kernels take.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_timeout(timeout_s: object) -> None:
    """TypeError or ValueError unless ``timeout_s`` is a positive number of seconds that a device can count."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be a number of seconds, int or float, got {timeout_s!r}; float() makes it one")
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout_s must be positive seconds, at most {LONGEST_TIMEOUT_S:g}, got {timeout_s!r}")


def check_active_shape(shape: Sequence[int], capacity: tuple[int, int], world_size: int) -> tuple[int, int]:
    """``shape`` as a tuple of two ints, or an ``ActiveShapeError`` that names the rule it breaks."""
    not_integers: TypeError | None = None
    dims: tuple[int, ...] = ()
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError as error:
        not_integers = error
    if len(dims) == 2 and 0 < dims[0] <= capacity[0] and dims[1] == capacity[1] and not dims[0] % world_size:
        return dims  # at every call: the words below take longer than the rest
    allowed = f"[tokens, {capacity[1]}] with 0 < tokens <= {capacity[0]} and tokens divisible by {world_size}"
    if not_integers is not None:
        raise ActiveShapeError(
            f"active shape must be two integers, got {shape!r}; allowed: {allowed}"
        ) from not_integers
    if len(dims) != 2:
        raise ActiveShapeError(f"active shape must be two-dimensional, got {dims}; allowed: {allowed}")
    tokens, hidden = dims
    if tokens <= 0 or hidden <= 0:
        raise ActiveShapeError(f"active shape must be nonzero, got {dims}; allowed: {allowed}")
    if hidden != capacity[1]:
        raise ActiveShapeError(
            f"hidden size must stay {capacity[1]}, got {dims}; allowed: {allowed}; a buffer is for one hidden size, "
            "K of a gathered operand and N of a reduced product: register another for this one"
        )
    if tokens > capacity[0]:
        raise ActiveShapeError(
            f"active shape must be within the capacity {capacity}, got {dims}; allowed: {allowed}; "
            "register a larger max_tokens"
        )
    raise ActiveShapeError(
        f"tokens must be divisible by the group size {world_size}, got {dims}; allowed: {allowed}; "
        "triton_overlap.packing.pad_packed adds the missing tokens as a document of their own"
    )


def check_capacity(
    what: str, world_size: int, max_tokens: object, hidden: object, dtype: object, device_count: object = False
) -> tuple[int, int, torch.dtype, bool]:
    """The arguments as they are, or TypeError or ValueError with the rule of a buffer that they break. Local."""
    sizes = []
    for name, size in (("max_tokens", max_tokens), ("hidden", hidden)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{what}: {name} must be an int, got {size!r}; int() makes it one")
        if size > _MOST_ROWS:
            raise ValueError(
                f"{what}: {name} must be at most {_MOST_ROWS}, since kernels count in 32 bits, got {size}; give what "
                "the largest call needs"
            )
        sizes.append(size)
    allowed = ", ".join(map(str, DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{what}: dtype must be a torch.dtype, got {dtype!r}; allowed: {allowed}")
    if not isinstance(device_count, bool):
        raise TypeError(f"{what}: device_count must be True or False, got {device_count!r}; bool() makes it one")
    if dtype not in DTYPES:
        raise ValueError(f"{what}: dtype must be one of {allowed}, got {dtype}")
    if min(sizes) <= 0:
        raise ValueError(f"{what}: capacity must be positive, got {sizes}; give the tokens and columns of calls")
    if sizes[0] % world_size:
        raise ValueError(
            f"{what}: max_tokens must be divisible by the group size {world_size}, got {sizes[0]}; the next "
            f"larger one is {-(-sizes[0] // world_size) * world_size}"
        )
    num_bytes = BufferLayout(world_size, sizes[0], sizes[1], dtype.itemsize).num_bytes
    if num_bytes > _MOST_BYTES:
        raise ValueError(
            f"{what}: a buffer must have at most {_MOST_BYTES} bytes, got {num_bytes} for {sizes} in {dtype}; give "
            "what the largest call needs"
        )
    return sizes[0], sizes[1], dtype, device_count


def check_count_scalar(active_tokens: torch.Tensor, device: torch.device) -> None:
    """ValueError unless ``active_tokens`` is one int32 element on ``device``. Its value stays unread."""
    if active_tokens.dtype != torch.int32:
        raise ValueError(f"active_tokens must be torch.int32, got {active_tokens.dtype}; cast it")
    if active_tokens.numel() != 1:
        raise ValueError(f"active_tokens must have one element, the count of tokens, got {list(active_tokens.shape)}")
    if active_tokens.device != device:
        raise ValueError(f"active_tokens must be on {device}, got {active_tokens.device}; move it there")
