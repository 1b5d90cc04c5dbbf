"""Activations by name, as PyTorch functions: what the modules take and the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "GATED_ACTIVATIONS", "check_activation"]

_gelu_tanh = partial(F.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: Activations by TransformerEngine's names, "gelu" with the tanh approximation as there; "gelu_exact" is torch's own.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu_tanh,
    "gelu_exact": F.gelu,
    "qgelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "srelu": _squared_relu,
}
#: Gated ones, ``function(gate) * up``, and the function of each.
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _gelu_tanh,
    "glu": torch.sigmoid,
    "qgeglu": _quick_gelu,
    "reglu": F.relu,
    "sreglu": _squared_relu,
    "swiglu": F.silu,
}


def check_activation(kind: str, name: str) -> None:
    """TypeError or ValueError, in the name of ``kind``, unless there is an activation of this name, gated or not."""
    known = {**ACTIVATIONS, **GATED_ACTIVATIONS}
    if not isinstance(name, str) or name not in known:
        error = ValueError if isinstance(name, str) else TypeError
        raise error(f"{kind}: activation must be one of {', '.join(sorted(known))}, got {name!r}")
