"""How whoever asked for an answer says that nobody waits for it any more, from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Cancellation:
    """Ends the requests that began under it. Thread-safe.

    A generator can't be closed while it runs in another thread. A request that begins inside ``active`` finds this
    object by ``current_cancellation``, through whatever other generators lie between.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._is_cancelled = False

    def cancel(self) -> None:
        """End the requests, now and to come. Never blocks; cancelling twice is harmless."""
        with self._lock:
            self._is_cancelled, callbacks, self._callbacks = True, self._callbacks, []
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once by ``cancel``, from its thread; at once where that was already."""
        with self._lock:
            is_late = self._is_cancelled
            if not is_late:
                self._callbacks.append(callback)
        if is_late:
            callback()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have requests that begin in the block, on this thread, end with this object."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation | None] = ContextVar("cachecraft_cancellation", default=None)


def current_cancellation() -> Cancellation | None:
    """Who may cancel a request that begins here; ``None`` outside any ``active``."""
    return _current.get()
