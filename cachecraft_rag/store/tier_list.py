"""The tiers of a store in order, and moving an entry between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cachecraft_rag.chunk_kv import LayeredKV
from cachecraft_rag.errors import StoreError
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.evicted import Evicted


class TierList(Sequence[ChunkStore]):
    """Tiers, fastest first: those in memory, then the persistent ones.

    A tier that raises is counted as failing, and its entry as not there or not kept: our own tiers don't, others may.

    Args:
        tiers: At least one, with different names.

    Attributes:
        num_memory: How many are in memory.

    Raises:
        ValueError: They are none of that.
    """

    def __init__(self, tiers: Sequence[ChunkStore]) -> None:
        names = [tier.name for tier in tiers]
        if not tiers or len(set(names)) < len(names):
            raise ValueError(f"tiers: {names} must be at least one, with different names")
        if sorted(tiers, key=lambda tier: tier.is_persistent) != list(tiers):
            raise ValueError(f"tiers: {names} must have the persistent ones last")
        self._tiers = tuple(tiers)
        self.num_memory = sum(not tier.is_persistent for tier in tiers)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # an index or a slice, as a tuple's
        return self._tiers[number]

    def __len__(self) -> int:
        return len(self._tiers)

    def __iter__(self) -> Iterator[ChunkStore]:
        return iter(self._tiers)

    @property
    def memory(self) -> tuple[ChunkStore, ...]:
        """Those in memory."""
        return self._tiers[: self.num_memory]

    @property
    def persistent(self) -> tuple[ChunkStore, ...]:
        """The others."""
        return self._tiers[self.num_memory :]

    @property
    def persistent_numbers(self) -> range:
        """Their numbers."""
        return range(self.num_memory, len(self._tiers))

    def number_of(self, name: str) -> int:
        """Number of the tier of a name."""
        return [tier.name for tier in self._tiers].index(name)

    def relieve(self) -> int:
        """Make room in every tier ahead of need; returns the bytes freed."""
        return sum(tier.relieve() for tier in self._tiers)

    def load(self, number: int, load: Callable[[ChunkStore], LayeredKV | None]) -> LayeredKV | None:
        """What ``load`` gets from a tier."""
        tier = self._tiers[number]
        try:
            return load(tier)
        except (StoreError, OSError) as error:
            tier.counters.error("reading", error)
            return None

    def put(self, number: int, entry: Evicted) -> bool:
        """Put an entry into a tier; ``False`` when it does not take it."""
        tier = self._tiers[number]
        try:
            return tier.put(entry.key, entry.chunk_kv(), static=entry.static, cfo=entry.cfo)
        except (StoreError, OSError) as error:
            tier.counters.error("writing", error)
            return False

    def put_into_memory(self, entry: Evicted, fastest: int) -> int | None:
        """Put an entry into the first memory tier from ``fastest`` on that takes it; returns that tier's number.

        It is taken out of the other memory tiers.
        """
        holder = None
        for number in range(self.num_memory):
            if holder is None and number >= fastest and self.put(number, entry):
                holder = number
            else:
                self._tiers[number].remove(entry.key)
        return holder

    def promote(self, entry: Evicted, number: int, fastest: int) -> None:
        """Move an entry of tier ``number`` (-1: of none) to the first memory tier from ``fastest`` on that takes it."""
        is_in_memory = 0 <= number < self.num_memory
        for faster in range(fastest, self.num_memory if number < 0 else min(number, self.num_memory)):
            if self.put(faster, entry):
                if is_in_memory:
                    self._tiers[number].remove(entry.key)
                return
