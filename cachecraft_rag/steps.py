"""Runs an iterator from an event loop without blocking it, and ends it when the loop loses interest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, Protocol, TypeVar

from cachecraft_rag.cancellation import Cancellation
from cachecraft_rag.errors import RequestCancelledError
from cachecraft_rag.thread_workers import release_workers

# An event loop's own has a handful of threads on a small machine, and so many answers at once would be all there are.
_workers = ThreadPoolExecutor(max_workers=256, thread_name_prefix="cachecraft-step")

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

    An iterator can't be closed while it runs. When ``close`` is called (the task was cancelled) the engine's requests
    that began in a step are cancelled: one in line leaves it, one that is decoded ends before its next token. The step
    that is under way closes the iterator itself at its end; nobody waits for it.

    Args:
        items: The iterator; its items must not be ``None``.
    """

    def __init__(self, items: ClosableIterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._cancellation = Cancellation()
        self._is_closed = False

    async def take(self) -> T | None:
        """The next item; ``None`` after the last, and once closed."""
        return await _in_worker(self._take)

    async def take_last(self) -> T | None:
        """The last item; ``None`` when there was none."""
        return await _in_worker(self._take_last)

    def close(self) -> None:
        """End the iterator, now or when its current step ends. Never blocks; closing twice is harmless."""
        self._is_closed = True
        self._cancellation.cancel()
        if self._lock.acquire(blocking=False):
            try:
                self._items.close()
            finally:
                self._lock.release()

    def _take(self) -> T | None:
        try:
            with self._lock, self._cancellation.active():
                return None if self._is_closed else next(self._items, None)
        except RequestCancelledError:
            if not self._is_closed:
                raise
            return None
        finally:
            if self._is_closed:  # while the step ran
                self.close()

    def _take_last(self) -> T | None:
        last = None
        while (item := self._take()) is not None:
            last = item
        return last


async def _in_worker(step: Callable[[], T]) -> T:
    """``asyncio.to_thread`` with threads of our own."""
    release_workers()  # the loop's thread has some where it has computed an embedding
    return await asyncio.get_running_loop().run_in_executor(_workers, copy_context().run, _and_release, step)


def _and_release(step: Callable[[], T]) -> T:
    """Take a step. The next one may be another thread's, which PyTorch's workers of this one would slow down."""
    try:
        return step()
    finally:
        release_workers()
