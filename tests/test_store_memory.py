"""The tier in memory: within its budget at every moment, least recently used first out."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import ChunkStore, MemoryStore
from cachecraft_rag.store.precision import PackedKV

BYTES_PER_TOKEN = 2 * 4 * 4 + 4  # keys and values of 4 float32 numbers, and the id


def entry(num_tokens: int = 10) -> ChunkKV:
    tensors = [torch.zeros(1, 1, num_tokens, 4) for _ in range(2)]
    return ChunkKV(tensors[0], tensors[1], tuple(range(num_tokens)), 0)


def key(chunk: str, context: str = "c", namespace: str = "default") -> ChunkKey:
    return ChunkKey(namespace, chunk, context)


def store(num_tokens: int) -> MemoryStore:
    """A store with room for so many tokens."""
    return MemoryStore(num_tokens * BYTES_PER_TOKEN)


def filled(num_tokens: int, *chunks: str) -> MemoryStore:
    """A store with entries of 10 tokens."""
    memory = store(num_tokens)
    for chunk in chunks:
        assert memory.put(key(chunk), entry())
    return memory


def held(memory: ChunkStore, *chunks: str) -> list[str]:
    return [chunk for chunk in chunks if memory.contains(key(chunk))]


def test_an_entry_comes_back_as_it_was() -> None:
    memory, chunk_kv = store(10), entry()
    assert memory.put(key("a"), chunk_kv)
    assert memory.get(key("a")) is chunk_kv
    assert memory.nbytes == chunk_kv.nbytes == 10 * BYTES_PER_TOKEN
    assert len(memory) == 1


def test_an_unknown_key_is_a_miss() -> None:
    memory = filled(10, "a")
    for other in (key("b"), key("a", context="d"), key("a", namespace="other")):
        assert memory.get(other) is None
        assert not memory.contains(other)
        assert not memory.remove(other)


def test_the_least_recently_stored_entry_goes_first() -> None:
    memory = filled(30, "a", "b", "c", "d")
    assert held(memory, "a", "b", "c", "d") == ["b", "c", "d"]


def test_getting_an_entry_counts_as_using_it() -> None:
    memory = filled(30, "a", "b", "c")
    assert memory.get(key("a")) is not None
    memory.put(key("d"), entry())
    assert held(memory, "a", "b", "c", "d") == ["a", "c", "d"]


def test_asking_whether_an_entry_is_there_does_not_count_as_using_it() -> None:
    memory = filled(30, "a", "b", "c")
    assert memory.contains(key("a"))
    assert memory.variants("a") == [key("a")]
    memory.put(key("d"), entry())
    assert held(memory, "a", "b", "c", "d") == ["b", "c", "d"]


def test_storing_an_entry_again_counts_as_using_it() -> None:
    memory = filled(30, "a", "b", "c", "a", "d")
    assert held(memory, "a", "b", "c", "d") == ["a", "c", "d"]


def test_a_large_entry_pushes_out_as_many_as_it_needs_and_no_more() -> None:
    memory = filled(40, "a", "b", "c", "d")
    assert memory.put(key("e"), entry(11))
    assert held(memory, "a", "b", "c", "d", "e") == ["c", "d", "e"]


def test_a_replaced_entry_is_counted_once() -> None:
    memory = filled(40, "a", "a", "b")
    assert memory.nbytes == 20 * BYTES_PER_TOKEN
    assert len(memory) == 2
    larger = entry(25)
    memory.put(key("a"), larger)
    assert memory.get(key("a")) is larger
    assert memory.nbytes == 35 * BYTES_PER_TOKEN


def test_replacing_an_entry_does_not_push_out_others_that_fit_beside_it() -> None:
    memory = filled(20, "a", "b")
    assert memory.put(key("a"), entry(10))
    assert held(memory, "a", "b") == ["a", "b"]


def test_an_entry_of_exactly_the_budget_is_kept() -> None:
    memory = filled(30, "a", "b")
    assert memory.put(key("c"), entry(30))
    assert held(memory, "a", "b", "c") == ["c"]


def test_an_entry_larger_than_the_budget_is_refused_and_pushes_out_nothing() -> None:
    memory = filled(30, "a", "b")
    assert not memory.put(key("c"), entry(31))
    assert held(memory, "a", "b", "c") == ["a", "b"]
    assert memory.nbytes == 20 * BYTES_PER_TOKEN


def test_an_entry_that_grew_too_large_leaves_no_old_one_behind() -> None:
    memory = filled(30, "a")
    assert not memory.put(key("a"), entry(31))
    assert memory.get(key("a")) is None
    assert memory.nbytes == 0


def test_a_budget_of_nothing_keeps_nothing() -> None:
    memory = MemoryStore(0)
    assert not memory.put(key("a"), entry(1))
    assert len(memory) == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes: -1 is negative"):
        MemoryStore(-1)


def test_an_entry_can_be_removed_once() -> None:
    memory = filled(30, "a", "b")
    assert memory.remove(key("a"))
    assert not memory.remove(key("a"))
    assert (held(memory, "a", "b"), memory.nbytes) == (["b"], 10 * BYTES_PER_TOKEN)


def test_variants_are_all_entries_of_one_chunk() -> None:
    memory = store(100)
    for context in ("x", "z", "y"):
        memory.put(key("a", context), entry())
    memory.put(key("b", "x"), entry())
    assert memory.variants("a") == [key("a", "x"), key("a", "y"), key("a", "z")]
    assert memory.variants("b") == [key("b", "x")]
    assert memory.variants("c") == []


def test_variants_that_were_pushed_out_or_removed_are_forgotten() -> None:
    memory = store(20)
    for context in ("x", "y", "z"):
        memory.put(key("a", context), entry())
    assert memory.variants("a") == [key("a", "y"), key("a", "z")]
    memory.remove(key("a", "y"))
    memory.remove(key("a", "z"))
    assert memory.variants("a") == []


def test_one_namespace_can_be_cleared_alone() -> None:
    memory = store(100)
    for namespace in ("ours", "theirs"):
        for chunk in "ab":
            memory.put(key(chunk, namespace=namespace), entry())
    assert memory.clear("ours") == 2
    assert not memory.contains(key("a", namespace="ours"))
    assert memory.contains(key("a", namespace="theirs"))
    assert memory.clear("nobody") == 0
    assert memory.clear() == 2
    assert (len(memory), memory.nbytes) == (0, 0)


def test_closing_lets_go_of_everything() -> None:
    memory = filled(30, "a", "b")
    memory.close()
    assert (len(memory), memory.nbytes) == (0, 0)


def test_many_entries_are_taken_and_given_in_order() -> None:
    memory = store(30)
    entries = [(key(chunk), entry(size)) for chunk, size in (("a", 10), ("b", 40), ("c", 10))]
    assert memory.put_many(entries) == 2
    assert memory.get_many([key("c"), key("b"), key("a")]) == [entries[2][1], None, entries[0][1]]


def test_the_tier_has_a_name() -> None:
    assert MemoryStore(1).name == "cold"
    assert MemoryStore(1, name="warm").name == "warm"


class MemoryStoreMachine(RuleBasedStateMachine):
    """A store beside the simplest thing that does the same: a dictionary in order of use."""

    capacity = 25 * BYTES_PER_TOKEN
    keys = st.builds(key, st.sampled_from("abcd"), st.sampled_from("xy"), st.sampled_from(["ours", "theirs"]))

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(self.capacity)
        self.model: OrderedDict[ChunkKey, ChunkKV] = OrderedDict()

    @rule(name=keys, num_tokens=st.integers(1, 28))
    def put(self, name: ChunkKey, num_tokens: int) -> None:
        chunk_kv = entry(num_tokens)
        fits = chunk_kv.nbytes <= self.capacity
        self.model.pop(name, None)
        if fits:
            self.model[name] = chunk_kv
            while sum(kept.nbytes for kept in self.model.values()) > self.capacity:
                self.model.popitem(last=False)
        assert self.store.put(name, chunk_kv) == fits

    @rule(name=keys)
    def get(self, name: ChunkKey) -> None:
        assert self.store.get(name) is self.model.get(name)
        if name in self.model:
            self.model.move_to_end(name)

    @rule(name=keys)
    def remove(self, name: ChunkKey) -> None:
        assert self.store.remove(name) == (self.model.pop(name, None) is not None)

    @rule(namespace=st.sampled_from([None, "ours", "theirs"]))
    def clear(self, namespace: str | None) -> None:
        doomed = [name for name in self.model if namespace in (None, name.namespace)]
        for name in doomed:
            del self.model[name]
        assert self.store.clear(namespace) == len(doomed)

    @rule(name=keys)
    def contains(self, name: ChunkKey) -> None:
        assert self.store.contains(name) == (name in self.model)

    @rule(chunk=st.sampled_from("abcd"))
    def variants(self, chunk: str) -> None:
        assert set(self.store.variants(chunk)) == {name for name in self.model if name.chunk == chunk}

    @invariant()
    def figures_agree(self) -> None:
        assert self.store.nbytes == sum(kept.nbytes for kept in self.model.values()) <= self.capacity
        assert len(self.store) == len(self.model)


TestAnyOrderOfCalls = MemoryStoreMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_threads_never_push_it_over_its_budget() -> None:
    memory = store(50)
    is_over, start, done = threading.Event(), threading.Barrier(5), threading.Event()

    def use(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(1500):
            name = key(rng.choice("abcdefgh"), rng.choice("xy"))
            action = rng.random()
            if action < 0.5:
                memory.put(name, entry(rng.randint(1, 20)))
            elif action < 0.8:
                memory.get(name)
            elif action < 0.9:
                memory.remove(name)
            else:
                memory.variants(name.chunk)

    def watch() -> None:
        start.wait()
        while not done.is_set():
            if memory.nbytes > memory.capacity_bytes:
                is_over.set()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in [*threads, watcher]:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert not is_over.is_set()
    left = [name for chunk in "abcdefgh" for name in memory.variants(chunk)]
    assert len(left) == len(memory)
    kept = [memory.get(name) for name in left]
    assert sum(chunk_kv.nbytes for chunk_kv in kept if chunk_kv is not None) == memory.nbytes


def test_an_opened_entry_is_given_as_it_is_held() -> None:
    memory, chunk_kv = store(10), entry()
    memory.put(key("a"), chunk_kv)
    assert memory.open(key("a")) is chunk_kv
    assert memory.open(key("b")) is None
    packed = MemoryStore(1000, precision="int8")
    packed.put(key("a"), chunk_kv)
    opened = packed.open(key("a"))
    assert isinstance(opened, PackedKV)
    assert opened.nbytes == packed.nbytes
    assert torch.equal(opened.layer(0)[0], chunk_kv.keys[0])
    stats = packed.stats()
    assert (stats.hits, stats.bytes_loaded, stats.load_s > 0) == (1, packed.nbytes, True)
