"""What the code of tasks runs on, so that it can pause anywhere.

A rank's host code runs on a thread of its own: grad mode, autograd and dispatch state belong to a thread. A program of
a launch needs none of that and runs on a greenlet in the scheduler's thread, two orders of magnitude cheaper to switch
to; without the greenlet package it gets a thread too, and the schedule is the same.
"""

from __future__ import annotations

import _thread
import contextlib
import contextvars
import importlib
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

greenlet: Any = None  # an optional speed-up
with contextlib.suppress(ImportError):
    greenlet = importlib.import_module("greenlet")


class Stopped(BaseException):
    """Unwinds a task when its world ends. Not an Exception: kernels' and users' handlers must let it pass."""


class Fiber(Protocol):
    """What a task's code runs on."""

    def resume(self) -> None:
        """Run the code until it pauses or ends. Called by the scheduler."""

    def pause(self) -> None:
        """Give control back to the scheduler. Called by the code."""

    def stop(self) -> None:
        """Unwind the code with :class:`Stopped`, or never start it. Called by the scheduler."""

    def frame(self) -> FrameType | None:
        """Where the code stands."""


class ThreadFiber:
    """Code on an OS thread, handed control with a pair of locks."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._go, self._back = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._body = body
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._started = False

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._stopping:
                self._body()
        except Stopped:
            pass
        finally:
            self._ended = True
            self._back.release()

    def resume(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        if self._stopping:
            raise Stopped  # code that caught the first one waits again
        self._back.release()
        self._go.acquire()
        if self._stopping:
            raise Stopped

    def stop(self) -> None:
        self._stopping = True
        while self._started and not self._ended:
            self.resume()
        if self._started:
            self._thread.join()

    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or -1)


class GreenletFiber:
    """Code on a greenlet of the scheduler's thread."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self._greenlet: Any = None
        self._scheduler: Any = None

    def _main(self) -> None:
        with contextlib.suppress(Stopped, greenlet.GreenletExit):
            self._body()

    def resume(self) -> None:
        self._scheduler = greenlet.getcurrent()
        if self._greenlet is None:  # made here, since a greenlet belongs to the thread that makes it
            self._greenlet = greenlet.greenlet(self._main)
            # A new greenlet would start with an empty context, which holds numpy's error state among other things.
            self._greenlet.gr_context = contextvars.copy_context()
        self._greenlet.switch()

    def pause(self) -> None:
        self._scheduler.switch()

    def stop(self) -> None:
        if self._greenlet is not None and not self._greenlet.dead:
            self._scheduler = greenlet.getcurrent()
            self._greenlet.throw(Stopped)

    def frame(self) -> FrameType | None:
        return None if self._greenlet is None else self._greenlet.gr_frame


def program_fiber(kind: str) -> Callable[[Callable[[], None]], Fiber]:
    """What programs run on: ``"greenlet"``, ``"thread"``, or ``"auto"`` for greenlets where they are installed."""
    if kind not in ("auto", "greenlet", "thread"):
        raise ValueError(f"fibers are 'auto', 'greenlet' or 'thread', not {kind!r}")
    if kind == "greenlet" and greenlet is None:
        raise ValueError("fibers='greenlet' needs the greenlet package; install it, or use fibers='thread'")
    return ThreadFiber if kind == "thread" or greenlet is None else GreenletFiber
