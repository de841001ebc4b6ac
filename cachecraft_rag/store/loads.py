"""Reading from slow tiers: ahead of need, once for all who want it, and only where it is quicker than computing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.pace import Pace

_MEASURED_AGAIN = 16  # of so many loads that computing is quicker than, one is done after all: it may be faster by now


class Loads:
    """What is being read, by which threads, and whether it pays. Thread-safe.

    Args:
        load_ahead: Threads that read ahead of need; 0 for none.
        compute_if_faster: Whether loads that take longer than computing are to be left.

    Attributes:
        readers: The threads, which start when they are used.
    """

    def __init__(self, load_ahead: int, compute_if_faster: bool) -> None:
        self.readers = ThreadPoolExecutor(load_ahead, thread_name_prefix="cachecraft-load") if load_ahead else None
        # A thread of its own: no request waits behind what may be wanted some day.
        self._prefetcher = ThreadPoolExecutor(1, thread_name_prefix="cachecraft-prefetch")
        self._compute_if_faster = compute_if_faster
        self._compute_pace = Pace()
        self._num_declined = 0
        # Held weakly: what a request gave up before it was read is nobody's.
        self._under_way: WeakValueDictionary[ChunkKey, LayeredKV] = WeakValueDictionary()
        self._claimed: set[ChunkKey] = set()
        self._lock = threading.Lock()

    def prefetch(self, read: Callable[[ChunkKey], object], keys: Iterable[ChunkKey]) -> None:
        """Have entries read one after the other, beside what requests read."""
        for key in keys:
            self._prefetcher.submit(read, key)

    def under_way(self, key: ChunkKey) -> LayeredKV | None:
        """An entry that another request is reading."""
        with self._lock:
            return self._under_way.get(key)

    def begin(self, key: ChunkKey, kv: LayeredKV) -> LayeredKV:
        """Note that an entry is being read; returns the one that is read already where another request was quicker."""
        with self._lock:
            return self._under_way.setdefault(key, kv)

    def claim(self, key: ChunkKey, kv: LayeredKV) -> bool:
        """Whether an entry that has been read is for the caller to move: once, and not when it was removed since.

        It stays under way until the caller has moved it and calls ``end``, so that nobody reads it again meanwhile.
        """
        with self._lock:
            is_due = self._under_way.get(key) is kv and key not in self._claimed
            if is_due:
                self._claimed.add(key)
            return is_due

    def end(self, key: ChunkKey) -> None:
        """Note that an entry has been moved, or is removed: whoever reads it may go on, but it doesn't come back."""
        with self._lock:
            self._under_way.pop(key, None)
            self._claimed.discard(key)

    def forget(self, is_meant: Callable[[ChunkKey], bool]) -> None:
        """``end`` for several entries."""
        with self._lock:
            meant = [key for key in self._under_way if is_meant(key)]
        for key in meant:
            self.end(key)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Measure how fast KV is computed."""
        self._compute_pace.add(num_tokens, seconds)

    def is_slow(self, pace: Pace) -> bool:
        """Whether loading at this pace takes longer than computing, as far as both were measured."""
        load, compute = pace.s_per_token, self._compute_pace.s_per_token
        return self._compute_if_faster and load is not None and compute is not None and load > compute

    def is_declined(self) -> bool:
        """Whether a slow load is to be left; now and then it is done after all, to be measured again."""
        with self._lock:
            self._num_declined += 1
            return self._num_declined % _MEASURED_AGAIN != 0

    def close(self) -> None:
        """Wait for the threads; what is prefetched and has not begun is given up."""
        self._prefetcher.shutdown(cancel_futures=True)
        if self.readers is not None:
            self.readers.shutdown()
