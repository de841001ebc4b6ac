"""Work that several threads want at once is done by the first of them; the others wait for its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """Runs one computation per key at a time. Keeps no results: those who come later ask a store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[Key, Future[Value]] = {}

    def run(self, key: Key, compute: Callable[[], Value]) -> Value:
        """The result for a key: computed here, or by the thread that is at it already.

        Raises:
            BaseException: What ``compute`` raised, here and in every thread that waited for it.
        """
        with self._lock:
            future = self._running.get(key)
            is_first = future is None
            if future is None:
                future = self._running[key] = Future()
        if not is_first:
            return future.result()
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]
        return future.result()
