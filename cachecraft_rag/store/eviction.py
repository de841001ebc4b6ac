"""Which entry goes first when a tier is full. Keys and numbers only: no tensors, no files."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachecraft_rag.store_config import EvictionPolicyName

K = TypeVar("K", bound=Hashable)

# A use counts half after this many uses of the tier per entry it holds; small tiers age as if they held _FEWEST.
_HALF_LIFE_PER_ENTRY = 8
_FEWEST = 128


@dataclass
class _Standing:
    """What a policy knows of an entry.

    Attributes:
        nbytes: Its size.
        saving: Tokens that a reuse saves: tokens x (1 - CFO).
        uses: log2 of the aged number of uses, on the policy's clock.
        ticket: Number of its last use.
        version: Number of its newest heap item; the others are out of date.
    """

    nbytes: int
    saving: float
    uses: float
    ticket: int = 0
    version: int = 0


class EvictionPolicy(ABC, Generic[K]):
    """Orders entries by what keeping them is worth. Not thread-safe: its tier locks.

    A heap with lazy deletion: every operation takes O(log n) amortised. Ageing needs no sweep over the entries: on a
    logarithmic scale all old uses lose the same amount per tick, so that instead new uses gain it.
    """

    def __init__(self) -> None:
        self._standings: dict[K, _Standing] = {}
        self._heap: list[tuple[float, int, int, K]] = []  # worth, ticket, version, key
        self._parked: set[K] = set()  # met while looking for a victim, but pinned: not in the heap
        self._ticket = self._version = 0
        self._age = 0.0  # half-lives passed

    def __len__(self) -> int:
        return len(self._standings)

    def add(self, key: K, nbytes: int, saving: float = 1.0) -> None:
        """Take an entry in, or its replacement, which keeps its uses; this counts as a use.

        Args:
            key: Its key.
            nbytes: Its size in bytes.
            saving: Tokens that a reuse saves, 0 or more.
        """
        known = self._standings.get(key)
        uses = known.uses if known else -math.inf
        self._standings[key] = _Standing(nbytes, saving, uses)
        self.use(key)

    def use(self, key: K) -> None:
        """Count a use of an entry."""
        standing = self._standings[key]
        self._age += 1.0 / (_HALF_LIFE_PER_ENTRY * max(len(self._standings), _FEWEST))
        standing.uses = _log2_sum(standing.uses, self._age)
        self._ticket += 1
        standing.ticket = self._ticket
        self._push(key)

    def resize(self, key: K, nbytes: int) -> None:
        """Note an entry's new size, which is not a use."""
        self._standings[key].nbytes = nbytes
        self._push(key)

    def release(self, key: K) -> None:
        """Note that an entry is no longer pinned."""
        if key in self._parked:
            self._push(key)

    def remove(self, key: K) -> None:
        """Forget an entry."""
        del self._standings[key]
        self._parked.discard(key)

    def victim(self, is_pinned: Callable[[K], bool] = lambda key: False) -> K | None:
        """The entry to evict next, or ``None`` when all are pinned. It stays known until ``remove``.

        Args:
            is_pinned: Whether an entry must stay; asked again only after ``use``, ``resize`` or ``release`` of it.
        """
        while self._heap:
            _, _, version, key = self._heap[0]
            standing = self._standings.get(key)
            if standing is not None and standing.version == version:
                if not is_pinned(key):
                    return key
                self._parked.add(key)
            heapq.heappop(self._heap)
        return None

    @abstractmethod
    def _worth(self, standing: _Standing) -> float:
        """What keeping an entry is worth; the smallest goes first, among equals the longest unused."""

    def _push(self, key: K) -> None:
        self._parked.discard(key)
        if len(self._heap) > 2 * len(self._standings) + 64:  # mostly out of date: the pushes since then pay for this
            self._heap = [self._item(name) for name in self._standings if name not in self._parked]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, self._item(key))

    def _item(self, key: K) -> tuple[float, int, int, K]:
        standing = self._standings[key]
        self._version += 1
        standing.version = self._version
        return self._worth(standing), standing.ticket, self._version, key


class LruPolicy(EvictionPolicy[K]):
    """The least recently used entry goes first."""

    def _worth(self, standing: _Standing) -> float:
        return 0.0  # the ticket decides


class LfuPolicy(EvictionPolicy[K]):
    """The least frequently used entry goes first; old uses count less."""

    def _worth(self, standing: _Standing) -> float:
        return standing.uses


class SavingPolicy(EvictionPolicy[K]):
    """The entry that saves least per byte goes first: aged uses x tokens x (1 - CFO) / bytes."""

    def _worth(self, standing: _Standing) -> float:
        if standing.saving <= 0.0:
            return -math.inf
        return standing.uses + math.log2(standing.saving) - math.log2(max(standing.nbytes, 1))


def make_policy(name: EvictionPolicyName) -> EvictionPolicy[K]:
    """A policy by its name.

    Raises:
        ValueError: There is none of this name.
    """
    if name == "lru":
        return LruPolicy()
    if name == "lfu":
        return LfuPolicy()
    if name == "saving":
        return SavingPolicy()
    raise ValueError(f"policy: {name!r} is unknown; use 'lru', 'lfu' or 'saving'")


def _log2_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b), without leaving the range of floats."""
    high, low = max(a, b), min(a, b)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1000.0))
