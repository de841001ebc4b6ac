"""How many requests a model is answering: what is done while it is idle waits for none."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary


class RequestsInFlight:
    """Counts requests from their start to the end of their answers; a context manager around each. Thread-safe.

    It has no lock: a garbage collection may end a request on any thread, whatever that one holds.
    """

    def __init__(self) -> None:
        self._begun: deque[None] = deque()

    @property
    def count(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._begun)

    def __enter__(self) -> None:
        self._begun.append(None)

    def __exit__(self, *exception: object) -> None:
        self._begun.pop()


_of_model: WeakKeyDictionary[Any, RequestsInFlight] = WeakKeyDictionary()
_guard = threading.Lock()


def requests_in_flight(model: Any) -> RequestsInFlight:
    """The requests of a model: one count for all engines that share it, because they wait for each other."""
    with _guard:
        return _of_model.setdefault(model, RequestsInFlight())
