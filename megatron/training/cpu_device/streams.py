"""``torch.cuda`` streams and events for a device that has finished before a call returns.

A CPU operator is complete when it returns, so waiting for a stream or an event is always over.
Collectives that run in the background are waited for through their own work handles, as on a GPU.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any, Self

import torch

from .redirect import redirect

_CPU = torch.device("cpu")


class _Active(threading.local):
    """The stream that ``torch.cuda.stream`` made current, per thread."""

    stack: list[Stream]

    def __init__(self) -> None:
        self.stack = [_DEFAULT_STREAM]


class Stream:
    """Stand-in for ``torch.cuda.Stream``: an identity without a queue."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = _CPU
        self.device_index = 0
        self.priority = priority
        self.cuda_stream = self.stream_id = id(self)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority, as a GPU names them."""
        return (0, -1)

    def synchronize(self) -> None:
        """Return at once: nothing is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: nothing is pending on ``stream``."""

    def wait_event(self, event: Event) -> None:
        """Return at once: ``event`` has happened."""

    def query(self) -> bool:
        """Return whether all work is done: always."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return ``event``, or a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Self:
        """Become the current stream of this thread."""
        _ACTIVE.stack.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the previous stream back."""
        _ACTIVE.stack.pop()


class ExternalStream(Stream):
    """Stand-in for ``torch.cuda.ExternalStream``."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device)
        self.cuda_stream = stream_ptr


class Event:
    """Stand-in for ``torch.cuda.Event``: the wall clock at the time of recording."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._time: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once: the event has happened."""

    def query(self) -> bool:
        """Return whether the event has happened: always."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to ``end_event``."""
        if self._time is None or end_event._time is None:
            raise RuntimeError("elapsed_time needs both events to be recorded")
        return (end_event._time - self._time) * 1e3


class StreamContext:
    """Stand-in for ``with torch.cuda.stream(s)``: ``None`` leaves the current stream."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        """Make the stream current."""
        _ACTIVE.stack.append(self.stream or _ACTIVE.stack[-1])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the previous stream back."""
        _ACTIVE.stack.pop()


_DEFAULT_STREAM = Stream()
_ACTIVE = _Active()


def _current_stream(device: Any = None) -> Stream:
    """Return this thread's current stream."""
    return _ACTIVE.stack[-1]


def _default_stream(device: Any = None) -> Stream:
    """Return the stream that is current unless another was chosen."""
    return _DEFAULT_STREAM


def _set_stream(stream: Stream | None) -> None:
    """Make ``stream`` current from now on."""
    if stream is not None:
        _ACTIVE.stack[-1] = stream


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Return at once: memory is never reused before an operator has finished."""


def redirect_streams() -> None:
    """Redirect streams, events and ``Tensor.record_stream``."""
    why = "a CPU operator has finished when it returns"
    for owner in (torch.cuda, torch.cuda.streams):
        redirect(owner, "Stream", Stream, to="a stream that is always done", why=why)
        redirect(owner, "ExternalStream", ExternalStream, to="a stream that is done", why=why)
        redirect(owner, "Event", Event, to="the wall clock when recorded", why=why)
    for name in ("stream", "StreamContext"):
        redirect(torch.cuda, name, StreamContext, to="note the current stream", why=why)
    redirect(torch.cuda, "current_stream", _current_stream, to="the stream noted", why=why)
    redirect(torch.cuda, "default_stream", _default_stream, to="one stream", why=why)
    redirect(torch.cuda, "set_stream", _set_stream, to="note the current stream", why=why)
    redirect(torch.Tensor, "record_stream", _record_stream, to="nothing", why=why)
