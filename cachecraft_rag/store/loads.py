"""Reading from slow tiers: ahead of need, once for all who want it, and only where it is quicker than computing."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
        self._compute_if_faster = compute_if_faster
        self._compute_pace = Pace()
        self._num_declined = 0
        # Held weakly: what a request gave up before it was read is nobody's.
        self._under_way: WeakValueDictionary[ChunkKey, LayeredKV] = WeakValueDictionary()
        self._lock = threading.Lock()

    def under_way(self, key: ChunkKey) -> LayeredKV | None:
        """An entry that another request is reading."""
        with self._lock:
            return self._under_way.get(key)

    def begin(self, key: ChunkKey, kv: LayeredKV) -> LayeredKV:
        """Note that an entry is being read; returns the one that is read already where another request was quicker."""
        with self._lock:
            return self._under_way.setdefault(key, kv)

    def end(self, key: ChunkKey, kv: LayeredKV) -> bool:
        """Note that an entry has been read; ``False`` when that was noted before, or it was removed since."""
        with self._lock:
            is_due = self._under_way.get(key) is kv
            if is_due:
                del self._under_way[key]
            return is_due

    def forget(self, is_meant: Callable[[ChunkKey], bool]) -> None:
        """Note that entries are removed: whoever reads them may go on, but they don't come back."""
        with self._lock:
            for key in [key for key in self._under_way if is_meant(key)]:
                del self._under_way[key]

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

    @property
    def compute_tokens_per_s(self) -> float:
        """How fast KV is computed; 0.0 before the first measurement."""
        return 1.0 / (self._compute_pace.s_per_token or float("inf"))

    def close(self) -> None:
        """Wait for the threads."""
        if self.readers is not None:
            self.readers.shutdown()
