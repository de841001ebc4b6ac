"""What a tiered store remembers of its keys, whichever tier the entries are in."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cachecraft_rag.keys import ChunkKey

_KEYS_REMEMBERED = 100_000


@dataclass
class Trait:
    """What is remembered of a key.

    Attributes:
        static: Whether the entry is exempt from any time to live; once said, it stays so.
        cfo: Share of its tokens that a reuse recomputes.
        uses: How often it was used; being put is the first.
    """

    static: bool = False
    cfo: float = 0.0
    uses: int = 0


class Traits:
    """Traits by key, the longest unused forgotten when there are too many. Thread-safe."""

    def __init__(self) -> None:
        self._traits: OrderedDict[ChunkKey, Trait] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: ChunkKey, static: bool, cfo: float) -> Trait:
        """Note what an entry was put with."""
        with self._lock:
            trait = self._of(key)
            trait.static, trait.cfo, trait.uses = trait.static or static, cfo, max(trait.uses, 1)
            return trait

    def use(self, key: ChunkKey) -> Trait:
        """Count a use."""
        with self._lock:
            trait = self._of(key)
            trait.uses += 1
            return trait

    def undo_use(self, trait: Trait) -> None:
        """Take back a use: what it called for could not be done, and is due again at the next."""
        with self._lock:
            trait.uses -= 1

    def of(self, key: ChunkKey) -> Trait:
        """What is known of a key."""
        with self._lock:
            return self._of(key)

    def forget(self, key: ChunkKey) -> None:
        """Forget a key."""
        with self._lock:
            self._traits.pop(key, None)

    def forget_all(self, is_meant: Callable[[ChunkKey], bool]) -> None:
        """Forget keys."""
        with self._lock:
            for key in [key for key in self._traits if is_meant(key)]:
                del self._traits[key]

    def _of(self, key: ChunkKey) -> Trait:
        trait = self._traits.setdefault(key, Trait())
        self._traits.move_to_end(key)
        if len(self._traits) > _KEYS_REMEMBERED:
            self._traits.popitem(last=False)
        return trait
