"""Host side of signals: operation codes, failure records, and what is raised for them."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import torch

from ..errors import (
    ActiveCountError,
    CommError,
    CommMismatchError,
    CommSignalError,
    CommTimeoutError,
    FailureRecord,
    RoutingError,
)
from .layout import RECORD_WORDS, Failure, Place
from .method_names import OPTIONS


class HeaderOperation(IntEnum):
    """The operations that open a call; the lowest byte of a header's operation word."""

    ALL_GATHER_MATMUL = 1
    MATMUL_REDUCE_SCATTER = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    EP_DISPATCH = 5
    EP_CACHED_DISPATCH = 6
    EP_COMBINE = 7


class EpForm(IntFlag):
    """What the ranks of an expert-parallel call must agree on beside operation, dtype and routing, bit by bit."""

    WITH_WEIGHTS = 1
    #: Partial results come back one for each rank, or one for each expert, that made some; else one sum.
    BY_RANK = 2
    BY_EXPERT = 4
    #: The rows of a combine are the weights of received tokens.
    OF_WEIGHTS = 8


#: The order is what peers are sent.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
#: How an operation may be done, as far as ranks must agree on it: who sends also decides which flags there are.
METHODS = tuple(
    f"{name}{sender}"
    for name, options in OPTIONS.items()
    if name != "auto"  # which has become another before a call opens
    for sender in (("", " by copy engine") if "use_ce" in options else ("",))
)
_HEADER_FIELDS = ("operation", "T", "N", "K")
_LOW_32 = (1 << 32) - 1
_ROUTING = "the routing of the dispatch in epoch "


def operation_code(
    operation: HeaderOperation, dtype: torch.dtype, method: str = "fused", tile: tuple[int, int] | None = None
) -> int:
    """The operation word of a header: what two ranks must agree on beside T, N and K.

    Args:
        operation: which.
        dtype: of the data.
        method: one of METHODS.
        tile: rows and columns that a flag may stand for, powers of two from 16 to 1024, where the
            flags of the operation follow from them.
    """
    code = int(operation) | (_DTYPES.index(dtype) + 1) << 8 | METHODS.index(method) << 16
    if tile is not None:
        rows, columns = (size.bit_length() - 4 for size in tile)  # 1 for 16 .. 7 for 1024
        code |= rows << 24 | columns << 27
    return code


def ep_operation_code(operation: HeaderOperation, dtype: torch.dtype, form: EpForm) -> int:
    """The operation word of an expert-parallel call's header."""
    return operation_code(operation, dtype) | int(form) << 16


def is_expert_parallel(code: int) -> bool:
    """Whether the operation word is of an expert-parallel call."""
    return code & 0xFF in (HeaderOperation.EP_DISPATCH, HeaderOperation.EP_CACHED_DISPATCH, HeaderOperation.EP_COMBINE)


def describe_operation(code: int) -> str:
    """``operation_code`` or ``ep_operation_code`` read back, for messages."""
    operation, dtype, method, tile = code & 0xFF, code >> 8 & 0xFF, code >> 16 & 0xFF, code >> 24
    try:
        name = HeaderOperation(operation).name.lower()
        text = f"{name} in {str(_DTYPES[dtype - 1]).removeprefix('torch.')}"
        if is_expert_parallel(code):
            forms = [form.name.lower().replace("_", " ") for form in EpForm if form & method and form.name]
            return ", ".join([text, *forms])
        # The products have a choice of methods; what is always done in the same way needs no word for it.
        text = f"{text}, method {METHODS[method]}" if method or "matmul" in name else text
        return f"{text}, tiles of {8 << (tile & 7)} x {8 << (tile >> 3)}" if tile else text
    except (ValueError, IndexError):
        return f"operation word {code:#x}"


