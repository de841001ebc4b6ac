"""All tiers as one store: fast ones in front of large ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.errors import StoreError
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.background import BackgroundWriter, WriteTask
from cachecraft_rag.store.base import ChunkStore
from cachecraft_rag.store.evicted import Evicted
from cachecraft_rag.store.memory import MemoryStore
from cachecraft_rag.store.moves import Moves
from cachecraft_rag.store.tier_stats import TierStats

_KEYS_REMEMBERED = 100_000


@dataclass
class _Trait:
    static: bool = False
    cfo: float = 0.0
    uses: int = 0


class TieredStore(ChunkStore):
    """Looks from the fastest tier to the slowest, and moves what it finds to the fastest. Thread-safe.

    An entry is in one memory tier at a time: in the first when it is put or found, in the next when it is pushed out.
    Its time to live there begins anew. Disk and remote get a copy in the background once it was used often enough. Two
    entries of one key are taken to be equally good: an older copy may come back when a newer one was pushed out of
    memory before it was written.

    Args:
        tiers: Fastest first: memory tiers, then persistent ones, each with a name of its own. The store owns them.
        admit_after: Uses after which an entry is written to persistent tiers; being put is the first.
        max_waiting_bytes: Most bytes of entries that wait for the background thread, beyond the tiers' budgets. What
            comes on top is not written, and counted as dropped.
        name: Name in statistics.

    Attributes:
        tiers: As given.
    """

    def __init__(
        self,
        tiers: Sequence[ChunkStore],
        admit_after: int = 1,
        max_waiting_bytes: int = 256 * 2**20,
        name: str = "tiered",
    ) -> None:
        super().__init__(name)
        if not tiers or len({tier.name for tier in tiers}) < len(tiers):
            raise ValueError(f"tiers: {[tier.name for tier in tiers]} must be at least one, with different names")
        if sorted(tiers, key=lambda tier: tier.is_persistent) != list(tiers):
            raise ValueError(f"tiers: {[tier.name for tier in tiers]} must have the persistent ones last")
        if admit_after < 1:
            raise ValueError(f"admit_after: {admit_after} is below 1; give the number of uses")
        if max_waiting_bytes < 0:
            raise ValueError(f"max_waiting_bytes: {max_waiting_bytes} is negative; give 0 or more bytes")
        self.tiers = tuple(tiers)
        self._num_memory = sum(not tier.is_persistent for tier in tiers)
        self._has_relief = any(isinstance(tier, MemoryStore) and tier.demote_after_s is not None for tier in tiers)
        self._admit_after = admit_after
        self._traits: OrderedDict[ChunkKey, _Trait] = OrderedDict()
        self._traits_lock = threading.Lock()
        self._moves = Moves()
        self._background = BackgroundWriter(self._write, self._relieve, max_waiting_bytes)
        for number, tier in enumerate(self.tiers):
            if isinstance(tier, MemoryStore):
                tier.on_evict = partial(self._demote, number)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry from the fastest tier that has it."""
        found = self.get_with_tier(key)
        return None if found is None else found[0]

    def get_with_tier(self, key: ChunkKey) -> tuple[ChunkKV, str] | None:
        """The entry, and the name of the tier that had it; it is in the fastest tier afterwards."""
        started = time.perf_counter()
        with self._moves.moving(key):
            found = self._look(key)
            if found is None:
                self.counters.count("misses")
                return None
            chunk_kv, number = found
            if number != 0:
                self._promote(key, chunk_kv, number)
            self._admit(key, chunk_kv, number)
        self.counters.hit(chunk_kv.num_tokens, time.perf_counter() - started)
        return chunk_kv, self.tiers[max(number, 0)].name

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Keep an entry in the fastest tier with room for it; persistent tiers get it in the background."""
        trait = self._trait(key, put=_Trait(static, cfo, 1))
        entry = Evicted(key, chunk_kv, static, cfo)
        with self._moves.moving(key):
            self._background.cancel(lambda name: name == key)
            holder = self._put_into_memory(entry)
            is_offered = False
            if trait.uses >= self._admit_after or holder is None:
                is_offered = self._offer(entry, dict.fromkeys(self._persistent(), True))
        if self._has_relief:
            self._background.wake()
        return holder is not None or is_offered

    def contains(self, key: ChunkKey) -> bool:
        """Whether any tier has the entry."""
        return key in self._background.under_way() or any(tier.contains(key) for tier in self.tiers)

    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry from every tier; it can't come back from one that it was on its way to."""
        with self._moves.halted(lambda name: name == key):
            removed = [tier.remove(key) for tier in self.tiers[: self._num_memory]]
            removed.append(self._background.cancel(lambda name: name == key) > 0)
            removed += [tier.remove(key) for tier in self.tiers[self._num_memory :]]
        with self._traits_lock:
            self._traits.pop(key, None)
        return any(removed)

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries in all tiers."""
        keys = {key for key in self._background.under_way() if key.chunk == chunk}
        return sorted(keys.union(*(tier.variants(chunk) for tier in self.tiers)), key=str)

    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all, from every tier.

        Returns:
            How many entries the memory tiers together or any persistent tier had, whichever is most: entries in several
            tiers are counted once as far as that can be told.
        """
        with self._moves.halted(lambda key: namespace in (None, key.namespace)):
            in_memory = sum(tier.clear(namespace) for tier in self.tiers[: self._num_memory])
            waiting = self._background.cancel(lambda key: namespace in (None, key.namespace))
            persistent = [tier.clear(namespace) for tier in self.tiers[self._num_memory :]]
        with self._traits_lock:
            for key in [key for key in self._traits if namespace in (None, key.namespace)]:
                del self._traits[key]
        return max([in_memory, waiting, *persistent])

    @property
    def nbytes(self) -> int:
        """Bytes of all tiers; what is in several counts in each."""
        return sum(tier.nbytes for tier in self.tiers)

    @property
    def capacity(self) -> int | None:
        """Sum of all budgets, ``None`` when a tier has none."""
        budgets = [tier.capacity for tier in self.tiers]
        return None if None in budgets else sum(budget for budget in budgets if budget is not None)

    def __len__(self) -> int:
        """Number of entries of all tiers; what is in several counts in each."""
        return sum(len(tier) for tier in self.tiers)

    def close(self) -> None:
        """Write what is waiting, then close every tier."""
        self._background.close()
        for tier in self.tiers:
            tier.close()

    def flush(self) -> None:
        """Wait until everything that was put or pushed out so far has reached the tiers it goes to."""
        self._background.flush()

    def stats(self) -> TierStats:
        """Figures of the whole, with those of every tier in ``tiers``."""
        tiers = tuple(tier.stats() for tier in self.tiers)
        entries, nbytes = sum(tier.entries for tier in tiers), sum(tier.bytes for tier in tiers)
        return self.counters.stats(entries, nbytes, self.capacity).model_copy(update={"tiers": tiers})

    def pin(self, key: ChunkKey) -> None:
        """Keep a key from being evicted from any tier."""
        super().pin(key)
        for tier in self.tiers:
            tier.pin(key)

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``."""
        super().unpin(key)
        for tier in self.tiers:
            tier.unpin(key)

    def _look(self, key: ChunkKey) -> tuple[ChunkKV, int] | None:
        """The entry and the number of its tier, -1 for one that waits for the background thread."""
        for number, tier in enumerate(self.tiers):
            chunk_kv = None
            try:
                chunk_kv = tier.get(key)
            except (StoreError, OSError) as error:  # our tiers don't raise; others may
                tier.counters.error("reading", error)
            if chunk_kv is not None:
                return chunk_kv, number
            if number == 0 and (chunk_kv := self._background.get(key)) is not None:
                return chunk_kv, -1
        chunk_kv = self._background.get(key)  # pushed out of a tier after it was looked for among the waiting
        return None if chunk_kv is None else (chunk_kv, -1)

    def _promote(self, key: ChunkKey, chunk_kv: ChunkKV, number: int) -> None:
        trait = self._trait(key)
        entry = Evicted(key, chunk_kv, trait.static, trait.cfo)
        stop = self._num_memory if number < 0 else min(number, self._num_memory)
        for faster in range(stop):
            if self._put_into(faster, entry):
                if 0 <= number < self._num_memory:
                    self.tiers[number].remove(key)
                return

    def _put_into_memory(self, entry: Evicted) -> int | None:
        """Put an entry into the first memory tier that takes it, and take it out of the others; its tier's number."""
        holder = None
        for number in range(self._num_memory):
            if holder is None and self._put_into(number, entry):
                holder = number
            elif holder is not None:
                self.tiers[number].remove(entry.key)
        return holder

    def _put_into(self, number: int, entry: Evicted) -> bool:
        tier = self.tiers[number]
        try:
            return tier.put(entry.key, entry.chunk_kv(), static=entry.static, cfo=entry.cfo)
        except (StoreError, OSError) as error:
            tier.counters.error("writing", error)
            return False

    def _admit(self, key: ChunkKey, chunk_kv: ChunkKV, number: int) -> None:
        """Write an entry that was just used to the persistent tiers that should have it by now."""
        trait = self._trait(key, used=True)
        is_due = trait.uses == self._admit_after
        targets = [
            tier
            for tier in self._persistent()
            if tier != number and (is_due or (tier < number and trait.uses > self._admit_after))
        ]
        entry = Evicted(key, chunk_kv, trait.static, trait.cfo)
        if targets and not self._offer(entry, dict.fromkeys(targets, False)) and is_due:
            with self._traits_lock:
                trait.uses -= 1  # due again at the next use

    def _demote(self, number: int, entry: Evicted) -> bool:
        """Pass on what tier ``number`` pushed out; called with that tier locked."""
        if number + 1 < self._num_memory:
            return self._offer(entry, {number + 1: True})
        if self._trait(entry.key).uses < self._admit_after:
            return False
        return self._offer(entry, dict.fromkeys(self._persistent(), False))

    def _offer(self, entry: Evicted, tiers: Mapping[int, bool]) -> bool:
        if not tiers:
            return False
        is_queued = self._background.offer(entry, tiers)
        if not is_queued:
            for tier in tiers:
                self.tiers[tier].counters.count("dropped")
        return is_queued

    def _write(self, task: WriteTask) -> None:
        """Carry out a task of the background thread."""
        entry = task.entry
        with self._moves.moving(entry.key):
            for number, replaces in sorted(task.tiers.items()):
                if task.is_cancelled:
                    return
                tier = self.tiers[number]
                if not tier.is_persistent:
                    is_faster = any(faster.contains(entry.key) for faster in self.tiers[:number])
                    if not is_faster and not self._put_into(number, entry):
                        self._demote(number, entry)
                elif replaces or not tier.contains(entry.key):
                    self._put_into(number, entry)

    def _relieve(self) -> None:
        for tier in self.tiers:
            tier.relieve()

    def _persistent(self) -> range:
        return range(self._num_memory, len(self.tiers))

    def _trait(self, key: ChunkKey, put: _Trait | None = None, used: bool = False) -> _Trait:
        """What is remembered of a key; forgotten again when there are too many."""
        with self._traits_lock:
            trait = self._traits.setdefault(key, replace(put) if put is not None else _Trait())
            self._traits.move_to_end(key)
            if put is not None:
                trait.static, trait.cfo, trait.uses = put.static, put.cfo, max(trait.uses, put.uses)
            trait.uses += used
            if len(self._traits) > _KEYS_REMEMBERED:
                self._traits.popitem(last=False)
            return trait
