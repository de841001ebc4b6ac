"""Which entry goes first."""

from __future__ import annotations

import cProfile
import pstats
import random
from itertools import pairwise

import pytest

from cachecraft_rag.store import ChunkStore, MemoryStore
from cachecraft_rag.store.eviction import EvictionPolicy, make_policy
from cachecraft_rag.store_config import EvictionPolicyName
from tests.store_entries import entry, held, key


def policy_with(name: EvictionPolicyName, *keys: str) -> EvictionPolicy[str]:
    policy: EvictionPolicy[str] = make_policy(name)
    for one in keys:
        policy.add(one, 100, 10.0)
    return policy


def order(policy: EvictionPolicy[str]) -> str:
    """All keys in the order in which they would be evicted."""
    keys = ""
    while (victim := policy.victim()) is not None:
        keys += victim
        policy.remove(victim)
    return keys


def test_lru_evicts_by_last_use() -> None:
    policy = policy_with("lru", *"abcd")
    policy.use("a")
    policy.use("c")
    assert order(policy) == "bdac"


def test_lfu_evicts_by_number_of_uses_and_then_by_last_use() -> None:
    policy = policy_with("lfu", *"abcd")
    for used in "aaab":
        policy.use(used)
    assert order(policy) == "cdba"


def test_lfu_forgets_what_was_used_long_ago() -> None:
    policy = policy_with("lfu", *"ab")
    for _ in range(50):
        policy.use("a")
    for _ in range(20_000):
        policy.add("passing", 100)
        policy.remove("passing")
    for _ in range(3):
        policy.use("b")
    assert order(policy) == "ab"


def test_saving_evicts_what_saves_least_per_byte() -> None:
    policy: EvictionPolicy[str] = make_policy("saving")
    policy.add("dense", 100, 50.0)
    policy.add("wide", 1000, 50.0)
    policy.add("recomputed", 100, 50.0 * (1 - 0.9))
    policy.add("useless", 1, 0.0)
    policy.add("small", 10, 7.0)
    assert order(policy) == "uselesswiderecomputeddensesmall"


def test_saving_counts_uses_as_well() -> None:
    policy = policy_with("saving", *"ab")
    policy.add("c", 300, 10.0)
    for _ in range(5):
        policy.use("c")
    assert order(policy) == "abc"


def test_a_smaller_entry_is_worth_more() -> None:
    policy = policy_with("saving", *"ab")
    policy.resize("a", 25)
    assert order(policy) == "ba"


def test_a_replaced_entry_keeps_its_uses() -> None:
    policy = policy_with("lfu", *"ab")
    for _ in range(3):
        policy.use("a")
    policy.add("a", 100)
    policy.use("b")
    assert order(policy) == "ba"


@pytest.mark.parametrize("name", ["lru", "lfu", "saving"])
def test_pinned_entries_are_never_victims(name: EvictionPolicyName) -> None:
    policy = policy_with(name, *"abc")
    pinned = {"a", "b", "c"}
    assert policy.victim(pinned.__contains__) is None
    pinned = {"b"}
    for free in "ac":
        policy.release(free)
    assert policy.victim(pinned.__contains__) == "a"
    policy.remove("a")
    assert policy.victim(pinned.__contains__) == "c"
    policy.remove("c")
    assert policy.victim(pinned.__contains__) is None
    policy.use("b")
    assert policy.victim(pinned.__contains__) is None
    policy.release("b")
    assert policy.victim() == "b"


@pytest.mark.parametrize("name", ["lru", "lfu", "saving"])
def test_the_order_is_that_of_a_full_sort_after_any_history(name: EvictionPolicyName) -> None:
    rng = random.Random(5)
    policy: EvictionPolicy[int] = make_policy(name)
    uses: dict[int, list[int]] = {}
    for tick in range(3000):
        one = rng.randrange(40)
        if one not in uses:
            policy.add(one, 100, 10.0)
            uses[one] = [tick]
        elif rng.random() < 0.1:
            policy.remove(one)
            del uses[one]
        else:
            policy.use(one)
            uses[one].append(tick)
    victims = []
    while (victim := policy.victim()) is not None:
        victims.append(victim)
        policy.remove(victim)
    assert len(policy) == 0
    if name == "lru":
        assert victims == sorted(uses, key=lambda one: uses[one][-1])
    else:
        # Few entries age as if they were 128, a half-life of 1024 uses.
        def aged(one: int) -> float:
            return float(sum(2.0 ** (tick / 1024) for tick in uses[one]))

        # Removals don't age anything, so that ranks may differ where two are nearly alike.
        assert all(aged(a) < aged(b) * 1.25 for a, b in pairwise(victims))


@pytest.mark.parametrize("name", ["lfu", "saving"])
@pytest.mark.parametrize("room", [2, 10, 50])
def test_one_hot_chunk_survives_a_scan_of_a_hundred_cold_ones(name: EvictionPolicyName, room: int) -> None:
    store: ChunkStore = MemoryStore(room * entry().nbytes, policy=name)
    store.put(key("hot"), entry())
    for _ in range(5):
        store.get(key("hot"))
    for number in range(100):
        store.put(key(f"cold {number}"), entry())
    assert held(store, "hot", "cold 99") == ["hot", "cold 99"]


@pytest.mark.parametrize("name", ["lru", "lfu", "saving"])
def test_operations_stay_cheap_with_ten_thousand_entries(name: EvictionPolicyName) -> None:
    def calls(num_entries: int) -> int:
        rng = random.Random(1)
        policy: EvictionPolicy[int] = make_policy(name)
        for one in range(num_entries):
            policy.add(one, rng.randint(1, 1000), 10.0)
        profile = cProfile.Profile()  # counts, where time depends on what else the machine does
        with profile:
            for tick in range(10_000):
                policy.use(rng.randrange(tick, num_entries + tick))
                victim = policy.victim()
                assert victim is not None
                policy.remove(victim)
                policy.add(victim, 10, 10.0)
                policy.remove(tick)
                policy.add(num_entries + tick, 10, 10.0)
        return pstats.Stats(profile).total_calls

    assert calls(10_000) < 8 * calls(100)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy: 'fifo' is unknown"):
        make_policy("fifo")  # type: ignore[arg-type]
