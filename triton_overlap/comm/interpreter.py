"""The only file that reaches into Triton's interpreter (``TRITON_INTERPRET=1``), for Triton 3.6 to 3.9.

Two parts of the library need more than the stock interpreter, which runs the programs of a grid one after another:

* The simulator runs the programs of many launches in turns. It needs a say in every load, store, atomic, barrier and
  launch, and the grid position must belong to the running program instead of to the process.
* The shared-memory backend runs one process a rank, often more processes than processors. A process that polls a flag
  has to give its processor away.

Both install an :class:`InterpreterHooks` object (interpreter_hooks.py); everything private lives behind it. Without
hooks the interpreter computes what the stock one does, with these changes:

* The interpreter replaces the functions of ``triton.language`` for the length of a launch, and again at every call of
  a device function, and puts the originals back afterwards. Launches that overlap cannot nest such scopes, so here
  the replacement happens once for the life of the process. That also makes the call of a device function about nine
  times cheaper.
* The look-up of a NumPy dtype rebuilds a table at every load, store and cast; here it remembers.
* Inline assembly that only orders memory has an effect on hooks instead of an error.
* Integer sums and products are computed a second time for an overflow check whose outcome is then dropped, unless
  kernels run in debug mode; here they are not.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton._C.libtriton import ir
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_overlap.errors import BackendError

from .interpreter_hooks import AtomicAccess, InterpreterHooks, KernelLaunch

#: ``load(addresses, mask, other, dtype)``, ``store(addresses, values, mask)``: direct accesses, past any hooks.
raw = stock._interpreter

InterpreterError = stock.InterpreterError

_SEMANTICS = ir.MEM_SEMANTIC
_ACQUIRE = (_SEMANTICS.ACQUIRE, _SEMANTICS.ACQUIRE_RELEASE)
_RELEASE = (_SEMANTICS.RELEASE, _SEMANTICS.ACQUIRE_RELEASE)
_SCOPES = {ir.MEM_SYNC_SCOPE.CTA: "cta", ir.MEM_SYNC_SCOPE.GPU: "gpu", ir.MEM_SYNC_SCOPE.SYSTEM: "sys"}

_hooks: InterpreterHooks | None = None
#: What holds while nobody else has installed hooks: None, or those of :func:`yield_on_spin`.
_resting: InterpreterHooks | None = None
_prepared = False


def install(hooks: InterpreterHooks) -> None:
    """Route the interpreter through ``hooks`` until :func:`uninstall`.

    Raises:
        BackendError: the interpreter is not active, or other hooks are installed.
    """
    global _hooks
    prepare()
    if _hooks is not _resting:
        raise BackendError(f"the interpreter already serves {type(_hooks).__name__}; one set of hooks at a time")
    _hooks = hooks


def uninstall(hooks: InterpreterHooks) -> None:
    """Undo :func:`install`, or :func:`yield_on_spin`, of the same object; without effect where it is not installed."""
    global _hooks, _resting
    if _resting is hooks:
        _resting = None
    if _hooks is hooks:
        _hooks = _resting


def prepare() -> None:
    """Change the interpreter as this module's page says, once. Launches work as before.

    Raises:
        BackendError: kernels are not interpreted in this process, or NumPy is too new for this Triton.
    """
    global _prepared
    if _prepared:
        return
    # Triton's own device functions are decorated when triton is imported, as early as any kernel: they tell whether
    # the variable was set in time.
    if not isinstance(tl.cdiv, stock.InterpretedFunction):
        raise BackendError(
            "Triton's interpreter is not active in this process: set TRITON_INTERPRET=1 in the environment before "
            "triton is first imported (importing triton_overlap first does so where torch sees no GPU)"
        )
    _patch_interpreter()
    _replace_language_once(prepare)
    _refuse_incompatible_numpy()
    _prepared = True


def _refuse_incompatible_numpy() -> None:
    bound = tl.tensor(stock.TensorHandle(np.array([3], dtype=np.int32), tl.int32), tl.int32)
    try:
        operator.index(bound)
    except TypeError as error:
        raise BackendError(
            f"the interpreter of triton {triton.__version__} cannot run loops with numpy {np.__version__} ({error}): "
            "install an older numpy"
        ) from error


# ---- changes made once ------------------------------------------------------------------------------------------


class _PermanentScope:
    """Stands for the interpreter's scope of replaced functions, which ends a launch by putting the originals back."""

    def restore(self) -> None:
        """Nothing to put back: the replacement is for the life of the process."""


