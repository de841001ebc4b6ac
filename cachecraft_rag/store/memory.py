"""A tier in memory, of the host or of a device: hot, warm and cold are this class with different settings."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store.base import ChunkStore, check_nbytes
from cachecraft_rag.store.entry_info import EntryInfo
from cachecraft_rag.store.evicted import Evicted
from cachecraft_rag.store.eviction import EvictionPolicy, make_policy
from cachecraft_rag.store.precision import PRECISIONS, PackedKV, pack
from cachecraft_rag.store_config import EvictionPolicyName, Precision

_KV = TypeVar("_KV", ChunkKV, ChunkKV | PackedKV)
_RELIEVED_FILL = 0.9  # share of the budget that background lowering leaves in use


@dataclass(eq=False)
class _Slot:
    held: ChunkKV | PackedKV
    used_at: float
    static: bool
    cfo: float


class MemoryStore(ChunkStore):
    """Keeps entries in memory, and evicts by a policy. Thread-safe.

    Args:
        capacity_bytes: Byte budget, never exceeded.
        name: Name of the tier in statistics.
        policy: Which entry goes first: ``"lru"``, ``"lfu"`` or ``"saving"``.
        precision: How entries are held; ``"model"`` holds the very object that was put.
        ttl_s: Seconds without use after which an entry is dropped; ``None`` keeps it. Static entries are exempt.
        clock: Source of the time in seconds.
        on_evict: Called with every entry that is pushed out; returns whether it goes on elsewhere. The tier is locked
            meanwhile, so that no entry is ever in neither place: it must be quick, and not call this tier.
        demote_after_s: Seconds without use after which an entry's precision is lowered, once memory is short, before
            anything is pushed out; ``None`` never. Static entries are exempt.
        demote_to: The precision that such entries are lowered to.
        device: Where tensors are held; ``None`` leaves them where they are.
        pin_memory: Whether host memory is page-locked, so that a GPU copies from it while it computes.
        pins_static: Whether static entries are never pushed out.
    """

    def __init__(
        self,
        capacity_bytes: int,
        name: str = "cold",
        policy: EvictionPolicyName = "lru",
        precision: Precision = "model",
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_evict: Callable[[Evicted], bool] | None = None,
        demote_after_s: float | None = None,
        demote_to: Precision = "int4",
        device: torch.device | None = None,
        pin_memory: bool = False,
        pins_static: bool = False,
    ) -> None:
        super().__init__(name)
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: {capacity_bytes} is negative; give 0 or more bytes")
        for field, precision_name in (("precision", precision), ("demote_to", demote_to)):
            if precision_name not in PRECISIONS:
                raise ValueError(f"{field}: {precision_name!r} is unknown; use one of {', '.join(PRECISIONS)}")
        for field, seconds in (("ttl_s", ttl_s), ("demote_after_s", demote_after_s)):
            if seconds is not None and seconds <= 0:
                raise ValueError(f"{field}: {seconds} is not positive; give seconds above 0, or None")
        self.capacity_bytes = capacity_bytes
        self.on_evict, self.demote_after_s = on_evict, demote_after_s
        self._precision, self._demote_to, self._device = precision, demote_to, device
        self._pin_memory, self._pins_static = pin_memory, pins_static
        self._ttl_s, self._clock = ttl_s, clock
        self._policy: EvictionPolicy[ChunkKey] = make_policy(policy)
        self._entries: dict[ChunkKey, _Slot] = {}
        self._variants: defaultdict[str, set[ChunkKey]] = defaultdict(set)
        self._static: set[ChunkKey] = set()
        # Longest unused first; the second holds only what can still be lowered. Static entries are in neither.
        self._aging: OrderedDict[ChunkKey, None] = OrderedDict()
        self._full: OrderedDict[ChunkKey, None] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> ChunkKV | None:
        """The entry, unpacked where it is held packed."""
        return self._look_up(key, lambda held: held.complete())

    def open(self, key: ChunkKey) -> ChunkKV | PackedKV | None:
        """The entry as it is held."""
        return self._look_up(key, lambda held: held)

    def _look_up(self, key: ChunkKey, use: Callable[[ChunkKV | PackedKV], _KV]) -> _KV | None:
        started = time.perf_counter()
        with self._lock:
            self._expire()
            slot = self._used(key)
            if slot is not None:
                held = slot.held
        if slot is None:
            self.counters.count("misses")
            return None
        kv = use(held)
        seconds = time.perf_counter() - started
        self.counters.hit(held.num_tokens, seconds)
        self.counters.loaded(held.num_tokens, held.nbytes, seconds)
        return kv

    def _used(self, key: ChunkKey) -> _Slot | None:
        """The entry's place, once this use of it is counted. With the lock held."""
        slot = self._entries.get(key)
        if slot is not None:
            slot.used_at = self._clock()
            self._policy.use(key)
            for order in (self._aging, self._full):
                if key in order:
                    order.move_to_end(key)
        return slot

    def put(self, key: ChunkKey, chunk_kv: ChunkKV, *, static: bool = False, cfo: float = 0.0) -> bool:
        """Keep an entry; others make room before it is counted in."""
        held = self._prepared(chunk_kv)
        with self._lock:
            self._expire()
            is_kept = self._make_room(key, held.nbytes)
            if is_kept:
                self._keep(key, _Slot(held, self._clock(), static, cfo))
            else:
                self._drop(key)
        return is_kept

    def contains(self, key: ChunkKey) -> bool:
        """Whether the entry is there."""
        with self._lock:
            self._expire()
            return key in self._entries

    def touch(self, key: ChunkKey) -> bool:
        """Whether the entry is there, which counts as a use."""
        with self._lock:
            self._expire()
            return self._used(key) is not None

    def remove(self, key: ChunkKey) -> bool:
        """Drop an entry."""
        with self._lock:
            self._expire()
            return self._drop(key)

    def variants(self, chunk: str) -> list[ChunkKey]:
        """Keys of a chunk's entries."""
        with self._lock:
            self._expire()
            return sorted(self._variants.get(chunk, ()), key=str)

    def clear(self, namespace: str | None = None) -> int:
        """Drop the entries of a namespace, or all."""
        self.documents.clear(namespace)
        with self._lock:
            self._expire()
            doomed = [key for key in self._entries if namespace in (None, key.namespace)]
            return sum(self._drop(key) for key in doomed)

    def entries(self, namespace: str | None = None) -> list[EntryInfo]:
        """The entries of a namespace, or all."""
        with self._lock:
            self._expire()
            return [
                EntryInfo(
                    key,
                    self.name,
                    slot.held.nbytes,
                    slot.used_at,
                    round(slot.held.num_tokens * (1.0 - slot.cfo)),
                    slot.static,
                    key in self._pins,
                )
                for key, slot in self._entries.items()
                if namespace in (None, key.namespace)
            ]

    def shrink(self, nbytes: int) -> int:
        """Push out until at most so many bytes are held; entries go on to where evicted ones go."""
        check_nbytes(nbytes)
        num_gone = 0
        with self._lock:
            self._expire()
            stay = self._static if self._pins_static else set()
            while self._nbytes > nbytes:
                victim = self._policy.victim(lambda name: name in stay or name in self._pins)
                if victim is None:
                    break
                self._push_out(victim)
                num_gone += 1
        return num_gone

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        with self._lock:
            self._expire()
            return self._nbytes

    @property
    def capacity(self) -> int:
        """Byte budget."""
        return self.capacity_bytes

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._entries)

    def close(self) -> None:
        """Let go of all tensors."""
        self.clear()

    def unpin(self, key: ChunkKey) -> None:
        """Undo one ``pin``."""
        super().unpin(key)
        with self._lock:
            self._policy.release(key)

    def relieve(self) -> int:
        """Lower the precision of entries that are long unused while the budget is nearly used up."""
        freed = 0
        while True:
            with self._lock:
                key = self._longest_idle()
                if key is None or self._nbytes <= _RELIEVED_FILL * self.capacity_bytes:
                    return freed
                held = self._entries[key].held
            lowered = self._lowered(held)  # outside the lock: requests go on meanwhile
            with self._lock:
                slot = self._entries.get(key)
                if slot is not None and slot.held is held:
                    freed += self._replace_by(key, slot, lowered)

    def _prepared(self, chunk_kv: ChunkKV) -> ChunkKV | PackedKV:
        """The entry as it is held: on this tier's device, without the rest of a larger tensor behind it, packed."""
        if self._device is not None:
            chunk_kv = chunk_kv.to(self._device)
        keys, values = _alone(chunk_kv.keys), _alone(chunk_kv.values)
        if keys is not chunk_kv.keys or values is not chunk_kv.values:
            chunk_kv = replace(chunk_kv, keys=keys, values=values)
        if self._precision != "model":
            return pack(chunk_kv, self._precision)
        if self._pin_memory:
            return replace(chunk_kv, keys=chunk_kv.keys.pin_memory(), values=chunk_kv.values.pin_memory())
        return chunk_kv

    def _make_room(self, key: ChunkKey, nbytes: int) -> bool:
        """Free what an entry needs beside the others; ``False``, and nothing freed, when that can't be done."""
        old = self._entries.get(key)
        available = self.capacity_bytes + (old.held.nbytes if old is not None else 0)
        stay = self._pins.held() | (self._static if self._pins_static else set())
        pinned = [self._entries[name] for name in stay - {key} if name in self._entries]
        if nbytes > self.capacity_bytes - sum(slot.held.nbytes for slot in pinned):
            return False
        while self._nbytes + nbytes > available and (idle := self._longest_idle()) is not None:
            slot = self._entries[idle]
            self._replace_by(idle, slot, self._lowered(slot.held))
        available = self.capacity_bytes + (old.held.nbytes if old is not None else 0)
        while self._nbytes + nbytes > available:
            victim = self._policy.victim(lambda name: name == key or name in stay or name in self._pins)
            if victim is None:  # pinned since the sum above
                return False
            self._push_out(victim)
        return True

    def _push_out(self, victim: ChunkKey) -> None:
        slot = self._entries[victim]
        self._drop(victim)
        self.counters.count("evictions")
        if self.on_evict is not None and self.on_evict(Evicted(victim, slot.held, slot.static, slot.cfo)):
            self.counters.count("demotions")

    def _keep(self, key: ChunkKey, slot: _Slot) -> None:
        old = self._entries.get(key)
        self._nbytes += slot.held.nbytes - (old.held.nbytes if old is not None else 0)
        self._entries[key] = slot
        self._variants[key.chunk].add(key)
        (self._static.add if slot.static else self._static.discard)(key)
        self._policy.add(key, slot.held.nbytes, slot.held.num_tokens * (1.0 - slot.cfo))
        for order in (self._aging, self._full):
            order.pop(key, None)
            if not slot.static:
                order[key] = None

    def _drop(self, key: ChunkKey) -> bool:
        slot = self._entries.pop(key, None)
        if slot is None:
            return False
        self._nbytes -= slot.held.nbytes
        self._policy.remove(key)
        self._static.discard(key)
        self._aging.pop(key, None)
        self._full.pop(key, None)
        self._variants[key.chunk].discard(key)
        if not self._variants[key.chunk]:
            del self._variants[key.chunk]
        return True

    def _expire(self) -> None:
        if self._ttl_s is None:
            return
        latest = self._clock() - self._ttl_s
        while self._aging and self._entries[key := next(iter(self._aging))].used_at <= latest:
            self._drop(key)
            self.counters.count("expired")

    def _longest_idle(self) -> ChunkKey | None:
        """The entry to lower next."""
        if self.demote_after_s is None or not self._full:
            return None
        key = next(iter(self._full))
        return key if self._entries[key].used_at <= self._clock() - self.demote_after_s else None

    def _lowered(self, held: ChunkKV | PackedKV) -> PackedKV:
        return held.lower(self._demote_to) if isinstance(held, PackedKV) else pack(held, self._demote_to)

    def _replace_by(self, key: ChunkKey, slot: _Slot, lowered: PackedKV) -> int:
        """Hold an entry at its lower precision where that is really smaller; returns the bytes freed."""
        del self._full[key]
        freed = slot.held.nbytes - lowered.nbytes
        if freed <= 0:
            return 0
        slot.held = lowered
        self._nbytes -= freed
        self._policy.resize(key, lowered.nbytes)
        self.counters.count("lowered")
        return freed


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps no more memory alive than its own bytes."""
    return tensor if tensor.untyped_storage().nbytes() <= tensor.nbytes else tensor.clone()
