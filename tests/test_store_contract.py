"""What every store promises, whatever it keeps its entries in."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from cachecraft_rag.chunk_kv import ChunkKV
from cachecraft_rag.keys import ChunkKey
from cachecraft_rag.store import ChunkStore, TieredStore
from tests.redis_server import redis_server
from tests.store_entries import entry, held, is_same, key
from tests.store_kinds import Kind, kind, settle

__all__ = ["kind", "redis_server"]


def test_an_entry_comes_back_equal(kind: Kind) -> None:
    store = kind.make(10)
    assert store.put(key("a"), entry(of=key("a")))
    assert is_same(store.get(key("a")), entry(of=key("a")))
    settle(store)
    assert is_same(store.get(key("a")), entry(of=key("a")))


def test_a_long_entry_comes_back_equal(kind: Kind) -> None:
    store = kind.make(200)
    long = entry(2100, of=key("a"))
    assert store.put(key("a"), long)
    settle(store)
    assert is_same(store.get(key("a")), long)


def test_an_unknown_key_is_a_miss(kind: Kind) -> None:
    store = kind.make(10)
    store.put(key("a"), entry())
    stranger = ChunkKey("other", key("a").chunk, key("a").context)
    for other in (key("b"), key("a", context="d"), stranger):
        assert store.get(other) is None
        assert not store.contains(other)
        assert not store.remove(other)
    assert store.contains(key("a"))


def test_a_newer_entry_takes_the_place_of_an_older_one(kind: Kind) -> None:
    store = kind.make(100)
    for version, size in enumerate((16, 1500, 16)):
        assert store.put(key("a"), entry(size, of=key("a"), version=version))
        assert is_same(store.get(key("a")), entry(size, of=key("a"), version=version))
    settle(store)
    assert is_same(store.get(key("a")), entry(16, of=key("a"), version=2))
    assert store.variants(key("a").chunk) == [key("a")]


def test_an_entry_can_be_removed_once(kind: Kind) -> None:
    store = kind.make(10)
    for chunk in "ab":
        store.put(key(chunk), entry())
    assert store.remove(key("a"))
    assert not store.remove(key("a"))
    settle(store)
    assert held(store, "a", "b") == ["b"]
    assert store.get(key("a")) is None


def test_variants_are_the_entries_of_one_chunk(kind: Kind) -> None:
    store = kind.make(10)
    names = sorted((key("a", context) for context in "xyz"), key=str)
    for name in (*names, key("b", "x")):
        store.put(name, entry())
    settle(store)
    assert store.variants(key("a").chunk) == names
    store.remove(names[1])
    assert store.variants(key("a").chunk) == [names[0], names[2]]
    assert store.variants(key("c").chunk) == []


def test_one_namespace_can_be_cleared_alone(kind: Kind) -> None:
    store = kind.make(10)
    for namespace in ("ours", "theirs"):
        for chunk in "ab":
            store.put(key(chunk, namespace=namespace), entry())
    settle(store)
    assert store.clear("ours") == 2
    assert not store.contains(key("a", namespace="ours"))
    assert store.get(key("b", namespace="ours")) is None
    assert store.contains(key("a", namespace="theirs"))
    assert store.clear("nobody") == 0
    assert store.clear() == 2
    assert len(store) == 0


def test_the_budget_holds_at_every_moment(kind: Kind) -> None:
    store = kind.make(4)
    for number in range(12):
        assert store.put(key(f"{number:02}"), entry())
        for tier in [store, *getattr(store, "tiers", ())]:
            assert tier.capacity is not None
            assert 0 < tier.nbytes <= tier.capacity or len(tier) == 0
    settle(store)
    assert store.contains(key("11"))
    assert 4 <= len(held(store, *(f"{number:02}" for number in range(12)))) <= 6
    assert store.stats().evictions or any(tier.evictions for tier in store.stats().tiers)


def test_an_entry_larger_than_the_budget_is_refused_and_pushes_out_nothing(kind: Kind) -> None:
    store = kind.make(3)
    for chunk in "ab":
        store.put(key(chunk), entry())
    settle(store)
    is_kept = store.put(key("c"), entry(100))
    settle(store)
    assert not is_kept or isinstance(store, TieredStore)  # which finds out in the background
    assert held(store, "a", "b", "c") == ["a", "b"]
    assert store.get(key("c")) is None


def test_the_entry_that_was_used_last_stays(kind: Kind) -> None:
    store = kind.make(3)
    for chunk in "abc":
        store.put(key(chunk), entry())
        settle(store)
        kind.wait(0.2)
    assert store.get(key("a")) is not None
    kind.wait(0.2)
    store.put(key("d"), entry())
    settle(store)
    assert "a" in held(store, *"abcd")


def test_pinned_entries_stay_until_they_are_unpinned(kind: Kind) -> None:
    store = kind.make(3)
    store.put(key("a"), entry())
    with store.pinned([key("a")]):
        for number in range(8):
            store.put(key(f"{number}"), entry())
            settle(store)
        assert store.contains(key("a"))
    for number in range(8, 16):
        store.put(key(f"{number:02}"), entry())
        settle(store)
    assert not store.contains(key("a"))


def test_pins_are_counted_and_return_to_zero_after_an_exception(kind: Kind) -> None:
    store = kind.make(3)
    store.pin(key("a"))

    def fail_while_pinned() -> None:
        with store.pinned([key("a"), key("a"), key("b")]):
            assert store.pin_count(key("a")) == 3
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail_while_pinned()
    assert (store.pin_count(key("a")), store.pin_count(key("b"))) == (1, 0)
    store.unpin(key("a"))
    assert store.pin_count(key("a")) == 0
    with pytest.raises(ValueError, match="is not pinned"):
        store.unpin(key("a"))


def test_a_pinned_entry_can_still_be_removed(kind: Kind) -> None:
    store = kind.make(3)
    store.put(key("a"), entry())
    with store.pinned([key("a")]):
        assert store.remove(key("a"))
        assert store.get(key("a")) is None


def test_an_unused_entry_expires_and_a_used_one_does_not(kind: Kind) -> None:
    store = kind.make(5, ttl_s=60)
    store.put(key("a"), entry())
    store.put(key("b"), entry())
    settle(store)
    for _ in range(3):
        kind.wait(30)
        assert store.get(key("a")) is not None
        settle(store)  # being pushed out of a tier starts the time to live in the next
    assert store.get(key("b")) is None
    assert not store.contains(key("b"))
    kind.wait(61)
    assert store.get(key("a")) is None
    assert (len(store), store.variants(key("a").chunk)) == (0, [])


def test_a_static_entry_never_expires(kind: Kind) -> None:
    store = kind.make(5, ttl_s=60)
    store.put(key("a"), entry(), static=True)
    store.put(key("a", "other"), entry())
    settle(store)
    kind.wait(50)
    assert store.get(key("a")) is not None
    settle(store)
    kind.wait(100)
    assert store.get(key("a")) is not None
    assert store.variants(key("a").chunk) == [key("a")]
    assert store.clear("default") == 1


def test_hits_and_misses_are_counted(kind: Kind) -> None:
    store = kind.make(5)
    store.put(key("a"), entry())
    for chunk in "aab":
        store.get(key(chunk))
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.hit_tokens, stats.errors, stats.corrupt) == (2, 1, 32, 0, 0)
    assert 0 < stats.open_s < 5
    tier = stats.tiers[0] if stats.tiers else stats
    assert 0 < tier.load_p50_s <= tier.load_p95_s <= tier.load_s < 5
    assert tier.bytes - 8 < tier.bytes_loaded / 2 <= tier.bytes  # a disk counts names of namespaces too


def test_an_opened_entry_is_a_use_and_gives_the_layers_of_the_whole(kind: Kind) -> None:
    store = kind.make(100)
    for size in (16, 1500):
        whole = entry(size, of=key("a"))
        store.put(key("a"), whole)
        settle(store)
        opened = store.open(key("a"))
        assert opened is not None
        assert (opened.num_tokens, opened.num_layers, opened.base) == (size, 2, whole.base)
        assert opened.matches(whole.token_ids)
        for layer_idx in range(2):
            keys, values = opened.layer(layer_idx)
            assert torch.equal(keys, whole.keys[layer_idx])
            assert torch.equal(values, whole.values[layer_idx])
        assert opened.is_read
        assert is_same(opened.complete(), whole)
    assert store.open(key("b")) is None
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.hit_tokens) == (2, 1, 1516)


def test_an_opened_entry_outlives_its_removal(kind: Kind) -> None:
    store = kind.make(200)
    store.put(key("a"), entry(2100, of=key("a")))
    settle(store)
    opened = store.open(key("a"))
    assert store.remove(key("a"))
    store.close()
    assert opened is not None
    assert is_same(opened.complete(), entry(2100, of=key("a")))


def test_the_tier_that_had_an_entry_is_named(kind: Kind) -> None:
    store = kind.make(5)
    store.put(key("a"), entry())
    found = store.get_with_tier(key("a"))
    assert found is not None
    assert found[1] == ("hot" if isinstance(store, TieredStore) else store.name)
    assert store.get_with_tier(key("b")) is None


def test_threads_get_what_belongs_to_their_key(kind: Kind) -> None:
    store = kind.make(6)
    names = [key(chunk, context) for chunk in "abcd" for context in "xy"]
    wrong: list[Any] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(40):
                name, action = rng.choice(names), rng.random()
                if action < 0.5:
                    store.put(name, entry(of=name))
                elif action < 0.9:
                    found = store.get(name)
                    if found is not None and not is_same(found, entry(of=name)):
                        wrong.append(name)
                else:
                    store.remove(name)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settle(store)
    assert not wrong
    assert store.capacity is not None
    assert store.nbytes <= store.capacity
    stats = store.stats()
    assert sum(tier.errors for tier in (stats, *stats.tiers)) == 0
    assert sum(tier.corrupt for tier in (stats, *stats.tiers)) == 0


def test_touching_tells_whether_an_entry_is_there(kind: Kind) -> None:
    store = kind.make(6)
    store.put(key("a"), entry(of=key("a")))
    settle(store)
    assert store.touch(key("a"))
    assert not store.touch(key("b"))
    assert (store.stats().hits, store.stats().misses) == (0, 0)


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything, beside a dictionary."""

    keys = st.builds(key, st.sampled_from("abc"), st.sampled_from("xy"), st.sampled_from(["ours", "theirs"]))

    def __init__(self, store: ChunkStore) -> None:
        super().__init__()
        self.store = store
        self.model: dict[ChunkKey, ChunkKV] = {}

    @rule(name=keys, version=st.integers(0, 5))
    def put(self, name: ChunkKey, version: int) -> None:
        self.model[name] = entry(of=name, version=version)
        assert self.store.put(name, self.model[name])

    @rule(name=keys)
    def get(self, name: ChunkKey) -> None:
        assert is_same(self.store.get(name), self.model.get(name))

    @rule(name=keys)
    def remove(self, name: ChunkKey) -> None:
        assert self.store.remove(name) == (self.model.pop(name, None) is not None)

    @rule(namespace=st.sampled_from([None, "ours", "theirs"]))
    def clear(self, namespace: str | None) -> None:
        settle(self.store)
        doomed = [name for name in self.model if namespace in (None, name.namespace)]
        for name in doomed:
            del self.model[name]
        assert self.store.clear(namespace) == len(doomed)

    @rule(name=keys)
    def contains(self, name: ChunkKey) -> None:
        assert self.store.contains(name) == (name in self.model)

    @rule(name=keys)
    def variants(self, name: ChunkKey) -> None:
        expected = sorted((other for other in self.model if other.chunk == name.chunk), key=str)
        assert self.store.variants(name.chunk) == expected

    @rule()
    def settle(self) -> None:
        settle(self.store)

    def teardown(self) -> None:
        self.store.close()


def test_any_order_of_calls_answers_like_a_dictionary(kind: Kind) -> None:
    run_state_machine_as_test(
        lambda: StoreMachine(kind.make(20)),  # type: ignore[arg-type]
        settings=settings(max_examples=20, stateful_step_count=25, deadline=None),
    )
