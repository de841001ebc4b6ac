"""The hot tier: what is used again and again, and static entries."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from cachecraft_rag import StoreConfig
from cachecraft_rag.store import MemoryStore, TieredStore
from cachecraft_rag.store.build import device_budgets, open_store
from tests.store_entries import FakeClock, entry, held, key

CPU = torch.device("cpu")


def hot_and_warm(hot_room: int = 2, warm_room: int = 2, **options: object) -> TieredStore:
    size = entry().nbytes
    config = StoreConfig.model_validate(
        {"hot": {"size": hot_room * size}, "warm": {"size": warm_room * size}, "cold": {"size": 0}, **options}
    )
    store = open_store(config)
    assert isinstance(store, TieredStore)
    return store


def put(store: TieredStore, *chunks: str, static: bool = False) -> None:
    for chunk in chunks:
        store.put(key(chunk), entry(of=key(chunk)), static=static)
        store.flush()


def test_tiers_get_their_share_of_the_device_unless_they_are_given_a_size() -> None:
    assert device_budgets(StoreConfig(device_size=1000), CPU) == (300, 700)
    assert device_budgets(StoreConfig(device_size=1000, hot_share=0.5), CPU) == (500, 500)
    sizes = StoreConfig.model_validate({"device_size": 1000, "hot": {"size": 10}})
    assert device_budgets(sizes, CPU) == (10, 990)
    assert device_budgets(StoreConfig(), CPU) == (0, 0)  # without a GPU, host memory is the cold tier's


def test_hot_and_warm_together_stay_within_the_device_size() -> None:
    sizes = StoreConfig.model_validate({"device_size": 1000, "warm": {"size": 900}})
    assert device_budgets(sizes, CPU) == (100, 900)
    both = StoreConfig.model_validate({"device_size": 1000, "hot": {"size": 400}, "warm": {"size": 600}})
    assert device_budgets(both, CPU) == (400, 600)
    assert device_budgets(StoreConfig.model_validate({"warm": {"size": 600}}), CPU) == (0, 600)
    with pytest.raises(ValidationError, match=r"device_size: 1000 bytes are fewer than .* 401 \+ 600 bytes"):
        StoreConfig.model_validate({"device_size": 1000, "hot": {"size": 401}, "warm": {"size": 600}})


def test_tiers_without_bytes_are_left_out() -> None:
    store = open_store(StoreConfig(device_size="1MiB"))  # type: ignore[arg-type]
    assert isinstance(store, TieredStore)
    assert [tier.name for tier in store.tiers] == ["hot", "warm", "cold"]
    assert [tier.name for tier in hot_and_warm().tiers] == ["hot", "warm"]
    assert isinstance(open_store(StoreConfig()), MemoryStore)


def test_an_entry_is_hot_from_its_second_use_on() -> None:
    store = hot_and_warm()
    put(store, "a", "b")
    assert held(store.tiers[0], "a", "b") == []
    found = store.get_with_tier(key("a"))
    assert found is not None
    assert found[1] == "warm"
    assert held(store.tiers[0], "a", "b") == ["a"]
    assert held(store.tiers[1], "a", "b") == ["b"]


def test_a_scan_of_a_hundred_entries_leaves_hot_ones_alone() -> None:
    store = hot_and_warm()
    put(store, "a")
    store.get(key("a"))
    put(store, *(f"scan {number}" for number in range(100)))
    assert held(store.tiers[0], "a") == ["a"]
    assert len(store.tiers[1]) == 2


def test_the_least_frequently_used_entry_goes_back_to_warm() -> None:
    store = hot_and_warm(hot_room=2)
    put(store, "a", "b")
    for chunk in "aaabb":
        store.get(key(chunk))
    put(store, "c")
    for _ in range(2):
        store.get(key("c"))
        store.flush()
    assert held(store.tiers[0], "a", "b", "c") == ["a", "c"]
    assert held(store.tiers[1], "a", "b", "c") == ["b"]


def test_static_entries_are_hot_at_once_and_never_pushed_out() -> None:
    store = hot_and_warm(hot_room=2)
    put(store, "system prompt", static=True)
    put(store, "a", "b")
    for _ in range(5):
        for chunk in "ab":
            store.get(key(chunk))
            store.flush()
    assert "system prompt" in held(store.tiers[0], "system prompt", "a", "b")
    assert len(store.tiers[0]) == 2


def test_more_static_entries_than_the_hot_tier_holds_stay_in_the_next() -> None:
    store = hot_and_warm(hot_room=1, warm_room=2)
    put(store, "one", "two", static=True)
    assert held(store.tiers[0], "one", "two") == ["one"]
    assert held(store.tiers[1], "one", "two") == ["two"]


def test_an_entry_stays_static_when_it_is_put_again() -> None:
    clock = FakeClock()
    tier = MemoryStore(10 * entry().nbytes, ttl_s=10, clock=clock)
    store = TieredStore([tier])
    store.put(key("a"), entry(), static=True)
    store.put(key("a"), entry())  # with its sensitivity, say
    store.put(key("b"), entry())
    clock.now += 11
    assert held(store, "a", "b") == ["a"]


@pytest.mark.gpu
def test_hot_entries_are_on_the_device_and_cold_ones_in_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    size = entry().nbytes
    config = StoreConfig.model_validate({"hot": {"size": size}, "warm": {"size": size}, "cold": {"size": 4 * size}})
    store = open_store(config, torch.device("cuda"))
    assert isinstance(store, TieredStore)
    put(store, "a", "b", "c")
    store.get(key("c"))
    store.flush()
    hot, cold = store.tiers[0].get(key("c")), store.tiers[2].get(key("a"))
    assert hot is not None
    assert hot.keys.is_cuda
    assert cold is not None
    assert cold.keys.is_pinned()
