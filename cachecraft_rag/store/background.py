"""Writes to slower tiers, done by one thread so that no request waits for them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.evicted import Evicted
from cachecraft_rag.thread_workers import release_workers

_IDLE_S = 1.0  # the thread holds the tiers: after so long without work it lets a store go that nobody closed
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WriteTask:
    """An entry on its way.

    Attributes:
        entry: The entry.
        tiers: Numbers of the tiers it goes to; ``True`` replaces what is there, ``False`` leaves it.
        is_cancelled: Whether it was removed meanwhile.
    """

    entry: Evicted
    tiers: Mapping[int, bool]
    is_cancelled: bool = False


class BackgroundWriter:
    """A queue of entries on their way to slower tiers, at most one per key. Thread-safe.

    Args:
        write: Carries out a task.
        idle: Called after every task, and after ``wake``: what can be done ahead of need.
        max_bytes: Most bytes of waiting entries; what comes on top is refused.
    """

    def __init__(self, write: Callable[[WriteTask], None], idle: Callable[[], object], max_bytes: int) -> None:
        self._write, self._idle, self._max_bytes = write, idle, max_bytes
        self._waiting: OrderedDict[ChunkKey, WriteTask] = OrderedDict()
        self._current: WriteTask | None = None
        self._nbytes = 0
        self._is_awake = self._is_busy = self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all entries that are waiting."""
        with self._changed:
            return self._nbytes

    def offer(self, entry: Evicted, tiers: Mapping[int, bool]) -> bool:
        """Queue an entry, in place of an older one of its key; ``False`` when too much is waiting."""
        with self._changed:
            older = self._waiting.pop(entry.key, None)
            if older is not None:
                self._nbytes -= older.entry.held.nbytes
                tiers = {tier: tiers.get(tier) or older.tiers.get(tier, False) for tier in {*tiers, *older.tiers}}
            has_room = not self._waiting or self._nbytes + entry.held.nbytes <= self._max_bytes
            if self._is_closing or not has_room:
                return False
            self._waiting[entry.key] = WriteTask(entry, tiers)
            self._nbytes += entry.held.nbytes
            self._start()
            return True

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """An entry that is waiting or being written."""
        with self._changed:
            task = self._waiting.get(key)
            if task is None and self._current is not None and self._current.entry.key == key:
                task = self._current
        return None if task is None or task.is_cancelled else task.entry.chunk_kv()

    def under_way(self) -> set[ChunkKey]:
        """Keys of all entries that are waiting or being written."""
        with self._changed:
            current = self._current
            return {*self._waiting, *(() if current is None or current.is_cancelled else (current.entry.key,))}

    def cancel(self, is_meant: Callable[[ChunkKey], bool]) -> int:
        """Give up entries; returns how many. A write that already began is not stopped."""
        with self._changed:
            cancelled = [key for key in self._waiting if is_meant(key)]
            for key in cancelled:
                self._nbytes -= self._waiting.pop(key).entry.held.nbytes
            if self._current is not None and is_meant(self._current.entry.key):
                self._current.is_cancelled = True
            self._changed.notify_all()
            return len(cancelled)

    def wake(self) -> None:
        """Have the idle work done soon."""
        with self._changed:
            if not self._is_closing:
                self._is_awake = True
                self._start()

    def flush(self) -> None:
        """Wait until everything queued so far, and what it causes, is done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._is_busy or self._is_awake))

    def close(self) -> None:
        """Write everything that is waiting, then end the thread."""
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        if self._thread is None:  # only who has work for it pays for a thread, and only as long
            self._thread = threading.Thread(target=self._work, name="cachecraft-store", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                has_work = self._changed.wait_for(
                    lambda: self._waiting or self._is_awake or self._is_closing, timeout=_IDLE_S
                )
                if not has_work or (self._is_closing and not self._waiting):
                    self._thread = None  # with the lock held: what is offered from now on starts another
                    return
                if self._waiting:
                    _, self._current = self._waiting.popitem(last=False)
                    self._nbytes -= self._current.entry.held.nbytes
                task, self._is_busy, self._is_awake = self._current, True, False
            try:
                if task is not None:
                    self._write(task)
                self._idle()
            except Exception:  # tiers count their failures themselves; whatever else happens must not end the thread
                _logger.exception("writing chunk KV to a slower tier failed")
            release_workers()  # packing has used some
            with self._changed:
                self._current, self._is_busy = None, False
                self._changed.notify_all()
