"""Runs a generator from an event loop without blocking it, and ends it when the loop loses interest."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Generic, TypeVar

from langchain_core.runnables.config import run_in_executor

T = TypeVar("T")


class Steps(Generic[T]):
    """Takes the items of a generator in worker threads, one at a time.

    A generator can't be closed while it runs. A step that is under way when ``close`` is called (the task was
    cancelled) therefore runs to its end, at most the prefill or one piece of text, and closes the generator itself;
    nobody waits for it.

    Args:
        items: The generator; its items must not be ``None``.
    """

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._is_closed = False

    async def take(self) -> T | None:
        """The next item; ``None`` after the last."""
        return await run_in_executor(None, self._take)

    async def take_last(self) -> T | None:
        """The last item; ``None`` when there was none."""
        return await run_in_executor(None, self._take_last)

    def close(self) -> None:
        """End the generator, now or when its current step ends. Never blocks; closing twice is harmless."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._items.close()
            finally:
                self._lock.release()

    def _take(self) -> T | None:
        with self._lock:
            item = None if self._is_closed else next(self._items, None)
        if self._is_closed:  # while the step ran
            self.close()
        return item

    def _take_last(self) -> T | None:
        last = None
        while (item := self._take()) is not None:
            last = item
        return last