_PERMANENT = _PermanentScope()
#: Globals of kernels for which the language has been replaced, by identity; held so that no identity is used twice.
_seen_globals: dict[int, dict[str, Any]] = {}
_stock_patch_lang = stock._patch_lang
_stock_np_dtype = stock._get_np_dtype
_np_dtypes: dict[str, np.dtype] = {}


def _replace_language_once(function: Callable[..., Any]) -> _PermanentScope:
    names = function.__globals__
    if id(names) not in _seen_globals:
        _stock_patch_lang(function)
        # Triton 3.6 turns a loop's bound into an int in a way that NumPy 2.4 refuses and older ones warn of.
        tl.tensor.__index__ = lambda self: int(self.handle.data.item())
        _seen_globals[id(names)] = names
    return _PERMANENT


def _np_dtype(tt_dtype: Any) -> np.dtype:
    if isinstance(tt_dtype, tl.pointer_type):
        return _UINT64
    scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
    if isinstance(scalar, tl.pointer_type):
        return _UINT64
    found = _np_dtypes.get(scalar.name)
    if found is None:
        found = _np_dtypes[scalar.name] = _stock_np_dtype(scalar)
    return found


_UINT64 = np.dtype(np.uint64)


class _MemoryShim:
    """Takes the place of the interpreter's extension module, whose ``load`` and ``store`` every access goes through."""

    def __getattr__(self, name: str) -> Any:
        return getattr(raw, name)

    @staticmethod
    def load(addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if _hooks is None:
            return raw.load(addresses, mask, other, dtype)
        return _hooks.load(addresses, mask, other, dtype)

    @staticmethod
    def store(addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        if _hooks is None:
            raw.store(addresses, values, mask)
        else:
            _hooks.store(addresses, values, mask, False)


#: Inline assembly that kernels order memory with: the wait for descriptor stores, the fence between the generic and the
#: asynchronous proxy, and the zero that stands for their result. None of it takes or computes a value.
_ASM_WITH_MEANING = ("cp.async.bulk.wait_group 0", "fence.proxy.async", "mov.u32 $0, 0")


@dataclass
class _AsmResult:
    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def _atomic_access(op: str, ptr: Any, values: np.ndarray | None, mask: np.ndarray | None, sem: Any, scope: Any) -> Any:
    addresses = np.asarray(ptr.data)
    dtype = _np_dtype(ptr.get_element_ty())
    operand: np.ndarray = (
        np.zeros(addresses.shape, dtype) if values is None else np.broadcast_to(values, addresses.shape)
    )
    if mask is None:
        addresses, operand = addresses.ravel(), operand.ravel()
    else:
        lanes = np.broadcast_to(mask, addresses.shape)
        addresses, operand = addresses[lanes], operand[lanes]
    block = np.size(ptr.data) > 1
    return AtomicAccess(op, addresses, operand, dtype, sem in _ACQUIRE, sem in _RELEASE, _SCOPES[scope], block)


def _fresh_load(ptr: Any, mask: np.ndarray) -> Any:
    """What memory holds, past the hooks' view of plain loads."""
    dtype = _np_dtype(ptr.get_element_ty())
    addresses = np.asarray(ptr.data)
    return stock.TensorHandle(raw.load(addresses, mask, np.zeros(addresses.shape, dtype), dtype), ptr.get_element_ty())


def _patch_interpreter() -> None:
    # On the class, not on the module's builder: Triton 3.6 makes a second builder for host descriptors.
    builder: Any = stock.InterpreterBuilder
    stock_rmw, stock_cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        def perform() -> Any:
            return stock_rmw(self, op, ptr, val, mask, sem, scope)

        if _hooks is None:
            return perform()
        access = _atomic_access(op.name.lower(), ptr, val.data, mask.data, sem, scope)
        return _hooks.atomic(access, perform) if access.addresses.size else perform()

    def create_atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        def perform() -> Any:
            return stock_cas(self, ptr, cmp, val, sem, scope)

        return (
            perform()
            if _hooks is None
            else _hooks.atomic(_atomic_access("cas", ptr, val.data, None, sem, scope), perform)
        )

    def create_atomic_load(self: Any, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _hooks is None or not mask.data.any():
            return _fresh_load(ptr, mask.data)
        return _hooks.atomic(
            _atomic_access("load", ptr, None, mask.data, sem, scope), lambda: _fresh_load(ptr, mask.data)
        )

    def create_atomic_store(self: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        def perform() -> Any:
            return raw.store(ptr.data, val.data, mask.data)

        if _hooks is None or not mask.data.any():
            return perform()
        return _hooks.atomic(_atomic_access("store", ptr, val.data, mask.data, sem, scope), perform)

    def create_atomic_poll(self: Any, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        clock = time.perf_counter_ns if _hooks is None else _hooks.time_ns
        every_lane = stock.TensorHandle(np.ones(np.shape(ptr.data), dtype=bool), tl.int1)
        end = None if timeout_ns is None else clock() + int(np.asarray(timeout_ns.data).item())
        while True:
            matched = self.create_atomic_load(ptr, every_lane, sem, scope).data == expected.data
            if matched.all() or (end is not None and clock() >= end):
                return stock.TensorHandle(matched, tl.int1)

    def create_barrier(self: Any, *args: Any, **kwargs: Any) -> None:
        if _hooks is not None:
            _hooks.barrier()

    def create_inline_asm(
        self: Any, asm: str, constraints: Any, values: Any, types: list[Any], is_pure: bool, pack: int
    ) -> Any:
        instructions = [" ".join(part.split()) for part in asm.split(";") if part.strip()]
        if values or not all(instruction.startswith(_ASM_WITH_MEANING) for instruction in instructions):
            raise NotImplementedError(f"inline assembly is not interpreted, but for {_ASM_WITH_MEANING}: {asm!r}")
        if _hooks is not None and any(instruction.startswith(_ASM_WITH_MEANING[0]) for instruction in instructions):
            _hooks.wait_descriptors()
        return _AsmResult([stock.TensorHandle(np.zeros(1, _np_dtype(dtype)), dtype) for dtype in types])

    stock_descriptor_store = builder.create_descriptor_store

    def create_descriptor_store(self: Any, desc: Any, value: Any, indices: Any) -> Any:
        if _hooks is None:
            return stock_descriptor_store(self, desc, value, indices)
        pointers, mask = desc.materialize_pointers(indices)
        # Triton 3.6 gives the mask as an array, 3.9 as a handle.
        lanes = mask.data if isinstance(mask, stock.TensorHandle) else mask
        _hooks.store(pointers.data, value.data, lanes, True)
        return None

    options = stock.interpreter_builder.options
    if not options.debug:
        stock.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    builder.create_atomic_rmw = create_atomic_rmw
    builder.create_atomic_cas = create_atomic_cas
    if hasattr(builder, "create_atomic_load"):  # Triton 3.9
        builder.create_atomic_load = create_atomic_load
        builder.create_atomic_store = create_atomic_store
    if hasattr(builder, "create_atomic_poll"):
        builder.create_atomic_poll = create_atomic_poll
    builder.create_barrier = create_barrier
    builder.create_inline_asm = create_inline_asm
    builder.create_descriptor_store = create_descriptor_store
    builder.grid_idx = _grid_property(0)
    builder.grid_dim = _grid_property(1)
    stock._interpreter = _MemoryShim()
    stock._patch_lang = _replace_language_once
    stock._get_np_dtype = _np_dtype
    stock.GridExecutor.__call__ = _launch


def _grid_property(index: int) -> property:
    """The running program's position (0) or extents (1); what the stock loop set where no hooked program runs."""
    name = ("_stock_grid_idx", "_stock_grid_dim")[index]

    def get(builder: Any) -> tuple[int, int, int]:
        program = None if _hooks is None else _hooks.program()
        return builder.__dict__[name] if program is None else program[index]

    def put(builder: Any, value: tuple[int, int, int]) -> None:
        builder.__dict__[name] = value

    return property(get, put)


_stock_launch = stock.GridExecutor.__call__
_parameters: dict[Callable[..., Any], frozenset[str]] = {}


def _launch(executor: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the interpreter's launch where all tensors are on the CPU; those of other devices need its copies."""
    function = executor.fn
    names = _parameters.get(function)
    if names is None:
        spec = inspect.getfullargspec(function)
        names = _parameters[function] = frozenset(spec.args + spec.kwonlyargs)
    known = {name: value for name, value in kwargs.items() if name in names}  # drops num_warps and its like
    bound = inspect.getcallargs(function, *args, **known)
    tensors = [(name, tensor) for name, value in bound.items() for tensor in _tensors_of(value)]
    if any(tensor.device.type != "cpu" for _, tensor in tensors):
        if _hooks is not None:
            raise BackendError("kernels of this backend run on CPU tensors; an argument lies on another device")
        _stock_launch(executor, *args, **kwargs)
        return
    for hook in executor.pre_run_hooks:
        hook(*args, **known)
    _replace_language_once(function)
    constants = executor.constexprs
    arguments = {name: value if name in constants else stock._implicit_cvt(value) for name, value in bound.items()}
    extents = tuple(executor.grid(arguments) if callable(executor.grid) else executor.grid)
    if not 1 <= len(extents) <= 3:
        raise ValueError(f"a grid has one to three extents, got {extents}")
    grid = tuple(int(extent) for extent in extents) + (1,) * (3 - len(extents))
    launch = KernelLaunch(function, function.__name__, arguments, grid, tensors)  # type: ignore[arg-type]
    if _hooks is None:
        run_in_order(launch)
    else:
        _hooks.launch(launch)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors_of(item)
    elif isinstance(value, TensorDescriptor):
        yield from _tensors_of(value.base)
    elif isinstance(value, triton.runtime.jit.TensorWrapper):
        yield value.base


def run_in_order(launch: KernelLaunch) -> None:
    """Run the programs of ``launch`` one after another, as the stock interpreter does.

    Raises:
        InterpreterError: a program raised; the cause is attached.
    """
    builder = stock.interpreter_builder
    builder.set_grid_dim(*launch.grid)
    try:
        for program in launch.program_ids():
            builder.set_grid_idx(*program)
            launch.function(**launch.arguments)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


# ---- hooks for processes that share processors ------------------------------------------------------------------


class SpinYield:
    """Hooks for one process of several: whoever polls in vain gives its processor to the others.

    The first vain polls only yield; a long wait sleeps, so that processes that compute get whole time slices.
    """

    _YIELDS = 64
    _SLEEP_S = 50e-6

    def __init__(self) -> None:
        self._vain = 0

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return raw.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, asynchronous: bool) -> None:
        raw.store(addresses, values, mask)

    def atomic(self, access: AtomicAccess, perform: Callable[[], Any]) -> Any:
        if not access.only_reads:
            self._vain = 0
            return perform()
        if self._vain:
            os.sched_yield() if self._vain < self._YIELDS else time.sleep(self._SLEEP_S)
        self._vain += 1
        return perform()

    def barrier(self) -> None:
        """A program is one thread here: nothing to wait for."""

    def wait_descriptors(self) -> None:
        """Descriptor stores are complete at once here."""

    def launch(self, launch: KernelLaunch) -> None:
        self._vain = 0
        run_in_order(launch)

    def program(self) -> None:
        """The stock grid position holds, since programs run one after another."""

    def time_ns(self) -> int:
        return time.perf_counter_ns()


def yield_on_spin() -> SpinYield:
    """Install :class:`SpinYield` until it is uninstalled, and return it. Other hooks go before it while they are
    installed."""
    global _hooks, _resting
    prepare()
    if isinstance(_resting, SpinYield):
        return _resting
    spinning = SpinYield()
    if _hooks is _resting:
        _hooks = spinning
    _resting = spinning
    return spinning
