"""How the library's operators are registered: as by ``torch.library.custom_op``, without what it costs at each call.

A custom operator's kernel runs behind wrappers that check its results for aliases and switch ``torch.compile``'s tracer
off, which imports the tracer first: three seconds in every process, compiled or not, and some microseconds a call. And
each call that autograd records reads the whole schema several times, which can take longer than the rest of it. Here
the function itself is the kernel of all devices, and the schema is read once. ``torch.library.opcheck`` looks for
aliases in the tests, and the tracer is told once to leave the function, and whatever it calls, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd.graph import increment_version

__all__ = ["COMMUNICATES", "Operator", "operator"]

#: Of operators that communicate. The host counts their epochs, so ``torch.compile(mode="reduce-overhead")`` must keep
#: them out of its CUDA graphs: with this tag it calls them between two. A graph that one makes by hand can have them,
#: with the count on the device.
COMMUNICATES = (torch.Tag.cudagraph_unsafe,)

_NAMESPACE = "triton_overlap"
# Its registrations last as long as it does.
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")

Function = Callable[..., Any]


def _leave_untraced(fn: Function) -> None:
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))


class Operator:
    """``torch.ops.triton_overlap.<name>``, which can be called as this object too."""

    def __init__(self, name: str, fn: Function, mutates_args: Sequence[str], tags: Sequence[torch.Tag]) -> None:
        self._name = f"{_NAMESPACE}::{name}"
        schema = torch.library.infer_schema(fn, mutates_args=mutates_args)
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        self._overload = getattr(getattr(torch.ops, _NAMESPACE), name).default
        _leave_untraced(fn)
        # For tensors of every kind: those that cannot be used are refused by name.
        _library.impl(name, fn, "CompositeExplicitAutograd")
        arguments = self._overload._schema.arguments
        self._defaults = tuple(argument.default_value for argument in arguments)
        self._mutated = tuple(index for index, argument in enumerate(arguments) if argument.name in mutates_args)
        # torch.autograd.Function does not see tensors in lists; what torch.library puts around it does.
        self._has_lists = any("List[Tensor]" in str(argument.type) for argument in arguments)
        self._backward: Function | None = None
        self._setup_context: Function | None = None
        if not self._has_lists:
            _library.impl(name, self._autograd_kernel(), "Autograd", with_keyset=True)

    def __call__(self, *args: Any) -> Any:
        return self._overload(*args)

    def register_fake(self, fn: Function) -> Function:
        """Decorates the function that makes results of the right shapes, strides and dtypes, without values."""
        torch.library.register_fake(self._name, fn, lib=_library)
        return fn

    def register_autograd(self, backward: Function, *, setup_context: Function | None = None) -> None:
        """Make the operator differentiable.

        Args:
            backward: ``backward(ctx, *grads)`` gives a gradient, or None, for each argument.
            setup_context: ``setup_context(ctx, inputs, output)`` keeps what backward needs; all arguments are among the
                inputs, those too that the caller left out.
        """
        if self._has_lists:
            torch.library.register_autograd(self._name, backward, setup_context=setup_context, lib=_library)
        self._backward, self._setup_context = backward, setup_context

    def _autograd_kernel(self) -> Function:
        overload, defaults, mutated = self._overload, self._defaults, self._mutated
        below_autograd = torch._C._after_autograd_keyset

        def run(keyset: Any, inputs: tuple[Any, ...]) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return overload.redispatch(keyset & below_autograd, *inputs)

        class Recorded(torch.autograd.Function):
            # The keyset comes last, so that ctx.needs_input_grad begins with the operator's own arguments.
            @staticmethod
            def forward(ctx: Any, *inputs_and_keyset: Any) -> Any:
                *inputs, keyset = inputs_and_keyset
                output = run(keyset, tuple(inputs))
                if self._setup_context is not None:
                    self._setup_context(ctx, tuple(inputs), output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                if self._backward is None:
                    raise NotImplementedError(f"{self._name} has no gradient")
                found = self._backward(ctx, *grads)
                return (*found, None) if isinstance(found, tuple) else (found, None)

        def kernel(keyset: Any, *given: Any) -> Any:
            inputs = given + defaults[len(given) :]  # the dispatcher leaves out trailing defaults
            if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
                output = Recorded.apply(*inputs, keyset)
            else:
                output = run(keyset, inputs)
            for index in mutated:
                increment_version(inputs[index])
            return output

        return kernel


def operator(
    name: str, *, mutates_args: Iterable[str] = (), tags: Sequence[torch.Tag] = ()
) -> Callable[[Function], Operator]:
    """Register the decorated function as ``torch.ops.triton_overlap.<name>``.

    Args:
        name: of the operator; one that changes an argument ends in an underscore.
        mutates_args: names of the arguments that it changes.
        tags: of ``torch.Tag``.

    Returns:
        The operator, with ``register_fake`` and ``register_autograd``; the schema follows from the annotations.
    """
    return lambda fn: Operator(name, fn, tuple(mutates_args), tags)
