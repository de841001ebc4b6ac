"""All tiers as one store: fast ones in front of large ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial

from cachecraft_rag.chunk_kv import ChunkKV, LayeredKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.base import ChunkStore, Found, check_nbytes
from cachecraft_rag.store.documents import AllDocuments
from cachecraft_rag.store.entry_check import EntryCheck
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.evicted import Evicted
from cachecraft_rag.store.loads import Loads
from cachecraft_rag.store.memory import MemoryStore
from cachecraft_rag.store.moves import Moves
from cachecraft_rag.store.pruned_documents import PrunedDocuments
from cachecraft_rag.store.tier_list import TierList
from cachecraft_rag.store.tier_stats import TierStats
from cachecraft_rag.store.traits import Trait, Traits
from cachecraft_rag.store.write_behind import WriteBehind


class TieredStore(ChunkStore):
    """Looks from the fastest tier to the slowest, and moves what it finds to the fastest. Thread-safe.

    An entry is in one memory tier at a time: in the first when it is put or found often enough, otherwise in the
    second, and in the next one when it is pushed out. Its time to live there begins anew. Disk and remote get a copy in
    the background once it was used often enough. Two entries of one key are taken to be equally good: an older copy may
    come back when a newer one was pushed out of memory before it was written.

    Args:
        tiers: Fastest first: memory tiers, then persistent ones, each with a name of its own. The store owns them.
        admit_after: Uses after which an entry is written to persistent tiers; being put is the first.
        hot_after: Uses after which an entry may enter the first of several memory tiers; static ones always may.
        load_ahead: Threads that read from persistent tiers ahead of need; 0 for none.
        compute_if_faster: Whether ``find`` leaves an entry alone where loading takes longer than computing.
        max_waiting_bytes: Most bytes of entries that wait for the background thread, beyond the tiers' budgets. What
            comes on top is not written, and counted as dropped.
        name: Name in statistics.

    Attributes:
        tiers: As given.

    Raises:
        ValueError: A number is too small, or see ``TierList``.
    """

    def __init__(
        self,
        tiers: Sequence[ChunkStore],
        admit_after: int = 1,
        hot_after: int = 1,
        load_ahead: int = 3,
        compute_if_faster: bool = True,
        max_waiting_bytes: int = 256 * 2**20,
        name: str = "tiered",
    ) -> None:
        super().__init__(name)
        for field, number, least in (
            ("admit_after", admit_after, 1),
            ("hot_after", hot_after, 1),
            ("load_ahead", load_ahead, 0),
            ("max_waiting_bytes", max_waiting_bytes, 0),
        ):
            if number < least:
                raise ValueError(f"{field}: {number} is below {least}; give {least} or more")
        self.tiers = TierList(tiers)
        self._has_relief = any(isinstance(tier, MemoryStore) and tier.demote_after_s is not None for tier in tiers)
        self._hot_after = hot_after
        if self.tiers.persistent:
            places = AllDocuments([tier.documents for tier in self.tiers.persistent])
            self.documents = PrunedDocuments(places, self._stored_chunks)
        self._loads = Loads(load_ahead if self.tiers.persistent else 0, compute_if_faster)
        self._traits = Traits()
        self._moves = Moves()
        self._behind = WriteBehind(self.tiers, self._traits, self._moves, admit_after, max_waiting_bytes)
        for number, tier in enumerate(self.tiers):
            if isinstance(tier, MemoryStore):
                tier.on_evict = partial(self._behind.demote, number)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry from the fastest tier that has it."""
        return (self.get_with_tier(key) or (None,))[0]

    def get_with_tier(self, key: ChunkKey) -> tuple[ChunkKV, str] | None:
        """The entry, and the name of the tier that had it; it is in the fastest tier afterwards."""
        found = self._find(key, lambda tier: tier.get(key), lazily=False)
        return None if found is None or found.kv is None else (found.kv.complete(), found.tier)

    def open(self, key: ChunkKey) -> LayeredKV | None:
        """The entry, perhaps not read yet; from a persistent tier it comes to memory when it is given to ``settle``."""
        found = self._find(key, lambda tier: tier.open(key), lazily=True)
        return None if found is None else found.kv

    def find(self, key: ChunkKey) -> Found | None:
        """The entry, where loading it is quicker than computing it; see ``open``."""
        declined: list[ChunkStore] = []

        def open_quickly(tier: ChunkStore) -> LayeredKV | None:
            is_slow = tier.is_persistent and self._loads.is_slow(tier.counters.pace)
            if not declined and not (is_slow and tier.contains(key) and self._loads.is_declined()):
                return tier.open(key)
            declined.append(tier)
            return None

        found = self._find(key, open_quickly, lazily=True)
        if found is None and declined:
            declined[0].counters.count("declined")
            return Found(declined[0].name, None)
        return found

    def settle(self, key: ChunkKey, kv: LayeredKV, tier: str) -> None:
        """Take an entry that was read from a persistent tier into memory, unless it was removed since."""
        with self._moves.moving(key):
            if self._loads.claim(key, kv):
                try:
                    self._used(key, kv, self.tiers.number_of(tier))
                finally:
                    self._loads.end(key)

    def prefetch(self, keys: Iterable[ChunkKey]) -> int:
        """Begin to move entries from persistent tiers to memory; returns how many."""
        if self._loads.readers is None:
            return 0
        memory, persistent = self.tiers.memory, self.tiers.persistent
        wanted = [
            key
            for key in dict.fromkeys(keys)
            if not any(tier.contains(key) for tier in memory) and any(tier.contains(key) for tier in persistent)
        ]
        self._loads.prefetch(self.get, wanted)
        return len(wanted)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Measure how fast KV is computed."""
        self._loads.computed(num_tokens, seconds)

    @property
    def readers(self) -> Executor | None:
        """Threads that read ahead from persistent tiers."""
        return self._loads.readers

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Keep an entry in the fastest tier with room for it; persistent tiers get it in the background."""
        trait = self._traits.put(key, static, cfo)
        entry = Evicted(key, chunk_kv, trait.static, cfo)
        with self._moves.moving(key):
            self._loads.end(key)
            self._behind.cancel(lambda name: name == key)
            holder = self.tiers.put_into_memory(entry, self._fastest(trait))
            is_offered = self._behind.admit_new(entry, trait, holder is not None)
        if self._has_relief:
            self._behind.wake()
        return holder is not None or is_offered

    def contains(self, key: ChunkKey) -> bool:
        """Whether any tier has the entry."""
        return key in self._behind.under_way() or any(tier.contains(key) for tier in self.tiers)

    def touch(self, key: ChunkKey) -> bool:
        """Whether any tier has the entry, which counts as a use in every one that has."""
        return any([key in self._behind.under_way(), *(tier.touch(key) for tier in self.tiers)])

    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry from every tier; it can't come back from one that it was on its way to."""
        with self._moves.halted(lambda name: name == key):
            self._loads.end(key)
            removed = [tier.remove(key) for tier in self.tiers.memory]
            removed.append(self._behind.cancel(lambda name: name == key) > 0)
            removed += [tier.remove(key) for tier in self.tiers.persistent]
        self._traits.forget(key)
        return any(removed)

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries in all tiers."""
        keys = {key for key in self._behind.under_way() if key.chunk == chunk}
        return sorted(keys.union(*(tier.variants(chunk) for tier in self.tiers)), key=str)

    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all, from every tier.

        Returns:
            How many entries the memory tiers together or any persistent tier had, whichever is most: entries in several
            tiers are counted once as far as that can be told.
        """

        def is_meant(key: ChunkKey) -> bool:
            return namespace in (None, key.namespace)

        with self._moves.halted(is_meant):
            self._loads.forget(is_meant)
            in_memory = sum(tier.clear(namespace) for tier in self.tiers.memory)
            waiting = self._behind.cancel(is_meant)
            persistent = [tier.clear(namespace) for tier in self.tiers.persistent]
        self._traits.forget_all(is_meant)
        self.documents.clear(namespace)
        return max([in_memory, waiting, *persistent])

    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """The entries of all tiers, fastest first; what is in several is listed for each."""
        return [info for tier in self.tiers for info in tier.entries(namespace)]

    def verify(self, namespace: str | None = None) -> Iterator[EntryCheck]:
        """Read every entry of the persistent tiers in full."""
        for tier in self.tiers:
            yield from tier.verify(namespace)

    def shrink(self, nbytes: int) -> int:
        """Evict until all tiers together hold at most so many bytes, from the fastest tier on: slower ones have copies.

        Returns:
            How many entries went from a tier; one that was pushed from tier to tier counts in each.
        """
        check_nbytes(nbytes)
        num_gone = 0
        for tier in self.tiers:
            self.flush()  # what a tier pushed out may have gone into this one
            excess = self.nbytes - nbytes
            if excess > 0:
                num_gone += tier.shrink(max(tier.nbytes - excess, 0))
        return num_gone

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
        self._loads.close()
        self._behind.close()
        for tier in self.tiers:
            tier.close()

    def flush(self) -> None:
        """Wait until everything that was put or pushed out so far has reached the tiers it goes to."""
        self._behind.flush()

    def relieve(self) -> int:
        """Make room in every tier ahead of need."""
        return self.tiers.relieve()

    def stats(self) -> TierStats:
        """Figures of the whole, with those of every tier in ``tiers``."""
        return self.counters.stats(len(self), self.nbytes, self.capacity).over([tier.stats() for tier in self.tiers])

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

    def _find(self, key: ChunkKey, load: Callable[[ChunkStore], LayeredKV | None], lazily: bool) -> Found | None:
        """The entry, got from its tier by ``load``; ``lazily`` leaves it there until ``settle``."""
        started = time.perf_counter()
        with self._moves.moving(key):
            found = self._look(key, load, lazily)
            if found is None:
                self.counters.count("misses")
                return None
            kv, number = found
            is_left = lazily and number >= self.tiers.num_memory
            kv = self._loads.begin(key, kv) if is_left else self._used(key, kv, number)
        self.counters.hit(kv.num_tokens, seconds := time.perf_counter() - started)
        if not is_left:
            self.counters.loaded(kv.num_tokens, kv.nbytes, seconds)
        return Found(self.tiers[max(number, 0)].name, kv)

    def _look(
        self, key: ChunkKey, load: Callable[[ChunkStore], LayeredKV | None], lazily: bool
    ) -> tuple[LayeredKV, int] | None:
        """The entry and the number of its tier, -1 for one that waits for the background thread."""
        under_way = self._loads.under_way(key) if lazily else None  # before memory, where it may be moved meanwhile
        for number in range(len(self.tiers)):
            found = under_way if number == self.tiers.num_memory else None
            found = self.tiers.load(number, load) if found is None else found
            if found is not None:
                return found, number
            if number == 0 and (waiting := self._behind.get(key)) is not None:
                return waiting, -1
        waiting = self._behind.get(key)  # pushed out of a tier after it was looked for among the waiting
        return None if waiting is None else (waiting, -1)

    def _used(self, key: ChunkKey, kv: LayeredKV, number: int) -> LayeredKV:
        """Count a use of an entry found in tier ``number``, and move it to where it is found sooner."""
        trait = self._traits.use(key)
        fastest = self._fastest(trait)
        is_promoted = fastest < self.tiers.num_memory and not 0 <= number <= fastest
        targets = self._behind.due(trait, number)
        if is_promoted or targets:
            kv = kv.complete()
            entry = Evicted(key, kv, trait.static, trait.cfo)
            if is_promoted:
                self.tiers.promote(entry, number, fastest)
            self._behind.admit(entry, trait, targets)
        return kv

    def _stored_chunks(self) -> set[str] | None:
        num_errors = self._num_errors()
        # Twice: an entry that moves meanwhile may be in neither tier when each is looked at.
        chunks = {info.key.chunk for _ in range(2) for info in self.entries()}
        chunks.update(key.chunk for key in self._behind.under_way())
        return chunks if self._num_errors() == num_errors else None  # a tier that fails lists nothing, or a part

    def _num_errors(self) -> int:
        return sum(tier.counters.num_errors for tier in self.tiers)

    def _fastest(self, trait: Trait) -> int:
        """Number of the fastest tier that an entry may enter."""
        return 0 if self.tiers.num_memory < 2 or trait.static or trait.uses >= self._hot_after else 1
