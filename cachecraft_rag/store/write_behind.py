"""What is on its way to slower tiers: pushed out of memory, or due on a disk or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.background import BackgroundWriter, WriteTask
from cachecraft_rag.store.evicted import Evicted
from cachecraft_rag.store.moves import Moves
from cachecraft_rag.store.tier_list import TierList
from cachecraft_rag.store.traits import Trait, Traits


class WriteBehind:
    """Decides which slower tiers an entry goes to, and writes it there in the background. Thread-safe.

    Args:
        tiers: The tiers.
        traits: What is remembered of the keys.
        moves: Keeps entries from coming back after their removal.
        admit_after: Uses after which an entry is written to persistent tiers.
        max_waiting_bytes: Most bytes of waiting entries; what comes on top is not written, and counted as dropped.
    """

    def __init__(self, tiers: TierList, traits: Traits, moves: Moves, admit_after: int, max_waiting_bytes: int) -> None:
        self._tiers, self._traits, self._moves, self._admit_after = tiers, traits, moves, admit_after
        self._writer = BackgroundWriter(self._write, tiers.relieve, max_waiting_bytes)

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """An entry that is on its way."""
        return self._writer.get(key)

    def under_way(self) -> set[ChunkKey]:
        """Keys of all entries that are on their way."""
        return self._writer.under_way()

    def cancel(self, is_meant: Callable[[ChunkKey], bool]) -> int:
        """Give up entries; returns how many."""
        return self._writer.cancel(is_meant)

    def admit_new(self, entry: Evicted, trait: Trait, is_in_memory: bool) -> bool:
        """Write a new entry to the persistent tiers that should have it; one that no memory tier took, to all."""
        if trait.uses < self._admit_after and is_in_memory:
            return False
        return self._offer(entry, dict.fromkeys(self._tiers.persistent_numbers, True))

    def due(self, trait: Trait, number: int) -> list[int]:
        """Persistent tiers that should have an entry by now, which was just used in tier ``number``."""
        is_due = trait.uses == self._admit_after
        return [
            tier
            for tier in self._tiers.persistent_numbers
            if tier != number and (is_due or (tier < number and trait.uses > self._admit_after))
        ]

    def admit(self, entry: Evicted, trait: Trait, targets: list[int]) -> None:
        """Write an entry that was used to the tiers that are ``due`` to have it."""
        if targets and not self._offer(entry, dict.fromkeys(targets, False)) and trait.uses == self._admit_after:
            self._traits.undo_use(trait)

    def demote(self, number: int, entry: Evicted) -> bool:
        """Pass on what tier ``number`` pushed out; called with that tier locked."""
        if number + 1 < self._tiers.num_memory:
            return self._offer(entry, {number + 1: True})
        is_admitted = self._traits.of(entry.key).uses >= self._admit_after
        return is_admitted and self._offer(entry, dict.fromkeys(self._tiers.persistent_numbers, False))

    def wake(self) -> None:
        """Have the tiers make room ahead of need."""
        self._writer.wake()

    def flush(self) -> None:
        """Wait until everything that is on its way has arrived."""
        self._writer.flush()

    def close(self) -> None:
        """Write what is waiting, then end."""
        self._writer.close()

    def _offer(self, entry: Evicted, tiers: Mapping[int, bool]) -> bool:
        if not tiers:
            return False
        is_queued = self._writer.offer(entry, tiers)
        if not is_queued:
            for tier in tiers:
                self._tiers[tier].counters.count("dropped")
        return is_queued

    def _write(self, task: WriteTask) -> None:
        """Carry out a task of the background thread."""
        entry = task.entry
        with self._moves.moving(entry.key):
            for number, replaces in sorted(task.tiers.items()):
                if task.is_cancelled:
                    return
                tier = self._tiers[number]
                if not tier.is_persistent:
                    is_faster = any(faster.contains(entry.key) for faster in self._tiers[:number])
                    if not is_faster and not self._tiers.put(number, entry):
                        self.demote(number, entry)
                elif replaces or not tier.contains(entry.key):
                    self._tiers.put(number, entry)
