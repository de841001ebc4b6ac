"""Runs an iterator from an event loop without blocking it, and ends it when the loop loses interest."""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ClosableIterator(Protocol[T_co]):
    """A generator, an ``AnswerStream``, or what else can be ended early."""

    def __next__(self) -> T_co:
        """The next item."""

    def close(self) -> None:
        """End the iteration."""


class Steps(Generic[T]):
    """Takes the items of an iterator in worker threads, one at a time.

    An iterator can't be closed while it runs. A step that is under way when ``close`` is called (the task was
    cancelled) therefore runs to its end, at most the prefill or one piece of text, and closes the iterator itself;
    nobody waits for it.

    Args:
        items: The iterator; its items must not be ``None``.
    """

    def __init__(self, items: ClosableIterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._is_closed = False

    async def take(self) -> T | None:
        """The next item; ``None`` after the last, and once closed."""
        return await asyncio.to_thread(self._take)

    async def take_last(self) -> T | None:
        """The last item; ``None`` when there was none."""
        return await asyncio.to_thread(self._take_last)

    def close(self) -> None:
        """End the iterator, now or when its current step ends. Never blocks; closing twice is harmless."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._items.close()
            finally:
                self._lock.release()

    def _take(self) -> T | None:
        try:
            with self._lock:
                return None if self._is_closed else next(self._items, None)
        finally:
            if self._is_closed:  # while the step ran
                self.close()

    def _take_last(self) -> T | None:
        last = None
        while (item := self._take()) is not None:
            last = item
        return last