def decode_record(words: list[int], reported_by: int, world_size: int) -> FailureRecord:
    """The failure that a kernel wrote as RECORD_WORDS int64 words (``comm.device._record``)."""
    head, rank_plus_1, peer, epoch, index, expected, seen, timeout_ns = words
    kind = Failure(head & 0xFF).name.lower()
    operation = describe_operation(head >> 8 & _LOW_32)
    place = Place(head >> 40 & 0xFF).name.lower().replace("_", " ")
    expected_text, seen_text = f"epoch {expected}", f"epoch {seen}"
    if place == "header":
        expert_parallel = is_expert_parallel(head >> 8)
        if kind == "timeout":
            expected_text = "the header of this call"
            if not expert_parallel:
                expected_text += f" with T = {(expected & _LOW_32) * world_size}"
            seen_text = f"nothing newer than epoch {seen >> 32}" if seen else "nothing"
        elif _HEADER_FIELDS[index] == "operation":
            expected_text = describe_operation(expected & _LOW_32)
            seen_text = describe_operation(seen & _LOW_32)
        elif expert_parallel:
            expected_text, seen_text = (f"{_ROUTING}{value & _LOW_32}" for value in (expected, seen))
        else:
            expected_text, seen_text = (
                _describe_size(_HEADER_FIELDS[index], value & _LOW_32, world_size) for value in (expected, seen)
            )
    elif place == "active count":
        expected_text = f"0 < T <= {expected}, divisible by {world_size}"
        seen_text = f"T = {seen}"
    elif place in ("signal", "forwarded rows"):
        expected_text, seen_text = f"{expected} puts and pushes", f"{seen}"
    elif place == "parts of channel":
        expected_text, seen_text = "further sub-parts", f"the headers of {expected} and the signals of {seen}"
    elif place == "routing":
        expected_text, seen_text = "that of a dispatch that went well", "that of one that failed"
    elif place == "counts":
        expected_text, seen_text = f"those of epoch {expected}", f"some of epoch {seen}"
    return FailureRecord(
        kind=kind,
        operation=operation,
        rank=rank_plus_1 - 1,
        peer=peer,
        place=place,
        index=index,
        epoch=epoch,
        expected=expected_text,
        seen=seen_text,
        reported_by=reported_by,
        timeout_s=timeout_ns / 1e9,
    )


def _describe_size(name: str, value: int, world_size: int) -> str:
    """A header's number for a message. It carries the rows of a chunk, of which T is the multiple."""
    return f"T = {value * world_size} ({value} rows a rank)" if name == "T" else f"{name} = {value}"


def error_for(record: FailureRecord, rank: int) -> CommError:
    """What rank ``rank`` raises for ``record``."""
    told = "" if record.rank == rank else f" (reported by rank {record.rank})"
    remedy = "the group is broken: call group.recover() on every rank"
    if record.kind == "mismatch":
        if record.expected.startswith("T ="):
            remedy = (
                "every rank must pass the same number of rows (packing.pad_packed makes T divisible by the ranks); "
                + remedy
            )
        elif record.expected.startswith(_ROUTING):
            remedy = "every rank must pass the handle of the same dispatch; " + remedy
        return CommMismatchError(
            f"{record.operation}: ranks disagree in epoch {record.epoch}: rank {record.rank} called with "
            f"{record.expected}, rank {record.peer} with {record.seen}{told}; {remedy}",
            record,
        )
    if record.kind == "count":
        return ActiveCountError(
            f"{record.operation}: rank {record.rank} read {record.seen} on its device in epoch {record.epoch}, "
            f"allowed: {record.expected}{told}; write an allowed count to active_tokens; {remedy}",
            record,
        )
    if record.kind == "routing":
        return RoutingError(
            f"{record.operation}: rank {record.rank} used the handle of a dispatch that failed, in epoch "
            f"{record.epoch}{told}; {remedy}, then dispatch again and use the new handle",
            record,
        )
    if record.kind == "surplus":
        return CommSignalError(
            f"{record.operation}: the network broke its promise to rank {record.rank}: {record.place} {record.index}, "
            f"epoch {record.epoch}, expected {record.expected}, saw {record.seen}{told}: a put signalled twice, or "
            f"before its bytes were there; results of this call, and of the one before, may be wrong; {remedy}",
            record,
        )
    return CommTimeoutError(
        f"{record.operation}: rank {record.rank} waited more than {record.timeout_s:g} s for rank {record.peer}: "
        f"{record.place} {record.index}, epoch {record.epoch}, expected {record.expected}, saw {record.seen}"
        f"{told}; {remedy}",
        record,
    )


class RecordReader:
    """Reads a failure record from host memory without a synchronisation.

    Args:
        words: int64 [RECORD_WORDS], written by kernels; word 0 last.
    """

    def __init__(self, words: torch.Tensor) -> None:
        assert words.shape == (RECORD_WORDS,)
        self.words = words
        # A numpy view reads in a tenth of the time of a tensor's item(); this runs before every call.
        self._view = words.numpy()

    def read(self) -> list[int] | None:
        """The words of the record, or None while there is none."""
        if self._view[0] == 0:
            return None
        return [int(word) for word in self._view]
